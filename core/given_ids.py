"""Log-probabilities of given ids and of the largest logits: checks of the arguments, and how the work is cut.

What both frameworks' ``given_ids`` share. Nothing here imports an array library.

K ids a token. Their logits are dot products with gathered rows of the weight, a bounded number of rows at a time. Of
everything else there is only a tile of logits, as in a distillation.
"""

from __future__ import annotations

import dataclasses
import numbers

from logitless.objectives import LARGEST_TILE, Tile
from logitless.scratch import TOKEN_TILE, VOCAB_TILE
from logitless.spec import ITEMSIZE, TARGET_DTYPES, ArrayInfo, check_dtype

# At most this many rows of the weight are gathered at a time.
LARGEST_GATHER = 4096
SMALLEST_GATHER = 64
# Without a budget a tile has so many times as many entries as tokens: a GPU's host is slower over more tiles.
WIDE = 4

# How many arrays of K numbers a token are live at once: of all tokens, and of a chunk.
ALL_PAIRS = 6
CHUNK_PAIRS = 16


@dataclasses.dataclass(frozen=True)
class IdsCut:
    """The tile of logits, and how many rows of the weight are gathered at a time."""

    tile: Tile
    ids: int
    """K."""
    gather_rows: int

    @property
    def id_chunk(self) -> int:
        """Ids of a token whose rows are gathered together."""
        return min(self.ids, self.gather_rows)

    @property
    def token_chunk(self) -> int:
        """Tokens whose rows are gathered together."""
        return max(1, min(self.tile.tokens, self.gather_rows // self.id_chunk))

    @property
    def kept_bytes(self) -> int:
        """Bytes of what lives beside the pass for the logsumexps."""
        return ALL_PAIRS * self.tile.itemsize * self.tile.tokens * self.ids

    @property
    def scratch_bytes(self) -> int:
        """A promise: bytes beyond inputs, results and gradients that are held at any time, without that pass."""
        pairs = CHUNK_PAIRS * self.tile.token_chunk * self.ids
        gathered = 3 * self.gather_rows * self.tile.hidden
        return self.kept_bytes + self.tile.scratch_bytes + self.tile.itemsize * (pairs + gathered)


def ids_cut(*, tokens: int, hidden: int, vocab: int, ids: int, dtype: str, memory_budget: int | None = None) -> IdsCut:
    """The largest cut whose ``scratch_bytes`` fit the budget.

    Arguments: N, D, V (of the largest shard), K; hidden's dtype; bytes, or None for the largest cut. Raises ValueError
    for a budget that the smallest cut does not fit.
    """
    itemsize = max(4, ITEMSIZE[dtype])

    def cut(share: int, wide: int = 1) -> IdsCut:
        chunk, block = max(LARGEST_TILE // share, TOKEN_TILE), max(wide * LARGEST_TILE // share, VOCAB_TILE)
        tile = Tile(tokens, vocab, min(max(1, tokens), chunk), min(vocab, block), hidden, 0, itemsize)
        rows = max(LARGEST_GATHER // share, SMALLEST_GATHER)
        return IdsCut(tile, ids, min(rows, max(1, tokens * ids)))

    cuts = [cut(1, WIDE), *(cut(2**step) for step in range((LARGEST_GATHER // SMALLEST_GATHER).bit_length()))]
    if memory_budget is None:
        return cuts[0]
    for candidate in cuts:
        if candidate.scratch_bytes <= memory_budget:
            return candidate
    raise ValueError(
        f"memory_budget: got {memory_budget} bytes, allowed for tokens={tokens}, hidden={hidden}, vocab={vocab} and "
        f"{ids} ids a token is at least {cuts[-1].scratch_bytes}"
    )


def rest_of_budget(memory_budget: int | None, tokens: int, ids: int, itemsize: int) -> int | None:
    """The bytes for the pass for the logsumexps, beside which arrays [N, K] live. Raises ValueError if none is left.

    What is no number of bytes stays as it is, for the planner to refuse.
    """
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, numbers.Integral) or memory_budget < 1:
        return memory_budget
    kept = ALL_PAIRS * itemsize * tokens * ids
    if memory_budget <= kept:
        raise ValueError(
            f"memory_budget: got {memory_budget} bytes, allowed for tokens={tokens} and {ids} ids a token is more than "
            f"{kept}"
        )
    return int(memory_budget) - kept


def of_whole_budget(words: str, memory_budget: int | None, rest: int | None) -> str:
    """An error's text about the rest of a budget, as a text about the whole."""
    if memory_budget is None or rest is None:
        return words
    kept = memory_budget - rest
    return words.replace(f"got {rest} bytes", f"got {memory_budget} bytes, {kept} of them for arrays of the ids")


def check_ids_array(ids: ArrayInfo, tokens: tuple[int, ...]) -> None:
    """Check ids beside tokens of this shape: [..., K], or [K] for all tokens; int32 or int64, K at least 1."""
    check_dtype("ids", ids, TARGET_DTYPES)
    if not ids.shape or ids.shape[-1] < 1 or ids.shape[:-1] not in ((), tokens):
        raise ValueError(
            f"ids: got shape {ids.shape}, allowed is [..., K] with hidden's leading axes {tokens}, or [K], K at least 1"
        )


def check_k(k: object, vocab: int) -> None:
    """Raise TypeError unless ``k`` is an integer, ValueError unless it is between 1 and V."""
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(f"k: got {type(k).__name__} {k!r}, allowed is an integer")
    if not 1 <= int(k) <= vocab:
        raise ValueError(f"k: got {k}, allowed is 1 to V = {vocab}")
