"""torch.compile(fullgraph=True): the same numbers as eager mode, bit for bit, from the same code and kernels.

Only exact operations (a multiplication by two) stand before the call, so that a compiler's other sums cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from functorch.compile import make_boxed_func  # noqa: E402
from implementations import TORCH_PLACES, in_every_torch_place, slow_where_interpreted  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.library import opcheck  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.tolerances import ELEMENTS  # noqa: E402
from logitless.torch_impl import checks, linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.call import LatePlan  # noqa: E402
from logitless.torch_impl.compiled import tracing  # noqa: E402
from logitless.torch_impl.plain_loss import large, small  # noqa: E402

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


def in_turns(names: str, values: Iterable[tuple[Any, ...]]) -> Any:
    """Every value in both places of a GPU. On a CPU eager and interpreted kernels take turns, because both are slow."""
    made = []
    for number, value in enumerate(values):
        ident = "-".join(str(part).removeprefix("torch.") for part in value)
        for place in (TORCH_PLACES[number % 2], *TORCH_PLACES[2:]):
            made.append(pytest.param(*place.values, *value, id=f"{ident}-{place.id}", marks=place.marks))
    return pytest.mark.parametrize(("device", "backend", *names.split()), made)


TOKENS, HIDDEN, VOCAB = 20, 16, 70
# Of 20 tokens 15 are valid: chunks of 12 leave some for the second.


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def tensors(device: str, tokens: int = TOKENS, dtype: Any = torch.float32, wrt: str = "xwb") -> tuple[Any, ...]:
    """hidden, weight, bias, target; 25 % ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (tokens, HIDDEN), "w": (VOCAB, HIDDEN), "b": (VOCAB,)}
    made = [torch.randn(shape, generator=generator) for shape in shapes.values()]
    y = torch.randint(0, VOCAB, (tokens,), generator=generator)
    y[::4] = -100
    floats = (t.to(device, dtype).requires_grad_(name in wrt) for name, t in zip(shapes, made, strict=True))
    return *floats, y.to(device)


def plan_of(backend: str, dtype: str = "float32", **how: Any) -> Any:
    return plan(tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=dtype, fused=backend == "triton", **how)


def results(function: Callable[..., Any], arrays: tuple[Any, ...], training: bool = True) -> list[Any]:
    """Everything that comes out, then every gradient of a weighted sum of it."""
    with torch.set_grad_enabled(training):
        made = function(*arrays)
    outs = [made] if torch.is_tensor(made) else [out for out in made if out is not None]
    found = [out.detach() for out in outs]
    if training:
        total = sum((out.double() * (1.3 + index)).sum() for index, out in enumerate(outs) if out.requires_grad)
        found += torch.autograd.grad(total, [array for array in arrays if array.requires_grad])
    return found


def assert_same(function: Callable[..., Any], arrays: tuple[Any, ...], training: bool = True, **how: Any) -> None:
    plain = results(function, arrays, training)
    compiled = torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **how})
    made = results(compiled, arrays, training)
    assert [(t.dtype, t.shape) for t in made] == [(t.dtype, t.shape) for t in plain]
    assert all(torch.equal(one, other) for one, other in zip(made, plain, strict=True))


def loss_with(backend: str, **options: Any) -> Callable[..., Any]:
    def function(x: Any, w: Any, b: Any, y: Any) -> Any:
        made = linear_cross_entropy(x * 2, w, y, b, backend=backend, **options)
        return (*made[:-1], *made[-1]) if options.get("return_stats") else made

    return function


def options_named(name: str, device: str, backend: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    classes, tokens = (torch.rand(size, generator=generator).to(device) + 0.5 for size in (VOCAB, TOKENS))
    smooth = {"label_smoothing": 0.1, "class_weight": classes, "token_weight": tokens}
    return {
        "plain": {},
        "sum_z": {"reduction": "sum", "z_loss": 1e-3},
        "none": {"reduction": "none"},
        "smooth": smooth,
        "softcap": {"softcap": 3.0, "logit_scale": 0.7},
        "softcap_smooth": {"softcap": 3.0, "label_smoothing": 0.1},
        "statistics": {"return_stats": True},
        "lse": {"return_lse": True, "shift": 1},
        "lse_statistics": {"return_lse": True, "return_stats": True, "reduction": "none", **smooth},
        "number": {"normalizer": 7.3},
        "tensor": {"normalizer": torch.tensor(7.3, device=device)},
        "chunks": {"plan": plan_of(backend, order="tokens", chunk=12)},
        "chunks_smooth": {"plan": plan_of(backend, order="tokens", chunk=12), **smooth},
        "two_passes": {"plan": plan_of(backend, order="tokens", chunk=12, one_pass=False)},
        "vocab": {"plan": plan_of(backend, order="vocab", chunk=32)},
    }[name]


OPTIONS = (
    "plain", "sum_z", "none", "smooth", "softcap", "softcap_smooth", "statistics", "lse", "lse_statistics", "number",
    "tensor", "chunks", "chunks_smooth", "two_passes", "vocab",
)  # fmt: skip
# These take no path of their own through the graph.
INTERPRETED = ("plain", "none", "chunks", "lse_statistics")
SLOW = ("sum_z", "smooth", "softcap", "softcap_smooth", "number", "two_passes")


@pytest.mark.parametrize("name", ["plain", "number", "chunks"])
def test_the_few_operations_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients lack a factor until the upstream gradient is there; compiled they wait for both, too."""
    monkeypatch.setattr(small, "loss", large.loss)
    assert_same(loss_with("eager", **options_named(name, "cpu", "eager")), tensors("cpu"))


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["name"] not in INTERPRETED)
@pytest.mark.case(24)
@in_every_torch_place
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in OPTIONS]
)
def test_training(device: str, backend: str, name: str) -> None:
    if (device, backend) == ("cpu", "triton") and name in ("sum_z", "softcap", "number", "tensor"):
        pytest.skip("interpreted kernels are slow: the others have these options' paths too")
    assert_same(loss_with(backend, **options_named(name, device, backend)), tensors(device))


@pytest.mark.case(24)
@in_turns("name", [("plain",), ("none",), ("statistics",), ("chunks",)])
def test_no_grad(device: str, backend: str, name: str) -> None:
    function = loss_with(backend, **options_named(name, device, backend))
    assert_same(function, tensors(device), training=False)


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["asked"] != "return_stats")
@pytest.mark.case(24)
@in_turns(
    "asked training",
    [(asked, training) for asked in ("nothing", "with_entropy", "return_stats") for training in (True, False)],
)
def test_log_probs(device: str, backend: str, asked: str, training: bool) -> None:
    how = {} if asked == "nothing" else {asked: True}

    def function(x: Any, w: Any, b: Any, y: Any) -> Any:
        made = linear_log_probs(x * 2, w, y, b, logit_scale=0.7, backend=backend, **how)
        return (*made[:2], *made[2]) if asked == "return_stats" else made

    assert_same(function, tensors(device), training)


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and (p["name"], p["wrt"]) != ("chunks", "x"))
@pytest.mark.case(24)
@in_turns("name wrt", [("none", "x"), ("chunks", "x"), ("chunks", "w"), ("none", "w"), ("none", "b"), ("chunks", "b")])
def test_only_the_wanted_gradients(device: str, backend: str, name: str, wrt: str) -> None:
    function = loss_with(backend, **options_named(name, device, backend))
    assert_same(function, tensors(device, wrt=wrt))


@pytest.mark.case(24)
@in_every_torch_place
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_low_precision(device: str, backend: str, dtype: Any) -> None:
    chunks = plan_of(backend, str(dtype).removeprefix("torch."), order="tokens", chunk=12)
    assert_same(loss_with(backend), tensors(device, dtype=dtype))
    assert_same(loss_with(backend, plan=chunks), tensors(device, dtype=dtype))


@pytest.mark.case(24)
@pytest.mark.case(25)
@in_every_torch_place
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(device: str, backend: str, reduction: str) -> None:
    def function(x: Any, w: Any, b: Any, y: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return linear_cross_entropy(x * 2, w, y, b, reduction=reduction, backend=backend)

    assert_same(function, tensors(device))


@pytest.mark.case(24)
@in_every_torch_place
def test_leading_axes_and_strides(device: str, backend: str) -> None:
    def function(x: Any, w: Any, b: Any, y: Any) -> Any:
        turned = (x * 2).t().contiguous().t()
        grid = linear_cross_entropy(x.view(5, 4, HIDDEN) * 2, w, y.view(5, 4), b, reduction="none", backend=backend)
        return linear_cross_entropy(turned, w, y, b, backend=backend), grid

    assert_same(function, tensors(device))


@pytest.mark.slow  # the tests above compile for "aot_eager"
@pytest.mark.case(24)
@in_every_torch_place
def test_inductor_and_tied_weights(device: str, backend: str) -> None:
    """A small model whose embedding is its head, by the default compiler."""

    def function(w: Any, b: Any, y: Any) -> Any:
        x = torch.nn.functional.embedding(y.clamp(min=0).roll(1), w) * 2
        return linear_cross_entropy(x, w, y, b, z_loss=1e-3, backend=backend, return_stats=True)[0] * 2

    _, w, b, y = tensors(device)
    compiled = torch.compile(function, fullgraph=True)
    for training in (True, False):
        plain, made = (results(f, (w, b, y), training) for f in (function, compiled))
        assert torch.equal(made[0], plain[0])
        for one, other in zip(made, plain, strict=True):
            torch.testing.assert_close(one, other, **ELEMENTS["another order"])


@pytest.mark.case(24)
@in_every_torch_place
def test_the_graph_holds_one_operation(device: str, backend: str) -> None:
    """It does not hold the chunks' own operations: a compiler's version of those is neither as fast nor as small."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    function = loss_with(backend, **options_named("chunks", device, backend))
    results(torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), tensors(device))
    forward, backward = ([name for name in graph if "getitem" not in name] for graph in graphs)
    assert forward == ["aten.mul.Tensor", "logitless.loss.default"]
    # Plain operations leave a multiplication by the upstream scalar, which a compiler may fuse.
    ours = [name for name in backward if "logitless" in name]
    assert ours == (["logitless.loss_gradients.default"] if backend == "triton" else [])


@pytest.mark.case(5)
@in_turns("name", [("plain",), ("chunks",), ("none",)])
def test_two_backwards(device: str, backend: str, name: str) -> None:
    """The backward uses nothing up: a second one gives the same bits."""
    arrays = tensors(device)
    function = loss_with(backend, **options_named(name, device, backend))
    loss = torch.compile(function, fullgraph=True, backend="aot_eager")(*arrays).sum()
    first = [grad.clone() for grad in torch.autograd.grad(loss, arrays[:3], retain_graph=True)]
    for one, other in zip(first, torch.autograd.grad(loss, arrays[:3]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and (p["name"], p["dynamic"]) == ("lse", None))
@pytest.mark.case(22)
@in_turns(
    "name dynamic",
    [
        ("mean", None),
        ("mean", True),
        ("none", True),
        ("log_probs", None),
        ("length", None),
        ("lse", None),
        ("lse", True),
    ],
)
def test_a_changing_number_of_tokens(device: str, backend: str, name: str, dynamic: bool | None) -> None:
    """One graph for all, after that of the first number; ``length``: the normalizer is a symbol too."""

    def function(x: Any, w: Any, b: Any, y: Any) -> Any:
        if name == "log_probs":
            return linear_log_probs(x * 2, w, y, b, with_entropy=True, backend=backend)
        how: dict[str, Any] = {"length": {"normalizer": x.shape[0]}, "lse": {"return_lse": True, "shift": 1}}
        how = how.get(name) or {"reduction": name}
        return linear_cross_entropy(x * 2, w, y, b, backend=backend, **how)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in (15, 26, 40) if backend == "triton" and device == "cpu" else (15, 26, 128, 513, 2048, 8192):
        arrays = tensors(device, tokens)
        plain, made = results(function, arrays), results(compiled, arrays)
        assert all(torch.equal(one, other) for one, other in zip(made, plain, strict=True)), tokens
    assert graphs_of(counter) <= 2


def graphs_of(counter: Any) -> int:
    """How many graphs with a call were compiled; one that holds nothing may come first."""
    return sum(any(node.op == "call_function" for node in graph.graph.nodes) for graph in counter.graphs)


def few_chunks(tokens: int) -> Any:
    """A rule that takes two chunks above 32 tokens, in one pass up to 128."""
    order: Any = "tokens" if tokens <= 128 else "vocab"
    chunk = {"tokens": max(1, tokens if tokens <= 32 else tokens // 2), "vocab": 32}[order]
    sizes = {"tokens": tokens, "hidden": HIDDEN, "vocab": VOCAB, "dtype": "float32"}
    return plan(**sizes, fused=True, order=order, chunk=chunk)


@pytest.mark.case(22)
def test_the_plan_for_a_changing_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by comparisons alone: here with numbers in the place of symbols."""
    monkeypatch.setattr(tracing, "TOKEN_TILE", 16)
    made = {n: tracing.symbolic_plan(n, few_chunks, None, chunk_waits=True) for n in (1, 16, 31, 32, 33, 64, 65, 127)}
    assert {n: (p.tokens, p.token_chunk) for n, p in made.items()} == {
        **{n: (n, n) for n in (1, 16, 31, 32)}, 33: (33, 32), 64: (64, 32), 65: (65, 64), 127: (127, 64),
    }  # fmt: skip
    assert tracing.symbolic_plan(129, few_chunks, None, chunk_waits=True) == LatePlan(False, None)
    assert tracing.symbolic_plan(64, few_chunks, None, chunk_waits=False) == LatePlan(True, None)
    assert tracing.symbolic_plan(64, few_chunks, 10**6, chunk_waits=False).token_chunk == 32


def test_a_budget_too_small_for_the_next_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(tokens: int) -> Any:
        if tokens > 100:
            raise ValueError("memory_budget: got too little")
        return few_chunks(tokens)

    monkeypatch.setattr(tracing, "TOKEN_TILE", 16)
    assert tracing.symbolic_plan(90, choose, 10**6, chunk_waits=True) == few_chunks(90)
    with pytest.raises(ValueError, match="too little"):
        tracing.symbolic_plan(101, choose, 10**6, chunk_waits=True)


@pytest.mark.case(22)
@slow_where_interpreted
def test_a_changing_number_of_chunks(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "TOKEN_TILE", 16)
    monkeypatch.setattr(checks, "choose_plan", lambda request: few_chunks(request.tokens))
    counter = CompileCounterWithBackend("aot_eager")
    function = loss_with(backend, label_smoothing=0.1)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (20, 40, 70, 50):
        arrays = tensors(device, tokens)
        for one, other in zip(results(compiled, arrays), results(function, arrays), strict=True):
            torch.testing.assert_close(one, other, **ELEMENTS["another size"])
    assert graphs_of(counter) == (3 if backend == "triton" else 1)


@in_every_torch_place
def test_ids_outside_the_vocabulary_make_nan(device: str, backend: str) -> None:
    x, w, b, y = tensors(device)
    y[1], y[2] = VOCAB, -1
    compiled = torch.compile(loss_with(backend, reduction="none"), fullgraph=True, backend="aot_eager")
    assert torch.isnan(compiled(x, w, b, y)).nonzero().flatten().tolist() == [1, 2]


@in_every_torch_place
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tokens_and_all_ignored(device: str, backend: str, tokens: int, reduction: str) -> None:
    x, w, b, y = tensors(device, tokens)
    assert_same(loss_with(backend, reduction=reduction), (x, w, b, torch.full_like(y, -100)))


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.case(31)
@pytest.mark.parametrize(("chunk", "dtype"), [(64, torch.bfloat16), (256, torch.float32)])
def test_memory_is_that_of_eager_mode(dtype: Any, chunk: int) -> None:
    from logitless.torch_impl.memory import peak_scratch_bytes

    x, w = torch.randn(256, 512, dtype=dtype).requires_grad_(), torch.randn(4096, 512, dtype=dtype).requires_grad_()
    y = torch.randint(0, 4096, (256,))
    name = str(dtype).removeprefix("torch.")
    chosen = plan(tokens=256, hidden=512, vocab=4096, dtype=name, order="tokens", chunk=chunk)

    def used(function: Callable[..., Any]) -> int:
        def step() -> None:
            x.grad = w.grad = None
            function(x, w, y).backward()

        step()
        x.grad = w.grad = None
        return peak_scratch_bytes(step) - x.nbytes - w.nbytes

    def loss(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, plan=chosen)

    compiled = used(torch.compile(loss, fullgraph=True))
    assert compiled <= chosen.scratch_bytes
    assert compiled <= 1.02 * used(loss)


def calls_of_operations(function: Callable[..., Any], arrays: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operations of ours that compiled training runs, with their arguments."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if "logitless" in str(target):
                seen.append((target, args))
            return super().call_function(target, args, kwargs)

    def watch(graph: Any, _: Any) -> Any:
        return make_boxed_func(Watch(graph).run)

    results(torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=watch)), arrays)
    return seen


@pytest.mark.late(where=lambda p: p["backend"] == "triton" and p["name"] != "chunks_smooth")
@in_turns(
    "name", [("plain",), ("chunks_smooth",), ("statistics",), ("two_passes",), ("log_probs",), ("lse_statistics",)]
)
def test_operations_keep_their_promises(device: str, backend: str, name: str) -> None:
    """PyTorch's own checks: schema, shapes, strides and dtypes as announced, no aliases, nothing written."""

    def log_probs(x: Any, w: Any, b: Any, y: Any) -> Any:
        return linear_log_probs(x * 2, w, y, b, with_entropy=True, backend=backend)

    function = log_probs if name == "log_probs" else loss_with(backend, **options_named(name, device, backend))
    calls = calls_of_operations(function, tensors(device))
    assert {operation.namespace for operation, _ in calls} == {"logitless"}
    assert len(calls) == (2 if backend == "triton" or name in ("two_passes", "log_probs", "lse_statistics") else 1)
    for operation, arguments in calls:
        detached = tuple(a.detach() if torch.is_tensor(a) else a for a in arguments)
        # The kernels' matrices have places that are never written or read: those cannot be compared.
        held = backend == "triton" and operation is torch.ops.logitless.loss.default
        opcheck(operation, detached, test_utils=CHECKS[:3] if held else CHECKS)
