"""Each of our three products alone, beside cuBLAS's on the same operands: for ``python -m bench energy --products``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from bench.gpu import Step

PRODUCTS = "first product", "dW", "dX"
# Where torch_impl/kernels launches them: a module's class, and its method.
LAUNCHERS = {
    "first product": ("kernel_call", "KernelCall", "logits"),
    "dW": ("products", "GradientProducts", "add_weight"),
    "dX": ("products", "GradientProducts", "add_hidden"),
}


@contextlib.contextmanager
def around(names: Iterable[str], call: Callable[[str, functools.partial[Any]], None]) -> Iterator[None]:
    """While it lasts, launches of these names go through ``call(name, launch)``, where ``launch()`` does it."""

    def through(name: str, real: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: call(name, functools.partial(real, *arguments, **options))

    with contextlib.ExitStack() as stack:
        for name in names:
            module, owner, function = LAUNCHERS[name]
            place = getattr(importlib.import_module(f"logitless.torch_impl.kernels.{module}"), owner)
            stack.enter_context(mock.patch.object(place, function, through(name, getattr(place, function))))
        yield


@dataclasses.dataclass(frozen=True)
class Product:
    """A product by both, and what puts its operands right before a row of them."""

    steps: dict[str, Step]
    restore: Step


def products(arrays: Any, step: Step) -> dict[str, Product]:
    """The products of ``step``, a step of one chunk, by name; cuBLAS's first."""
    import torch

    launched: dict[str, list[functools.partial[Any]]] = {product: [] for product in PRODUCTS}

    def record(product: str, launch: functools.partial[Any]) -> None:
        launched[product].append(launch)
        launch()

    step()
    with around(PRODUCTS, record):
        step()
    counts = {product: len(launches) for product, launches in launched.items()}
    if set(counts.values()) != {1}:
        raise ValueError(f"step: got {counts} launches of the products, allowed is one of each")
    ours = {product: launches[0] for product, launches in launched.items()}
    x, e = ours["dW"].args[2:4]  # of add_weight(self, first, x, e, entries, scale, targets)
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
        for product in PRODUCTS
    }
