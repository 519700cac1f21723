"""Time, scratch and error of our backends and of other implementations on a GPU, side by side, in both frameworks.

Here is what the frameworks share. Each has a class of arrays with steps on them: bench/gpu_torch.py, bench/gpu_jax.py.
Inputs are random. An implementation that is not installed is left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from bench.shapes import MIB, SHAPES, SWEEPS, Shape, named
from bench.variants import Variant, described, measured_rows
from logitless import ChunkPlan, plan

Loss = Callable[..., Any]
PerToken = Callable[..., tuple[Any, ...]]

# Values per token: the shape, and the budgets. They are the default, what the fastest plan in two passes takes, and
# what holds the exponentials of all tokens.
TOKEN_SHAPE = Shape(8192, 4096, 131072)
TOKEN_BUDGETS = (None, 1200 * MIB, 2400 * MIB)
# Peers that compile or try out much for a new size: they are left out of sweeps.
SLOW_TO_START = ("compile", "QuACK", "CuTe")


class Step(Protocol):
    """A function of arrays, forward and backward, that is run again and again."""

    def __call__(self) -> Any: ...
    def variant(self, promised_bytes: int | None = None) -> Variant: ...
    def results(self) -> tuple[Any, Any, Any]:
        """Loss, dX [N, D] and dW [V, D] of one run, in NumPy."""


Planned = tuple[Step, ChunkPlan | None]


class Arrays(Protocol):
    """x [N, D], w [V, D] and y [N] of a shape in one framework, and the steps on them."""

    shape: Shape
    budgets: tuple[int, ...]  # those of the shape that are this framework's
    kernels: str  # the backend of kernels, and the one without
    portable: str
    padded: bool  # whether the kernels' plans have whole tiles only
    lends: bool  # whether exponentials can lie in dW's rows
    floor_name: str
    prefix: str  # of the names of values per token
    loss: Loss  # linear_cross_entropy, which also takes options

    def floor(self) -> Step:
        """Three bare products of these sizes, the vocabulary rounded up to what cuBLAS likes."""

    def more_floors(self) -> dict[str, Variant]:
        """Other ways to the same products."""

    def step(self, loss: Loss, *, target: Any = None, transposed: bool = False) -> Step:
        """``loss(x, w, y)`` and its gradients in x and w; ``transposed``: the loss takes w as [D, V]."""

    def forward(self, loss: Loss) -> Step:
        """The loss alone."""

    def first_step(self, loss: Loss, gradients: bool) -> Callable[[], object]:
        """A step, or without ``gradients`` the loss alone, that traces and compiles what it needs, and returns when the
        device is done."""

    def half_ignored(self) -> Any:
        """y with every second token ignored."""

    def peers(self) -> Iterator[tuple[str, Loss, bool]]:
        """Other implementations that are installed here: name, loss(x, w, y), and whether w is [D, V] there."""

    def per_token(self) -> dict[str, PerToken]:
        """Our functions of (x, w, y, options) with values per token: a tuple of them."""

    def token_peers(self) -> dict[str, PerToken]: ...
    def token_floor(self) -> Variant:
        """Four bare products: a gradient per token arrives only in the backward, so the logits are made twice."""

    def token_step(self, values: PerToken) -> Step:
        """``values(x, w, y)`` and its gradients for a random upstream gradient of each value."""

    def numpy(self) -> tuple[Any, Any, Any]:
        """x and w in float64, and y."""

    def wait(self, steps: Iterable[Any] = ()) -> None:
        """Return when the device has the arrays, and has done all that was started of the steps."""

    def prepare(self, steps: Iterable[Step]) -> None:
        """Compile the steps, where the framework can do that before they run."""


def arrays_of(framework: str, shape: Shape) -> Arrays:
    arrays: Arrays = importlib.import_module(f"bench.gpu_{framework}").Arrays(shape)
    return arrays


def forget(framework: str) -> None:
    """Give back memory that no array uses any more, where the framework keeps it."""
    if framework == "torch":
        importlib.import_module("torch").cuda.empty_cache()


def _plan_takes(argument: str) -> bool:
    """Whether the checkout's plan, which may be an older one, takes the argument."""
    return argument in inspect.signature(plan).parameters


def planner(arrays: Arrays, backend: str) -> Callable[..., ChunkPlan]:
    """``plan`` of the arrays' sizes for a backend, which takes the other arguments."""
    planned = functools.partial(plan, **arrays.shape.sizes())
    if backend != arrays.kernels:
        return functools.partial(planned, eager=backend == "eager")
    planned = functools.partial(planned, fused=True, padded=arrays.padded)
    lending = _plan_takes("lends") and arrays.lends
    return functools.partial(planned, lends=True) if lending else planned  # as the calls do


def kernel_plans(arrays: Arrays, fastest: bool = False) -> dict[str, ChunkPlan]:
    """The kernels' plans by a variant's name: the default, the fastest and the leanest, and one for each budget.
    ``fastest``: that one as the default, without the others."""
    planned = planner(arrays, arrays.kernels)
    chosen = {arrays.kernels: planned()}
    if _plan_takes("prefer") and fastest:
        chosen = {arrays.kernels: planned(prefer="fast")}
    elif _plan_takes("prefer"):
        chosen |= {f"{arrays.kernels}, {name}": planned(prefer=name) for name in ("fast", "lean")}
    return chosen | {f"{arrays.kernels}, {b // MIB} MiB": planned(memory_budget=b) for b in arrays.budgets}


def step_of(arrays: Arrays, chosen: ChunkPlan, backend: str) -> Step:
    """Our step by a plan."""
    return arrays.step(functools.partial(arrays.loss, plan=chosen, backend=backend))


def kernel_steps(arrays: Arrays, fastest: bool = False) -> dict[str, Planned]:
    """Our kernels' steps by a variant's name, each with its plan where scratch is promised. ``fastest``: by the fastest
    plan instead of the default, as checkouts that knew no other do."""
    plans = kernel_plans(arrays, fastest)
    steps: dict[str, Planned] = {
        name: (step_of(arrays, chosen, arrays.kernels), chosen) for name, chosen in plans.items()
    }
    if arrays.shape.extras:
        named = {"plan": "fast"} if fastest and _plan_takes("prefer") else {}
        loss = functools.partial(arrays.loss, backend=arrays.kernels, **named)
        steps[f"{arrays.kernels}, half ignored"] = arrays.step(loss, target=arrays.half_ignored()), None
        steps[f"{arrays.kernels}, forward only"] = arrays.forward(loss), None
    return steps


def _peers(arrays: Arrays, left_out: tuple[str, ...] = ()) -> dict[str, Planned]:
    return {
        name: (arrays.step(loss, transposed=transposed), None)
        for name, loss, transposed in arrays.peers()
        if not any(word in name for word in left_out)
    }


def _variants(arrays: Arrays, steps: dict[str, Planned]) -> dict[str, Variant]:
    arrays.prepare(step for step, _ in steps.values())
    return {name: step.variant(chosen and chosen.scratch_bytes) for name, (step, chosen) in steps.items()}


def _rows(arrays: Arrays, name: str, steps: dict[str, Planned], rounds: int) -> list[dict[str, Any]]:
    """One row for the floors and every step: median time, ratio to the fastest floor, scratch."""
    steps = {arrays.floor_name: (arrays.floor(), None), **steps}
    variants = _variants(arrays, steps)
    more = arrays.more_floors()
    rows = measured_rows(name, arrays.shape, variants | more, rounds, (arrays.floor_name, *more))
    for row in rows:
        chosen = steps[row["variant"]][1] if row["variant"] in steps else None
        if chosen is not None:  # the planner may choose another one some day
            row |= {"order": chosen.order, "chunk": chosen.token_chunk if chosen.order == "tokens" else None}
    return rows


def measure(framework: str, name: str, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """The rows of a shape."""
    arrays = arrays_of(framework, named(name))
    chosen = plan(**arrays.shape.sizes())
    steps = kernel_steps(arrays) | {arrays.portable: (step_of(arrays, chosen, arrays.portable), chosen)}
    return _rows(arrays, name, steps | (_peers(arrays) if with_peers else {}), rounds)


def sweep(framework: str, kind: str, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """Rows of one sweep: the kernels, and the peers that compile nothing for a new size."""

    def rows(shape: Shape) -> list[dict[str, Any]]:
        arrays = arrays_of(framework, shape)
        return _rows(arrays, kind, kernel_steps(arrays) | (_peers(arrays, SLOW_TO_START) if with_peers else {}), rounds)

    found = []
    for shape in SWEEPS[kind]:
        found += rows(shape)
        forget(framework)
    return found


def measure_tokens(framework: str, rounds: int, with_peers: bool, shape: Shape = TOKEN_SHAPE) -> list[dict[str, Any]]:
    """Rows of values per token and their gradients, for a random upstream gradient of each token.

    The floor of a step is four products, where that of a mean is three; our step has three as well where the budget
    holds the exponentials until the gradient arrives.
    """
    arrays = arrays_of(framework, shape)
    steps: dict[str, Planned] = {}
    for budget in TOKEN_BUDGETS:
        for name, values in arrays.per_token().items():
            hold = budget is not None and "entropy" not in name
            sizes = shape.sizes() | {"fused": True, "padded": arrays.padded}
            chosen = plan(**sizes, one_pass=False, memory_budget=budget, hold=hold)
            name = arrays.prefix + name + ("" if budget is None else f", {budget // MIB} MiB")
            function = functools.partial(values, memory_budget=budget, backend=arrays.kernels)
            steps[name] = arrays.token_step(function), chosen
    if with_peers:
        steps |= {name: (arrays.token_step(values), None) for name, values in arrays.token_peers().items()}
    variants = _variants(arrays, steps)
    floor = f"{arrays.prefix}floor"
    return measured_rows("per token", shape, {floor: arrays.token_floor()} | variants, rounds, (floor,))


def errors(framework: str, shape: Shape = SHAPES["small"]) -> list[dict[str, Any]]:
    """‖· − truth‖ / ‖truth‖ of loss, dX and dW against float64, for every implementation and the ideal bf16 path."""
    arrays = arrays_of(framework, shape)
    truth, ideal = truth_and_ideal(*arrays.numpy())
    rows = [{"variant": "ideal: float32 logits, their gradient rounded once", **output_errors(ideal, truth)}]
    steps = {
        backend: arrays.step(functools.partial(arrays.loss, backend=backend))
        for backend in (arrays.kernels, arrays.portable)
    }
    steps |= {name: step for name, (step, _) in _peers(arrays).items()}
    arrays.prepare(steps.values())
    for variant, step in steps.items():
        try:
            rows.append({"variant": variant, **output_errors(step.results(), truth)})
        except Exception as failure:
            rows.append({"variant": variant, "error": described(failure)})
    return [{**shape.sizes(), **row} for row in rows]


def truth_and_ideal(x: Any, w: Any, y: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(loss, dX, dW) in float64, and of the path that rounds only the logits' gradient and the results."""
    from logitless.rounding import round_to

    rows, z = np.arange(len(y)), x @ w.T
    z -= z.max(1, keepdims=True)
    dz = np.exp(z)
    sums = dz.sum(1)
    loss = np.mean(np.log(sums) - z[rows, y])
    dz /= sums[:, None]
    dz[rows, y] -= 1
    low = round_to(dz, "bfloat16").astype(np.float64)
    truth = loss, dz @ w / len(y), dz.T @ x / len(y)
    ideal = np.float32(loss), *(round_to(d, "bfloat16") for d in (low @ w / len(y), low.T @ x / len(y)))
    return truth, ideal


def output_errors(outputs: tuple[Any, ...], truth: tuple[Any, ...]) -> dict[str, float]:
    """‖· − truth‖ / ‖truth‖ of loss, dX and dW, from what NumPy can read as float64."""
    from logitless.tolerances import error

    names = ("loss_error", "dhidden_error", "dweight_error")
    pairs = zip(names, outputs, truth, strict=True)
    return {name: error(np.asarray(a, np.float64), np.asarray(b, np.float64)) for name, a, b in pairs}


def first_call_seconds(framework: str, kind: str) -> dict[str, float]:
    """Wall time of this process's first forward and backward, then of the first at another shape, with all that has to
    be traced and compiled. kind: "default", "lean" (the plan), or "forward": the loss alone."""
    options = {"plan": "lean"} if kind == "lean" else {}
    seconds = {}
    for name in ("small", "odd"):
        arrays = arrays_of(framework, SHAPES[name])
        loss = functools.partial(arrays.loss, backend=arrays.kernels, **options)
        step = arrays.first_step(loss, gradients=kind != "forward")
        arrays.wait()
        start = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - start
    return seconds
