"""What filter_eps saves where many tiles are low: ``python bench/filter.py --output DIR`` writes DIR/filter.json.

A step is the loss and both gradients, in bfloat16, at 4096 × 4096 × 128256, on a made problem: in every second run of
a tile's columns all probabilities are low, so that half of the tiles are left out. Timed are the step, and inside of it
by events on the stream the two gradient products, and what judges and lists the tiles. The error is the largest change
of an element over its bound, and the norm of the change over the gradient's.

Runs from a checkout without installing anything, as gpu_check.py does.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPANS = "dX", "dW", "judge"


def arrays(tokens: int, hidden: int, vocab: int, device: str, dtype: str) -> tuple[Any, Any, Any, float]:
    """x, w, y, and a threshold that lies far from every tile's largest element: 8 / V."""
    import torch

    from logitless.spec import FILTER_COLUMNS

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, hidden, device=device, generator=generator)
    w = torch.randn(vocab, hidden, device=device, generator=generator) * (0.2 * hidden**-0.5)
    entry = torch.arange(vocab, device=device)
    even = entry // FILTER_COLUMNS % 2 == 0
    x[:, -1], w[:, -1] = 5.0, (even & (entry % 64 == 0)).float()
    y = entry[even][torch.randint(0, int(even.sum()), (tokens,), device=device, generator=generator)]
    chosen = getattr(torch, dtype)
    return x.to(chosen).requires_grad_(), w.to(chosen).requires_grad_(), y, 8.0 / vocab


class Clock:
    """Times between marks: of a GPU's stream, of the host on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, stop: Any) -> float:
        if not self.on_gpu:
            return (stop - start) * 1e3
        stop.synchronize()
        return float(start.elapsed_time(stop))


@contextlib.contextmanager
def spans(clock: Clock) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Marks around the launches of each gradient product and of the filter, while the context lasts."""
    from bench.products import around

    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in SPANS}

    def marked(name: str, launch: Callable[[], Any]) -> None:
        start = clock.mark()
        launch()
        found[name].append((start, clock.mark()))

    with around(SPANS, marked):
        yield found


def timed(step: Callable[[], Any], clock: Clock, repeats: int) -> dict[str, float]:
    """Mean times [ms] of ``repeats`` steps in a row, and then of the products inside of as many."""
    start = clock.mark()
    for _ in range(repeats):
        step()
    made = {"time_ms": clock.between_ms(start, clock.mark()) / repeats}
    with spans(clock) as found:
        for _ in range(repeats):
            step()
    made |= {f"{name}_ms": sum(clock.between_ms(*span) for span in own) / repeats for name, own in found.items()}
    return made | {"products_ms": made["dX_ms"] + made["dW_ms"]}


def errors(x: Any, w: Any, eps: float, exact: tuple[Any, Any], made: tuple[Any, Any]) -> dict[str, float]:
    """Of dX and dW: the largest change of an element over its bound, and the change's norm over the gradient's."""
    import torch

    g = 1.0 / len(x)  # of every row of a mean
    bounds = [eps * g * other.detach().float().abs().sum(0) for other in (w, x)]
    result = {}
    for name, one, other, bound in zip(("dhidden", "dweight"), exact, made, bounds, strict=True):
        change = (one.float() - other.float()).abs()
        rounding = one.float().abs() * torch.finfo(one.dtype).eps  # of both to their dtype: no error of the filter's
        result[f"{name}_over_bound"] = float(((change - rounding).clamp(min=0) / bound).max())
        result[f"{name}_change"] = float(change.norm() / one.float().norm())
    return result


def measure(
    tokens: int, hidden: int, vocab: int, rounds: int, repeats: int, device: str = "cuda", dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The rows of the exact and of the filtered step, the share of the tiles, and the errors."""
    from logitless.torch_impl import filtered_share, linear_cross_entropy

    x, w, y, eps = arrays(tokens, hidden, vocab, device, dtype)
    clock, kinds = Clock(device), {"exact": None, "filtered": eps}

    def step(filter_eps: float | None) -> tuple[Any, Any]:
        x.grad = w.grad = None
        linear_cross_entropy(x, w, y, filter_eps=filter_eps, backend="triton").backward()
        return x.grad, w.grad

    made = {name: step(given) for name, given in kinds.items()}
    result: dict[str, Any] = {"filter_eps": eps} | errors(x, w, eps, made["exact"], made["filtered"])
    result["share"] = float(filtered_share(x, w, y, filter_eps=eps, backend="triton"))
    del made
    times: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, given in kinds.items():
            times[name].append(timed(lambda given=given: step(given), clock, repeats))
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": dtype}
    rows = [
        sizes | {"variant": name} | {key: statistics.median(one[key] for one in own) for key in own[0]}
        for name, own in times.items()
    ]
    ratio = rows[1]["products_ms"] / rows[0]["products_ms"]
    return result | {"products_over_exact": ratio, "rounds": rounds, "repeats": repeats, "rows": rows}


def main() -> None:
    from bench import checkout

    parser = checkout.parser(__doc__, "filter.json")
    parser.add_argument("--sizes", type=int, nargs=3, default=[4096, 4096, 128256], metavar=("N", "D", "V"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="steps in a row")
    arguments = parser.parse_args()
    with checkout.results(arguments.output / "filter.json", arguments.commit) as found:
        made = measure(*arguments.sizes, arguments.rounds, arguments.repeats)
        print(json.dumps(made, indent=1))
        found.update(made)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
