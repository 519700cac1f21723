"""Repeated steps of the Triton kernels: other values, the same launches and the same bits.

Interpreted on the CPU, where steps are repeated only if a test asks for it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
pytest.importorskip("triton", reason="triton is not installed")

from count_compilations import HIDDEN as COUNTED_HIDDEN  # noqa: E402
from implementations import unwritten_is_nan  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402
from logitless.torch_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.kernels import layout, products, program, recording, replay  # noqa: E402
from logitless.torch_impl.kernels.rows import TOKEN_BLOCK  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"
)

FOLDER = Path(__file__).parent
TOKENS, HIDDEN, VOCAB = 37, 32, 140
SIZES = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": "float32", "fused": True}
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "logit_scale": 2.0}
CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "bias": True, "class_weight": True},
    "smoothing alone": {"label_smoothing": 0.1},
    "a weight [D, V]": {"turned": True, "bias": True},
    "a weight [D, V] in chunks": {"turned": True, "plan": {"order": "tokens", "chunk": 16}},
    "everything": {**EVERYTHING, "bias": True, "class_weight": True, "token_weight": True, "return_stats": True},
    "chunks": {"plan": {"order": "tokens", "chunk": 16}, "bias": True},
    "chunks of a narrow sum": {
        "plan": {"order": "tokens", "chunk": 16, "dtype": "bfloat16", "lends": True},
        "dtype": torch.bfloat16,
        "bias": True,
    },
    "slices": {"plan": {"order": "vocab", "chunk": 50}, "label_smoothing": 0.1},
    "both": {"plan": {"order": "both", "chunk": 16}, "label_smoothing": 0.1, "bias": True},
    "both per token": {"plan": {"order": "both", "chunk": 16}, "reduction": "none", "bias": True},
    "per token": {"reduction": "none"},
    "held per token": {"reduction": "none", "memory_budget": 2**30},
    "lse": {"return_lse": True, "z_loss": 1e-3},
    "a number": {"normalizer": 11.5},
    "temperatures": {"temperature": True, "label_smoothing": 0.1, "softcap": 5.0},
    "temperatures in chunks": {"temperature": True, "bias": True, "plan": {"order": "tokens", "chunk": 16}},
    "shifted": {"shift": 1},
    "zeros of several sizes": {"return_stats": True, "softcap": 5.0, "reduction": "sum", "bias": True, "tokens": 15},
    "no gradient": {"gradients": False, "return_stats": True},
    "hidden alone": {"frozen": True},
    "log-probs": {"function": linear_log_probs},
    "log-probs and entropy": {"function": linear_log_probs, "with_entropy": True},
    "log-probs and statistics": {"function": linear_log_probs, "return_stats": True},
    "held log-probs": {"function": linear_log_probs, "memory_budget": 2**30},
    "held log-probs, temperatures": {"function": linear_log_probs, "memory_budget": 2**30, "temperature": True},
    "held entropy": {"function": linear_log_probs, "memory_budget": 2**30, "with_entropy": True, "bias": True},
    "held statistics": {
        "function": linear_log_probs,
        "memory_budget": 2**30,
        "return_stats": True,
        "temperature": True,
        "softcap": 5.0,
    },
    "held statistics, a weight [D, V]": {
        "function": linear_log_probs,
        "memory_budget": 2**30,
        "return_stats": True,
        "dtype": torch.bfloat16,
        "turned": True,
        "bias": True,
    },
}

# Each of these steps is part of another one.
LATE = (
    *("sum", "smoothing", "smoothing alone", "a weight [D, V]", "chunks", "a number", "per token", "log-probs"),
    *("log-probs and entropy", "held log-probs"),
)


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps of the interpreter are repeated; what was, in order."""
    ran: list[Any] = []
    real = program.Program.run

    def run(self: Any, *given: Any) -> Any:
        ran.append(self)
        return real(self, *given)

    monkeypatch.setattr(program.Program, "run", run)
    monkeypatch.setattr(replay, "programs", {})
    monkeypatch.setattr(replay, "seen", set())
    monkeypatch.setattr(replay.settings, "on_cpu", True)
    return ran


def arrays(seed: int, options: dict[str, Any], tokens: int = TOKENS) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments of a call: other values, and other ignored tokens, for every seed."""
    options, random = dict(options), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    gradients, frozen = options.pop("gradients", True), options.pop("frozen", False)
    dtype = options.pop("dtype", torch.float32)
    hidden = normal(tokens, HIDDEN).to(dtype)
    weight = normal(HIDDEN, VOCAB).T if options.pop("turned", False) else normal(VOCAB, HIDDEN)
    weight = weight.to(dtype)
    target = torch.randint(VOCAB, (tokens,), generator=random)
    target[torch.rand(tokens, generator=random) < 0.3] = -100
    hidden.requires_grad_(gradients)
    weight.requires_grad_(gradients and not frozen)
    for name, shape in (("bias", VOCAB), ("class_weight", VOCAB), ("token_weight", tokens)):
        if options.pop(name, False):
            options[name] = normal(shape).abs().to(dtype).requires_grad_(name == "bias")
    if options.pop("temperature", False):
        options["temperature"] = normal(tokens).abs() + 0.5
    if "plan" in options:
        options["plan"] = plan(**SIZES | options["plan"])
    return (hidden, weight, target), options


def results(seed: int, options: dict[str, Any], tokens: int = TOKENS) -> list[Any]:
    """Values and gradients of a call with these random numbers."""
    options = dict(options)
    function: Callable[..., Any] = options.pop("function", linear_cross_entropy)
    given, named = arrays(seed, options, options.pop("tokens", tokens))
    found = function(*given, backend="triton", **named)
    values = []
    for value in found if isinstance(found, tuple) else (found,):
        values += value if isinstance(value, tuple) else [value]
    values = [value for value in values if value is not None]
    leaves = [v for v in (*given, *named.values()) if torch.is_tensor(v) and v.requires_grad]
    total = sum((i + seed + 1) * (v * v.detach().cos()).sum() for i, v in enumerate(values) if v.requires_grad)
    return values + (list(torch.autograd.grad(total, leaves)) if leaves else [])


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.late(where=lambda p: p["name"] in LATE)
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_step_has_the_same_bits(name: str, repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call runs, the second is written down, the third and the fourth are repeated."""
    with unwritten_is_nan():
        calls = [results(seed, CALLS[name]) for seed in range(4)]
    assert repeated, "nothing was repeated"
    steps = len(replay.programs)
    assert len(repeated) == 2 * steps
    monkeypatch.setattr(replay.settings, "on_cpu", False)
    for seed, found in enumerate(calls):
        assert_same(found, results(seed, CALLS[name]))
    assert len(repeated) == 2 * steps


@pytest.mark.late(where=lambda p: p["name"] == "everything")
@pytest.mark.parametrize("name", ["everything", "chunks"])
def test_more_tokens_than_are_ranked(name: str, repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sorts the targets of many tokens, in memory that it makes itself."""
    monkeypatch.setattr(products, "MOST_RANKED", 8)
    test_a_repeated_step_has_the_same_bits(name, repeated, monkeypatch)


def test_every_way_to_use_a_result(repeated: list[Any]) -> None:
    """Two forwards before their backwards, a graph that is kept, and results that are changed in place."""

    def call(seed: int) -> tuple[Any, ...]:
        (hidden, weight, target), _ = arrays(seed, {})
        return hidden, weight, linear_cross_entropy(hidden, weight, target, backend="triton")

    def gradients(hidden: Any, weight: Any, loss: Any, keep: bool = False) -> list[Any]:
        return list(torch.autograd.grad(loss, (hidden, weight), retain_graph=keep))

    expected = [gradients(*call(seed)) for seed in (0, 1)]
    one, other = call(0), call(1)
    assert len(repeated) == 2
    assert_same(gradients(*other, keep=True), expected[1])
    assert_same(gradients(*one), expected[0])
    again = gradients(*other)  # no product waits any more: from the statistics of the forward
    for a, b in zip(again, expected[1], strict=True):
        torch.testing.assert_close(a, b)
    hidden, weight, loss = call(0)
    loss *= 2.0
    loss.backward()
    assert_same([hidden.grad / 2.0, weight.grad / 2.0], expected[0])
    kept = {id(value.untyped_storage()) for value in (loss, hidden.grad, weight.grad)}
    assert len(kept) == 3
    for value in (loss, hidden.grad, weight.grad):
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_one_tensor_twice(repeated: list[Any]) -> None:
    """The same upstream gradient for two results; then two of them."""
    (hidden, weight, target), _ = arrays(0, {})
    same, other = torch.randn(TOKENS), torch.randn(TOKENS)

    def gradients(*upstream: Any) -> list[Any]:
        values = linear_log_probs(hidden, weight, target, with_entropy=True, backend="triton")
        return list(torch.autograd.grad(values, (hidden, weight), upstream))

    twice = [gradients(same, same) for _ in range(3)]
    assert len(repeated) == 2
    assert_same(twice[2], twice[0])
    apart = [gradients(same, value) for value in (other, same.clone(), other)]
    assert_same(apart[1], twice[0])
    assert_same(apart[2], apart[0])
    assert not torch.equal(apart[0][0], twice[0][0])


@pytest.mark.late(where=lambda p: p["name"] in ("mean", "log-probs and entropy"))
@pytest.mark.parametrize("name", ["mean", "everything", "chunks", "slices", "log-probs and entropy"])
def test_the_promise_of_memory_is_kept(name: str) -> None:
    """What a repeated step holds beside its results is no more than the plan says."""
    for seed in range(3):
        results(seed, CALLS[name])
    for known in replay.programs.values():
        assert known is not None
        held = sum(size for part in (known.first, *known.rest) for _, size in part.pieces)
        assert 0 < held <= plan(**{**SIZES, **CALLS[name].get("plan", {})}).scratch_bytes


def test_a_step_that_cannot_be_repeated_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free when it ends, not when garbage is collected. (A ring would be: seen in Python 3.12.)"""

    def unfit(*_: Any) -> None:
        raise program.Unfit

    def tensors() -> int:
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    results(0, {})
    results(1, {"softcap": 5.0})
    results(2, {"softcap": 5.0})  # what PyTorch imports at a first recording holds frames for once
    gc.collect()
    monkeypatch.setattr(recording.Recorder, "_note_operation", unfit)
    before = tensors()
    gc.disable()
    try:
        results(3, {})
        assert tensors() == before
    finally:
        gc.enable()
    assert list(replay.programs.values())[-1] is None


def test_what_waits_is_let_go() -> None:
    """After the backward, only the vectors of a call whose graph is kept are left: no exponentials."""
    for seed in range(2):
        results(seed, {})
    (hidden, weight, target), _ = arrays(2, {})
    loss = linear_cross_entropy(hidden, weight, target, backend="triton")
    made: list[Any] = []
    real = program.Part.run

    def run(self: Any, frame: Any, device: Any) -> Any:
        found = real(self, frame, device)
        made.extend(StorageWeakRef(m.untyped_storage()) for m in frame.memory if m is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.Part, "run", run)
        gradients = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    gc.collect()  # the interpreter's own rings
    alive = {ref.cdata for ref in made if not ref.expired()}
    own = {t.untyped_storage()._cdata for t in (hidden, weight, target, loss, *gradients)}
    saved = alive - own
    assert len(saved) <= 1  # normalizer and sums, in one piece
    del loss
    assert all(ref.expired() for ref in made if ref.cdata in saved)


class Looking(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every operation."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


def test_who_looks_sees_the_step_itself(repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a dispatch mode, or a profiler of launches, nothing is repeated or written down."""
    results(0, {})
    for _ in range(3):
        with Looking():
            results(0, {})
    monkeypatch.setattr(replay.launch, "is_watched", lambda: True)
    for _ in range(3):
        results(0, {})
    assert not repeated
    assert not replay.programs


# What one of these calls does in a compiled graph, another one does too.
LATE_COMPILED = (
    *LATE, "everything", "slices", "lse", "temperatures", "temperatures in chunks", "hidden alone",
    "shifted", "no gradient", "zeros of several sizes", "held per token", "held log-probs, temperatures",
)  # fmt: skip


@pytest.mark.late(where=lambda p: p["name"] in LATE_COMPILED)
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("both")])  # which is no graph's
def test_a_repeated_compiled_call_has_the_same_bits(
    name: str, repeated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of a graph are steps of their own: forward and backward."""
    options = dict(CALLS[name])
    function: Callable[..., Any] = options.get("function", linear_cross_entropy)
    tokens = options.pop("tokens", TOKENS)
    constants = arrays(0, {n: v for n, v in options.items() if n != "function"})[1]
    constants = {name: value for name, value in constants.items() if not torch.is_tensor(value)}

    def call(hidden: Any, weight: Any, target: Any, tensors: dict[str, Any]) -> Any:
        return function(hidden, weight, target, backend="triton", **tensors, **constants)

    torch._dynamo.reset()
    graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    options["function"] = lambda *given, backend, **named: graph(
        *given, {name: value for name, value in named.items() if torch.is_tensor(value)}
    )
    with unwritten_is_nan():
        calls = [results(seed, options, tokens) for seed in range(4)]
    operations = 1 if options.get("gradients") is False else 2
    assert len(replay.programs) == operations
    assert len(repeated) == 2 * operations
    monkeypatch.setattr(replay.settings, "on_cpu", False)
    for seed, found in enumerate(calls):
        assert_same(found, results(seed, options, tokens))
    assert len(repeated) == 2 * operations


def test_a_retained_compiled_graph_is_repeated(repeated: list[Any]) -> None:
    """A graph's tensors are written to by nobody: a second backward has the bits of the first."""
    options = {"plan": {"order": "tokens", "chunk": 16}, "bias": True}
    constants = {"plan": plan(**SIZES | options["plan"])}
    graph = torch.compile(
        lambda *given: linear_cross_entropy(*given, backend="triton", **constants), backend="aot_eager", fullgraph=True
    )
    for seed in range(4):
        (hidden, weight, target), named = arrays(seed, options)
        leaves = hidden, weight, named["bias"]
        loss = graph(hidden, weight, target, named["bias"])
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert_same(list(torch.autograd.grad(loss, leaves)), list(first))
    # Of eight backwards the first ran and the second was written down.
    assert len(repeated) == 2 + 6


def stepped(tensor: Any) -> Any:
    """The same values, in every other row of a matrix."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], 1).flatten(0, 1)[::2]


def shifted(tensor: Any) -> Any:
    """The same values, not at a multiple of 16 bytes."""
    return torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(tensor.shape)


LAYOUTS: tuple[Callable[[Any], Any], ...] = (torch.clone, stepped, shifted, lambda tensor: tensor.T.contiguous().T)


@pytest.mark.slow
def test_compiled_calls_in_other_layouts(repeated: list[Any]) -> None:
    """One graph, whose tensors lie in another way from call to call: each way is a kind of its own."""
    torch._dynamo.reset()
    graph = torch.compile(lambda *given: linear_cross_entropy(*given, backend="triton"), backend="aot_eager")
    random.seed(0)
    for seed in range(24):
        lying = LAYOUTS[seed % 4], random.choice(LAYOUTS)
        (hidden, weight, target), _ = arrays(seed, {})
        leaves = [lie(tensor.detach()).requires_grad_() for lie, tensor in zip(lying, (hidden, weight), strict=True)]
        found = torch.autograd.grad(graph(*leaves, target), leaves)
        loss = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target)
        for one, right in zip(found, torch.autograd.grad(loss, (hidden, weight)), strict=True):
            assert error(one.numpy(), right.numpy()) <= GRADIENT["float32"]
    assert repeated


def test_another_kind_is_not_mistaken(repeated: list[Any]) -> None:
    """What the kernels' host code depends on tells kinds apart: sizes, strides, alignment, dtypes, options, needs."""
    for seed in range(2):
        results(seed, {})
    (hidden, weight, target), _ = arrays(2, {})
    with torch.no_grad():
        wide = torch.randn(TOKENS, HIDDEN + 3)
        room = torch.randn(TOKENS * HIDDEN + 1)
        columns = torch.randn(HIDDEN, VOCAB).t()
    fixed = hidden.detach(), weight.detach()
    constants = set(map(id, fixed))
    others = [
        (torch.randn(TOKENS + 1, HIDDEN), weight, torch.cat([target, target[:1]])),
        (wide[:, :HIDDEN], weight, target),
        (wide[:, 3:], weight, target),
        (room[1:].view(TOKENS, HIDDEN), weight, target),
        (hidden, columns, target),
        (hidden, weight, target.int()),
        (fixed[0], weight, target),
        (hidden, fixed[1], target),
        (hidden.detach().half(), weight.detach().half(), target),
    ]
    for given in others:
        for tensor in given[:2]:
            if id(tensor) not in constants:
                tensor.requires_grad_()
        linear_cross_entropy(*given, backend="triton")
    for changed in ({"label_smoothing": 0.1}, {"label_smoothing": 0.2}, {"z_loss": 1e-3}, {"ignore_index": 3},
                    {"softcap": 5.0}, {"reduction": "sum"}, {"return_stats": True}):  # fmt: skip
        linear_cross_entropy(hidden, weight, target.clamp(min=0), backend="triton", **changed)
    with torch.autocast("cpu", dtype=torch.float16):
        linear_cross_entropy(hidden, weight, target, backend="triton")
    assert not repeated
    linear_cross_entropy(hidden, weight, target, backend="triton")
    assert len(repeated) == 1


def test_numbers_of_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(replay, "MOST_SEEN", 3)
    for tokens in range(3, 9):
        for seed in range(2):
            results(seed, {}, tokens)
        assert len(replay.programs) <= 2
        assert len(replay.seen) <= 3


def test_another_token_count_compiles_nothing() -> None:
    """Triton would compile for whatever it tells apart of a launch's arguments. 100 random token counts in one chunk:
    after the first, nothing is new but, once each, where a block of TOKEN_BLOCK tokens ends, and where the exponentials
    fit into dW's rows."""
    chosen, size = random.Random(0), COUNTED_HIDDEN
    few = [chosen.randint(size + 1, TOKEN_BLOCK) for _ in range(40)]
    many = [chosen.randint(TOKEN_BLOCK + 1, 8 * TOKEN_BLOCK) for _ in range(40)]
    lent = [chosen.randint(2, size) for _ in range(20)]
    command = [sys.executable, str(FOLDER / "count_compilations.py"), *map(str, few + many + lent)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for step, kernels in json.loads(done.stdout).items():
        assert kernels[0] > 5, step
        assert set(kernels[:40]) == {kernels[0]}, step
        assert set(kernels[40:80]) == {kernels[40]}, step
        assert kernels[40] <= kernels[0] + 2, step
        assert len(set(kernels[80:])) == 1, step


def test_the_host_alone_is_measured(tmp_path: Path) -> None:
    """Where launches do nothing, a repeated step takes less time than the same as it runs."""
    command = [sys.executable, "-m", "bench", "small", "--host", "--rounds", "1", "--output", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    times = {row["variant"]: row["time_ms"] for row in json.loads((tmp_path / "small_host.json").read_text())["rows"]}
    assert len(times) == 10
    for variant in times:
        if not variant.endswith("as it runs"):
            assert 0 < times[variant] < times[f"{variant}, as it runs"], variant


def repeated_both(chunk: int, vocab_chunk: int) -> Any:
    """What repeats a step of 96 × 64 × 600 in the order "both", if anything does. The fourth has the bits of the
    first."""
    sizes = {"tokens": 96, "hidden": 64, "vocab": 600, "dtype": "float32", "fused": True}
    chosen = dataclasses.replace(plan(**sizes, order="both", chunk=chunk), vocab_chunk=vocab_chunk)
    hidden, weight = torch.randn(96, 64, requires_grad=True), torch.randn(600, 64, requires_grad=True)
    target = torch.randint(600, (96,))
    made = []
    for _ in range(4):
        loss = linear_cross_entropy(hidden, weight, target, plan=chosen, backend="triton")
        made.append((loss.detach(), *torch.autograd.grad(loss, [hidden, weight])))
    for one, other in zip(made[0], made[-1], strict=True):
        assert torch.equal(one, other)
    (found,) = replay.programs.values()
    return found


def test_scratch_lies_where_held_scratch_was() -> None:
    """What the first half of the order "both" leaves is read no more when the second one begins."""
    found = repeated_both(48, 128)
    assert found is not None
    (last,) = found.rest
    held, operand = 48 * 608 * 4, 96 * 64 * 4  # a chunk's exponentials; all hidden states, which the second half reads
    assert max(size for _, size in found.first.pieces) >= held
    assert sum(size for _, size in last.pieces) < operand


@pytest.mark.parametrize(("promised", "halves"), [(240_000, 1), (200_000, 2), (150_000, 0)])
def test_a_backward_is_cut_where_the_promise_asks_for_it(
    promised: int, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first half alone reads of the forward is free when the second half takes its memory."""
    monkeypatch.setattr(layout, "SMALL", 2**11)
    monkeypatch.setattr(replay, "_promised", lambda _: promised)
    found = repeated_both(32, 384)
    assert halves == (0 if found is None else len(found.rest))
    if found is not None and halves == 2:
        first, second = found.rest
        left = [size for buffer, size in found.first.pieces if buffer not in (*found.first.dropped, *first.dropped)]
        assert sum(left) + sum(size for _, size in second.pieces) <= promised
        assert {buffer for buffer, _ in found.first.pieces} & {*first.dropped}


def test_first_uses_import_no_compiler() -> None:
    """torch.compile takes 1 to 4 s to import, in the middle of somebody's first steps."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "first_uses.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
