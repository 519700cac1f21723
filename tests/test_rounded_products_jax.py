"""A GPU rounds what a product of float32 reads to TF32 by default, a TPU to bfloat16. A loss of low-precision arrays
leaves no such product to the device: matrices come as they are, and vectors are never rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="this test is about JAX")
import jax.numpy as jnp  # noqa: E402

from logitless.jax_impl import linear_cross_entropy, linear_log_probs  # noqa: E402

N, D, V = 16, 8, 40
WEIGHTS = {"class_weight": np.linspace(0.5, 2.0, V, dtype=np.float32)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "smooth, capped": {"label_smoothing": 0.1, "softcap": 5.0},
    "smooth, class weights": {"label_smoothing": 0.1, **WEIGHTS},
    "smooth, capped, class weights": {"label_smoothing": 0.1, "softcap": 5.0, **WEIGHTS},
    "none": {"reduction": "none", "z_loss": 1e-3},
}
PLANS = ("balanced", "lean")


def equations(value: Any) -> Iterator[Any]:
    """Those of a program, or of the programs among an equation's parameters, and of the programs in them."""
    program = getattr(value, "jaxpr", value)
    if isinstance(value, tuple | list):
        for each in value:
            yield from equations(each)
    for equation in getattr(program, "eqns", ()):
        yield equation
        for parameter in equation.params.values():
            yield from equations(parameter)


def rounded(function: Any, *arrays: Any) -> list[str]:
    """The products of float32 that leave their precision to the device."""
    found = []
    for equation in equations(jax.make_jaxpr(function)(*arrays)):
        if equation.primitive.name == "dot_general" and equation.invars[0].aval.dtype == jnp.float32:
            precision = equation.params["precision"]
            if precision is None or set(precision) != {jax.lax.Precision.HIGHEST}:
                found.append(str(equation))
    return found


def arrays(dtype: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((N, D), (V, D), (V,)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_product_of_float32_is_left_to_the_device(name: str, plan: str, dtype: Any) -> None:
    target = jnp.arange(N) % V

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, target, b, backend="xla", plan=plan, **OPTIONS[name]).sum()

    def log_prob(x: Any, w: Any, b: Any) -> Any:
        return sum(value.sum() for value in linear_log_probs(x, w, target, b, backend="xla", with_entropy=True))

    assert rounded(jax.value_and_grad(loss, (0, 1, 2)), *arrays(dtype)) == []
    assert rounded(jax.value_and_grad(log_prob, (0, 1, 2)), *arrays(dtype)) == []


def test_such_a_product_is_found() -> None:
    x, w, _ = arrays(jnp.float32)
    assert len(rounded(lambda x, w: x @ w.T, x, w)) == 1
    assert rounded(lambda x, w: jnp.matmul(x, w.T, precision="highest"), x, w) == []
    assert rounded(lambda x, w: x @ w.T, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)) == []
