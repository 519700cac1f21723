"""The losses on top hold nothing of the size of the logits, forward and backward, on any side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distilling import rows_of
from implementations import every_implementation, in_turn

from logitless.doctor import cuda_device_count
from logitless.objectives import DistillationSizes, RowsBy, WholeRows, distillation_order

B, T, D, D_TEACHER = 4, 128, 64, 96
V = 65536 if cuda_device_count() else 8192  # the kernels' smallest slice of the vocabulary is 16384 wide
N = B * T
LOGITS = N * V * 4
DENSE, SPARSE = "dense_distillation_loss", "sparse_distillation_loss"
NAMES = ("dpo_loss", "kto_loss", "clipped_policy_loss", "distillation_loss", SPARSE, DENSE)
K = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "dpo_loss": {"loss_type": "ipo", "nll_coef": 0.5},
    "kto_loss": {"kl": 0.1},
    "clipped_policy_loss": {"entropy_coef": 0.1, "kl_coef": 0.1, "ratio": "sequence", "dual_clip": 3.0},
    "distillation_loss": {"beta": 0.5, "softcap": 30.0},
    SPARSE: {"beta": 0.5, "softcap": 30.0, "nll_coef": 0.5},
    DENSE: {"beta": 0.5, "softcap": 30.0, "nll_coef": 0.5},
}


def floats_and_constants(impl: Any, name: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return impl.array(rng.standard_normal(shape) * 0.1, dtype)

    floats = {"hidden": some(B, T, D), "weight": some(V, D), "bias": some(V)}
    per_token = {key: impl.array(rng.standard_normal((B, T)), "float32") for key in ("old", "reference", "advantage")}
    known: dict[str, Any] = {"mask": impl.array(rng.integers(0, 2, (B, T)))}
    if name == "distillation_loss":
        return floats, known | {"teacher_hidden": some(B, T, D_TEACHER), "teacher_weight": some(V, D_TEACHER)}
    known["target"] = impl.array(rng.integers(0, V, (B, T)))
    if name == SPARSE:
        ids = np.argsort(rng.random((B, T, V // K)), axis=-1)[..., :K] * K
        return floats, known | {"ids": impl.array(ids), "probs": impl.array(np.full((B, T, K), 0.5 / K), "float32")}
    if name == DENSE:
        return floats, known | {"teacher": impl.array(np.full((B, T, V), 1.0 / V), dtype)}
    known |= {"reference_log_prob": per_token["reference"]}
    if name == "clipped_policy_loss":
        known |= {"old_log_prob": per_token["old"], "advantage": per_token["advantage"]}
    if name == "kto_loss":
        known["desirable"] = impl.array(np.arange(B) % 2)
    return floats, known


def scratch(impl: Any, name: str, dtype: str, *, gradients: bool = True, **options: Any) -> int:
    """Peak bytes beyond inputs and gradients of one forward and backward, or of the forward alone."""
    dtype = impl.takes(dtype)
    options = OPTIONS[name] | options
    if impl.name.startswith("torch"):
        from logitless import torch_impl

        return torch_scratch(impl, name, dtype, getattr(torch_impl, name), options, gradients)
    from logitless import jax_impl

    return jax_scratch(impl, name, dtype, getattr(jax_impl, name), options, gradients)


def torch_scratch(
    impl: Any, name: str, dtype: str, loss: Callable[..., Any], options: dict[str, Any], gradients: bool
) -> int:
    import torch

    from logitless.torch_impl.memory import peak_scratch_bytes

    floats, known = floats_and_constants(impl, name, dtype)
    known = {key: values for key, values in known.items() if key not in options}
    for leaf in floats.values():
        leaf.requires_grad_()

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            made = loss(**floats, **known, backend=impl.backend, **options)
        if gradients:
            made.backward()

    if impl.on_gpu:  # where the first call makes what stays: kernels, cuBLAS's workspace
        step()
    for leaf in floats.values():
        leaf.grad = None
    return peak_scratch_bytes(step) - sum(leaf.grad.nbytes for leaf in floats.values() if leaf.grad is not None)


def jax_scratch(
    impl: Any, name: str, dtype: str, loss: Callable[..., Any], options: dict[str, Any], gradients: bool
) -> int:
    from logitless.jax_impl.memory import temp_bytes

    return temp_bytes(*jax_step(impl, name, dtype, loss, options, gradients))


def jax_step(
    impl: Any, name: str, dtype: str, loss: Callable[..., Any], options: dict[str, Any], gradients: bool
) -> tuple[Any, Any, Any]:
    """A jitted function, and what it takes."""
    import jax

    def value(floats: Any, known: Any) -> Any:
        return loss(**floats, **known, backend=impl.backend, **options)

    floats, known = floats_and_constants(impl, name, dtype)
    known = {key: values for key, values in known.items() if key not in options}
    return jax.jit(jax.value_and_grad(value) if gradients else value), floats, known


@pytest.mark.every_value
@pytest.mark.case(31)
@every_implementation
@pytest.mark.parametrize(("name", "dtype"), in_turn(NAMES, ["float32", "bfloat16"]))
def test_within_a_budget_below_the_logits(impl: Any, dtype: str, name: str) -> None:
    budget = LOGITS // 2
    used = scratch(impl, name, dtype, memory_budget=budget)
    assert used <= budget, f"{used / 2**20:.2f} MiB of {budget / 2**20:.2f}"
    # The meter is not blind.
    assert used >= 0.02 * budget


WAYS = pytest.mark.parametrize("way", ["head", "class", "spread", "dense"])


def order_of(impl: Any, way: str, dtype: str, *, gradients: bool = True) -> WholeRows:
    """What a call takes that sets no budget."""
    in_torch = impl.name.startswith("torch")
    operand = 2 if dtype == "bfloat16" and (impl.on_gpu or not in_torch) else 4
    sparse = way in ("class", "spread", "drop")
    plain: RowsBy = "plain" if in_torch else "xla"
    kernel: RowsBy = "kernel" if in_torch else "pallas"
    ids: RowsBy = "kernel, ids" if in_torch else "xla"
    probabilities: RowsBy = "kernel, probabilities" if in_torch else "pallas, probabilities"
    by = {"head": kernel, "class": ids, "drop": ids}.get(way, probabilities) if impl.fused else plain
    sizes = DistillationSizes(N, D, V, dtype, D_TEACHER * (way == "head"), (K + 1) * sparse, whole_rows=way == "rows")
    return distillation_order(sizes, operand_itemsize=operand * gradients, by=by)


def scratch_of(impl: Any, way: str, dtype: str, **more: Any) -> int:
    rest: dict[str, Any] = {"rest": way} if way in ("class", "spread", "drop") else {}
    name = SPARSE if rest else "distillation_loss" if way == "head" else DENSE
    teacher = {"teacher": generated(impl)} if way == "rows" else {}
    return scratch(impl, name, dtype, **rest, **teacher, **more)


def again(monkeypatch: pytest.MonkeyPatch, side: int, tokens: int = 4) -> None:
    """No held gradient: so many whole rows at a time, and tiles of up to ``side`` tokens and entries."""
    monkeypatch.setattr("logitless.objectives.LARGEST_TILE", side)
    monkeypatch.setattr("logitless.objectives.KERNEL_TILE", (side, side))
    monkeypatch.setattr("logitless.objectives.FEW_ROWS", (tokens,))
    rows_of(monkeypatch)


@pytest.mark.every_value
@pytest.mark.late(where=lambda p: p["side"] in (512, 1024))
@every_implementation
@pytest.mark.parametrize(("side", "dtype"), in_turn([256, 512, 1024, 2048], ["float32", "bfloat16"]))
def test_a_distillation_holds_its_tile(impl: Any, side: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again(monkeypatch, side)
    promised = order_of(impl, "head", dtype).scratch_bytes
    used = scratch_of(impl, "head", dtype, memory_budget=promised)
    assert used <= promised, f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"


@pytest.mark.every_value
@every_implementation
@pytest.mark.parametrize(
    ("way", "dtype"), in_turn(["class", "spread", "drop", "dense", "rows"], ["float32", "bfloat16"])
)
def test_a_distillation_from_targets_holds_its_tile(
    impl: Any, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hard loss beside it. A function's rows are generated a chunk of tokens at a time."""
    again(monkeypatch, 512)
    promised = order_of(impl, way, dtype).scratch_bytes
    used = scratch_of(impl, way, dtype, memory_budget=promised)
    assert 0.1 * promised <= used <= promised, f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"


def generated(impl: Any) -> Callable[..., Any]:
    """rows(start, count) of the same probabilities for every token."""
    if impl.name.startswith("torch"):
        import torch

        device = "cuda" if impl.on_gpu else "cpu"
        return lambda start, count: torch.full((count, V), 1.0 / V, device=device)
    import jax.numpy as jnp

    return lambda start, count: jnp.full((count, V), 1.0 / V) + 0.0 * start


# What the tile's promise may be of the peak, beside 1 MiB, by backend and dtype. One number of matrices is for all
# kinds of teachers and both devices. PyTorch's own operations hold up to all seven, and fewer copies of rows.
TILE_SHARE = {
    ("eager", "float32"): 1.35,
    ("eager", "bfloat16"): 1.35,
    ("xla", "float32"): 1.75,
    ("xla", "bfloat16"): 1.35,
}


@pytest.mark.every_value(each="impl")
@pytest.mark.case(31)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", [2048, 4096])
def test_a_tiles_promise_is_from_both_sides(impl: Any, side: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again(monkeypatch, side)
    promised, used = order_of(impl, "head", dtype).scratch_bytes, scratch_of(impl, "head", dtype)
    told = f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"
    assert used <= promised, told
    if not impl.fused:  # of rows without a bias, which end on a boundary, a kernel's tile takes less
        assert promised >= 8 * 2**20, "too small a tile: the slack would hide a wrong promise"
        assert promised <= TILE_SHARE[impl.backend, dtype] * used + 2**20, told


@pytest.mark.case(31)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_hidden_and_weight_are_in_a_tiles_promise(
    impl: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are most of it: copies of a tile's rows, and sums. (On a GPU 16-bit operands are not converted.)"""
    for name, value in {"D": 512, "D_TEACHER": 768, "V": 1024, "N": 128, "B": 1}.items():
        monkeypatch.setitem(globals(), name, value)
    again(monkeypatch, 128)
    promised, used = order_of(impl, "head", dtype).scratch_bytes, scratch_of(impl, "head", dtype)
    told = f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"
    assert used <= promised, told
    assert impl.on_gpu or promised / 3 <= used, told


# What the promise of whole rows may be of the peak, beside 1 MiB.
ROWS_SHARE = {"eager": 1.35, "xla": 1.3}


@pytest.mark.case(31)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@WAYS
def test_a_distillation_holds_its_rows(impl: Any, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise of whole rows, from both sides. The kernel makes fewer matrices, and not of every kind."""
    rows_of(monkeypatch, 192)
    promised = order_of(impl, way, dtype).scratch_bytes
    used = scratch_of(impl, way, dtype, memory_budget=promised)
    told = f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"
    assert used <= promised, told
    if not impl.on_gpu and way != "class":  # which has no log-probabilities of a teacher
        assert promised <= ROWS_SHARE[impl.backend] * used + 2**20, told


@pytest.mark.case(31)
@every_implementation
@WAYS
def test_a_value_alone_has_no_gradient_of_the_logits(impl: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(monkeypatch, 64)
    promised = order_of(impl, way, impl.dtype, gradients=False).scratch_bytes
    used = scratch_of(impl, way, impl.dtype, gradients=False)
    assert used <= promised, f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"
    # The promise is less than what such a gradient would make of the peak. (On a GPU XLA holds fewer matrices.)
    assert impl.on_gpu or promised < used + N * V * (2 if impl.dtype == "bfloat16" else 4)


@pytest.mark.every_value
@pytest.mark.case(31)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@WAYS
def test_xla_makes_no_logit_twice(way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' logits, dX and dW are a product each; the gradient of the logits is written in place."""
    pytest.importorskip("jax", reason="this is about XLA")
    from compiled_text import copies
    from implementations import JaxXla

    from logitless import jax_impl

    if JaxXla.on_gpu:
        pytest.skip("on a GPU products have many names")
    rest = {"rest": way} if way in ("class", "spread") else {}
    name = SPARSE if rest else DENSE if way == "dense" else "distillation_loss"

    def program() -> str:
        step, *given = jax_step(JaxXla(), name, dtype, getattr(jax_impl, name), OPTIONS[name] | rest, gradients=True)
        return str(step.lower(*given).compile().as_text())

    rows_of(monkeypatch, N // 4)
    text, products = program(), 3 + (way == "head")
    assert text.count(" dot(") == products
    assert not copies(text, N * V * (4 if dtype == "float32" else 2))
    assert (f"f32[{N},{V}]" in text) == (dtype == "float32")
    rows_of(monkeypatch)
    assert program().count(" dot(") > products


@every_implementation
def test_full_logits_would_break_the_budget(impl: Any) -> None:
    """The oracle can go red: a distillation that holds both sides' logits."""
    floats, known = floats_and_constants(impl, "distillation_loss", "float32")
    used = full_torch(floats, known) if impl.name.startswith("torch") else full_jax(floats, known)
    assert used > 2 * LOGITS


def full_torch(floats: Any, known: Any) -> int:
    import torch

    from logitless.torch_impl.memory import peak_scratch_bytes

    for leaf in floats.values():
        leaf.requires_grad_()

    def step() -> None:
        q = torch.log_softmax(floats["hidden"] @ floats["weight"].T + floats["bias"], -1)
        p = torch.log_softmax(known["teacher_hidden"] @ known["teacher_weight"].T, -1)
        (p.exp() * (p - q)).sum().backward()

    return peak_scratch_bytes(step) - sum(leaf.nbytes for leaf in floats.values())


def full_jax(floats: Any, known: Any) -> int:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl.memory import temp_bytes

    def loss(floats: Any, known: Any) -> Any:
        q = jax.nn.log_softmax(floats["hidden"] @ floats["weight"].T + floats["bias"])
        p = jax.nn.log_softmax(known["teacher_hidden"] @ known["teacher_weight"].T)
        return (jnp.exp(p) * (p - q)).sum()

    return temp_bytes(jax.jit(jax.value_and_grad(loss)), floats, known)
