"""A problem carried out by logitless.jax_impl."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.fuzzing.data import Arrays, given
from bench.fuzzing.plans import plan_arguments
from bench.fuzzing.problems import RESULTS, Found, Problem
from logitless import jax_impl

CACHED_PROBLEMS = 40
_done = 0


def run(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """The outputs by name, as NumPy arrays."""
    global _done
    _done += 1
    if _done % CACHED_PROBLEMS == 0:  # what was compiled for other shapes and options is never used again
        jax.clear_caches()
    with jax.enable_x64(problem.dtype == "float64"):
        inputs = {name: _array(problem, name, values) for name, values in given(problem, arrays).items()}
        outputs = _outputs(problem, inputs)
        return {name: _numpy(value) for name, value in outputs.items() if value is not None}


def _numpy(value: Any) -> Any:
    value = np.asarray(value)
    return value if value.dtype.kind in "ib" else value.astype(np.float64)


def _array(problem: Problem, name: str, values: Any) -> Any:
    """A NumPy array of the dtype and layout; a JAX array where the layout is the plain one."""
    values = np.asarray(values)
    floats = {"hidden", "weight", "bias", "logits", "input"}
    if (
        name in floats
        or name.startswith("teacher_")
        or (problem.function == "padded_index_gather" and name == "upstream")
    ):
        values = values.astype(jnp.dtype(problem.dtype))
    elif values.dtype == np.int64 and (problem.dtype != "float64" or name == "mask"):
        values = values.astype(np.int32)
    layout = problem.layouts.get(name, "contiguous")
    return jax.device_put(values) if layout == "contiguous" else _laid_out(values, layout)


def _laid_out(values: Any, layout: str) -> Any:
    if values.ndim == 0 or values.size == 0:
        return values
    shape = values.shape
    junk = np.ones((), values.dtype) if values.dtype == bool else np.asarray(10**4, values.dtype)
    if layout == "offset":
        view = np.full(values.size + 3, junk)[3:].reshape(shape)
    elif layout == "step":
        view = np.full((*shape[:-1], 2 * shape[-1]), junk)[..., ::2]
    elif layout == "step_rows":
        view = np.full((3 * shape[0], *shape[1:]), junk)[1::3]
    elif layout == "transposed":
        view = np.full(shape[::-1], junk).transpose()
    elif layout == "negative":
        view = np.full(shape, junk)[::-1]
    elif layout == "expanded":
        return np.broadcast_to(values[:1], shape)
    else:
        return np.broadcast_to(values.reshape(-1)[:1].reshape((1,) * values.ndim), shape)
    view[...] = values
    return view


def _outputs(problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
    names = ("upstream", "upstream_entropy", "upstream_lse", "upstream_squared")
    inputs = {name: array for name, array in arrays.items() if name not in names}
    options = dict(problem.options) | plan_arguments(problem)
    if problem.function != "padded_index_gather":
        options["backend"] = problem.backend
    if problem.arrays.get("normalizer") == "array":
        options["normalizer"] = jnp.asarray(options["normalizer"])
    function = getattr(jax_impl, problem.function)
    top = problem.function == "linear_top_k"
    has_stats = bool(options.get("return_stats")) or top

    def call(chosen: dict[str, Any], rest: dict[str, Any]) -> tuple[Any, Any]:
        results = function(**rest, **chosen, **options)
        results = results if isinstance(results, tuple) else (results,)
        results, stats = (results[:-1], results[-1]) if has_stats else (results, None)
        stats = Found(stats) if top else stats
        if has_stats and problem.function == "linear_log_probs":
            results = (*results, stats.lse, stats.sum_p_squared)
        return tuple(m for m in results if m is not None), stats

    def downstream(chosen: dict[str, Any], rest: dict[str, Any], gs: tuple[Any, ...]) -> Any:
        """The gradient of a sum that a caller makes of the results."""

        def total(c: dict[str, Any]) -> tuple[Any, Any]:
            results, stats = call(c, rest)
            return sum((m * jnp.asarray(g, m.dtype)).sum() for m, g in zip(results, gs, strict=True)), (results, stats)

        grads, (results, stats) = jax.grad(total, has_aux=True)(chosen)
        return results, stats, grads

    def step(chosen: dict[str, Any], rest: dict[str, Any], gs: tuple[Any, ...]) -> Any:
        if problem.transform == "downstream":
            return downstream(chosen, rest, gs)
        inner = jax.checkpoint(call) if problem.transform == "checkpoint" else call
        results, pull, stats = jax.vjp(lambda c: inner(c, rest), chosen, has_aux=True)
        gs = tuple(jnp.broadcast_to(jnp.asarray(g), m.shape).astype(m.dtype) for g, m in zip(gs, results, strict=True))
        (grads,) = pull(gs)
        return results, stats, grads

    chosen = {name: inputs.pop(name) for name in problem.needs}
    gs = tuple(arrays[name] for name in names if name in arrays)
    if problem.transform == "vmap":
        doubled = jax.tree.map(lambda a: jnp.stack([jnp.flip(jnp.asarray(a)), jnp.asarray(a)]), (chosen, inputs, gs))
        results, stats, grads = jax.tree.map(lambda a: a[1], jax.vmap(step)(*doubled))
    else:
        results, stats, grads = (jax.jit(step) if problem.transform == "jit" else step)(chosen, inputs, gs)
    outputs = dict(zip(RESULTS.get(problem.function, ("loss", "lse")), results, strict=False))
    if stats is not None:
        outputs |= {f"stats.{name}": value for name, value in stats._asdict().items()}
    return outputs | {f"d{name}": grad for name, grad in grads.items()}
