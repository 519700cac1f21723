"""interop.jax_in_torch and interop.torch_in_jax: gradients, what is shared, what is compiled once, what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="a bridge needs both frameworks, and jax is not installed")
torch = pytest.importorskip("torch", reason="a bridge needs both frameworks, and torch is not installed")
jnp = jax.numpy

import test_cases as cases  # noqa: E402
from implementations import ARGUMENTS, JaxInTorch, TorchInJax, assert_within, problem_named, run_case  # noqa: E402

from logitless import jax_impl, torch_impl  # noqa: E402
from logitless.interop import dlpack, jax_in_torch, to_jax, to_torch, torch_in_jax  # noqa: E402
from logitless.problems import BY_NAME  # noqa: E402
from logitless.tolerances import CHAIN, GRADIENT, TINY, error  # noqa: E402

both = pytest.mark.parametrize("impl", [JaxInTorch(), TorchInJax()], ids=lambda impl: impl.name)
SUBSETS = [tuple(a for i, a in enumerate(ARGUMENTS) if mask >> i & 1) for mask in range(1, 8)]


def tokens(count: int = 12, hidden: int = 8, vocab: int = 30, dtype: Any = None) -> tuple[Any, Any, Any]:
    """x and w that require gradients, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, hidden, generator=generator, dtype=dtype or torch.float32)
    w = torch.randn(vocab, hidden, generator=generator, dtype=dtype or torch.float32)
    y = torch.randint(0, vocab, (count,), generator=generator, dtype=torch.int32)
    return x.requires_grad_(), w.requires_grad_(), y


def expected(x: Any, w: Any, y: Any, upstream: Any, **options: Any) -> list[Any]:
    """Gradients of x and w from torch_impl."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    torch_impl.linear_cross_entropy(x, w, y, **options).backward(upstream)
    return [x.grad, w.grad]


def near(made: Any, true: Any, times: float = 2.0) -> bool:
    made, true = (np.asarray(a.detach() if isinstance(a, torch.Tensor) else a) for a in (made, true))
    return error(made, true) <= times * TINY["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# The loss through both bridges: what every implementation must pass


class TestTheLoss:
    @pytest.mark.every_value
    @both
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["odd_all", "odd_most", "odd_none_most", "confident_wrong", "no_axes", "signed"])
    def test_problems(self, impl: Any, name: str, dtype: str) -> None:
        problem = BY_NAME[name].with_dtype(dtype)
        assert_within(problem, run_case(impl, problem.case()))

    @both
    def test_float64(self, impl: Any) -> None:
        problem = BY_NAME["odd_bias"].with_dtype("float64")
        assert_within(problem, run_case(impl, problem.case()))

    @both
    @pytest.mark.case(4)
    @pytest.mark.case(5)
    def test_upstream_gradients(self, impl: Any) -> None:
        cases.test_upstream_other_than_one(impl)
        cases.test_none_with_random_upstream(impl, "odd_none_all")

    @pytest.mark.every_value
    @both
    @pytest.mark.case(6)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("wrt", SUBSETS)
    def test_every_subset_of_gradients(self, impl: Any, wrt: tuple[str, ...], reduction: str) -> None:
        cases.test_every_subset_of_gradients(impl, wrt, reduction)

    @pytest.mark.every_value
    @both
    @pytest.mark.case(7)
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("count", [0, 1, 9])
    def test_no_token_counts(self, impl: Any, count: int, reduction: str) -> None:
        cases.test_no_token_counts(impl, count, reduction)

    @both
    @pytest.mark.case(7)
    def test_one_token(self, impl: Any) -> None:
        cases.test_one_token(impl)

    @both
    def test_statistics_come_along(self, impl: Any) -> None:
        cases.test_argmax_takes_the_first_of_a_tie(impl, "tokens")

    @both
    def test_loss_without_gradients(self, impl: Any) -> None:
        cases.test_loss_without_gradients_equals_the_training_loss(impl, "odd_most")

    @pytest.mark.parametrize("jit", [False, True])
    def test_torch_loss_inside_jit(self, jit: bool) -> None:
        problem = problem_named("odd_most")
        x, w, y = (to_jax(t.detach()) for t in tokens())
        loss = torch_in_jax(torch_impl.linear_cross_entropy)
        step = jax.value_and_grad(lambda x, w: loss(x, w, y, label_smoothing=0.1) * 3.0, argnums=(0, 1))
        value, made = (jax.jit(step) if jit else step)(x, w)
        true_value, true = jax.value_and_grad(
            lambda x, w: jax_impl.linear_cross_entropy(x, w, y, label_smoothing=0.1) * 3.0, argnums=(0, 1)
        )(x, w)
        assert near(value, true_value)
        assert near(made[0], true[0])
        assert near(made[1], true[1])
        assert problem.options.label_smoothing == 0.1

    @pytest.mark.case(25)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_autocast_around_the_jax_loss(self, dtype: Any, bias: bool) -> None:
        """Parameters are float32 and the input either dtype. The loss is computed in bfloat16, and each gradient has
        its tensor's own dtype."""
        x, w, y = tokens()
        x = x.detach().to(dtype).requires_grad_()
        b = torch.linspace(-1, 1, 30).requires_grad_() if bias else None
        loss = jax_in_torch(jax_impl.linear_cross_entropy, autocast=("hidden", "weight", "bias"))
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(x, w, y, b)
        value.backward()
        given = [t for t in (x, w, b) if t is not None]
        made = [t.grad for t in given]
        for t in given:
            t.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            true = torch_impl.linear_cross_entropy(x, w, y, b)
        true.backward()
        assert value.dtype == torch.float32
        assert near(value, true)
        for t, gradient in zip(given, made, strict=True):
            assert gradient.dtype == t.dtype
            assert error(gradient.double(), t.grad.double()) <= 2 * GRADIENT["bfloat16"]
        outside = loss(x.detach().float(), w, y, b)
        assert not near(outside, value, 100)  # without autocast nothing is cast

    @pytest.mark.case(25)
    def test_autocast_inside_a_torch_function(self) -> None:
        def loss(x: Any, w: Any, y: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return torch_impl.linear_cross_entropy(x, w, y)

        x, w, y = (to_jax(t.detach()) for t in tokens())
        for function in (torch_in_jax(loss), jax.jit(torch_in_jax(loss))):
            value, (dx, dw) = jax.value_and_grad(function, argnums=(0, 1))(x, w, y)
            assert (value.dtype, dx.dtype, dw.dtype) == (jnp.float32,) * 3
            low = jax_impl.linear_cross_entropy(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), y)
            assert near(value, low)
            assert not near(value, jax_impl.linear_cross_entropy(x, w, y), 100)

    def test_the_jax_loss_trains_a_torch_model(self) -> None:
        x, w, y = tokens(64, 16, 40)
        layer = torch.nn.Linear(16, 16)
        loss_of = jax_in_torch(jax_impl.linear_cross_entropy)
        optimizer = torch.optim.Adam([*layer.parameters(), w], lr=0.02)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = loss_of(layer(x.detach()), w, y, z_loss=1e-4)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]

    @pytest.mark.parametrize("jit", [False, True])
    def test_the_torch_loss_trains_a_jax_model(self, jit: bool) -> None:
        x, w, y = (to_jax(t.detach(), copy=True) for t in tokens(64, 16, 40))
        loss_of = torch_in_jax(torch_impl.linear_cross_entropy)

        def step(parameters: Any) -> Any:
            def loss(p: Any) -> Any:
                return loss_of(x @ p["layer"], p["head"], y, z_loss=1e-4)

            value, gradients = jax.value_and_grad(loss)(parameters)
            return value, jax.tree.map(lambda p, g: p - 1.0 * g, parameters, gradients)

        run = jax.jit(step) if jit else step
        parameters = {"layer": jnp.eye(16), "head": w}
        losses = []
        for _ in range(40):
            loss, parameters = run(parameters)
            losses.append(float(loss))
        assert losses[-1] < 0.3 * losses[0]


# ---------------------------------------------------------------------------------------------------------------------
# JAX functions in torch


class Pair(NamedTuple):
    first: Any
    second: Any


class TestJaxInTorch:
    def test_pytrees_constants_and_several_outputs(self) -> None:
        def fn(batch: Any, scale: float, *, pair: Pair, mode: str, unused: Any = None) -> Any:
            assert unused is None
            assert mode == "sum"
            return {"a": batch["x"] * scale + pair.first, "n": (jnp.argmax(batch["x"]), batch["mask"]), "none": None}

        x, first = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        mask = torch.tensor([True, False])
        made = jax_in_torch(fn)({"x": x, "mask": mask}, 2.0, pair=Pair(first, 7), mode="sum")
        assert set(made) == {"a", "n", "none"}
        assert torch.equal(made["a"], x * 2 + first)
        assert (made["n"][0].dtype, made["n"][0].requires_grad, made["none"]) == (torch.int32, False, None)
        assert torch.equal(made["n"][1], mask)
        made["a"].sum().backward()
        assert torch.equal(x.grad, torch.full((3, 4), 2.0))
        assert torch.equal(first.grad, torch.full((4,), 3.0))

    def test_compiled_once_for_shapes_and_constants(self) -> None:
        traces = []

        def fn(x: Any, power: Any) -> Any:
            traces.append(power)
            return x**power

        function = jax_in_torch(fn)
        x = torch.ones(3, requires_grad=True)
        for _ in range(3):
            function(x, 2).sum().backward()
        assert traces == [2]
        function(x, 2.0)
        assert [type(power) for power in traces] == [int, float]  # 2 == 2.0, and yet another function
        function(torch.ones(4, requires_grad=True), 2)
        assert len(traces) == 3
        function(x.detach(), 2)
        assert len(traces) == 4  # the value alone is another program
        function(x.detach(), 2)
        assert len(traces) == 4

    def test_only_what_is_wanted_is_computed(self) -> None:
        asked = []

        @jax.custom_vjp
        def product(x: Any, w: Any) -> Any:
            return x * w

        def forward(x: Any, w: Any) -> Any:
            asked.append((x.perturbed, w.perturbed))
            return x.value * w.value, (x.value, w.value)

        product.defvjp(forward, lambda kept, g: (g * kept[1], g * kept[0]), symbolic_zeros=True)
        function = jax_in_torch(product)
        x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
        function(x, w).sum().backward()
        assert asked == [(True, False)]
        assert w.grad is None
        assert torch.equal(x.grad, w)
        with torch.no_grad():
            assert not function(x, w).requires_grad
        assert not function(w, w).requires_grad
        assert len(asked) == 1  # neither traced a forward rule

    @pytest.mark.case(4)
    def test_upstream_gradients_of_any_stride(self) -> None:
        x, w, y = tokens()
        function = jax_in_torch(jax_impl.linear_cross_entropy)
        wide = torch.randn(24)
        for upstream in (wide[::2], wide[:1].expand(12), wide[:12].flip(0), torch.zeros(12)):
            x.grad = w.grad = None
            function(x, w, y, reduction="none").backward(upstream)
            true = expected(x, w, y, upstream, reduction="none")
            assert near(x.grad, true[0])
            assert near(w.grad, true[1])
        x.grad = None
        function(x, w, y, reduction="none").sum().backward()  # sum sends an expanded scalar back
        assert near(x.grad, expected(x, w, y, torch.ones(12), reduction="none")[0])

    @pytest.mark.case(5)
    def test_backward_twice(self) -> None:
        x, w, y = tokens()
        function = jax_in_torch(jax_impl.linear_cross_entropy)
        for reduction in ("mean", "none"):
            total = function(x, w, y, reduction=reduction).sum()
            first = torch.autograd.grad(total, (x, w), retain_graph=True)
            kept = [gradient.clone() for gradient in first]
            second = torch.autograd.grad(total * -3.0, (x, w))
            assert near(second[1], -3 * kept[1])
            assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(total, (x, w))

    def test_two_uses_in_one_graph(self) -> None:
        function = jax_in_torch(jnp.sin)
        x = torch.randn(5, requires_grad=True)
        (function(x) * function(function(x))).sum().backward()
        own = x.detach().requires_grad_()
        (own.sin() * own.sin().sin()).sum().backward()
        assert near(x.grad, own.grad)

    def test_outputs_that_get_no_gradient(self) -> None:
        function = jax_in_torch(lambda x, w: (x * w, x + w, jnp.exp(w)))
        x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        function(x, w)[0].sum().backward()
        assert torch.equal(x.grad, w)
        assert torch.equal(w.grad, x)

    def test_complex_gradients_are_torchs(self) -> None:
        function = jax_in_torch(lambda z: z * z * (1 + 2j))
        z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        upstream = torch.tensor([2 - 1j, 1j])
        own = z.detach().requires_grad_()
        function(z).backward(upstream)
        (own * own * (1 + 2j)).backward(upstream)
        assert near(z.grad.resolve_conj().numpy().view(np.float32), own.grad.resolve_conj().numpy().view(np.float32))

    def test_arguments_results_and_gradients_are_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Addresses at every crossing: what goes in is the caller's memory, what comes out is JAX's."""
        crossed: list[tuple[str, int, int]] = []
        share, to_torch_one = dlpack.share, dlpack.to_torch

        def spied_share(tensor: Any, **kwargs: Any) -> Any:
            array = share(tensor, **kwargs)
            crossed.append(("in", tensor.data_ptr(), array.unsafe_buffer_pointer()))
            return array

        def spied_to_torch(array: Any, **kwargs: Any) -> Any:
            tensor = to_torch_one(array, **kwargs)
            crossed.append(("out", array.unsafe_buffer_pointer(), tensor.data_ptr()))
            return tensor

        monkeypatch.setattr(dlpack, "share", spied_share)
        monkeypatch.setattr(dlpack, "to_torch", spied_to_torch)
        x = torch.randn(64, requires_grad=True)
        result = jax_in_torch(lambda x: jnp.sin(x) * 2)(x)
        upstream = torch.randn(64)
        result.backward(upstream)
        assert [kind for kind, _, _ in crossed].count("in") >= 2
        assert all(before == after for _, before, after in crossed)
        addresses = {after for _, _, after in crossed}
        assert {x.data_ptr(), result.data_ptr(), upstream.data_ptr(), x.grad.data_ptr()} <= addresses

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_residuals_are_the_callers_own_tensors(self, reduction: str) -> None:
        """No copy of the weight waits for the backward: what torch saves for it is the weight, or of another size."""
        x, w, y = tokens(12, 8, 30)
        loss = jax_in_torch(jax_impl.linear_cross_entropy)(x, w, y, reduction=reduction)
        saved = loss.grad_fn.saved_tensors
        if reduction == "none":
            assert {x.data_ptr(), w.data_ptr(), y.data_ptr()} <= {tensor.data_ptr() for tensor in saved}
        own = {x.data_ptr(), w.data_ptr()}
        copies = [t for t in saved if t.data_ptr() not in own and (torch.equal(t, w) or torch.equal(t, x))]
        assert copies == []

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_write_between_forward_and_backward_is_found(self, index: int) -> None:
        given = tokens()
        loss = jax_in_torch(jax_impl.linear_cross_entropy)(*given, reduction="none").sum()
        with torch.no_grad():
            given[index].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_write_to_an_output_is_found_where_the_backward_needs_it(self) -> None:
        x = torch.randn(4, requires_grad=True)
        result = jax_in_torch(jnp.exp)(x)
        result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()

    def test_a_write_after_the_call_does_not_reach_it(self) -> None:
        """On a CPU the call has read its arguments when it returns."""
        function = jax_in_torch(lambda x: (x @ x @ x @ x).sum())
        x = torch.ones(600, 600)
        function(x)
        result = function(x)
        x.zero_()
        assert result.item() == pytest.approx(600.0**5, rel=CHAIN)

    def test_the_graph_frees_what_it_kept(self) -> None:
        x, w, y = tokens(40, 16, 3000)
        loss = jax_in_torch(jax_impl.linear_cross_entropy)(x, w, y)
        held = [weakref.ref(tensor.untyped_storage()) for tensor in loss.grad_fn.saved_tensors]
        assert held
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            _ = loss.grad_fn.saved_tensors
        gc.collect()
        assert not any(storage() for storage in held)

    def test_views_with_gaps_and_wide_labels_are_copied(self) -> None:
        x, w, y = tokens(24)
        function = jax_in_torch(jax_impl.linear_cross_entropy)
        rows, ids = x[::2], y[::2].long()
        loss = function(rows, w.t().contiguous().t(), ids)
        loss.backward()
        assert near(x.grad[::2], expected(rows, w, ids, None)[0])
        assert not x.grad[1::2].any()

    def test_settings_of_the_forward_hold_in_the_backward(self) -> None:
        """torch may run a backward in any thread. x64 was on where the forward ran."""
        function = jax_in_torch(lambda x: jnp.sin(x) * x)
        x = torch.randn(5, dtype=torch.float64, requires_grad=True)
        with jax.enable_x64(True):
            result = function(x)
        result.sum().backward()
        assert x.grad.dtype == torch.float64
        assert error(x.grad, (x.cos() * x + x.sin()).detach()) <= TINY["float64"]

    def test_prng_keys_are_constants(self) -> None:
        function = jax_in_torch(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape))
        x = torch.ones(100, requires_grad=True)
        result = function(x, jax.random.key(3))
        result.sum().backward()
        assert torch.equal(x.grad, result)
        assert 20 < result.sum() < 80

    def test_inside_torch_compile(self) -> None:
        function = jax_in_torch(jnp.sin)

        @torch.compile(backend="eager")
        def compiled(x: Any) -> Any:
            return function(x + 1) * 2

        x = torch.zeros(3, requires_grad=True)
        compiled(x).sum().backward()
        assert near(x.grad, 2 * torch.ones(3).cos())

    def test_name_and_signature_are_those_of_the_function(self) -> None:
        assert jax_in_torch(jax_impl.linear_cross_entropy).__name__ == "linear_cross_entropy"
        assert torch_in_jax(torch_impl.linear_cross_entropy).__doc__ == torch_impl.linear_cross_entropy.__doc__

    def test_second_derivative_is_refused(self) -> None:
        x = torch.randn(3, requires_grad=True)
        with pytest.raises(NotImplementedError, match="differentiated once: got create_graph=True"):
            torch.autograd.grad(jax_in_torch(jnp.sin)(x).sum(), x, create_graph=True)


class TestJaxInTorchRefuses:
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return jax_in_torch(lambda *args, **kwargs: jnp.zeros(()))(*args, **kwargs)

    def test_not_a_function(self) -> None:
        for make in (jax_in_torch, torch_in_jax):
            with pytest.raises(TypeError, match=r"fn: got builtins\.int, allowed is a function"):
                make(3)

    def test_names_that_are_no_parameters(self) -> None:
        with pytest.raises(ValueError, match=r"autocast: got 'wieght', allowed are names .*: hidden, weight, target"):
            jax_in_torch(jax_impl.linear_cross_entropy, autocast=("wieght",))

    @pytest.mark.parametrize("value", [np.zeros(3), bytearray(b"x")])
    def test_unhashable_leaves(self, value: Any) -> None:
        with pytest.raises(
            TypeError, match=r"argument 1\['a'\]\[0\]: got .*, allowed is a torch.Tensor or a jax.Array"
        ):
            self.call(torch.zeros(2), {"a": [value]})

    def test_mixed_devices(self) -> None:
        with pytest.raises(ValueError, match=r"several devices: got argument 0 on cpu, x on meta, allowed is one"):
            self.call(torch.zeros(2), x=torch.zeros(2, device="meta"))

    def test_meta(self) -> None:
        with pytest.raises(ValueError, match=r"argument 0\[1\]: tensor is on the meta device and holds no data"):
            self.call([1, torch.zeros(2, device="meta")])

    def test_sparse(self) -> None:
        with pytest.raises(ValueError, match=r"w: tensor must be strided.*\.to_dense\(\)"):
            self.call(torch.zeros(2), w=torch.eye(3).to_sparse())

    def test_dtypes(self) -> None:
        with pytest.raises(TypeError, match=r"argument 0: tensor has dtype complex32, .*allowed are bool"):
            self.call(torch.zeros(2, dtype=torch.complex32))
        with pytest.raises(ValueError, match=r"argument 0: tensor has dtype float64, which JAX would round.*x64"):
            self.call(torch.zeros(2, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"argument 0: tensor has int64 values that do not fit int32.*4294967296"):
            self.call(torch.tensor([1, 2**32]))

    def test_inside_jit(self) -> None:
        """JAX traces whatever runs inside its transformations, and a tracer is no memory for torch."""
        function = jax_in_torch(lambda x: x * 2)

        def traced(x: Any) -> Any:
            function(torch.ones(3))
            return x

        with pytest.raises(TypeError, match=r"JAX tracer .*outside jit"):
            jax.jit(traced)(1.0)
        with pytest.raises(TypeError, match=r"JAX tracer .*outside jit"):
            jax.jit(lambda x: function(x))(jnp.ones(3))

    @pytest.mark.parametrize("transform", ["grad", "vmap"])
    def test_inside_torch_func(self, transform: str) -> None:
        with pytest.raises(ValueError, match=r"argument 0: tensor has no memory of its own.*torch\.func"):
            getattr(torch.func, transform)(jax_in_torch(lambda x: x.sum()))(torch.ones(2, 2))


# ---------------------------------------------------------------------------------------------------------------------
# torch functions in JAX


def torch_example(x: Any, options: Any) -> Any:
    return {"y": (x.exp() * options["scale"]).sum(0), "best": x.argmax(), "same": x}


class TestTorchInJax:
    def test_pytrees_constants_and_several_outputs(self) -> None:
        x = jax.random.normal(jax.random.key(0), (3, 4))
        function = torch_in_jax(torch_example)
        for run in (function, jax.jit(function, static_argnums=()), lambda *a: jax.vjp(function, *a)[0]):
            made = run(x, {"scale": jnp.float32(2.0)})
            assert near(made["y"], jnp.exp(x).sum(0) * 2)
            assert (made["best"].dtype, int(made["best"])) == (jnp.int32, int(jnp.argmax(x)))
            assert near(made["same"], x)

    @pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "checkpoint", "scan", "jacrev", "jit_of_pullback"])
    def test_transformations(self, transform: str) -> None:
        def own(x: Any) -> Any:
            return (jnp.sin(x) * x).sum(-1)

        bridged = torch_in_jax(lambda x: (x.sin() * x).sum(-1))
        x = jax.random.normal(jax.random.key(0), (3, 4))

        def gradient(function: Any) -> Any:
            total = lambda x: function(x).sum()  # noqa: E731
            if transform == "eager":
                return jax.grad(total)(x)
            if transform == "jit":
                return jax.jit(jax.grad(total))(x)
            if transform == "vmap":
                return jax.vmap(jax.grad(total))(x)
            if transform == "checkpoint":
                return jax.grad(jax.checkpoint(total))(x)
            if transform == "scan":
                return jax.grad(lambda x: jax.lax.scan(lambda c, row: (c + function(row), None), 0.0, x)[0])(x)
            if transform == "jacrev":
                return jax.jacrev(function)(x)
            return jax.jit(jax.vjp(function, x)[1])(jnp.arange(3.0))[0]

        assert near(gradient(bridged), gradient(own))

    def test_eager_calls_share_memory_both_ways(self) -> None:
        seen = []

        def fn(x: Any, w: Any) -> Any:
            result = x * w
            seen.append((x.data_ptr(), w.data_ptr(), result.data_ptr()))
            return result

        x, w = jnp.arange(64.0), jnp.ones(64)
        function = torch_in_jax(fn)
        for run in (function, lambda *given: jax.vjp(function, *given)[0]):
            result = run(x, w)
            assert seen[-1] == tuple(a.unsafe_buffer_pointer() for a in (x, w, result))

    def test_eager_gradients_share_memory(self) -> None:
        made = []

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x * 2

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                made.append((g.data_ptr(), g * 2))
                return made[-1][1]

        _, pull_back = jax.vjp(torch_in_jax(Double.apply), jnp.ones(64))
        upstream = jnp.arange(64.0)
        (gradient,) = pull_back(upstream)
        assert made[-1][0] == upstream.unsafe_buffer_pointer()
        assert made[-1][1].data_ptr() == gradient.unsafe_buffer_pointer()

    def test_only_what_is_differentiated_requires_a_gradient(self) -> None:
        asked = []

        def fn(x: Any, w: Any, n: Any) -> Any:
            asked.append((torch.is_grad_enabled(), x.requires_grad, w.requires_grad, n.requires_grad))
            return x * w * n

        x, w, n = jnp.ones(3), jnp.full(3, 2.0), jnp.arange(3)
        function = torch_in_jax(fn)
        assert jax.grad(lambda w: function(x, w, n).sum())(w).tolist() == [0, 1, 2]
        assert asked.pop() == (True, False, True, False)
        function(x, w, n)
        assert asked.pop() == (False, False, False, False)
        made = jax.grad(lambda x, w, n: function(x, w, n).sum(), argnums=(0, 2), allow_int=True)(x, w, n)
        assert asked.pop() == (True, True, False, False)
        assert made[0].tolist() == [0, 2, 4]
        assert made[1].dtype == jax.dtypes.float0

    @pytest.mark.case(4)
    @pytest.mark.case(5)
    def test_a_pullback_used_again(self) -> None:
        x, w, y = (to_jax(t.detach()) for t in tokens())
        for reduction, shape in (("mean", ()), ("none", (12,))):
            function = torch_in_jax(torch_impl.linear_cross_entropy)
            _, pull_back = jax.vjp(lambda x, w, f=function, r=reduction: f(x, w, y, reduction=r), x, w)
            first = pull_back(jnp.ones(shape))
            kept = jax.tree.map(lambda a: np.array(a), first)
            third = pull_back(jnp.broadcast_to(jnp.float32(-3.0), shape))
            assert near(third[0], -3 * kept[0])
            assert near(third[1], -3 * kept[1])
            assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=True))

    @pytest.mark.parametrize("jit", [False, True])
    def test_outputs_without_gradient(self, jit: bool) -> None:
        function = torch_in_jax(lambda x, w: (x * w, w.exp(), x.detach(), torch.ones(2, dtype=torch.int32)))
        own = lambda x, w: (x * w, jnp.exp(w), x, jnp.ones(2, jnp.int32))  # noqa: E731
        x, w = jnp.arange(3.0), jnp.ones(3)
        for chosen in (0, 1):
            gradient = jax.grad(lambda x, w, n=chosen, f=function: f(x, w)[n].sum(), argnums=(0, 1))
            true = jax.grad(lambda x, w, n=chosen: own(x, w)[n].sum(), argnums=(0, 1))(x, w)
            made = (jax.jit(gradient) if jit else gradient)(x, w)
            assert all(near(a, b) for a, b in zip(made, true, strict=True))
        detached = jax.grad(lambda x: function(x, w)[2].sum())
        assert not (jax.jit(detached) if jit else detached)(x).any()

    @pytest.mark.parametrize("jit", [False, True])
    def test_complex_gradients_are_jaxs(self, jit: bool) -> None:
        function = torch_in_jax(lambda z: z * z * (1 + 2j))
        if jit:
            function = jax.jit(function)
        z, upstream = jnp.asarray([1 + 2j, 3 - 1j]), jnp.asarray([2 - 1j, 1j])
        made, true = (jax.vjp(f, z)[1](upstream)[0] for f in (function, lambda z: z * z * (1 + 2j)))
        assert np.allclose(made, true, rtol=TINY["float32"])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "bool", "int8"])
    def test_dtypes_through_the_callback(self, dtype: str) -> None:
        x = jnp.asarray([[0, 1], [1, 0]]).astype(dtype)
        made = jax.jit(torch_in_jax(lambda x: x.t()))(x)
        assert made.dtype.name == dtype
        assert np.array_equal(np.asarray(made, np.float32), np.asarray(x, np.float32).T)

    def test_x64(self) -> None:
        with jax.enable_x64(True):
            x = jnp.asarray(np.random.default_rng(0).standard_normal(7))
            function = torch_in_jax(torch.sin)
            for run in (jax.grad(lambda x: function(x).sum()), jax.jit(jax.grad(lambda x: function(x).sum()))):
                assert run(x).dtype == jnp.float64
                assert error(run(x), jnp.cos(x)) <= TINY["float64"]
            assert jax.jit(torch_in_jax(torch.argmax))(x).dtype == jnp.int64

    def test_memory_lives_until_used(self) -> None:
        function = torch_in_jax(lambda x: x * 2)
        result = function(jnp.arange(1 << 16, dtype=jnp.float32))
        gc.collect()
        others = [torch.full((1 << 16,), -1.0) for _ in range(20)]
        assert all(other.data_ptr() != result.unsafe_buffer_pointer() for other in others)
        assert float(result[-1]) == 2.0 * ((1 << 16) - 1)

    def test_large_arrays_through_the_callback(self) -> None:
        """A callback that computes in JAX would hang on a machine with few cores."""
        function = torch_in_jax(lambda x: x + 1)
        run = jax.jit(lambda x: function(jnp.sin(x)).sum())
        x = jnp.zeros((1000, 1000))
        assert [float(run(x)) for _ in range(5)] == [1e6] * 5

    def test_a_modules_parameters_as_arguments(self) -> None:
        module = torch.nn.Linear(4, 2)
        parameters = to_jax({name: p.detach() for name, p in module.named_parameters()})
        function = torch_in_jax(lambda p, x: torch.func.functional_call(module, p, (x,)).sum())
        made = jax.grad(function)(parameters, jnp.ones((3, 4)))
        assert made["weight"].tolist() == [[3.0] * 4] * 2
        assert module.weight.grad is None


class TestTorchInJaxRefuses:
    def test_torch_tensors_and_unhashable_leaves(self) -> None:
        function = torch_in_jax(lambda *a, **k: a[0])
        for value in (torch.zeros(2), np.zeros(2)):
            with pytest.raises(TypeError, match=r"w\['a'\]: got .*, allowed is a jax\.Array, or a hashable constant"):
                function(jnp.ones(2), w={"a": value})

    @pytest.mark.parametrize("jit", [False, True])
    def test_dtypes(self, jit: bool) -> None:
        function = torch_in_jax(lambda x: x)
        with pytest.raises(TypeError, match=r"argument 0: array has dtype int4, .*allowed are bool"):
            (jax.jit(function) if jit else function)(jnp.zeros(4, "int4"))
        with pytest.raises(TypeError, match=r"argument 0: array holds PRNG keys"):
            function(jax.random.key(0))

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize(
        ("result", "kind", "words"),
        [
            (3.0, TypeError, r"the function returned builtins\.float, allowed is a pytree of tensors"),
            ("double", ValueError, r"dtype float64, which JAX would round"),
            ("half", TypeError, r"dtype complex32, which cannot be exchanged"),
        ],
    )
    def test_results(self, result: Any, kind: type[Exception], words: str, jit: bool) -> None:
        made = {"double": lambda x: x.double(), "half": lambda x: x.to(torch.complex32)}.get(result, lambda x: result)
        function = torch_in_jax(made)
        with pytest.raises(kind, match=words):
            (jax.jit(function) if jit else function)(jnp.ones(3))

    def test_sparse(self) -> None:
        from jax.experimental import sparse

        with pytest.raises(TypeError, match=r"argument 0: got jax\.experimental\.sparse.*allowed is a jax\.Array"):
            torch_in_jax(lambda x: x)(sparse.BCOO.fromdense(jnp.eye(3)))
        with pytest.raises(ValueError, match="must be strided"):
            torch_in_jax(lambda x: x.to_sparse())(jnp.eye(3))

    @pytest.mark.parametrize("jit", [False, True])
    def test_writes_to_an_argument(self, jit: bool) -> None:
        function = torch_in_jax(lambda x, w: x * w.add_(1))
        with pytest.raises(ValueError, match=r"argument 1: the function wrote to it in place.*clone it"):
            (jax.jit(function) if jit else function)(jnp.ones(3), jnp.ones(3))

    def test_shapes_that_depend_on_values(self) -> None:
        function = torch_in_jax(lambda x: x[x > 0])
        assert function(jnp.asarray([1.0, -1.0, 2.0])).tolist() == [1.0, 2.0]
        with pytest.raises(RuntimeError, match=r"fake tensors, which failed .*must not depend on values.*outside jit"):
            jax.jit(function)(jnp.ones(3))

    @pytest.mark.parametrize("jit", [False, True])
    def test_second_derivatives_and_forward_mode(self, jit: bool) -> None:
        function = torch_in_jax(torch.sin)
        twice = jax.grad(jax.grad(lambda x: function(x)))
        with pytest.raises(NotImplementedError, match="differentiated once, in reverse mode"):
            (jax.jit(twice) if jit else twice)(1.0 * jnp.ones(()))
        _, pull_back = jax.vjp(function, jnp.ones(()))
        again = jax.grad(lambda upstream: pull_back(upstream)[0])
        with pytest.raises(NotImplementedError, match="differentiated once, in reverse mode"):
            (jax.jit(again) if jit else again)(jnp.ones(()))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(function, (jnp.ones(()),), (jnp.ones(()),))

    def test_leaked_tracers(self) -> None:
        leaked = []
        jax.jit(lambda x: leaked.append(x) or x)(jnp.ones(3))
        with pytest.raises(jax.errors.UnexpectedTracerError):
            torch_in_jax(torch.sin)(leaked[0])
        with pytest.raises(TypeError, match="JAX tracer"):
            to_torch(leaked[0])

    def test_several_devices(self) -> None:
        from test_interop import run_python

        run_python(
            """
            import jax, jax.numpy as jnp, pytest
            jax.config.update("jax_num_cpu_devices", 2)
            from logitless.interop import torch_in_jax
            one, other = (jax.device_put(jnp.ones(3), device) for device in jax.devices())
            function = torch_in_jax(lambda x, w: x + w)
            with pytest.raises(ValueError, match="several devices: got argument 0 on .*, w on .*1"):
                function(one, w=other)
            assert function(one, one).tolist() == [2.0] * 3
            """
        )
