"""Values per token on a GPU, in PyTorch: log-probabilities, entropy and statistics beside bare products.

The gradient that arrives per token is known only in the backward, so the floor of a step has four bare products: the
logits twice, dX and dW. That of a step whose loss is a mean has three, as ours has where the budget holds the
exponentials until the gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.floor import torch_floor
from bench.gpu import Arrays, Step
from bench.shapes import MIB, Shape
from bench.variants import Variant, measured_rows
from logitless import plan
from logitless.torch_impl import linear_cross_entropy, linear_log_probs

SHAPE = Shape(8192, 4096, 131072)
# The default, what the fastest plan in two passes takes, and what holds the exponentials of all tokens.
BUDGETS = (None, 1200 * MIB, 2400 * MIB)
# The logits of a chunk of the bare product.
CHUNK = 4096

PerToken = Callable[[Any, Any, Any], tuple[Any, ...]]


def _ours(memory_budget: int | None) -> dict[str, PerToken]:
    given: dict[str, Any] = {"memory_budget": memory_budget, "backend": "triton"}
    return {
        "log-probs": lambda x, w, y: (linear_log_probs(x, w, y, **given)[0],),
        "log-probs and entropy": lambda x, w, y: linear_log_probs(x, w, y, with_entropy=True, **given),
        "reduction none": lambda x, w, y: (linear_cross_entropy(x, w, y, reduction="none", **given),),
    }


def _full_logits(x: Any, w: Any, y: Any) -> tuple[Any, ...]:
    return (torch.log_softmax(x @ w.t(), 1).gather(1, y[:, None])[:, 0],)


def _peers() -> dict[str, PerToken]:
    """Other implementations of values per token that are installed here."""
    made: dict[str, PerToken] = {"torch, full logits": _full_logits, "torch.compile": torch.compile(_full_logits)}
    try:
        from cut_cross_entropy import linear_cross_entropy as cce
    except ImportError:
        pass
    else:
        made["cut-cross-entropy"] = lambda x, w, y: (cce(x, w, y, reduction="none"),)
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger
    except ImportError:
        pass
    else:  # scaled by the detached probability, the one per-token factor that it takes
        made["Liger-Kernel, token scaling"] = lambda x, w, y: (
            liger(x, w, y, reduction="sum", use_token_scaling=True).reshape(1),
        )
    return made


def _step(arrays: Arrays, values: PerToken) -> Step:
    """Forward and backward of ``values`` with a random gradient for each of them."""
    generator = torch.Generator("cuda").manual_seed(1)
    upstream = [torch.randn(len(arrays.y), device="cuda", generator=generator) for _ in range(2)]

    def run() -> None:
        arrays.x.grad = arrays.w.grad = None
        made = values(arrays.x, arrays.w, arrays.y)
        torch.autograd.backward(made, [g[: len(v)].to(v.dtype) for g, v in zip(upstream, made, strict=False)])

    return run


def four_products(x: Any, w: Any) -> Step:
    """The floor."""
    gradients = torch_floor(x, w)
    z = torch.empty(CHUNK, len(w), device=x.device, dtype=x.dtype)

    def run() -> None:
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            torch.mm(part, w.t(), out=z[: len(part)])
        gradients()

    return run


def measure(rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """Rows of values per token, whose floor is four products, then of statistics beside what costs none."""
    arrays = Arrays(SHAPE)
    variants = {"floor": arrays.variant(four_products(arrays.x.detach(), arrays.w.detach()), gradients=False)}
    for budget in BUDGETS:
        for name, values in _ours(budget).items():
            hold = budget is not None and "entropy" not in name
            chosen = plan(**SHAPE.sizes(), fused=True, one_pass=False, memory_budget=budget, hold=hold)
            promised = chosen.scratch_bytes
            name += "" if budget is None else f", {budget // MIB} MiB"
            variants[name] = arrays.variant(_step(arrays, values), promised)
    if with_peers:
        variants |= {name: arrays.variant(_step(arrays, values)) for name, values in _peers().items()}
    rows = measured_rows("per token", SHAPE, variants, rounds)
    variants.clear()
    torch.cuda.empty_cache()
    return rows + measured_rows("statistics", SHAPE, _statistics(arrays), rounds)


def _statistics(arrays: Arrays) -> dict[str, Variant]:
    """The mean and its gradients, and the forward alone, each without and with statistics."""
    x, w, y = arrays.x, arrays.w, arrays.y

    def mean(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, backend="triton")

    def mean_with(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, return_stats=True, backend="triton")[0]

    made = {"floor": arrays.variant(arrays.floor(), gradients=False)}
    for name, loss in (("mean", mean), ("mean, statistics", mean_with)):
        made[name] = arrays.variant(arrays.step(loss))
        made[f"{name}, forward only"] = arrays.variant(
            lambda loss=loss: loss(x.detach(), w.detach(), y), gradients=False
        )
    return made
