"""JAX on a GPU: time, scratch and error of our backends and of other implementations, side by side.

Mirror of bench/gpu.py. A step is jax.value_and_grad over hidden and weight, compiled once, and writes its results where
those of the step before lay (their memory is donated), as a training step's gradients are. All that is timed at a shape
is compiled before that, side by side.

Two floors run in the same rounds: the bare products as XLA runs them, and by cuBLAS through torch where torch is
installed. Ratios are to the faster of the two.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from bench.floor import torch_floor, xla_floor
from bench.shapes import MIB, SHAPES, Shape
from bench.timing import burst_ms
from bench.variants import Variant, described, measured_rows, output_errors
from logitless import ChunkPlan, plan
from logitless.jax_impl import linear_cross_entropy, linear_log_probs

FLOORS = ("floor, XLA", "floor, torch")
# Tokens that a user's own scan with jax.checkpoint takes at a time.
CHECKPOINT_CHUNK = 2048

Loss = Callable[[Any, Any, Any], Any]


class Program:
    """A function compiled for arrays, its results written where the last ones lay; a failure waits for a run."""

    def __init__(self, function: Callable[..., Any], *arrays: Any) -> None:
        self.function, self.arrays = jax.jit(function), arrays
        self.failure: Exception | None = None
        self._lowered: Any = None
        self._compiled: Any = None

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

    def run(self, last: Any, arrays: tuple[Any, ...]) -> Any:
        if self.failure is not None:
            raise self.failure
        if last is None:
            last = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._results)
        return self._compiled(last, *arrays)

    def scratch_bytes(self) -> int:
        """What the compiled program sets aside beyond its arguments and results."""
        analysis = self._compiled.memory_analysis()
        results = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._results))
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - results)


class Step:
    """A program on the same arrays again and again; what it made last is in ``made``."""

    def __init__(self, program: Program, *arrays: Any) -> None:
        self.program, self.arrays = program, arrays or program.arrays
        self.made: Any = None

    def __call__(self) -> Any:
        self.made = self.program.run(self.made, self.arrays)
        return self.made

    def wait(self) -> None:
        jax.block_until_ready(self.made)

    def scratch_bytes(self) -> int:
        self(), self()
        self.wait()
        return self.program.scratch_bytes()

    def variant(self, chosen: ChunkPlan | None = None) -> Variant:
        promised = None if chosen is None else chosen.scratch_bytes
        return Variant(self.scratch_bytes, lambda: burst_ms(self, self.wait), promised)


def compile_all(steps: Iterable[Step]) -> None:
    """Trace one program after the other, then compile them side by side."""
    programs = list({id(step.program): step.program for step in steps}.values())
    for program in programs:
        program.lower()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(Program.compile, programs))


class Arrays:
    """x, w and y of a shape on JAX's first device."""

    def __init__(self, shape: Shape) -> None:
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

    def step(self, loss: Loss, *, kernel: bool = False) -> Step:
        """``loss(x, w, y)`` and its gradients in x and w."""
        both = jax.value_and_grad(loss, (0, 1))
        return Step(Program(both, self.x, self.kernel if kernel else self.w, self.y))


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


def peers() -> Iterator[tuple[str, Loss, bool]]:
    """Other implementations that are installed here: name, loss(x, w, y), and whether w is a [D, V] kernel there."""
    yield "jax, full logits", _full_logits, False
    yield "jax, full logits in float32", _full_logits_float32, False
    yield "jax.checkpoint in a scan", _checkpointed_scan, False
    try:
        from tokamax import linear_softmax_cross_entropy_loss as tokamax
    except Exception as failure:  # it imports much that other packages' versions can break
        print("left out: tokamax:", described(failure))
    else:
        for name in ("chunked_xla", "xla"):
            yield (
                f"tokamax, {name}",
                lambda x, w, y, name=name: tokamax(x, y, w, reduction="mean", implementation=name),
                True,
            )
    try:
        from jax_cce import linear_cross_entropy as cce
    except ImportError as failure:
        print("left out: jax-cce:", described(failure))
    else:
        yield "jax-cce", cce, False


def ours(shape: Shape, arrays: Arrays) -> dict[str, tuple[Step, ChunkPlan | None]]:
    """Our steps by name, each with its plan where scratch is promised."""

    def with_plan(chosen: ChunkPlan, backend: str) -> tuple[Step, ChunkPlan]:
        return arrays.step(functools.partial(linear_cross_entropy, plan=chosen, backend=backend)), chosen

    padded = functools.partial(plan, **shape.sizes(), fused=True, padded=True)
    made: dict[str, tuple[Step, ChunkPlan | None]] = {"pallas": with_plan(padded(), "pallas")}
    for budget in shape.pallas_budgets:
        made[f"pallas, {budget // MIB} MiB"] = with_plan(padded(memory_budget=budget), "pallas")
    if shape.extras:
        half = jnp.where(jnp.arange(shape.tokens) % 2 == 0, arrays.y, -100)
        made["pallas, half ignored"] = Step(made["pallas"][0].program, arrays.x, arrays.w, half), None
        forward = functools.partial(linear_cross_entropy, backend="pallas")
        made["pallas, forward only"] = Step(Program(forward, arrays.x, arrays.w, arrays.y)), None
    made["xla"] = with_plan(plan(**shape.sizes()), "xla")
    return made


def _torch_floor(arrays: Arrays, floor: Callable[[Any, Any], Callable[[], object]] = torch_floor) -> Variant:
    """cuBLAS on the same bytes; timed as JAX's steps are."""
    import torch

    from logitless.interop import to_torch

    x, w = to_torch((arrays.x, arrays.floor_weight))
    step = floor(x, w)
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None

    def scratch_bytes() -> int:
        step()
        wait()
        return 0  # what it holds is made before

    return Variant(scratch_bytes, lambda: burst_ms(step, wait))


def measure(name: str, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """One row for every variant of the shape: median time, ratio to the faster floor, scratch."""
    return measure_shape(name, SHAPES[name], rounds, with_peers)


def measure_shape(name: str, shape: Shape, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    arrays = Arrays(shape)
    steps: dict[str, tuple[Step, ChunkPlan | None]] = {
        "floor, XLA": (Step(Program(xla_floor, arrays.x, arrays.floor_weight)), None),
        **ours(shape, arrays),
    }
    if with_peers:
        steps |= {peer: (arrays.step(loss, kernel=kernel), None) for peer, loss, kernel in peers()}
    compile_all(step for step, _ in steps.values())
    variants = {variant: step.variant(chosen) for variant, (step, chosen) in steps.items()}
    if importlib.util.find_spec("torch") is not None:
        variants["floor, torch"] = _torch_floor(arrays)
    return measured_rows(name, shape, variants, rounds, FLOORS)


def measure_tokens(rounds: int) -> list[dict[str, Any]]:
    """Rows of log-probabilities and their gradients for a random gradient of each; the floor is torch's four products.

    Mirror of bench/gpu_tokens.py, without other implementations.
    """
    from bench.gpu_tokens import BUDGETS, SHAPE, four_products

    arrays = Arrays(SHAPE)
    upstream = jax.random.normal(jax.random.key(1), arrays.y.shape)
    steps: dict[str, tuple[Step, ChunkPlan]] = {}
    for entropy, budget in itertools.product((False, True), BUDGETS):
        held = budget is not None and not entropy
        chosen = plan(**SHAPE.sizes(), fused=True, padded=True, one_pass=False, memory_budget=budget, hold=held)

        def both(x: Any, w: Any, y: Any, g: Any, chosen: ChunkPlan = chosen, entropy: bool = entropy) -> Any:
            def values(x: Any, w: Any) -> Any:
                made = linear_log_probs(x, w, y, with_entropy=entropy, plan=chosen, backend="pallas")
                return made[: 1 + entropy]

            made, backward = jax.vjp(values, x, w)
            return made, backward((g,) * len(made))

        name = "JAX, log-probs" + " and entropy" * entropy
        name += "" if budget is None else f", {budget // MIB} MiB"
        steps[name] = Step(Program(both, arrays.x, arrays.w, arrays.y, upstream)), chosen
    compile_all(step for step, _ in steps.values())
    variants = {"JAX, floor": _torch_floor(arrays, four_products)}
    variants |= {name: step.variant(chosen) for name, (step, chosen) in steps.items()}
    return measured_rows("per token", SHAPE, variants, rounds, ("JAX, floor",))


def errors(tokens: int = 2048, hidden: int = 1024, vocab: int = 32768) -> list[dict[str, Any]]:
    """‖· − truth‖ / ‖truth‖ of loss, dX and dW against float64, for every implementation and the ideal bf16 path."""
    shape = Shape(tokens, hidden, vocab)
    arrays = Arrays(shape)
    truth, ideal = _truth_and_ideal(arrays)
    rows = [{"variant": "ideal: float32 logits, their gradient rounded once", **output_errors(ideal, truth)}]
    steps = {
        backend: (arrays.step(functools.partial(linear_cross_entropy, backend=backend)), False)
        for backend in ("pallas", "xla")
    }
    steps |= {peer: (arrays.step(loss, kernel=kernel), kernel) for peer, loss, kernel in peers()}
    compile_all(step for step, _ in steps.values())
    for variant, (step, kernel) in steps.items():
        try:
            loss, (dx, dw) = jax.device_get(step())
        except Exception as failure:
            rows.append({"variant": variant, "error": described(failure)})
            continue
        rows.append({"variant": variant, **output_errors((loss, dx, dw.T if kernel else dw), truth)})
    return [{**shape.sizes(), **row} for row in rows]


def _truth_and_ideal(arrays: Arrays) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(loss, dX, dW) in float64, and of the path that rounds only the logits' gradient and the results."""
    tokens = len(arrays.x)
    with jax.enable_x64(True):
        x, w = arrays.x.astype(jnp.float64), arrays.w.astype(jnp.float64)
        z = x @ w.T
        loss = _mean_loss(z, arrays.y)
        dz = jax.nn.softmax(z, axis=1).at[jnp.arange(tokens), arrays.y].add(-1.0)

        def products(dz: Any) -> tuple[Any, Any]:
            return dz @ w / tokens, dz.T @ x / tokens

        low = products(dz.astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float64))
        truth = jax.device_get((loss, *products(dz)))
        return truth, jax.device_get((loss.astype(jnp.float32), *(array.astype(jnp.bfloat16) for array in low)))


def first_call_seconds() -> dict[str, float]:
    """Wall time of this process's first step at each shape: tracing, compilation and one run."""
    made = {}
    for name in ("small", "odd"):
        arrays = Arrays(SHAPES[name])
        jax.block_until_ready((arrays.x, arrays.w, arrays.y))
        step = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, backend="pallas"), (0, 1)))
        start = time.perf_counter()
        jax.block_until_ready(step(arrays.x, arrays.w, arrays.y))
        made[name] = time.perf_counter() - start
    return made
