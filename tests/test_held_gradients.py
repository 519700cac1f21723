"""dX and dW by the products' kernels from a gradient of the logits that a distillation holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="this is about PyTorch")

from implementations import in_every_torch_place  # noqa: E402

from logitless.tolerances import GRADIENT, ROUNDED_ONCE, error  # noqa: E402
from logitless.torch_impl import chunk  # noqa: E402
from logitless.torch_impl.call import Arrays, Inputs, Needs  # noqa: E402

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

# Whole tiles, and tiles with an edge along every axis; rows that start on 16 bytes, and rows that do not.
SIZES = ((128, 64, 256), (75, 72, 200), (33, 44, 70))
by_triton = pytest.mark.parametrize(
    ("device", "backend"), [place for place in in_every_torch_place.args[1] if place.values[1] == "triton"]
)


@dataclasses.dataclass(frozen=True)
class Held:
    """A held gradient of the logits, and what else its products take."""

    inputs: Inputs
    gradient: Any
    factor: Any

    @classmethod
    def random(cls, sizes: tuple[int, int, int], dtype: Any, device: str, turned: bool = False) -> Held:
        from logitless.scratch import row_stride
        from logitless.spec import LossOptions

        tokens, size, vocab = sizes
        torch.manual_seed(sum(sizes))
        x, w = torch.randn(tokens, size).to(dtype), torch.randn(vocab, size).to(dtype)
        if turned:
            w = w.t().contiguous().t()
        y = torch.zeros(tokens, dtype=torch.int64)
        y[tokens // 3] = -100
        x[tokens // 3] = torch.nan  # nothing is read of a token that does not count
        inputs = chunk.prepare(Arrays(x.to(device), w.to(device), None, y.to(device)), LossOptions(), dtype)
        held = torch.full((tokens, row_stride(vocab, 2)), torch.nan, dtype=dtype)
        held[:, :vocab] = torch.randn(tokens, vocab)
        held[tokens // 3, :vocab] = 0.0
        return cls(inputs, held.to(device)[:, :vocab], torch.full((tokens,), 1 / 7, device=device))

    def made(self, **dtypes: Any) -> Any:
        from logitless.torch_impl.distillation import fused

        return fused.held_gradients(self.inputs, self.gradient, self.factor, Needs(**dtypes))

    def true(self) -> dict[str, Any]:
        x = torch.where(self.inputs.valid.unsqueeze(1), self.inputs.hidden.double(), 0.0)
        w, g = self.inputs.weight.double(), self.gradient.double()
        rows = (g * self.factor.double().unsqueeze(1)).cpu()
        return {"hidden": rows @ w.cpu(), "weight": rows.T @ x.cpu()}


def wrong(made: Any, true: Any) -> float:
    return error(made.double().cpu(), true)


@by_triton
@pytest.mark.parametrize("turned", [False, True], ids=["vd", "dv"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_rounded_once(
    sizes: tuple[int, int, int], name: str, turned: bool, device: str, backend: str
) -> None:
    """Where all tokens have the same factor, nothing but the results is rounded, in their own dtypes."""
    del backend
    dtype = getattr(torch, name)
    held = Held.random(sizes, dtype, device, turned)
    true = held.true()
    for wanted in (dtype, torch.float32):
        made = held.made(hidden=wanted, weight=wanted, bias=None)
        assert made.weight.stride() == torch.empty_like(held.inputs.weight).stride()
        for key, value in true.items():
            got = getattr(made, key)
            assert got.dtype == wanted
            rounded = ROUNDED_ONCE * wrong(value.to(wanted), value)
            if device == "cpu" and wanted == torch.bfloat16:  # Triton's interpreter cuts digits off
                rounded = GRADIENT[name]
            assert wrong(got, value) <= max(rounded, GRADIENT["float32"]), key


@by_triton
def test_one_gradient_alone_and_factors_that_differ(device: str, backend: str) -> None:
    """A product that nobody wants is not run. Factors may be 0 and negative; one that is no number spoils its own token
    in dX, and all of dW."""
    del backend
    held = Held.random(SIZES[1], torch.bfloat16, device)
    factor = torch.linspace(-3.0, 2.0, SIZES[1][0], device=device)
    factor[5] = 0.0
    held = dataclasses.replace(held, factor=factor)
    true = held.true()
    alone = held.made(hidden=torch.float32, weight=None, bias=None)
    assert alone.weight is None
    assert wrong(alone.hidden, true["hidden"]) <= GRADIENT["float32"]
    assert not alone.hidden[5].any()
    alone = held.made(hidden=None, weight=torch.float32, bias=None)
    assert alone.hidden is None
    assert wrong(alone.weight, true["weight"]) <= GRADIENT["bfloat16"]
    factor[7] = torch.nan
    both = held.made(hidden=torch.bfloat16, weight=torch.bfloat16, bias=None)
    assert both.hidden[7].isnan().all()
    others = torch.arange(len(factor), device=device) != 7
    assert wrong(both.hidden[others], true["hidden"][others.cpu()]) <= GRADIENT["bfloat16"]
    assert both.weight.isnan().all()
