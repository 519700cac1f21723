"""A weight that is [D, V]: the same numbers as with [V, D], a gradient that lies as it does, and no copy of either."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from implementations import (
    MORE_DTYPES,
    TORCH_PLACES,
    JaxPallas,
    TorchTriton,
    assert_within,
    every_implementation,
    interpreted,
    options_of,
    plan_for,
)

from logitless import ChunkPlan, plan
from logitless.problems import BY_NAME, Problem
from logitless.tolerances import GRADIENT, error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

# Every epilogue, a ragged vocabulary, rows that are done again, an upstream gradient per token, targets that cancel.
PROBLEMS = ("odd_bias", "odd_none_most", "confident_wrong", "gemma", "trained_smooth")
MORE = [pytest.param(TorchTriton(), id="torch_triton", marks=interpreted), *MORE_DTYPES]


def sized(name: str, impl: Any) -> Problem:
    """A named problem; a smaller one where kernels are interpreted, but for the vocabulary of more than one tile."""
    problem = BY_NAME[name].with_dtype(impl.dtype)
    smaller = {"gemma": {"shape": (2, 20), "vocab": 600}, "trained_smooth": {"shape": (2, 48), "vocab": 256}}
    if isinstance(impl, TorchTriton) and name in smaller:
        return dataclasses.replace(problem, name=f"{name}_small", **smaller[name])
    return problem


def outcome_of(impl: Any, problem: Problem, **more: Any) -> Any:
    """A run with the weight as [D, V]; the weight's gradient is turned back."""
    case = problem.case()
    arrays = (case.hidden, np.ascontiguousarray(case.weight.T), case.target, case.bias)
    options = options_of(case) | more
    made = impl.run(*arrays, dtype=problem.dtype, upstream=case.upstream, weight_layout="dv", **options)
    assert made.grads["weight"].shape == case.weight.T.shape
    return dataclasses.replace(made, grads=made.grads | {"weight": made.grads["weight"].T})


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("impl", [*every_implementation.args[1], *MORE])
def test_within_the_rule(impl: Any, name: str) -> None:
    problem = sized(name, impl)
    assert_within(problem, outcome_of(impl, problem), impl.product)


def cut(problem: Problem, impl: Any, order: str) -> ChunkPlan:
    """Several chunks of tokens or slices of the vocabulary."""
    size = {"tokens": problem.tokens, "vocab": problem.vocab}[order] // 3  # slices begin anywhere
    return plan_for(problem, order=order, chunk=size, fused=impl.fused, padded=impl.padded)


@pytest.mark.parametrize("order", ["tokens", "vocab"])
@pytest.mark.parametrize("impl", [*every_implementation.args[1], *MORE])
def test_chunks_and_slices(impl: Any, order: str) -> None:
    problem = sized("trained_smooth", impl)
    plan = cut(problem, impl, order)
    assert plan.chunks > 1
    assert_within(problem, outcome_of(impl, problem, plan=plan), impl.product)


@pytest.mark.parametrize("order", [None, "tokens"])
@pytest.mark.parametrize("name", ["odd_bias", "confident_wrong"])
def test_interpreted_pallas(name: str, order: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="these tests are about JAX")
    if jax.__version_info__ < (0, 11) or jax.devices()[0].platform != "cpu":
        pytest.skip("kernels are interpreted by jax 0.11, on a CPU")
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
    impl = JaxPallas()
    problem = BY_NAME[name].with_dtype(impl.dtype)
    plan = None if order is None else cut(problem, impl, order)
    assert plan is None or plan.chunks > 1
    assert_within(problem, outcome_of(impl, problem, plan=plan), impl.product)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch: the strides say how a weight lies


def arrays_of(device: str, tokens: int = 48, hidden: int = 64, vocab: int = 264) -> tuple[Any, ...]:
    """hidden, a weight [D, V] and target, in bfloat16."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device).requires_grad_()
    k = torch.randn(hidden, vocab, generator=generator).mul_(hidden**-0.5).bfloat16().to(device).requires_grad_()
    return x, k, torch.randint(vocab, (tokens,), generator=generator).to(device)


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and not p["options"])
@pytest.mark.parametrize(("device", "backend"), TORCH_PLACES)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"plan": "lean"}], ids=str)
def test_a_gradient_lies_as_its_weight(device: str, backend: str, options: dict[str, Any]) -> None:
    """Else autograd copies it when it becomes a parameter's .grad."""
    torch_impl = pytest.importorskip("logitless.torch_impl", reason="these tests are about PyTorch")
    import torch

    x, k, y = arrays_of(device)
    strides = []
    view = k.T
    view.register_hook(lambda gradient: strides.append(gradient.stride()))
    loss = torch_impl.linear_cross_entropy(x, view, y, backend=backend, **options)
    loss.sum().backward()
    assert strides == [view.stride()]
    plain = k.detach().T.contiguous().requires_grad_()
    torch_impl.linear_cross_entropy(x.detach(), plain, y, backend=backend, **options).sum().backward()
    assert error(k.grad.double().cpu().numpy().T, plain.grad.double().cpu().numpy()) <= GRADIENT["bfloat16"]
    torch.testing.assert_close(loss.detach(), torch_impl.linear_cross_entropy(x, plain, y, backend=backend, **options))


@pytest.mark.every_value(where=lambda p: p["backend"] == "triton", each="lies")
@pytest.mark.parametrize(("device", "backend"), TORCH_PLACES)
@pytest.mark.parametrize("lies", ["dv", "vd"])
@pytest.mark.parametrize("buffer", ["dv", "vd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "entries"), [(520, None), (257, None), (520, 253)])
def test_a_buffer_of_either_layout(
    device: str, backend: str, lies: str, buffer: str, dtype: str, vocab: int, entries: int | None
) -> None:
    """Beside a weight that lies in either; rows of 257 elements, or parts of them for 253 entries, start anywhere."""
    torch_impl = pytest.importorskip("logitless.torch_impl", reason="these tests are about PyTorch")
    import torch

    x, k, y = arrays_of(device, vocab=vocab)
    if lies == "vd":
        k = k.detach().T.contiguous().T.requires_grad_()
    shape = k.shape if buffer == "dv" else k.shape[::-1]
    into = torch.ones(shape, device=device, dtype=getattr(torch, dtype))
    options: dict[str, Any] = {"backend": backend, "accumulate_into": into}
    if entries is not None:
        sizes = {"tokens": x.shape[0], "hidden": x.shape[1], "vocab": vocab, "dtype": "bfloat16"}
        options["plan"] = plan(**sizes, order="vocab", chunk=entries, fused=backend == "triton")
    if buffer == "dv":
        loss = torch_impl.linear_cross_entropy(x, k, y, weight_layout="dv", **options)
    else:
        loss = torch_impl.linear_cross_entropy(x, k.T, y, **options)
    loss.backward()
    into = into if buffer == "dv" else into.T
    assert k.grad is None
    torch_impl.linear_cross_entropy(x, k, y, weight_layout="dv", backend=backend).backward()
    assert error(into.double().cpu().numpy(), 1 + k.grad.double().cpu().numpy()) <= GRADIENT["bfloat16"]


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["reduction"] == "mean")
@pytest.mark.parametrize(("device", "backend"), TORCH_PLACES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(device: str, backend: str, reduction: str) -> None:
    torch_impl = pytest.importorskip("logitless.torch_impl", reason="these tests are about PyTorch")
    import torch

    def function(x: Any, k: Any, y: Any) -> Any:
        options = {"reduction": reduction, "backend": backend}
        return torch_impl.linear_cross_entropy(x, k, y, weight_layout="dv", **options).sum()

    found = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x, k, y = arrays_of(device)
        loss = call(x, k, y)
        loss.backward()
        found.append((loss.detach(), x.grad, k.grad))
    for made, right in zip(*found, strict=True):  # a compiled call may have another plan
        assert error(made.double().cpu().numpy(), right.double().cpu().numpy()) <= GRADIENT["bfloat16"]


def test_bad_layouts() -> None:
    torch_impl = pytest.importorskip("logitless.torch_impl", reason="these tests are about PyTorch")
    x, k, y = arrays_of("cpu")
    with pytest.raises(ValueError, match=r"weight: got shape \(264, 64\), allowed beside .*'dv' is \(64, V"):
        torch_impl.linear_cross_entropy(x, k.T, y, weight_layout="dv")
    with pytest.raises(ValueError, match=r"weight_layout: got 'vv', allowed are 'vd'"):
        torch_impl.linear_log_probs(x, k, y, weight_layout="vv")
    with pytest.raises(ValueError, match=r"defer_weight_grad: got True beside weight_layout='dv'"):
        torch_impl.linear_cross_entropy(x, k, y, weight_layout="dv", defer_weight_grad=True)


def test_jax_makes_no_copy() -> None:
    """Plain operations on a CPU: no more scratch than with [V, D], by what XLA says."""
    jax = pytest.importorskip("jax", reason="these tests are about JAX")
    import jax.numpy as jnp

    from logitless.jax_impl import linear_cross_entropy

    tokens, hidden, vocab = 64, 128, 4096
    scratch = {}
    for layout, shape in (("vd", (vocab, hidden)), ("dv", (hidden, vocab))):

        def loss(x: Any, w: Any, y: Any, layout: str = layout) -> Any:
            return linear_cross_entropy(x, w, y, weight_layout=layout, backend="xla", plan="lean")

        kinds = ((tokens, hidden), "float32"), (shape, "float32"), ((tokens,), "int32")
        arguments = [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in kinds]
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
        scratch[layout] = compiled.memory_analysis().temp_size_in_bytes
    assert scratch["dv"] <= scratch["vd"]
