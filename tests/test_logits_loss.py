"""Cross-entropy on given logits: every implementation against float64, and what is written in place and when."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compiled_kernels import compiled_by
from compiled_text import copies
from implementations import (
    JaxPallasCuda,
    JaxXla,
    TorchEager,
    in_every_torch_place,
    interpreted,
    options_of,
    problem_named,
)

from logitless import reference
from logitless.rounding import round_to
from logitless.tolerances import BOUND, TARGET_GRADIENT, TINY, allowance, error

IGNORED = -100

pytestmark = pytest.mark.usefixtures("checked_accesses")


class TorchLogits(TorchEager):
    """torch_impl.cross_entropy; the logits are the result of an operation."""

    in_place = False

    def loss(self, logits: Any, target: Any, *, dtype: str = "float32", upstream: Any = 1.0, **options: Any) -> Any:
        """(loss, gradient, statistics), the gradient in the logits' own dtype."""
        import torch

        from logitless.torch_impl import cross_entropy

        leaf = self.array(logits, dtype).requires_grad_()
        for name in ("token_weight", "class_weight"):
            options[name] = self.array(options.get(name))
        loss, stats = cross_entropy(
            leaf * 1, self.array(target), backend=self.backend, inplace_backward=self.in_place, return_stats=True,
            **options,
        )  # fmt: skip
        loss.backward(torch.as_tensor(np.array(upstream), dtype=loss.dtype, device=loss.device).expand_as(loss))
        assert leaf.grad.dtype == leaf.dtype
        return self.numpy(loss), self.numpy(leaf.grad), type(stats)(*map(self.numpy, stats))


class TorchLogitsInPlace(TorchLogits):
    name = "torch_eager_in_place"
    in_place = True


class TorchLogitsTriton(TorchLogitsInPlace):
    name = "torch_triton"
    backend = "triton"


class TorchLogitsCuda(TorchLogits):
    """The kernels on the GPU, where ids are not looked at."""

    name = "torch_triton_cuda"
    backend = "triton"
    on_gpu = True

    def array(self, values: Any, dtype: str | None = None) -> Any:
        tensor = super().array(values, dtype)
        return None if tensor is None else tensor.cuda()


class TorchLogitsInPlaceCuda(TorchLogitsCuda):
    name = "torch_triton_in_place_cuda"
    in_place = True


class JaxLogits(JaxXla):
    """jax_impl.cross_entropy."""

    in_place = False

    def loss(self, logits: Any, target: Any, *, dtype: str = "float32", upstream: Any = 1.0, **options: Any) -> Any:
        import jax
        import jax.numpy as jnp

        from logitless.jax_impl import cross_entropy

        with self.precision(dtype):
            for name in ("token_weight", "class_weight"):
                options[name] = self.array(options.get(name))
            given, ids = self.array(logits, dtype), self.array(target)
            kept = np.array(given)
            loss, backward, stats = jax.vjp(
                lambda z: cross_entropy(
                    z, ids, backend=self.backend, inplace_backward=self.in_place, return_stats=True, **options
                ),
                given,
                has_aux=True,
            )
            (made,) = backward(jnp.broadcast_to(jnp.asarray(upstream, loss.dtype), loss.shape))
            assert made.dtype == given.dtype
            assert np.asarray(given).tobytes() == kept.tobytes()  # JAX's arrays are values, in place or not
            return self.numpy(loss), self.numpy(made), type(stats)(*map(self.numpy, stats))


class JaxLogitsPallas(JaxLogits):
    """The kernels, interpreted."""

    name = "jax_pallas"
    backend = "pallas"
    in_place = True

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super().precision(dtype):
            patch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
            yield


class JaxLogitsCuda(JaxLogits):
    """The kernels on the GPU."""

    name = "jax_pallas_cuda"
    backend = "pallas"
    on_gpu = True

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        JaxPallasCuda.skip_unless_hopper()
        with super().precision(dtype):
            yield


class JaxLogitsInPlaceCuda(JaxLogitsCuda):
    name = "jax_pallas_in_place_cuda"
    in_place = True


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


needs_torch = pytest.mark.skipif(not _installed("torch"), reason="torch is not installed")
needs_jax = pytest.mark.skipif(not _installed("jax"), reason="jax is not installed")


def _interprets_pallas() -> bool:
    if not (_installed("jax") and _installed("absl")):
        return False
    import jax

    from logitless.jax_impl.kernels.architecture import can_interpret

    return can_interpret() and jax.default_backend() == "cpu"


needs_interpreter = pytest.mark.skipif(
    not _interprets_pallas(), reason="interpreting Pallas kernels takes jax 0.11, absl-py and a CPU as JAX's device"
)
needs_absl = pytest.mark.skipif(not _installed("absl"), reason="absl-py is not installed")
IMPLEMENTATIONS = (
    pytest.param(TorchLogits(), id="torch_eager", marks=needs_torch),
    pytest.param(TorchLogitsInPlace(), id="torch_eager_in_place", marks=needs_torch),
    pytest.param(TorchLogitsTriton(), id="torch_triton_in_place", marks=interpreted),
    pytest.param(JaxLogits(), id="jax_xla", marks=needs_jax),
    pytest.param(TorchLogitsCuda(), id="torch_triton_cuda", marks=[needs_torch, pytest.mark.gpu]),
    pytest.param(TorchLogitsInPlaceCuda(), id="torch_triton_in_place_cuda", marks=[needs_torch, pytest.mark.gpu]),
    pytest.param(JaxLogitsPallas(), id="jax_pallas_in_place", marks=needs_interpreter),
    pytest.param(JaxLogitsCuda(), id="jax_pallas_cuda", marks=[needs_jax, pytest.mark.gpu]),
    pytest.param(JaxLogitsInPlaceCuda(), id="jax_pallas_in_place_cuda", marks=[needs_jax, pytest.mark.gpu]),
)
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def given_of(name: str, dtype: str, most: int = 16) -> tuple[Any, Any, dict[str, Any]]:
    """Logits rounded to the dtype that the implementation gets, and targets and options of all or some tokens."""
    case = problem_named(name).with_dtype(dtype).case()
    z = case.hidden.astype(np.float64) @ case.weight.T.astype(np.float64)
    logits = round_to(z if case.bias is None else z + case.bias, dtype)
    options = options_of(case) | {"upstream": case.upstream}
    if case.target.size <= most:
        return logits, case.target, options
    some = np.arange(0, case.target.size, -(-case.target.size // most))
    for key in ("token_weight", "upstream"):
        if np.size(options[key]) == case.target.size:
            options[key] = options[key].reshape(-1)[some]
    return logits.reshape(-1, logits.shape[-1])[some], case.target.reshape(-1)[some], options


def dtypes_of(impl: Any) -> tuple[str, ...]:
    """Triton's interpreter cuts bfloat16 off where it should round; no kernel has float64; XLA takes a second to
    compile."""
    if impl.backend == "pallas":
        return ("float32", "bfloat16", "float16") if impl.on_gpu else ("float32", "bfloat16")
    if impl.backend == "triton":
        return ("float32", "bfloat16", "float16") if impl.on_gpu else ("float32", "float16")
    return ("float32", "bfloat16", "float64", *(("float16",) if impl.backend == "eager" else ()))


RUNS = [
    pytest.param(*impl.values, dtype, id=f"{dtype}-{impl.id}", marks=impl.marks)
    for impl in IMPLEMENTATIONS
    for dtype in dtypes_of(impl.values[0])
]


@pytest.mark.parametrize(("impl", "dtype"), RUNS)
def test_within_the_rule(impl: Any, dtype: str) -> None:
    """Loss and gradient at most 1.35 times as far from float64 as the truth rounded once; statistics as exact."""
    names: tuple[str, ...] = ("odd_none_most", "confident_wrong", "all_ignored", "no_token")
    if impl.backend != "xla":
        names += ("signed_smooth", "minus_inf", "no_axes")
    for name in ("odd_all", *(names if dtype == "float32" else ())):
        logits, target, options = given_of(name, dtype)
        true = reference.cross_entropy(logits, target, **options)
        loss, gradient, stats = impl.loss(logits, target, dtype=dtype, **options)
        assert error(loss, true.loss) <= TINY[dtype], name
        allowed = allowance(error(round_to(true.logits_grad, dtype), true.logits_grad), dtype)
        assert error(gradient, true.logits_grad) <= allowed, name
        for field in ("nll", "lse", "entropy", "max_logit", "min_logit", "target_logit"):
            assert error(getattr(stats, field), getattr(true.stats, field)) <= 2 * TINY[dtype], (name, field)
        assert (stats.argmax == true.stats.argmax).all()
        assert (stats.correct == true.stats.correct).all()


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.case(14)
def test_confident_targets(impl: Any, dtype: str) -> None:
    """p − 1 and the loss keep their relative accuracy as p → 1, here at 0.999, 0.99999 and 1 − 1e-7. Of tied logits the
    first counts."""
    rest, some = np.array([1e-3, 1e-5, 1e-7]), np.arange(3)
    vocab = 5000  # more than a block of the kernels
    logits, target = np.zeros((4, vocab)), np.array([0, 150, vocab - 1, 9])
    logits[some, target[:3]] = np.log((1 - rest) / rest * (vocab - 1))
    logits = round_to(logits, dtype)
    true = reference.cross_entropy(logits, target, reduction="none")
    loss, gradient, stats = impl.loss(logits, target, dtype=dtype, reduction="none", upstream=np.full(4, 64.0))
    truth = true.logits_grad[some, target[:3]]
    assert (np.abs(truth / -rest - 1) < BOUND["quotient near one"]).all()
    assert (np.abs(loss / true.loss - 1) <= TARGET_GRADIENT["float32"]).all()
    assert (np.abs(gradient[some, target[:3]] / 64 / truth - 1) <= TARGET_GRADIENT[dtype]).all()
    assert stats.argmax.tolist() == [0, 150, vocab - 1, 0]


def test_the_reference_is_the_linear_one_with_an_identity() -> None:
    logits, target, options = given_of("odd_none_all", "float64")
    one = reference.cross_entropy(logits, target, **options)
    other = reference.linear_cross_entropy(logits, np.eye(logits.shape[1]), target, **options)
    assert error(one.logits_grad, other.hidden_grad) <= BOUND["given and own logits float64"]
    assert error(one.loss, other.loss) <= BOUND["given and own logits float64"]


@every_implementation
def test_ids_outside_and_what_ignored_rows_hold(impl: Any) -> None:
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((2, 3, 20)), rng.integers(0, 20, (2, 3))
    target[1, 1] = IGNORED
    plain, gradient, _ = impl.loss(logits, target)
    logits[1, 1] = np.nan
    loss, other, stats = impl.loss(logits, target)
    assert loss == plain
    assert (other == gradient).all()
    assert (other[1, 1] == 0).all()
    assert stats.argmax[1, 1] == -1
    wrong = np.where(np.arange(6).reshape(2, 3) == 2, 20, target)
    if impl.on_gpu:  # nobody looks
        assert np.isnan(impl.loss(logits, wrong)[0])
    else:
        with pytest.raises(ValueError, match=r"target: got id 20 at index \(0, 2\), allowed are 0 to 19 and"):
            impl.loss(logits, wrong)
    with pytest.raises(ValueError, match=r"target: got shape \(3,\), allowed is logits' leading axes \(2, 3\)"):
        impl.loss(logits, target[0])
    with pytest.raises(ValueError, match=r"class_weight: got shape \(3,\), allowed is \[V\] = \(20,\)"):
        impl.loss(logits, target, class_weight=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"label_smoothing: got 2\.0"):
        impl.loss(logits, target, label_smoothing=2.0)


@needs_torch
@needs_jax
def test_signatures_agree() -> None:
    from logitless import jax_impl, torch_impl

    one, other = (dict(inspect.signature(p.cross_entropy).parameters) for p in (torch_impl, jax_impl))
    assert list(one) == list(other)
    assert [p.default for p in one.values()] == [p.default for p in other.values()]


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch: the gradient in the logits' place


@needs_torch
@in_every_torch_place
def test_the_gradient_takes_the_logits_place(device: str, backend: str) -> None:
    import torch

    from logitless.torch_impl import cross_entropy

    leaf, y = torch.randn(4, 6, 30, device=device, requires_grad=True), torch.randint(0, 30, (4, 6), device=device)
    (plain,) = torch.autograd.grad(cross_entropy(leaf * 2, y, backend=backend), leaf)
    flat = (leaf * 2).view(24, 30)
    logits = flat.view(4, 6, 30)  # what torch.nn.Linear gives: the whole of it, reshaped
    values = logits.detach().clone()
    loss = cross_entropy(logits, y, inplace_backward=True, backend=backend)
    assert torch.equal(logits, values)
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, plain)
    assert torch.equal(logits, plain / 2)
    with pytest.raises(RuntimeError, match="first backward wrote the gradient over the logits"):
        loss.backward()
    assert torch.equal(leaf.grad, plain)
    # Without it a second backward is right.
    loss = cross_entropy(leaf * 2, y, backend=backend)
    for factor in (3.0, 0.5):
        (again,) = torch.autograd.grad(loss * factor, leaf, retain_graph=True)
        assert error(again.cpu().numpy(), factor * plain.cpu().numpy()) <= TINY["float32"]


@needs_torch
@in_every_torch_place
def test_another_user_of_overwritten_logits_is_refused_by_autograd(device: str, backend: str) -> None:
    import torch

    from logitless.torch_impl import cross_entropy

    leaf, y = torch.randn(5, 9, device=device, requires_grad=True), torch.randint(0, 9, (5,), device=device)
    logits = leaf * 1
    other = logits.square().sum()
    cross_entropy(logits, y, inplace_backward=True, backend=backend).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@needs_torch
def test_what_must_not_be_overwritten_is_not() -> None:
    import torch

    from logitless.torch_impl import cross_entropy

    leaf, y = torch.randn(5, 12, requires_grad=True), torch.randint(0, 9, (5,))
    for logits, words in (
        (leaf, "a leaf, whose values"),
        (leaf.view(5, 12), "a leaf, whose values"),
        ((leaf * 1)[:, :9], r"a view of a part of a tensor of shape \(5, 12\)"),
        ((leaf * 1)[:1].expand(5, 12), "strides"),
        ((leaf * 1).t().contiguous().t(), "strides"),
    ):
        with pytest.raises(ValueError, match=f"logits: got {words}.*inplace_backward=False takes any"):
            cross_entropy(logits, y, inplace_backward=True)
        cross_entropy(logits, y).backward()
    values = leaf.detach().clone()
    with torch.no_grad():
        cross_entropy(leaf, y, inplace_backward=True)
    cross_entropy(leaf.detach(), y, inplace_backward=True)
    assert torch.equal(leaf, values)
    (made,) = torch.autograd.grad(cross_entropy(leaf * 1, y) ** 2, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy is differentiable once"):
        made.sum().backward()


@needs_torch
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_memory_is_the_logits_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, forward and backward make only blocks of rows, nothing as large as the logits."""
    import torch

    from logitless.torch_impl import cross_entropy
    from logitless.torch_impl.given_logits import eager as logits_eager
    from logitless.torch_impl.memory import peak_scratch_bytes

    monkeypatch.setitem(logits_eager.BLOCK_ELEMENTS, "cpu", 2**16)
    leaf = torch.randn(64, 8192, dtype=torch.bfloat16, device=device, requires_grad=True)
    logits, y = leaf * 1, torch.randint(0, 8192, (64,), device=device)

    def step() -> None:
        loss = cross_entropy(logits, y, inplace_backward=True)
        torch.autograd.grad(loss, logits)

    if device == "cuda":  # the first call makes what stays
        step()
        logits = leaf * 1
    assert peak_scratch_bytes(step) <= 2.5 * 4 * 2**16 < logits.nbytes


@needs_torch
@in_every_torch_place
def test_compiled_as_one_graph(device: str, backend: str) -> None:
    import torch

    from logitless.torch_impl import cross_entropy

    def function(x: Any, y: Any, c: Any) -> Any:
        loss, stats = cross_entropy(
            x * 2, y, class_weight=c, label_smoothing=0.1, softcap=9.0, normalizer=7.5, inplace_backward=True,
            return_stats=True, backend=backend,
        )  # fmt: skip
        return loss, stats.entropy

    torch._dynamo.reset()
    x, c = torch.randn(6, 40, device=device, requires_grad=True), torch.rand(40, device=device)
    y = torch.randint(0, 40, (6,), device=device)
    y[2] = IGNORED
    plain = function(x, y, c)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, y, c)
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))
    gradients = [torch.autograd.grad(made[0] * 3, x)[0] for made in (plain, compiled)]
    assert torch.equal(*gradients)


@needs_torch
@pytest.mark.skipif(not _installed("triton"), reason="triton is not installed")
@pytest.mark.slow
def test_the_kernels_compile_for_hopper() -> None:
    """For sm_90, without a GPU: nothing spilled, 16-byte loads."""
    made = compiled_by("compile_logits.py")
    assert len(made) == 2
    assert all(kernel["spills"] == 0 and kernel["wide_loads"] > 0 for kernel in made.values())


# ---------------------------------------------------------------------------------------------------------------------
# JAX


@needs_jax
def test_the_gradient_may_take_a_donated_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the result nothing of the logits' size is made, and the result lies where the donated logits were."""
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy
    from logitless.jax_impl.given_logits import api as logits_loss

    monkeypatch.setattr(logits_loss, "CPU_BLOCK", 2**16)
    logits = jax.ShapeDtypeStruct((64, 8195), jnp.bfloat16)
    target = jax.ShapeDtypeStruct((64,), jnp.int32)
    step = jax.jit(jax.value_and_grad(functools.partial(cross_entropy, backend="xla")), donate_argnums=0)
    analysis: Any = step.lower(logits, target).compile().memory_analysis()
    size = 2 * 64 * 8195
    assert analysis.alias_size_in_bytes >= size
    assert analysis.temp_size_in_bytes <= 1.5 * 4 * 2**16 < size


def _lowered(function: Any, *arguments: Any, donate: bool = False) -> str:
    """For CUDA, wherever this runs."""
    import jax

    jitted = jax.jit(function, donate_argnums=0 if donate else ())
    text: str = jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text


EVERYTHING: dict[str, Any] = {
    "label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 1.5, "z_loss": 1e-4, "reduction": "none",
    "return_stats": True,
}  # fmt: skip


@needs_jax
@needs_absl
@pytest.mark.parametrize(
    ("dtype", "vocab", "options"),
    [
        pytest.param("bfloat16", 128256, {}, marks=pytest.mark.slow),
        ("bfloat16", 1001, EVERYTHING),
        pytest.param("float16", 1000, EVERYTHING, marks=pytest.mark.slow),
        pytest.param("float32", 50257, {}, marks=pytest.mark.slow),
        pytest.param("float32", 1000, EVERYTHING, marks=pytest.mark.slow),
        ("float32", 5, EVERYTHING),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "everything" if value else "plain",
)
def test_the_kernels_lower_for_cuda(dtype: str, vocab: int, options: dict[str, Any]) -> None:
    """Under both lines of jax; the gradient is written over the logits where that was asked for, and nothing is in a
    forward alone."""
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy

    shape = jax.ShapeDtypeStruct
    z, y = shape((64, vocab), dtype), shape((64,), jnp.int32)
    k = shape((vocab,), jnp.float32) if options else None

    def loss(z: Any, y: Any, k: Any, in_place: bool) -> Any:
        made = cross_entropy(z, y, class_weight=k, backend="pallas", inplace_backward=in_place, **options)
        return (made[0] if options else made).sum()

    for in_place in (False, True):
        step = functools.partial(loss, in_place=in_place)
        forward, both = _lowered(step, z, y, k), _lowered(jax.value_and_grad(step), z, y, k, donate=in_place)
        assert (forward.count("@mosaic_gpu"), both.count("@mosaic_gpu")) == (1, 2)
        assert (forward + both).count("output_operand_alias<") == in_place
        assert f"tensor<64x{vocab}xf32>" not in (forward + both if dtype != "float32" else "")


@needs_jax
@needs_absl
@pytest.mark.case(32)
def test_vmap_of_grad_lowers_or_says_why_not() -> None:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy

    step = jax.grad(lambda z, y: cross_entropy(z, y, backend="pallas", inplace_backward=True))
    arrays = jax.ShapeDtypeStruct((3, 8, 300), jnp.bfloat16), jax.ShapeDtypeStruct((3, 8), jnp.int32)
    if jax.__version_info__ >= (0, 11):
        assert _lowered(jax.vmap(step), *arrays).count("@mosaic_gpu") == 2
        return
    with pytest.raises(NotImplementedError, match=r"under jax.vmap needs jax 0\.11 or newer.*backend='xla'"):
        _lowered(jax.vmap(step), *arrays)


@pytest.mark.gpu
@needs_jax
@pytest.mark.case(32)
@pytest.mark.parametrize("in_place", [False, True])
def test_vmap_of_grad_is_each_problem_by_itself(in_place: bool) -> None:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy

    if jax.__version_info__ < (0, 11):
        pytest.skip("jax.vmap over the kernels needs jax 0.11")
    keys = jax.random.split(jax.random.key(0), 2)
    z = 4 * jax.random.normal(keys[0], (3, 40, 1000), jnp.bfloat16)
    y = jax.random.randint(keys[1], (3, 40), 0, 1000)
    step = jax.jit(jax.grad(lambda z, y: cross_entropy(z, y, backend="pallas", inplace_backward=in_place)))
    mapped = jax.jit(jax.vmap(step))(z, y)
    for i in range(len(z)):
        assert jnp.array_equal(mapped[i], step(z[i], y[i]))


@needs_jax
@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 50257])
def test_kernels_are_the_default_and_take_the_logits_place(vocab: int) -> None:
    """In place, of donated logits, nothing of their size is made and nothing is copied; without, one array."""
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy

    JaxPallasCuda.skip_unless_hopper()
    logits, target = jax.ShapeDtypeStruct((512, vocab), jnp.bfloat16), jax.ShapeDtypeStruct((512,), jnp.int32)
    size = 2 * 512 * vocab
    for in_place in (True, False):
        step = jax.value_and_grad(functools.partial(cross_entropy, inplace_backward=in_place))
        lowered = jax.jit(step, donate_argnums=0 if in_place else ()).lower(logits, target)
        assert lowered.as_text().count("@mosaic_gpu") == 2
        compiled = lowered.compile()
        analysis: Any = compiled.memory_analysis()
        assert analysis.temp_size_in_bytes <= 2**20 < size
        assert analysis.alias_size_in_bytes == (size if in_place else 0)
        assert not copies(compiled.as_text(), size)


@needs_jax
@needs_absl
def test_pieces_cover_a_row_once() -> None:
    """Behind a row's blocks every column counts once. Pieces that share columns are loaded together. Each begins where
    its threads may load, and none reaches back into a block."""
    import jax.numpy as jnp

    from logitless.jax_impl.kernels.pieces import PIECES, Row

    for dtype, pieces in ((jnp.dtype("bfloat16"), PIECES), (jnp.dtype("float32"), PIECES), (jnp.dtype("float32"), 1)):
        for vocab in [*range(1, 700), *range(3900, 4200, 7), 8192, 8193, 50257, 50304, 128256]:
            row = Row(vocab, dtype)
            rest, behind = row.rest(pieces), row.blocks(pieces) * pieces * row.lanes
            seen = np.zeros(row.width, int)
            for piece in rest:
                assert piece.start % row.vector == 0
                assert behind <= piece.start <= row.width - row.lanes
                seen[piece.start + piece.shared : piece.start + row.lanes] += 1
            assert (seen[behind:] == 1).all()
            assert len(rest) <= pieces + 1


@needs_jax
def test_traced_ids_make_nan_and_misuse_is_refused() -> None:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy

    logits, y = jnp.zeros((3, 5)), jnp.array([0, 7, 2])
    losses = jax.jit(lambda z, y: cross_entropy(z, y, reduction="none"))(logits, y)
    assert np.isnan(np.asarray(losses)).tolist() == [False, True, False]
    wide = r"'pallas' cannot run here: .* bfloat16, float16 and float32, not float64.*backend='xla' can"
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=wide):
        cross_entropy(jnp.zeros((3, 5), jnp.float64), np.zeros(3, np.int32), backend="pallas")
    with pytest.raises(ValueError, match="class_weight: got an array that is differentiated"):
        jax.grad(lambda c: cross_entropy(logits, jnp.array([0, 1, 2]), class_weight=c))(jnp.ones(5))
    with pytest.raises(NotImplementedError, match="differentiated once"):
        jax.hessian(lambda z: cross_entropy(z, jnp.array([0, 1, 2])))(logits)
