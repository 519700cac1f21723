"""Each of our three products alone, beside cuBLAS's on the same operands: what bench/energy.py --products times."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Step = Callable[[], Any]
# The functions of torch_impl/fused.py that launch a product, and the product's name.
LAUNCHERS = {"launch_logits": "first product", "_Products._weight": "dW", "_Products._hidden": "dX"}


@contextlib.contextmanager
def recorded(fused: Any) -> Iterator[dict[str, list[Step]]]:
    """By product, what repeats each of its launches that took place while this lasts."""
    made: dict[str, list[Step]] = defaultdict(list)

    def record(real: Callable[..., Any], product: str, *arguments: Any, **options: Any) -> Any:
        made[product].append(functools.partial(real, *arguments, **options))
        return real(*arguments, **options)

    with contextlib.ExitStack() as stack:
        for path, product in LAUNCHERS.items():
            *owner, name = path.split(".")
            place = functools.reduce(getattr, owner, fused)
            # A function and no partial, so that it is a method where it takes the place of one.
            replacement = _function(functools.partial(record, getattr(place, name), product))
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield made


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: call(*arguments, **options)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product by both, and what puts its operands right before a row of them."""

    steps: dict[str, Step]
    restore: Step


def products(arrays: Any, step: Step) -> dict[str, Product]:
    """The products of ``step``, a step of one chunk, by name; cuBLAS's first."""
    import torch

    from logitless.torch_impl import fused

    step()
    with recorded(fused) as made:
        step()
    counts = {product: len(made[product]) for product in LAUNCHERS.values()}
    if set(counts.values()) != {1}:
        raise ValueError(f"step: got {counts} launches of the products, allowed is one of each")
    ours = {product: calls[0] for product, calls in made.items()}
    operands = ours["dW"].args  # self, first, x, e, entries, scale  # type: ignore[attr-defined]
    x, e = operands[2], operands[3]
    hidden, weight = arrays.x.detach(), arrays.w.detach()
    kept = x.clone(), e.clone()  # x with the row factors, as dW reads it; the first product has it without
    z, dx, dw = torch.empty_like(e), torch.empty_like(hidden), torch.empty_like(weight)

    def restore(raw: bool) -> None:
        x.copy_(hidden if raw else kept[0])
        e.copy_(kept[1])

    cublas = {
        "first product": lambda: torch.mm(hidden, weight.t(), out=z),
        "dW": lambda: torch.mm(e.t(), x, out=dw),
        "dX": lambda: torch.mm(e, weight, out=dx),
    }
    return {
        product: Product(
            {f"{product}, cuBLAS": cublas[product], f"{product}, triton": ours[product]},
            functools.partial(restore, product == "first product"),
        )
        for product in LAUNCHERS.values()
    }
