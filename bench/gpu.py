"""PyTorch on a GPU: time, scratch and error of our backends and of other implementations, side by side.

Inputs are random. A peer that is not installed is left out. bench/gpu_jax.py is the mirror of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.floor import torch_floor
from bench.shapes import MIB, SHAPES, SWEEPS, Shape
from bench.variants import Variant, described, measured_rows, output_errors
from logitless import plan
from logitless.torch_impl import linear_cross_entropy
from logitless.torch_impl.memory import peak_scratch_bytes

Step = Callable[[], Any]


class Arrays:
    """x, w and y of a shape on the current GPU."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(shape.tokens, shape.hidden, device="cuda", generator=generator)
        w = torch.randn(shape.vocab, shape.hidden, device="cuda", generator=generator) * shape.hidden**-0.5
        self.x, self.w = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()
        self.y = torch.randint(0, shape.vocab, (shape.tokens,), device="cuda", generator=generator)

    def floor(self) -> Step:
        """Three bare products of these sizes, the vocabulary rounded up to what cuBLAS likes."""
        w = self.w.detach()
        missing = -len(w) % 64
        return torch_floor(self.x.detach(), torch.cat([w, w[:missing]]) if missing else w)

    def step(self, loss: Callable[[Any, Any, Any], Any], y: Any = None) -> Step:
        """Forward and backward of ``loss(x, w, y)``, the gradients left in x.grad and w.grad."""

        def run() -> Any:
            self.x.grad = self.w.grad = None
            value = loss(self.x, self.w, self.y if y is None else y)
            value.backward()
            return value

        return run

    def variant(self, step: Step, promised_bytes: int | None = None, *, gradients: bool = True) -> Variant:
        """``step`` as a variant; ``gradients``: whether it leaves x.grad and w.grad, which are no scratch."""

        def scratch_bytes() -> int:
            try:
                step(), step()
                self.x.grad = self.w.grad = None
                return peak_scratch_bytes(step) - (self.x.nbytes + self.w.nbytes if gradients else 0)
            finally:
                self.x.grad = self.w.grad = None

        return Variant(scratch_bytes, lambda: event_ms(step), promised_bytes)


def _full_logits(x: Any, w: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(x @ w.t(), y)


def _full_logits_float32(x: Any, w: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy((x @ w.t()).float(), y)


def _quack_rows(tokens: int, hidden: int) -> int:
    """QuACK's own chunk of 4096 rows, or else 8192, 2048 or 1024: version 0.6.5 refuses as many rows as D."""
    return next(rows for rows in (4096, 8192, 2048, 1024) if min(rows, tokens) != hidden)


def peers() -> Iterator[tuple[str, Callable[[Any, Any, Any], Any]]]:
    """Other implementations that are installed here, as loss(x, w, y)."""
    yield "torch, full logits", _full_logits
    yield "torch.compile, full logits", torch.compile(_full_logits_float32)
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger
    except ImportError:
        pass
    else:
        yield "Liger-Kernel", lambda x, w, y: liger(x, w, y)
    try:
        from cut_cross_entropy import linear_cross_entropy as cce
    except ImportError:
        pass
    else:
        yield "cut-cross-entropy", lambda x, w, y: cce(x, w, y)
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack
    except ImportError:
        pass
    else:
        yield "QuACK", lambda x, w, y: quack(x, w, y, chunk_size=_quack_rows(*x.shape), reduction="mean")


def kernel_plans(shape: Shape) -> dict[str, Any]:
    """The kernels' plans by a variant's name: the default, and one for each budget."""
    made = {"triton": plan(**shape.sizes(), fused=True)}
    for budget in shape.budgets:
        made[f"triton, {budget // MIB} MiB"] = plan(**shape.sizes(), fused=True, memory_budget=budget)
    return made


def step_of(arrays: Arrays, chosen: Any, backend: str) -> Step:
    """Our step by a plan."""
    return arrays.step(lambda x, w, y: linear_cross_entropy(x, w, y, plan=chosen, backend=backend))


def ours(shape: Shape, arrays: Arrays) -> dict[str, Variant]:
    """Our variants by name."""

    def with_plan(chosen: Any, backend: str) -> Variant:
        return arrays.variant(step_of(arrays, chosen, backend), chosen.scratch_bytes)

    made = {name: with_plan(chosen, "triton") for name, chosen in kernel_plans(shape).items()}
    if shape.extras:
        x, w, y = arrays.x, arrays.w, arrays.y
        half = torch.where(torch.arange(len(y), device="cuda") % 2 == 0, y, -100)
        ignored = arrays.step(lambda x, w, y: linear_cross_entropy(x, w, y), half)
        made["triton, half ignored"] = arrays.variant(ignored)
        made["triton, forward only"] = arrays.variant(
            lambda: linear_cross_entropy(x.detach(), w.detach(), y), gradients=False
        )
    made["eager"] = with_plan(plan(**shape.sizes()), "eager")
    return made


def event_ms(step: Step, warm_s: float = 0.4, repeats: int = 6) -> list[float]:
    """CUDA-event times of single steps in a row, after as many untimed ones as settle the clock: power limits it, and
    what ran before would be seen in it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    while time.perf_counter() - start < warm_s:
        step()
        torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in pairs:
        first.record()
        step()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in pairs]


def measure(name: str, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """One row for every variant of the shape: median time, ratio to the floor, scratch beyond inputs and gradients."""
    shape = SHAPES[name]
    arrays = Arrays(shape)
    variants = {"floor": arrays.variant(arrays.floor(), gradients=False)} | ours(shape, arrays)
    if with_peers:
        variants |= {peer: arrays.variant(arrays.step(loss)) for peer, loss in peers()}
    return measured_rows(name, shape, variants, rounds)


def sweep(kind: str, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """Rows of one sweep: the kernels and the peers that compile nothing for a new size."""
    made = []
    for shape in SWEEPS[kind]:
        arrays = Arrays(shape)
        variants = {"floor": arrays.variant(arrays.floor(), gradients=False)}
        variants |= {name: what for name, what in ours(shape, arrays).items() if name != "eager"}
        if with_peers:
            variants |= {name: arrays.variant(arrays.step(loss)) for name, loss in peers() if "compile" not in name}
        made += measured_rows(kind, shape, variants, rounds)
        del arrays, variants
        torch.cuda.empty_cache()
    return made


def errors(tokens: int = 2048, hidden: int = 1024, vocab: int = 32768) -> list[dict[str, Any]]:
    """‖· − truth‖ / ‖truth‖ of loss, dX and dW against float64, for every implementation and the ideal bf16 path."""
    shape = Shape(tokens, hidden, vocab)
    arrays = Arrays(shape)
    x, w, y = arrays.x.detach().double(), arrays.w.detach().double(), arrays.y
    z = x @ w.t()
    true_loss = torch.nn.functional.cross_entropy(z, y)
    dz = torch.softmax(z, 1)
    dz[torch.arange(tokens), y] -= 1
    truth = true_loss, dz @ w / tokens, dz.t() @ x / tokens
    low = dz.float().bfloat16().double()
    ideal = true_loss.float(), (low @ w / tokens).bfloat16(), (low.t() @ x / tokens).bfloat16()
    rows = [{"variant": "ideal: float32 logits, their gradient rounded once", **_errors(ideal, truth)}]
    steps = {
        "triton": arrays.step(lambda x, w, y: linear_cross_entropy(x, w, y, backend="triton")),
        "eager": arrays.step(lambda x, w, y: linear_cross_entropy(x, w, y, backend="eager")),
        **{peer: arrays.step(loss) for peer, loss in peers()},
    }
    for variant, step in steps.items():
        try:
            loss = step()
        except Exception as failure:
            rows.append({"variant": variant, "error": described(failure)})
            continue
        rows.append({"variant": variant, **_errors((loss.detach(), arrays.x.grad, arrays.w.grad), truth)})
    return [{**shape.sizes(), **row} for row in rows]


def _errors(made: tuple[Any, ...], truth: tuple[Any, ...]) -> dict[str, float]:
    return output_errors(*(tuple(tensor.double().cpu().numpy() for tensor in side) for side in (made, truth)))


def first_call_seconds() -> dict[str, float]:
    """Wall time of this process's first forward and backward, then of the first at another shape, with all that has to
    be compiled."""
    made = {}
    for name in ("small", "odd"):
        arrays = Arrays(SHAPES[name])
        step = arrays.step(lambda x, w, y: linear_cross_entropy(x, w, y, backend="triton"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        made[name] = time.perf_counter() - start
    return made
