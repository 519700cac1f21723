"""Loss and gradients of one case on every implementation, as float64 NumPy arrays, for the parity check.

The reference and both frameworks' backends run on the case's arrays. A bridge runs the other framework's function on
this framework's arrays. An implementation that cannot run raises ImportError or NotImplementedError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from logitless.problems import Case
from logitless.rounding import Floats
from logitless.spec import unavailable_error

A = TypeVar("A")

Outputs = dict[str, Floats]
"""loss, dhidden, dweight and, with a bias, dbias."""
Runner = Callable[[Case], Outputs]

Loss = Callable[..., Any]
"""A linear_cross_entropy. Without statistics it returns one array, but its type says that it may return more."""


def _options(case: Case) -> dict[str, Any]:  # keyword arguments of several types
    """The keyword arguments of the case, arrays left out."""
    return dataclasses.asdict(case.problem.options) | {"normalizer": case.problem.normalizer}


def _arrays(case: Case) -> dict[str, Floats]:
    """The arguments that get gradients, by name."""
    arrays = {"hidden": case.hidden, "weight": case.weight}
    return arrays if case.bias is None else arrays | {"bias": case.bias}


def _constants(case: Case) -> dict[str, Floats]:
    constants = {"token_weight": case.token_weight, "class_weight": case.class_weight}
    return {name: array for name, array in constants.items() if array is not None}


def _named(loss: A, gradients: dict[str, A]) -> dict[str, A]:
    return {"loss": loss} | {f"d{name}": gradient for name, gradient in gradients.items()}


def reference(case: Case) -> Outputs:
    """The float64 NumPy reference."""
    from logitless import reference as module

    results = module.linear_cross_entropy(
        case.hidden, case.weight, case.target, case.bias, upstream=case.upstream, token_weight=case.token_weight,
        class_weight=case.class_weight, **_options(case),
    )  # fmt: skip
    gradients = {"hidden": results.hidden_grad, "weight": results.weight_grad, "bias": results.bias_grad}
    return _named(results.loss, {name: gradients[name] for name in _arrays(case)})


def torch_with(loss: Loss) -> Runner:
    """Autograd through ``loss``, which has the arguments of torch_impl.linear_cross_entropy, on the best device."""

    def run(case: Case) -> Outputs:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, case.problem.dtype)

        def tensor(values: ArrayLike) -> torch.Tensor:
            return torch.tensor(np.asarray(values), device=device)

        inputs = {name: tensor(array).to(dtype).requires_grad_() for name, array in _arrays(case).items()}
        constants = {name: tensor(array) for name, array in _constants(case).items()}
        # Every id fits int32, which both frameworks take as it is.
        target = tensor(case.target).to(torch.int32)
        value = loss(target=target, **inputs, **constants, **_options(case))
        upstream = tensor(case.upstream).to(value.dtype).expand_as(value)
        gradients = torch.autograd.grad(value, tuple(inputs.values()), upstream)
        outputs = _named(value.detach(), dict(zip(inputs, gradients, strict=True)))
        return {name: array.double().cpu().numpy() for name, array in outputs.items()}

    return run


def jax_with(loss: Loss, *, jit: bool) -> Runner:
    """jax.vjp of ``loss``, which has the arguments of jax_impl.linear_cross_entropy, on JAX's default device."""

    def run(case: Case) -> Outputs:
        import jax
        import jax.numpy as jnp

        # JAX's own default on a GPU is TF32; the check is of IEEE float32.
        with jax.enable_x64(case.problem.dtype == "float64"), jax.default_matmul_precision("highest"):
            inputs = {name: jnp.asarray(array).astype(case.problem.dtype) for name, array in _arrays(case).items()}
            constants = {name: jnp.asarray(array) for name, array in _constants(case).items()}
            target = jnp.asarray(case.target.astype(np.int32))

            def value_and_gradients(
                inputs: dict[str, jax.Array], upstream: jax.Array
            ) -> tuple[jax.Array, dict[str, jax.Array]]:
                value, pull_back = jax.vjp(lambda g: loss(target=target, **g, **constants, **_options(case)), inputs)
                (gradients,) = pull_back(jnp.broadcast_to(upstream, value.shape).astype(value.dtype))
                return value, gradients

            function = jax.jit(value_and_gradients) if jit else value_and_gradients
            value, gradients = function(inputs, jnp.asarray(case.upstream))
            return {name: np.asarray(array, np.float64) for name, array in _named(value, gradients).items()}

    return run


def torch_backend(name: str) -> Runner:
    """torch_impl with this backend."""

    def run(case: Case) -> Outputs:
        import torch

        from logitless import torch_impl

        if name == "triton" and not torch.cuda.is_available():
            # Under TRITON_INTERPRET=1 they would run, in another arithmetic than a GPU's.
            raise unavailable_error(name, "its kernels need a CUDA device", usable="eager")
        return torch_with(lambda **arguments: torch_impl.linear_cross_entropy(**arguments, backend=name))(case)

    return run


def jax_backend(name: str) -> Runner:
    """jax_impl with this backend."""

    def run(case: Case) -> Outputs:
        import jax

        from logitless import jax_impl
        from logitless.jax_impl.backend import backend_named

        if name == "pallas":
            # Under jit the function does not know its device. Interpreted they would run, in another arithmetic.
            device = jax.devices()[0]
            reason = backend_named(name).unavailable(device, case.problem.dtype)
            if reason is not None or device.platform != "gpu":
                raise unavailable_error(name, reason or "its kernels need a CUDA device", usable="xla")
        return jax_with(lambda **arguments: jax_impl.linear_cross_entropy(**arguments, backend=name), jit=True)(case)

    return run


def jax_in_torch(case: Case) -> Outputs:
    """JAX's best backend, from torch tensors."""
    import jax

    from logitless import jax_impl
    from logitless.interop import bridges

    with jax.enable_x64(case.problem.dtype == "float64"), jax.default_matmul_precision("highest"):
        return torch_with(bridges.jax_in_torch(jax_impl.linear_cross_entropy))(case)


def torch_in_jax(case: Case) -> Outputs:
    """torch's best backend, from JAX arrays, eagerly."""
    from logitless import torch_impl
    from logitless.interop import bridges

    return jax_with(bridges.torch_in_jax(torch_impl.linear_cross_entropy), jit=False)(case)


RUNNERS: dict[str, Runner] = {
    "reference": reference,
    "eager": torch_backend("eager"),
    "triton": torch_backend("triton"),
    "xla": jax_backend("xla"),
    "pallas": jax_backend("pallas"),
    "jax_in_torch": jax_in_torch,
    "torch_in_jax": torch_in_jax,
}
NEEDS = {
    "reference": (), "eager": ("torch",), "triton": ("torch",), "xla": ("jax",), "pallas": ("jax",),
    "jax_in_torch": ("torch", "jax"), "torch_in_jax": ("torch", "jax"),
}  # fmt: skip
