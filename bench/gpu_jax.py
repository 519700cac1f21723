"""JAX's arrays and steps for bench/gpu.py.

A step is jax.value_and_grad over hidden and weight, compiled once, and writes its results where those of the step
before lay (their memory is donated), as a training step's gradients are. All that is timed at a shape is compiled
before that, side by side.

Two floors run in the same rounds: the bare products as XLA runs them, and by cuBLAS through torch where torch is
installed. Ratios are to the faster of the two.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu
from bench.floor import torch_floor, torch_four_products, xla_floor
from bench.shapes import Shape
from bench.timing import burst_ms
from bench.variants import Variant, peer
from logitless.jax_impl import linear_cross_entropy, linear_log_probs

# Tokens that a user's own scan with jax.checkpoint takes at a time.
CHECKPOINT_CHUNK = 2048


class Step:
    """A function compiled for its arrays, run again and again, its results written where the last ones lay. A failure
    to compile is raised when it runs."""

    def __init__(self, function: Callable[..., Any], *arrays: Any, transposed: bool = False) -> None:
        self.function, self.arrays, self.transposed = jax.jit(function), arrays, transposed
        self.failure: Exception | None = None
        self._lowered: Any = None
        self._compiled: Any = None
        self._made: Any = None

    def lower(self) -> None:
        try:
            self._results = jax.eval_shape(self.function, *self.arrays)
            # The last results are not read: their memory is this run's.
            jitted = jax.jit(lambda last, *arrays: self.function(*arrays), donate_argnums=0, keep_unused=True)
            self._lowered = jitted.lower(self._results, *self.arrays)
        except Exception as failure:
            self.failure = failure

    def compile(self) -> None:
        """After :meth:`lower`, on any thread."""
        try:
            if self.failure is None:
                self._compiled, self._lowered = self._lowered.compile(), None
        except Exception as failure:
            self.failure = failure

    def __call__(self) -> Any:
        if self.failure is not None:
            raise self.failure
        if self._made is None:
            self._made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._results)
        self._made = self._compiled(self._made, *self.arrays)
        return self._made

    def wait(self) -> None:
        jax.block_until_ready(self._made)

    def results(self) -> tuple[Any, Any, Any]:
        loss, (dx, dw) = jax.device_get(self())
        return loss, dx, dw.T if self.transposed else dw

    def scratch_bytes(self) -> int:
        """What the compiled program sets aside beyond its arguments and results."""
        self(), self()
        self.wait()
        analysis = self._compiled.memory_analysis()
        results = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._results))
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - results)

    def variant(self, promised_bytes: int | None = None) -> Variant:
        return Variant(self.scratch_bytes, lambda: burst_ms(self, self.wait), promised_bytes)


def compile_all(steps: Iterable[Step]) -> None:
    """Trace one step after the other, then compile them side by side."""
    steps = list(steps)
    for step in steps:
        step.lower()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(Step.compile, steps))


class Arrays:
    """On JAX's first device."""

    kernels, portable, padded, lends = "pallas", "xla", True, True
    floor_name, prefix = "floor, XLA", "JAX, "
    loss = staticmethod(linear_cross_entropy)

    def __init__(self, shape: Shape) -> None:
        self.shape, self.budgets = shape, shape.pallas_budgets
        keys = jax.random.split(jax.random.key(0), 3)

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def normal(key: Any, size: tuple[int, int], scale: float) -> Any:
            return (jax.random.normal(key, size) * scale).astype(jnp.bfloat16)

        self.x = normal(keys[0], (shape.tokens, shape.hidden), 1.0)
        self.w = normal(keys[1], (shape.vocab, shape.hidden), shape.hidden**-0.5)
        self.y = jax.random.randint(keys[2], (shape.tokens,), 0, shape.vocab)

    @functools.cached_property
    def kernel(self) -> Any:
        """The weight as [D, V], for those that take it so."""
        return jnp.copy(self.w.T)

    @functools.cached_property
    def floor_weight(self) -> Any:
        """The weight, its vocabulary rounded up to what cuBLAS likes."""
        missing = -len(self.w) % 64
        return jnp.concatenate([self.w, self.w[:missing]]) if missing else self.w

    def floor(self) -> Step:
        return Step(xla_floor, self.x, self.floor_weight)

    def more_floors(self) -> dict[str, Variant]:
        return {"floor, torch": self._by_torch(torch_floor)} if importlib.util.find_spec("torch") else {}

    def _by_torch(self, floor: Callable[[Any, Any], Callable[[], object]]) -> Variant:
        """cuBLAS on the same bytes; timed as JAX's steps are."""
        import torch

        from logitless.interop import to_torch

        x, w = to_torch((self.x, self.floor_weight))
        step = floor(x, w)
        wait = torch.cuda.synchronize if x.is_cuda else lambda: None

        def scratch_bytes() -> int:
            step()
            wait()
            return 0  # its buffers are there before

        return Variant(scratch_bytes, lambda: burst_ms(step, wait))

    def step(self, loss: gpu.Loss, *, target: Any = None, transposed: bool = False) -> Step:
        both = jax.value_and_grad(loss, (0, 1))
        w, y = self.kernel if transposed else self.w, self.y if target is None else target
        return Step(both, self.x, w, y, transposed=transposed)

    def forward(self, loss: gpu.Loss) -> Step:
        return Step(loss, self.x, self.w, self.y)

    def first_step(self, loss: gpu.Loss, gradients: bool) -> Callable[[], object]:
        step = jax.jit(jax.value_and_grad(loss, (0, 1)) if gradients else loss)
        return lambda: jax.block_until_ready(step(self.x, self.w, self.y))

    def half_ignored(self) -> Any:
        return jnp.where(jnp.arange(self.shape.tokens) % 2 == 0, self.y, -100)

    def peers(self) -> Iterator[tuple[str, gpu.Loss, bool]]:
        yield "jax, full logits", _full_logits, False
        yield "jax, full logits in float32", _full_logits_float32, False
        yield "jax.checkpoint in a scan", _checkpointed_scan, False
        if tokamax := peer("tokamax", "linear_softmax_cross_entropy_loss"):
            for name in ("chunked_xla", "xla"):
                options = {"reduction": "mean", "implementation": name}
                yield f"tokamax, {name}", lambda x, w, y, options=options: tokamax(x, y, w, **options), True
        if cce := peer("jax_cce", "linear_cross_entropy"):
            yield "jax-cce", cce, False

    def per_token(self) -> dict[str, gpu.PerToken]:
        return {
            "log-probs": lambda x, w, y, **options: linear_log_probs(x, w, y, **options)[:1],
            "log-probs and entropy": lambda x, w, y, **options: linear_log_probs(x, w, y, with_entropy=True, **options),
        }

    def token_peers(self) -> dict[str, gpu.PerToken]:
        return {}

    def token_floor(self) -> Variant:
        return self._by_torch(torch_four_products)

    def token_step(self, values: gpu.PerToken) -> Step:
        upstream = jax.random.normal(jax.random.key(1), self.y.shape)

        def both(x: Any, w: Any, y: Any, g: Any) -> Any:
            results, backward = jax.vjp(lambda x, w: values(x, w, y), x, w)
            return results, backward((g,) * len(results))

        return Step(both, self.x, self.w, self.y, upstream)

    def numpy(self) -> tuple[Any, Any, Any]:
        return np.asarray(self.x, np.float64), np.asarray(self.w, np.float64), np.asarray(self.y)

    def wait(self, steps: Iterable[Step] = ()) -> None:
        jax.block_until_ready((self.x, self.w, self.y))
        for step in steps:
            step.wait()

    def prepare(self, steps: Iterable[Step]) -> None:
        compile_all(steps)


def _full_logits(x: Any, w: Any, y: Any) -> Any:
    return _mean_loss((x @ w.T).astype(jnp.float32), y)


def _full_logits_float32(x: Any, w: Any, y: Any) -> Any:
    return _mean_loss(jnp.dot(x, w.T, preferred_element_type=jnp.float32), y)


def _mean_loss(z: Any, y: Any) -> Any:
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, y[:, None], axis=1)[:, 0])


def _checkpointed_scan(x: Any, w: Any, y: Any) -> Any:
    chunk = min(CHECKPOINT_CHUNK, len(x))

    @jax.checkpoint
    def part(w: Any, x: Any, y: Any) -> Any:
        return _full_logits_float32(x, w, y)

    parts = x.reshape(-1, chunk, x.shape[1]), y.reshape(-1, chunk)
    total, _ = jax.lax.scan(lambda total, chunk: (total + part(w, *chunk), None), jnp.zeros(()), parts)
    return total * chunk / len(x)
