"""The plan: pure integers, the same everywhere, within its budget, balanced."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless import ChunkPlan, plan
from logitless.hardware import HOPPER
from logitless.planning import MOST_MORE, SCRATCH_SLACK, SLACK, Preference, check_plan_argument, check_plan_sizes
from logitless.scratch import ROW_ALIGNMENT_BYTES, TOKEN_TILE, TOKENS_ORDER_BLOCK, VOCAB_TILE, round_up
from logitless.spec import FLOAT_DTYPES, ITEMSIZE

LLAMA: dict[str, Any] = {"tokens": 16384, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16"}

sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 100_000),
        "hidden": st.integers(1, 9000),
        "vocab": st.integers(1, 300_000),
        "dtype": st.sampled_from(FLOAT_DTYPES),
        "one_pass": st.booleans(),
        "device": st.sampled_from(["cpu", "gpu", "tpu"]),
    }
)


def covers(slices: tuple[tuple[int, int], ...], length: int) -> bool:
    ends = [0, *(stop for _, stop in slices)]
    return all(start == end for (start, _), end in zip(slices, ends, strict=False)) and ends[-1] == length


@settings(deadline=None, max_examples=150)
@given(sizes, st.sampled_from([None, "tokens", "vocab"]))
def test_every_plan_covers_everything_once_in_balanced_chunks(arguments: dict[str, Any], order: Any) -> None:
    made = plan(**arguments, order=order)
    assert covers(made.token_slices, made.tokens)
    assert covers(made.vocab_slices, made.vocab)
    assert order is None or made.order == order
    assert made.one_pass == (arguments["one_pass"] and made.order == "tokens")
    assert made.flops == (6 if made.one_pass else 8) * made.tokens * made.hidden * made.vocab
    if made.order == "vocab":
        assert made.token_chunk == max(1, made.tokens)
    length, size, tile = (
        (made.tokens, made.token_chunk, TOKEN_TILE)
        if made.order == "tokens"
        else (made.vocab, made.vocab_chunk, VOCAB_TILE)
    )
    if made.chunks > 1:
        assert size % tile == 0
        # No runt but by rounding to the tile: one chunk fewer would not have been enough for smaller chunks.
        assert size - tile < math.ceil(length / made.chunks) <= size
    stride_bytes = made.row_stride * made.accumulation_itemsize
    assert stride_bytes % ROW_ALIGNMENT_BYTES == 0
    width = made.vocab if made.one_pass else made.vocab_chunk
    assert 0 <= stride_bytes - width * made.accumulation_itemsize < ROW_ALIGNMENT_BYTES


@settings(deadline=None, max_examples=100)
@given(sizes)
def test_xla_on_a_gpu_has_the_vocabulary_in_one_block(arguments: dict[str, Any]) -> None:
    """All others have narrow ones, also if they are given such a plan: within its promise."""
    made = plan(**arguments, order="tokens")
    vocab, narrow = arguments["vocab"], min(arguments["vocab"], TOKENS_ORDER_BLOCK)
    wide = arguments["device"] == "gpu" and vocab % 8 == 0
    assert made.vocab_chunk == (vocab if wide else narrow)
    assert made.in_narrow_blocks.vocab_chunk == narrow
    assert made.in_narrow_blocks.scratch_bytes <= made.scratch_bytes
    slices = plan(**arguments, order="vocab")
    assert slices.in_narrow_blocks == slices


@settings(deadline=None, max_examples=100)
@given(sizes, st.floats(0.01, 2.0))
def test_a_budget_is_kept_and_spent_well(arguments: dict[str, Any], share: float) -> None:
    device = arguments["device"]
    fastest = min((plan(**arguments, order=o) for o in ("tokens", "vocab")), key=lambda p: p.relative_cost(device))
    budget = max(1, int(fastest.scratch_bytes * share))
    try:
        made = plan(**arguments, memory_budget=budget)
    except ValueError as error:
        assert "memory_budget" in str(error)  # noqa: PT017
        smallest = int(str(error).rsplit(" ", 1)[1])
        assert smallest > budget
        assert plan(**arguments, memory_budget=smallest).scratch_bytes == smallest
        with pytest.raises(ValueError, match="memory_budget"):
            plan(**arguments, memory_budget=smallest - 1)
        return
    assert made.scratch_bytes <= budget
    roomier = plan(**arguments, memory_budget=2 * budget)
    assert roomier.relative_cost(device) <= made.relative_cost(device)


def below(scratch: int, prefer: Preference | None) -> int:
    """Less than a plan must hold for ``scratch`` to be worth its time."""
    if prefer == "lean":
        return max((scratch + 1) // 2, scratch - MOST_MORE) - 1
    return int(scratch / SCRATCH_SLACK) - 1


@settings(deadline=None, max_examples=60)
@given(sizes, st.sampled_from([None, *SLACK]))
def test_a_preference_is_the_smallest_within_its_slack(arguments: dict[str, Any], prefer: Preference | None) -> None:
    made = plan(**arguments) if prefer is None else plan(**arguments, prefer=prefer)
    device, slack = arguments["device"], SLACK[prefer or "balanced"]
    best = plan(**arguments, memory_budget=2**62)
    assert made.relative_cost(device) <= slack * best.relative_cost(device)
    assert made.scratch_bytes <= best.scratch_bytes
    if made.scratch_bytes > 1:
        try:  # smaller by enough to wait for
            smaller = plan(**arguments, memory_budget=below(made.scratch_bytes, prefer))
        except ValueError:
            return
        assert smaller.relative_cost(device) > slack * best.relative_cost(device)


@settings(deadline=None, max_examples=100)
@given(sizes, st.sampled_from(["portable", "triton", "pallas"]), st.booleans())
def test_lean_holds_no_more_than_the_default_and_fast_takes_no_longer(
    arguments: dict[str, Any], kind: str, hold: bool
) -> None:
    """Of values per token the leanest plans hold little less than the default does."""
    kernels = {"fused": True, "padded": kind == "pallas", "hold": hold and not arguments["one_pass"]}
    more = {} if kind == "portable" or arguments["dtype"] == "float64" else kernels
    lean, balanced, fast = (plan(**arguments, **more, prefer=name) for name in ("lean", "balanced", "fast"))
    assert lean.scratch_bytes <= balanced.scratch_bytes
    costs = [made.relative_cost(arguments["device"]) for made in (fast, balanced, lean)]
    assert costs[0] <= SLACK["fast"] * min(costs)


def test_preferences_by_name() -> None:
    """The default holds less than the logits in bfloat16 do."""
    fast, balanced, lean = (plan(**LLAMA, fused=True, prefer=name) for name in ("fast", "balanced", "lean"))
    assert plan(**LLAMA, fused=True) == balanced
    assert fast.holds_all
    assert (balanced.order, lean.order) == ("tokens", "vocab")
    logits = LLAMA["tokens"] * LLAMA["vocab"] * 2
    assert lean.scratch_bytes < balanced.scratch_bytes < logits < fast.scratch_bytes
    with pytest.raises(ValueError, match="prefer: got 'quick', allowed are 'fast', 'balanced', 'lean'"):
        plan(**LLAMA, prefer="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefer: got 'lean' beside a memory_budget"):
        plan(**LLAMA, prefer="lean", memory_budget=2**30)


def test_scratch_falls_as_one_over_chunks() -> None:
    ladder = [
        plan(tokens=8192, hidden=64, vocab=65536, dtype="float32", order="tokens", chunk=8192 >> i) for i in range(5)
    ]
    for larger, smaller in itertools.pairwise(ladder):
        assert smaller.chunks == 2 * larger.chunks
        assert smaller.scratch_bytes < 0.52 * larger.scratch_bytes + 10 * 2**20


def test_lean_order_has_nothing_of_size_v_by_d() -> None:
    accumulator = 4 * LLAMA["vocab"] * LLAMA["hidden"]
    fast, lean = plan(**LLAMA), plan(**LLAMA, memory_budget=accumulator // 2)
    assert (fast.order, fast.one_pass, fast.chunks > 1) == ("tokens", True, True)
    assert fast.weight_accumulator
    assert fast.scratch_bytes > accumulator
    assert (lean.order, lean.one_pass) == ("vocab", False)
    assert not lean.weight_accumulator
    assert lean.scratch_bytes < accumulator // 2


@pytest.mark.parametrize(
    ("dtype", "chunk", "expected"),
    [
        ("float32", 100, False),
        ("float64", 100, False),
        ("bfloat16", 100, True),
        ("bfloat16", 1000, True),
        ("float16", 1000, True),
    ],
)
def test_when_an_accumulator_is_needed(dtype: str, chunk: int, expected: bool) -> None:
    made = plan(tokens=1000, hidden=8, vocab=64, dtype=dtype, order="tokens", chunk=chunk)
    assert made.weight_accumulator is expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": -1}, "tokens: got -1, allowed is at least 0"),
        ({"hidden": 0}, "hidden: got 0, allowed is at least 1"),
        ({"vocab": 0}, "vocab: got 0"),
        ({"dtype": "int8"}, "dtype: got 'int8', allowed are bfloat16, float16, float32, float64"),
        ({"memory_budget": -5}, "memory_budget: got -5"),
        ({"memory_budget": 1000}, "memory_budget: got 1000 bytes, allowed .* at least"),
        ({"order": "rows"}, "order: got 'rows', allowed are None, 'tokens', 'vocab'"),
        ({"device": "xpu"}, "device: got 'xpu'"),
        ({"chunk": 0, "order": "tokens"}, "chunk: got 0"),
        ({"chunk": 64}, "order: got None beside chunk=64"),
        ({"fused": True, "eager": True}, "eager: got True beside fused=True, allowed is False"),
    ],
)
def test_bad_values(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**(LLAMA | change))


@pytest.mark.parametrize("name", ["tokens", "hidden", "vocab", "memory_budget"])
@pytest.mark.parametrize("value", [1.5, "8", True])
def test_bad_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}: got .* allowed is an integer"):
        plan(**(LLAMA | {name: value}))


def test_a_plan_is_frozen_and_checked_against_the_call() -> None:
    made = plan(**LLAMA)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.token_chunk = 1  # type: ignore[misc]
    check_plan_argument(None, None)
    check_plan_argument(made, None)
    check_plan_sizes(made, 16384, 4096, 128256, "bfloat16")
    with pytest.raises(TypeError, match="plan: got dict"):
        check_plan_argument({}, None)
    with pytest.raises(ValueError, match="memory_budget: got a value beside a plan"):
        check_plan_argument(made, 10)
    for sizes_of_call in ((1, 4096, 128256, "bfloat16"), (16384, 4096, 128256, "float32")):
        with pytest.raises(ValueError, match="plan: got one for"):
            check_plan_sizes(made, *sizes_of_call)
    assert isinstance(made, ChunkPlan)
    assert made == plan(**LLAMA)
    assert hash(made) == hash(plan(**LLAMA))


@settings(deadline=None, max_examples=100)
@given(sizes, st.integers(2**20, 2**34))
def test_plans_for_the_kernels(arguments: dict[str, Any], budget: int) -> None:
    """The same slices with a promise and a cost of their own: within the budget, never dearer than needed, float16 in
    two passes."""
    if arguments["dtype"] == "float64":
        with pytest.raises(ValueError, match="fused: got True beside dtype='float64'"):
            plan(**arguments, fused=True)
        return
    try:
        made = plan(**arguments, fused=True, memory_budget=budget)
    except ValueError:
        with pytest.raises(ValueError, match="memory_budget: got"):
            plan(**arguments, fused=True, memory_budget=budget)
        return
    assert made.fused
    assert made.scratch_bytes <= budget
    assert covers(made.token_slices, made.tokens)
    assert covers(made.vocab_slices, made.vocab)
    assert not (made.one_pass and arguments["dtype"] == "float16")
    device = arguments["device"]
    assert made.relative_cost(device) >= plan(**arguments, fused=True, memory_budget=2**62).relative_cost(device)


@settings(deadline=None, max_examples=300)
@given(sizes, st.integers(1, 4096), st.sampled_from([0, 2, 4]))
def test_what_dw_lends_is_written_later(arguments: dict[str, Any], chunk: int, itemsize: int) -> None:
    """Every slice fits the plan's own matrix, or the rows of dW behind those that are written up to its end."""
    if arguments["dtype"] == "float64":
        return
    made = plan(**arguments, fused=True, order="vocab", chunk=chunk)
    item, row_bytes = ITEMSIZE[made.dtype], made.hidden * itemsize
    slices = made.lent_slices(row_bytes)
    assert covers(tuple((start, stop) for start, stop, _ in slices), made.vocab)
    assert len(slices) <= len(made.vocab_slices)
    for start, stop, lent in slices:
        if lent:
            assert stop - start > made.fused_columns
            assert (stop - start) % 128 == 0  # so that rows start on 128 bytes
            assert made.tokens * (stop - start) * item + 128 <= (made.vocab - stop) * row_bytes
        else:
            assert stop - start <= made.fused_columns
    if not itemsize:
        assert tuple((start, stop) for start, stop, _ in slices) == made.vocab_slices
    chunks = plan(**arguments, fused=True, order="tokens", chunk=chunk)
    assert chunks.lent_slices(row_bytes) == ((0, chunks.vocab, False),)


def test_known_slices_that_dw_lends() -> None:
    """About half of what is left where N = D, in whole turns of the 132 programs; six slices instead of eighteen."""
    sizes = {"tokens": 4096, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16", "fused": True}
    lean = plan(**sizes, order="vocab", chunk=7168)
    assert lean.chunks == 18
    slices = lean.lent_slices(2 * 4096)
    assert [(stop - start) // 256 for start, stop, _ in slices] == [247, 123, 61, 33, 28, 9]
    assert [lent for *_, lent in slices] == [True] * 4 + [False] * 2


def test_known_plans_for_the_kernels() -> None:
    """One chunk where the exponentials of all tokens are the only thing of that size; lean: nothing of size V × D."""
    sizes = {"tokens": 4096, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16", "fused": True}
    default, lean = plan(**sizes), plan(**sizes, memory_budget=130 * 2**20)
    assert (default.order, default.chunks, default.one_pass) == ("tokens", 1, True)
    exponentials = 4096 * 128256 * 2
    assert exponentials < default.scratch_bytes < 1.11 * exponentials
    assert (lean.order, lean.one_pass) == ("vocab", False)
    lower_bits = 128256 * 4096
    for padded in (False, True):
        several = plan(**sizes, order="tokens", chunk=2048, padded=padded)
        assert lower_bits < several.scratch_bytes - exponentials // 2 < 1.4 * lower_bits


def test_chunks_may_be_unequal_where_their_tiles_fill_the_turns() -> None:
    """Three equal chunks of 16384 tokens leave multiprocessors idle in the last turn of each product."""
    sizes = {"tokens": 16384, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16", "fused": True, "padded": True}
    made = plan(**sizes, memory_budget=3 * 2**30)
    assert made.token_slices == ((0, 5632), (5632, 11264), (11264, 16384))
    equal = plan(**sizes, order="tokens", chunk=5504)
    assert equal.chunks == made.chunks
    assert equal.relative_cost("gpu") > made.relative_cost("gpu")


def test_slices_of_a_padded_plan_lend_the_gradients_memory() -> None:
    """The operand of dW lies where dX will be, unless their shapes differ: log-probs of 8192 tokens in 300 MiB."""
    sizes = {"hidden": 4096, "vocab": 131072, "dtype": "bfloat16", "fused": True, "padded": True, "one_pass": False}
    made = plan(tokens=8192, **sizes)
    assert made.order == "vocab"
    assert made.scratch_bytes < 300 * 2**20
    other = plan(tokens=8191, order="vocab", chunk=made.vocab_chunk, **sizes)
    operand = 8192 * 4096 * 2
    assert abs(other.scratch_bytes - made.scratch_bytes - operand) < 2**18


@settings(deadline=None, max_examples=150)
@given(sizes, st.sampled_from([None, "tokens", "vocab"]), st.booleans(), st.one_of(st.none(), st.integers(1, 2**34)))
def test_what_waits_for_a_gradient_per_token(
    arguments: dict[str, Any], order: Any, fused: bool, budget: int | None
) -> None:
    """``hold`` adds one plan, and only where it can exist: for the kernels, in one chunk, not in float16."""
    arguments |= {"one_pass": False, "order": order, "memory_budget": budget}
    arguments |= {"fused": fused and arguments["dtype"] != "float64"}
    try:
        made = plan(**arguments, hold=True)
    except ValueError:
        with pytest.raises(ValueError, match="memory_budget: got"):
            plan(**arguments)
        return
    if made.one_pass:
        assert made.fused
        assert made.dtype != "float16"
        assert made.token_chunk == made.tokens > 0
        assert made == plan(**arguments | {"one_pass": True, "order": "tokens", "chunk": made.tokens})
        assert made.relative_cost(arguments["device"]) <= plan(**arguments | {"memory_budget": None}).relative_cost(
            arguments["device"]
        )
    elif budget is not None:
        assert made == plan(**arguments)
    else:  # the fastest plan, which the default may cost little more than, can be the one that waits
        assert made.scratch_bytes >= plan(**arguments).scratch_bytes


def test_known_plans_that_wait() -> None:
    sizes = {"tokens": 8192, "hidden": 4096, "vocab": 131072, "dtype": "bfloat16", "fused": True, "one_pass": False}
    exponentials = 8192 * 131072 * 2
    for padded in (False, True):
        made = plan(**sizes, hold=True, memory_budget=int(1.2 * exponentials), padded=padded)
        assert made.one_pass
        assert made.chunks == 1
        assert made.flops == 6 * 8192 * 4096 * 131072
        assert exponentials < made.scratch_bytes
        assert not plan(**sizes, hold=True, memory_budget=exponentials, padded=padded).one_pass


def test_copies_of_odd_sizes_are_promised_where_they_are_made() -> None:
    sizes = {"tokens": 512, "dtype": "bfloat16", "fused": True, "padded": True, "order": "tokens", "chunk": 512}
    even = plan(**sizes, hidden=256, vocab=8200).scratch_bytes
    weight, hidden = 256 * 8200 * 2, 512 * 256 * 2
    unpadded = [plan(**(sizes | {"padded": False}), hidden=256, vocab=vocab).scratch_bytes for vocab in (8193, 8200)]
    assert abs(unpadded[1] - unpadded[0]) < 2**16
    assert 2 * weight <= plan(**sizes, hidden=256, vocab=8193).scratch_bytes - even + 8192 < 2 * weight + 2**16
    assert abs(plan(**sizes, hidden=248, vocab=8200).scratch_bytes - even - 2 * weight - 2 * hidden) < 2**16


def test_known_plans() -> None:
    """The default of plain operations: chunks of some thousand tokens on a GPU."""
    assert plan(**LLAMA).chunks == 6
    assert plan(**LLAMA, prefer="fast").chunks < 4
    assert plan(**(LLAMA | {"tokens": 4096})).chunks <= 2
    assert plan(tokens=2048, hidden=512, vocab=32768, dtype="float32", device="cpu").chunks >= 4


# ---------------------------------------------------------------------------------------------------------------------
# Exponentials in dW's rows


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(4096, 4096, 128256), (2048, 4096, 128256), (800, 1024, 5000)])
def test_exponentials_in_the_rows_of_dw(tokens: int, hidden: int, vocab: int, one_pass: bool, padded: bool) -> None:
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16", "fused": True}
    sizes["padded"] = padded
    made, own = plan(**sizes, one_pass=one_pass, lends=True), plan(**sizes, order="tokens", chunk=tokens)
    assert made.lends
    assert made.one_pass
    assert made.token_chunk == tokens
    stride = round_up(vocab, ROW_ALIGNMENT_BYTES // 2)
    beside = own.scratch_bytes - tokens * stride * 2
    if padded:  # JAX's dW comes last, and holds one matrix more; db needs no partial sums
        assert beside - 4 * math.isqrt(tokens) * 2 * vocab < made.scratch_bytes < beside + tokens * hidden * 3
    else:
        assert made.scratch_bytes == beside
    assert made.relative_cost("gpu") >= own.relative_cost("gpu")


@pytest.mark.parametrize(
    "different",
    [
        {"tokens": 4097},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"lends": False},
        {"prefer": "fast"},
        {"fused": False},
    ],
)
def test_where_they_do_not_fit(different: dict[str, Any]) -> None:
    sizes = {"tokens": 4096, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16", "fused": True, "lends": True}
    assert not plan(**(sizes | different)).lends


def test_few_tokens_keep_their_exponentials_beside_dw() -> None:
    """In dW's rows they would cost more than 5 %. "lean" may."""
    sizes: dict[str, Any] = {"tokens": 256, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16", "fused": True}
    assert not plan(**sizes, lends=True).lends
    assert plan(**sizes, lends=True, prefer="lean").lends


def test_more_columns_of_tiles_than_programs() -> None:
    """All column tiles of a row are made at a time. Pallas' programs come in pairs."""
    sizes: dict[str, Any] = {"tokens": 2048, "vocab": 65536, "dtype": "bfloat16", "fused": True, "lends": True}
    for padded in (False, True):
        most = HOPPER.tile[1] * HOPPER.multiprocessors // (2 if padded else 1)
        assert plan(**sizes, hidden=most, padded=padded).lends
        assert not plan(**sizes, hidden=most + 1, padded=padded).lends


# ---------------------------------------------------------------------------------------------------------------------
# The modelled time beside what was measured

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "gpu_check.json"
# Below it, the host's own time is a part of what was measured.
SHORTEST_MS = 4.0


@functools.cache
def measured_plans() -> list[Any]:
    """(name, measured over the floor, plan) of the kernels' loss and gradients, by default or within a budget."""
    found = json.loads(RESULTS.read_text())
    rows = [*found["rows"], *found["sweeps"], *found["jax_rows"]]
    # Where there is a row of the fastest plan, the default is another one.
    with_fast = {(row["shape"], row["variant"].removesuffix(", fast")) for row in rows if ", fast" in row["variant"]}
    pairs = []
    for row in rows:
        kind, _, which = row["variant"].removeprefix("JAX, ").partition(", ")
        if kind not in ("triton", "pallas") or row["time_ms"] < SHORTEST_MS:
            continue
        sizes = {name: row[name] for name in ("tokens", "hidden", "vocab", "dtype")}
        options: dict[str, Any] = {"fused": True, "padded": kind == "pallas", "lends": True}
        if which.endswith(" MiB"):
            options["memory_budget"] = int(which.removesuffix(" MiB")) * 2**20
        elif which in ("", "fast", "lean"):
            options["prefer"] = which or ("balanced" if (row["shape"], row["variant"]) in with_fast else "fast")
        else:
            continue
        # A row is of the plan that was chosen then, as far as its promise tells.
        now = plan(**{**sizes, **options})
        # Rows that do not say their order are older than "both".
        order = row.get("order", "tokens" if now.order == "both" else now.order)
        if abs(now.scratch_bytes / row["promised_bytes"] - 1.0) > 0.02 or order != now.order:
            continue
        name = f"{row['variant']}, {row['tokens']} x {row['hidden']} x {row['vocab']}, {row['shape']}"
        pairs.append((name, row["over_floor"], {**sizes, **options}))
    return pairs


def test_there_are_enough_measured_plans() -> None:
    assert len(measured_plans()) >= 30


def test_the_modelled_times_are_within_a_tenth() -> None:
    found = [(name, plan(**options).relative_cost("gpu") / measured) for name, measured, options in measured_plans()]
    assert [(name, ratio) for name, ratio in found if not abs(ratio - 1.0) <= 0.1] == []
