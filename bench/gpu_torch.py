"""PyTorch's arrays and steps for bench/gpu.py, on a GPU; on a CPU only to try them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bench import gpu
from bench.floor import torch_floor, torch_four_products
from bench.shapes import Shape
from bench.timing import burst_ms
from bench.variants import Variant, measured_rows, peer
from logitless.torch_impl import linear_cross_entropy, linear_log_probs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIGER = "liger_kernel.transformers.functional"
LIGER_CUTE = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Step:
    """A function that leaves its gradients in x.grad and w.grad, which are no scratch; or one without gradients."""

    def __init__(self, arrays: Arrays, run: Callable[[], Any], *, gradients: bool = True) -> None:
        self.arrays, self.run, self.gradients = arrays, run, gradients

    def __call__(self) -> Any:
        return self.run()

    def results(self) -> tuple[Any, Any, Any]:
        loss: Any = self.run().detach()
        dx, dw = self.arrays.x.grad, self.arrays.w.grad
        assert dx is not None
        assert dw is not None
        return float(loss), dx.double().cpu().numpy(), dw.double().cpu().numpy()

    def scratch_bytes(self) -> int:
        from logitless.torch_impl.memory import peak_scratch_bytes

        x, w = self.arrays.x, self.arrays.w
        try:
            self.run(), self.run()
            x.grad = w.grad = None
            return peak_scratch_bytes(self.run) - (x.nbytes + w.nbytes if self.gradients else 0)
        finally:
            x.grad = w.grad = None

    def variant(self, promised_bytes: int | None = None) -> Variant:
        return Variant(self.scratch_bytes, lambda: event_ms(self.run), promised_bytes)


class Arrays:
    kernels, portable, padded = "triton", "eager", False
    floor_name, prefix = "floor", ""
    loss = staticmethod(linear_cross_entropy)

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.budgets = shape, shape.budgets
        generator = torch.Generator(DEVICE).manual_seed(0)
        x = torch.randn(shape.tokens, shape.hidden, device=DEVICE, generator=generator)
        w = torch.randn(shape.vocab, shape.hidden, device=DEVICE, generator=generator) * shape.hidden**-0.5
        self.x, self.w = x.to(dtype).requires_grad_(), torch.nn.Parameter(w.to(dtype))
        self.y = torch.randint(0, shape.vocab, (shape.tokens,), device=DEVICE, generator=generator)

    @property
    def lends(self) -> bool:
        """Whether exponentials can lie in dW's rows."""
        try:
            from logitless.torch_impl.kernels.fused import lends
        except ImportError:  # of a checkout that is older
            return False
        return lends(self.w, self.w.dtype)

    def floor(self) -> Step:
        w = self.w.detach()
        missing = -len(w) % 64
        run = torch_floor(self.x.detach(), torch.cat([w, w[:missing]]) if missing else w)
        return Step(self, run, gradients=False)

    def more_floors(self) -> dict[str, Variant]:
        return {}

    def step(self, loss: gpu.Loss, *, target: Any = None, transposed: bool = False) -> Step:
        def run() -> Any:
            self.x.grad = self.w.grad = None
            value = loss(self.x, self.w, self.y if target is None else target)
            value.backward()
            return value

        return Step(self, run)

    def forward(self, loss: gpu.Loss) -> Step:
        return Step(self, lambda: loss(self.x.detach(), self.w.detach(), self.y), gradients=False)

    def first_step(self, loss: gpu.Loss, gradients: bool) -> Callable[[], object]:
        step = self.step(loss) if gradients else self.forward(loss)

        def run() -> None:
            step()
            wait()

        return run

    def half_ignored(self) -> Any:
        return torch.where(torch.arange(len(self.y), device=DEVICE) % 2 == 0, self.y, -100)

    def peers(self) -> Iterator[tuple[str, gpu.Loss, bool]]:
        yield "torch, full logits", _full_logits, False
        yield "torch.compile, full logits", torch.compile(full_logits_float32), False
        if liger := peer(LIGER, "liger_fused_linear_cross_entropy"):
            yield "Liger-Kernel", lambda x, w, y: liger(x, w, y), False
        if cute := peer(LIGER_CUTE, "LigerFusedLinearCrossEntropySM90Function"):
            yield "Liger-Kernel, CuTe", lambda x, w, y: cute.apply(x, w, y), False
        if cce := peer("cut_cross_entropy", "linear_cross_entropy"):
            yield "cut-cross-entropy", lambda x, w, y: cce(x, w, y), False
            yield "cut-cross-entropy, exact", lambda x, w, y: cce(x, w, y, filter_eps=None), False
        if quack := peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy"):
            base = {"reduction": "mean", "chunk_size": 4096, "use_scaled_exp": False}
            scaled = {"reduction": "mean", "chunk_size": _quack_rows(*self.x.shape), "use_scaled_exp": True}
            yield "QuACK", lambda x, w, y: quack(x, w, y, **base), False
            yield "QuACK, scaled", lambda x, w, y: quack(x, w, y, **scaled), False

    def per_token(self) -> dict[str, gpu.PerToken]:
        return {
            "log-probs": lambda x, w, y, **options: (linear_log_probs(x, w, y, **options)[0],),
            "log-probs and entropy": lambda x, w, y, **options: linear_log_probs(x, w, y, with_entropy=True, **options),
            "reduction none": lambda x, w, y, **options: (linear_cross_entropy(x, w, y, reduction="none", **options),),
        }

    def token_peers(self) -> dict[str, gpu.PerToken]:
        peers: dict[str, gpu.PerToken] = {
            "torch, full logits": _full_log_probs, "torch.compile": torch.compile(_full_log_probs)
        }  # fmt: skip
        if cce := peer("cut_cross_entropy", "linear_cross_entropy"):
            peers["cut-cross-entropy"] = lambda x, w, y: (cce(x, w, y, reduction="none"),)
        if liger := peer(LIGER, "liger_fused_linear_cross_entropy"):
            # Scaled by the detached probability, the one per-token factor that it takes.
            options = {"reduction": "sum", "use_token_scaling": True}
            peers["Liger-Kernel, token scaling"] = lambda x, w, y: (liger(x, w, y, **options).reshape(1),)
        return peers

    def token_floor(self) -> Variant:
        return Step(self, torch_four_products(self.x.detach(), self.w.detach()), gradients=False).variant()

    def token_step(self, values: gpu.PerToken) -> Step:
        generator = torch.Generator(DEVICE).manual_seed(1)
        upstream = [torch.randn(len(self.y), device=DEVICE, generator=generator) for _ in range(2)]

        def run() -> None:
            self.x.grad = self.w.grad = None
            results = values(self.x, self.w, self.y)
            torch.autograd.backward(results, [g[: len(v)].to(v.dtype) for g, v in zip(upstream, results, strict=False)])

        return Step(self, run)

    def numpy(self) -> tuple[Any, Any, Any]:
        x, w = (tensor.detach().double().cpu().numpy() for tensor in (self.x, self.w))
        return x, w, self.y.cpu().numpy()

    def wait(self, steps: Iterable[gpu.Step] = ()) -> None:
        wait()

    def prepare(self, steps: Iterable[gpu.Step]) -> None: ...


def measure_statistics(rounds: int, shape: Shape = gpu.TOKEN_SHAPE) -> list[dict[str, Any]]:
    """Rows of the mean and its gradients, and of the forward alone, each without and with statistics."""
    arrays = Arrays(shape)

    def mean(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, backend="triton")

    def mean_with(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, return_stats=True, backend="triton")[0]

    variants = {"floor": arrays.floor().variant()}
    for name, loss in (("mean", mean), ("mean, statistics", mean_with)):
        variants[name] = arrays.step(loss).variant()
        variants[f"{name}, forward only"] = arrays.forward(loss).variant()
    return measured_rows("statistics", shape, variants, rounds)


def event_ms(step: Callable[[], Any], warm_s: float = 0.4, repeats: int = 6) -> list[float]:
    """CUDA-event times of single steps in a row, after as many untimed ones as settle the clock: power limits it, and
    what ran before would be seen in it."""
    if DEVICE != "cuda":
        return burst_ms(step, wait)
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


def _full_logits(x: Any, w: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(x @ w.t(), y)


def full_logits_float32(x: Any, w: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy((x @ w.t()).float(), y)


def _full_log_probs(x: Any, w: Any, y: Any) -> tuple[Any, ...]:
    return (torch.log_softmax(x @ w.t(), 1).gather(1, y[:, None])[:, 0],)


def _quack_rows(tokens: int, hidden: int) -> int:
    """QuACK's own chunk of 4096 rows, or else 8192, 2048 or 1024: scaled, version 0.6.5 refuses as many rows as D."""
    return next(rows for rows in (4096, 8192, 2048, 1024) if min(rows, tokens) != hidden)
