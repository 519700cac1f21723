"""What only a GPU can show of the PyTorch backends. The other GPU tests are the usual ones: where a CUDA device
exists, tests/implementations.py adds it to every test that runs on all implementations (marker ``gpu``)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch on a GPU")

from compiled_kernels import compiled_by  # noqa: E402
from implementations import unwritten_is_nan  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.tolerances import TARGET_GRADIENT, TINY, allowance, error  # noqa: E402
from logitless.torch_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.plain_loss import large, row_kernels  # noqa: E402

pytestmark = pytest.mark.gpu


def tensors(dtype: Any = torch.bfloat16, device: str = "cuda") -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((700, 128), (3001, 128), (3001,)))
    y = torch.randint(0, 3001, (700,), generator=generator)
    y[::5] = -100
    x, w, b = (t.to(device, dtype).requires_grad_() for t in (x, w * 0.1, b))
    return x, w, b, y.to(device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("chip", ["8.0", "8.6", "8.9"])
def test_the_kernels_of_older_chips(chip: str, dtype: str) -> None:
    """Every problem by the code that Triton makes for them, which a newer GPU runs as well."""
    pytest.importorskip("triton", reason="these are Triton's kernels")
    assert compiled_by("run_as_chip.py", chip, dtype) == {}


def values_and_gradients(seed: int, dtype: Any, options: dict[str, Any]) -> list[Any]:
    """Of a loss, or of log-probabilities. The arrays, and which tokens are ignored, follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((300, 128), (1000, 128), (1000,)))
    y = torch.randint(0, 1000, (300,), generator=generator)
    y[torch.rand(300, generator=generator) < 0.3] = -100
    x, w, b = (t.to("cuda", dtype).requires_grad_() for t in (x, w * 0.1, b))
    if "order" in options:
        sizes = {"tokens": 300, "hidden": 128, "vocab": 1000, "dtype": str(dtype).removeprefix("torch.")}
        options = {"plan": plan(**sizes, fused=True, **options)}
    function = linear_log_probs if "with_entropy" in options else linear_cross_entropy
    found = function(x, w, y.cuda(), b, backend="triton", **options)
    values = [value for value in (found if isinstance(found, tuple) else (found,)) if torch.is_tensor(value)]
    total = sum((i + seed + 1) * (value * value.detach().cos()).sum() for i, value in enumerate(values))
    return [*values, *torch.autograd.grad(total, (x, w, b))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "softcap": 5.0, "return_lse": True},
        {"reduction": "none"},
        {"reduction": "none", "memory_budget": 2**30},
        {"order": "tokens", "chunk": 128},
        {"order": "vocab", "chunk": 256},
        {"with_entropy": True},
        {"with_entropy": False},
    ],
    ids=str,
)
def test_repeated_steps_have_the_same_bits(
    dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call runs, the second is written down, later ones are repeated, with other values."""
    pytest.importorskip("triton", reason="these are Triton's kernels")
    from logitless.torch_impl.kernels import replay

    monkeypatch.setattr(replay, "programs", {})
    repeated = [values_and_gradients(seed, dtype, options) for seed in range(5)]
    assert replay.programs
    assert None not in replay.programs.values()
    monkeypatch.setattr(replay.settings, "off", True)
    for seed, found in enumerate(repeated):
        for value, expected in zip(found, values_and_gradients(seed, dtype, options), strict=True):
            assert torch.equal(value, expected), seed


class Fixed:
    """A problem whose arguments stay where they are, and a step of it."""

    def __init__(self, options: dict[str, Any], tokens: int = 700) -> None:
        self.options = options
        x, self.w, _, y = tensors()
        self.x, self.y = x.detach()[:tokens].requires_grad_(), y[:tokens]

    def step(self, seed: int) -> tuple[Any, ...]:
        """Values and gradients for other arguments."""
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            self.x.normal_(generator=generator)
            self.w.normal_(generator=generator)
            self.y.random_(0, 3001, generator=generator)[seed::5] = -100
        return *self.begun(), *self.ended()

    def begun(self) -> tuple[Any, ...]:
        function = linear_log_probs if "with_entropy" in self.options else linear_cross_entropy
        found = function(self.x, self.w, self.y, backend="triton", **self.options)
        self.values = tuple(v for v in (found if isinstance(found, tuple) else (found,)) if v is not None)
        return self.values

    def ended(self) -> tuple[Any, ...]:
        values, self.values = self.values, ()
        return torch.autograd.grad(values, (self.x, self.w), [torch.full_like(value, 0.5) for value in values])


@pytest.mark.parametrize("tokens", [700, 120], ids=["apart", "lent"])  # exponentials, of as many tokens as hidden units
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"return_lse": True}, {"with_entropy": True}, {"memory_budget": 20 * 2**20}],
    ids=str,
)  # fmt: skip
def test_repeated_steps_become_graphs(options: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory is the same again, the kernels are launched as a CUDA graph, and give the same bits: on another
    stream, while results of earlier steps are kept, and with two forwards before their backwards."""
    pytest.importorskip("triton", reason="these are Triton's kernels")
    from logitless.torch_impl.kernels import graphs, replay

    monkeypatch.setattr(replay, "programs", {})
    monkeypatch.setattr(graphs, "alive", type(graphs.alive)())
    fixed = Fixed(options, tokens)

    def shown(*values: Any) -> tuple[Any, ...]:
        return tuple(value.detach().cpu() for value in values)

    def steps() -> list[tuple[Any, ...]]:
        found = [shown(*fixed.step(seed)) for seed in range(8)]
        found += [fixed.step(seed) for seed in range(4)]  # all in other memory
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            found += [shown(*fixed.step(seed)) for seed in range(8)]
        torch.cuda.synchronize()
        for _ in range(6):
            first, second = fixed.begun(), fixed.begun()
            found.append(shown(*second, *fixed.ended()))
            fixed.values = first
            found.append(shown(*first, *fixed.ended()))
            del first, second
        return found

    repeated = steps()
    assert None not in replay.programs.values()
    parts = sum(1 + len(known.rest) for known in replay.programs.values() if known is not None)
    assert len(graphs.alive) >= 2 * parts, "of two streams"
    monkeypatch.setattr(replay.settings, "off", True)
    for number, (found, expected) in enumerate(zip(repeated, steps(), strict=True)):
        assert len(found) == len(expected) >= 3
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b.cpu()), number


def test_graphs_of_repeated_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="these are Triton's kernels")
    from logitless.torch_impl.kernels import graphs

    monkeypatch.setattr(graphs, "alive", type(graphs.alive)())
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    fixed, other = Fixed({}), Fixed({"z_loss": 1e-3})
    for seed in range(12):
        for problem in (fixed, other):
            values = problem.step(seed)
            assert all(value.isfinite().all() for value in values)
            del values
    assert len(graphs.alive) == 2
    assert all(ref().graph is not None for ref in graphs.alive)


@pytest.mark.case(28)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_host_synchronisation(dtype: Any) -> None:
    x, w, b, y = tensors(dtype)

    def everything() -> None:
        options = {"label_smoothing": 0.1, "z_loss": 1e-4}
        linear_cross_entropy(x, w, y, b, **options, return_stats=True)[0].backward()
        linear_cross_entropy(x, w, y, b, **options, softcap=30.0, reduction="none").sum().backward()
        linear_cross_entropy(x, w, y, b, token_weight=weights, memory_budget=20 * 2**20).backward()
        log_prob, entropy = linear_log_probs(x, w, y, b, with_entropy=True)
        (log_prob.sum() + entropy.sum()).backward()

    weights = torch.rand(700, device="cuda")
    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):  # run, written down, repeated, as CUDA graphs
            everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def as_graph(step: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of the step, after a first one, and what the captured step returned."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            return graph, step()


@pytest.mark.case(28)
def test_cuda_graph_capture() -> None:
    x, w, b, y = tensors()

    def step() -> Any:
        x.grad = w.grad = b.grad = None
        loss = linear_cross_entropy(x, w, y, b, z_loss=1e-4)
        loss.backward()
        return loss

    graph, captured = as_graph(step)
    grads = x.grad, w.grad, b.grad
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [captured.item(), *(grad.clone() for grad in grads)]
    plain = [step().item(), x.grad, w.grad, b.grad]
    assert replayed[0] == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(replayed[1:], plain[1:], strict=True))


@pytest.mark.case(24)
@pytest.mark.case(31)
@pytest.mark.parametrize("chunk", [1024, 2048])
def test_compiled_is_the_same_kernels_in_the_same_memory(chunk: int) -> None:
    """By the default compiler, 25 % ignored: bit for bit, without synchronisation, and within the plan's promise, but
    for the upper half of several chunks' sum of dW (README, limits)."""
    from logitless import plan
    from logitless.torch_impl.memory import peak_scratch_bytes

    torch._dynamo.reset()
    tokens, hidden, vocab = 2048, 512, 32003
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda") * 0.05).bfloat16().requires_grad_()
    y = torch.randint(0, vocab, (tokens,), device="cuda")
    y[::4] = -100
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16"}
    chosen = plan(**sizes, order="tokens", chunk=chunk, fused=True)
    compiled = torch.compile(lambda *a: linear_cross_entropy(*a, z_loss=1e-4, plan=chosen), fullgraph=True)

    def step(used: bool = False) -> Any:
        x.grad = w.grad = None
        loss = compiled(x, w, y)
        if used:  # where dW will lie, others' numbers were
            torch.full_like(w, torch.nan)
        loss.backward()
        return loss.detach()

    def freed() -> None:
        x.grad = w.grad = None

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step(used=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grads = x.grad, w.grad
    plain = linear_cross_entropy(x, w, y, z_loss=1e-4, plan=chosen)
    assert torch.equal(loss, plain.detach())
    assert all(torch.equal(one, two) for one, two in zip(grads, torch.autograd.grad(plain, (x, w)), strict=True))
    del grads, plain, loss
    freed()
    peak = peak_scratch_bytes(step) - x.nbytes - w.nbytes
    assert peak <= chosen.scratch_bytes + (w.nbytes if chunk < tokens else 0)


@pytest.mark.case(24)
@pytest.mark.case(28)
def test_compiled_into_a_cuda_graph() -> None:
    """mode="reduce-overhead": the operations are recorded, kernels and all, and replayed."""
    from logitless import plan

    torch._dynamo.reset()
    x, w, b, y = tensors()
    compiled = torch.compile(lambda *a: linear_cross_entropy(*a, z_loss=1e-4), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = w.grad = b.grad = None
        loss = compiled(x, w, y, b)
        loss.backward()
    made = [loss.detach().clone(), *(leaf.grad.clone() for leaf in (x, w, b))]
    # Outside of a graph the forward of so small a step makes dX, and dX is rounded twice.
    (tokens, hidden), vocab = x.shape, w.shape[0]
    whole = plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype="bfloat16", order="tokens", chunk=tokens, fused=True)
    plain = linear_cross_entropy(x, w, y, b, z_loss=1e-4, plan=whole)
    expected = [plain.detach(), *torch.autograd.grad(plain, (x, w, b))]
    assert all(torch.equal(one, two) for one, two in zip(made, expected, strict=True))


@pytest.mark.parametrize("current", [0, 1])
def test_a_device_that_is_not_current(current: int) -> None:
    """The current device and another one give the same bits. The caller's current device stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    made = []
    with torch.cuda.device(current):
        for device in ("cuda:1", "cuda:0"):
            x, w, b, y = tensors(device=device)
            loss = linear_cross_entropy(x, w, y, b)
            loss.backward()
            assert torch.cuda.current_device() == current
            made.append([part.cpu() for part in (loss.detach(), x.grad, w.grad, b.grad)])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.case(31)
def test_the_same_bits_from_run_to_run() -> None:
    results = []
    for _ in range(3):
        x, w, b, y = tensors()
        loss = linear_cross_entropy(x, w, y, b, label_smoothing=0.1, backend="triton")
        loss.backward()
        results.append([loss.detach(), x.grad, w.grad, b.grad])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.case(28)
def test_other_arguments_get_their_own_kernels() -> None:
    """Aligned and unaligned tensors take turns. Each call gives what it gives when no earlier call is known."""
    from logitless.torch_impl.kernels import launch as launches

    x, w, b, y = tensors()
    weights = torch.rand(701, device="cuda")
    shifted = torch.empty(701, 128, device="cuda", dtype=torch.bfloat16).view(-1)[1 : 1 + 700 * 128].view(700, 128)
    later = torch.cat((y[:1], y))[1:]
    cases = [
        {"hidden": x, "bias": b, "target": y, "token_weight": weights[:700]},
        {"hidden": shifted.copy_(x.detach()).requires_grad_(), "bias": b, "target": y, "token_weight": weights[1:]},
        {"hidden": x, "bias": torch.cat((b[:1], b))[1:].detach().requires_grad_(), "target": later},
        {"hidden": x, "bias": b, "target": y.int(), "logit_scale": 0.5, "softcap": 30.0},
        {"hidden": x[:699], "bias": b, "target": y[:699]},
    ]

    def made(case: dict[str, Any]) -> list[Any]:
        loss = linear_cross_entropy(weight=w, **case)
        return [loss.detach(), *torch.autograd.grad(loss, (case["hidden"], w, case["bias"]))]

    alone = []
    for case in cases:
        launches.compiled.clear()
        alone.append(made(case))
    for _ in range(2):
        for case, expected in zip(cases, alone, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(made(case), expected, strict=True))


FIRST_CALLS = """
import sys
from implementations import TorchTritonCuda, assert_within, problem_named, run_case
sys.setswitchinterval(1e-6)
for name in ("odd_all", "odd_none_most", "odd_none", "odd_bias", "odd_softcap", "odd_sum", "confident_wrong"):
    for dtype in ("float32", "bfloat16"):
        problem = problem_named(name).with_dtype(dtype)
        assert_within(problem, run_case(TorchTritonCuda(), problem.case()))
"""


def test_first_calls_whose_threads_take_turns_all_the_time() -> None:
    """In a fresh process, which may find kernels compiled and then loads all of a call's at once: each is its own."""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


PLANS: dict[str, dict[str, Any]] = {
    "one chunk": {"order": "tokens", "chunk": 700},
    "chunks": {"order": "tokens", "chunk": 256},
    "two passes": {"order": "tokens", "chunk": 256, "one_pass": False},
    "slices": {"order": "vocab", "chunk": 1024},
    "lent slices": {"order": "vocab", "chunk": 128},
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "none"}], ids=str)
def test_what_is_not_written_is_read_nowhere(options: dict[str, Any], dtype: Any, kind: str) -> None:
    """Memory that nobody wrote holds NaN, and the bits stay the same."""
    made = []
    for filled in (contextlib.nullcontext(), unwritten_is_nan()):
        x, w, b, y = tensors(dtype)
        sizes = {"tokens": 700, "hidden": 128, "vocab": 3001, "dtype": str(dtype).removeprefix("torch.")}
        chosen = plan(**sizes, **PLANS[kind], fused=True)
        with filled:
            loss = linear_cross_entropy(x, w, y, b, plan=chosen, backend="triton", **options)
            loss.sum().backward()
        made.append([loss.detach(), x.grad, w.grad, b.grad])
    assert all(bool(values.isfinite().all()) for values in made[0])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("chosen", [("tokens", 2300), ("tokens", 1152), ("vocab", 1024)], ids=str)
@pytest.mark.parametrize("hidden", [4096, 4360])
def test_many_tiles_of_every_result(hidden: int, chosen: tuple[str, int]) -> None:
    """More row tiles than walk together, and dX as wide as has them walk in another order: no tile is another's."""
    tokens, vocab, generator = 2300, 5003, torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(rows, hidden, device="cuda", generator=generator) for rows in (tokens, vocab))
    x, w = x.bfloat16().requires_grad_(), (w * hidden**-0.5).bfloat16().requires_grad_()
    y = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    y[::5] = -100
    order, chunk = chosen
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16"}
    loss = linear_cross_entropy(x, w, y, plan=plan(**sizes, order=order, chunk=chunk, fused=True), backend="triton")
    loss.backward()
    valid = y != -100
    z = x.detach().double() @ w.detach().double().t()
    true_loss = torch.nn.functional.cross_entropy(z, y)
    dz = torch.softmax(z, 1)
    dz[torch.arange(tokens), y.clamp(min=0)] -= 1
    dz *= (valid / valid.sum())[:, None]
    ideal = dz.bfloat16().double()
    for made, exact, rounded, right in ((x.grad, dz, ideal, w), (w.grad, dz.t(), ideal.t(), x)):
        truth, best = (left @ right.detach().double() for left in (exact, rounded))
        most = allowance(error(best.bfloat16().double().cpu(), truth.cpu()), "bfloat16")
        assert error(made.double().cpu(), truth.cpu()) <= most
    assert error(loss.detach().double().cpu(), true_loss.cpu()) <= TINY["bfloat16"]


@pytest.mark.case(28)
def test_programs_that_cannot_all_run_do_not_wait_for_each_other() -> None:
    """Another stream holds multiprocessors until our gradient is ready. The programs that can run must make it."""
    from holding import BYTES, hold_kernel

    multiprocessors, held = torch.cuda.get_device_properties(0).multi_processor_count, 16
    # A tile of dX for every multiprocessor, and a vocabulary through which 16 too few would be waited for.
    tokens, hidden, vocab = 64 * multiprocessors, 512, 20011
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(rows, hidden, device="cuda", generator=generator).bfloat16() for rows in (tokens, vocab))
    y = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    x.requires_grad_(), w.requires_grad_()

    def gradients() -> Any:
        return torch.autograd.grad(linear_cross_entropy(x, w, y, backend="triton"), (x, w))

    alone = gradients()
    gradients()  # finds its memory
    started, done, late = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))
    room, other = torch.zeros(BYTES // 4, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    done.fill_(1)
    with torch.cuda.stream(other):  # compiles it
        hold_kernel[(1,)](started, done, late, room, 0, SIZE=BYTES // 4)
    torch.cuda.synchronize()
    started.zero_(), done.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        hold_kernel[(held,)](started, done, late, room, 2_000_000_000, SIZE=BYTES // 4)
    while int(started) < held:
        pass
    made = gradients()
    done.fill_(1)
    torch.cuda.synchronize()
    assert int(late) == 0
    assert all(map(torch.equal, made, alone))


def test_ids_outside_the_vocabulary_make_nan() -> None:
    x, w, b, y = tensors()
    y[1], y[2], y[3] = 3001, -1, 2**32
    losses = linear_cross_entropy(x, w, y, b, reduction="none").detach().cpu().numpy()
    assert np.flatnonzero(np.isnan(losses)).tolist() == [1, 2, 3]


@pytest.mark.case(28)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_operations_of_a_loss(dtype: Any, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CUDA graph, where nobody can ask how many tokens count, and outside, where no operation waits for the
    device: both are right. A row is several blocks of the kernels' columns."""
    monkeypatch.setattr(large, "COUNTED_FLOPS", 0)
    tokens, size, vocab = 700, 128, 20001
    generator = torch.Generator("cuda").manual_seed(0)
    x, w, b = (
        torch.randn(shape, generator=generator, device="cuda") for shape in ((tokens, size), (vocab, size), vocab)
    )
    leaves = [leaf.to(dtype).requires_grad_() for leaf in (x, w * 0.1, b)[: 2 + with_bias]]
    y = torch.randint(vocab, (tokens,), generator=generator, device="cuda")
    y[300:] = -100  # whole chunks of them
    name = str(dtype).removeprefix("torch.")
    chosen = plan(tokens=tokens, hidden=size, vocab=vocab, dtype=name, eager=True, order="tokens", chunk=128)

    def step() -> list[Any]:
        loss = linear_cross_entropy(*leaves[:2], y, *leaves[2:], plan=chosen, backend="eager")
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    graph, captured = as_graph(step)
    graph.replay()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact[:2], *exact[2:]), y)
    limit = TARGET_GRADIENT["float32"] if dtype == torch.float32 else torch.finfo(dtype).eps
    for made in (captured, found):
        for one, right in zip(made, (true.detach(), *torch.autograd.grad(true, exact, retain_graph=True)), strict=True):
            assert error(one.double().cpu().numpy(), right.cpu().numpy()) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_trial_of_the_kernels_between_plain_products(dtype: Any) -> None:
    assert row_kernels._trial(torch.device("cuda", 0), dtype) is None
