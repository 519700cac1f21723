"""Who distils in the tests, and in which order: with a gradient of the logits that is held, or made again."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
from implementations import MORE_DTYPES, WITH_INTERPRETED, JaxPallas, JaxPallasCuda

from logitless.doctor import cuda_device_count
from logitless.objectives import ROWS, DistillationSizes, distillation_order

ORDERS = ("held", "again")
RAGGED = 32


class JaxRows(JaxPallas):
    """The kernels of a distillation's rows, interpreted. They take float32 too."""

    dtype = "float32"
    dtypes = ("float32", "bfloat16", "float16")

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super().precision(dtype):
            patch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
            yield


class JaxRowsCuda(JaxPallasCuda):
    """The kernels on the GPU, in the dtype that the products' kernels lack."""

    name = "jax_pallas_cuda_float32"
    dtype = "float32"
    dtypes = ("float32",)


def _interprets_pallas() -> bool:
    if not all(importlib.util.find_spec(name) for name in ("jax", "absl")):
        return False
    import jax

    from logitless.jax_impl.kernels.architecture import can_interpret

    return can_interpret() and jax.default_backend() == "cpu"


needs_interpreter = pytest.mark.skipif(
    not _interprets_pallas(), reason="interpreting Pallas kernels takes jax 0.11, absl-py and a CPU as JAX's device"
)
ALL = [*WITH_INTERPRETED, pytest.param(JaxRows(), id="jax_pallas", marks=needs_interpreter)]
if cuda_device_count():
    ALL.append(pytest.param(JaxRowsCuda(), id="jax_pallas_cuda_float32", marks=pytest.mark.gpu))
DISTILLING = pytest.mark.parametrize("impl", ALL)
# For tests whose subject is not the dtype: they take ``impl.dtype``.
DISTILLING_DTYPES = pytest.mark.parametrize("impl", [*ALL, *MORE_DTYPES])


def cut_raggedly(monkeypatch: pytest.MonkeyPatch, order: str, tokens: int, vocab: int) -> None:
    """Rows and tiles of RAGGED tokens, tiles of as many entries, of which the last are fewer."""
    for name in ("LARGEST_TILE", "TOKEN_TILE", "VOCAB_TILE"):
        monkeypatch.setattr(f"logitless.objectives.{name}", RAGGED)
    monkeypatch.setattr("logitless.objectives.KERNEL_TILE", (RAGGED, RAGGED))
    take_order(monkeypatch, order, RAGGED)
    for by in ROWS:
        cut = distillation_order(DistillationSizes(tokens, 12, vocab, "float32"), operand_itemsize=4, by=by)
        assert (cut.again is None) == (order == "held")
        for tiles in (cut, cut.again or cut):
            assert (len(tiles.token_slices), len(tiles.vocab_slices)) == (-(-tokens // RAGGED), -(-vocab // RAGGED))
            assert len(tiles.token_slices) > 1


def rows_of(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Whole rows of one of these numbers of tokens at a time beside a held gradient, whoever makes them; of none: the
    gradient is made again."""
    for by, rows in ROWS.items():
        monkeypatch.setitem(ROWS, by, rows._replace(tokens=tokens))


IN_EITHER_ORDER = pytest.mark.parametrize("order", ORDERS)


def take_order(monkeypatch: pytest.MonkeyPatch, order: str, tokens: int = 64) -> None:
    """Of :data:`IN_EITHER_ORDER`, with whole rows of so many tokens."""
    rows_of(monkeypatch, *(tokens,) * (order == "held"))
    monkeypatch.setattr("logitless.objectives.FEW_ROWS", (tokens,))
