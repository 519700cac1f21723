"""Exponentials in dW's rows, where dW is then made in place: the same as from a matrix of their own, every time.

The kernels for it are Hopper's and cannot be interpreted. test_hopper.py compiles them; here they run on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless import ChunkPlan, plan  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402
from logitless.torch_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.backend import backend_named, chosen_backend  # noqa: E402
from logitless.torch_impl.memory import peak_scratch_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

on_gpu = pytest.mark.gpu


@pytest.fixture
def _on_hopper() -> None:
    device = torch.device("cuda")
    if chosen_backend(None, device, torch.bfloat16) != "triton":
        pytest.skip("the kernels do not run here")
    weight = torch.zeros(8, 8, device=device, dtype=torch.bfloat16)
    if not backend_named("triton").lends(weight, weight.dtype):
        pytest.skip("this GPU's kernels do not work in place")


def arrays(tokens: int, hidden: int, vocab: int, ignored: float = 0.0, bias: bool = True) -> tuple[Any, ...]:
    """hidden, weight, target and bias on the GPU, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(tokens + hidden + vocab)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator)

    x, w = normal(tokens, hidden).bfloat16(), (normal(vocab, hidden) * hidden**-0.5).bfloat16()
    b = normal(vocab).bfloat16() if bias else None
    y = torch.randint(vocab, (tokens,), device="cuda", generator=generator)
    y[torch.rand(tokens, device="cuda", generator=generator) < ignored] = -100
    return x.requires_grad_(), w.requires_grad_(), y, None if b is None else b.requires_grad_()


def one_chunk(tokens: int, hidden: int, vocab: int, lends: bool, one_pass: bool = True) -> ChunkPlan:
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "bfloat16"}
    made = plan(**sizes, fused=True, order="tokens", chunk=tokens, one_pass=one_pass, lends=lends, hold=not lends)
    if made.lends != lends:  # both kinds are among the candidates
        made = ChunkPlan(tokens, hidden, vocab, "bfloat16", "tokens", True, tokens, min(vocab, 2048), "triton", lends)
    return made


def gradients(
    of: tuple[Any, ...], chosen: ChunkPlan | None, function: Any = linear_cross_entropy, **options: Any
) -> Any:
    """The results and the gradients of Σ c_i result_i, c drawn."""
    x, w, y, b = of
    made = function(x, w, y, b, plan=chosen, **options)
    made = made[0] if isinstance(made, tuple) else made
    upstream = torch.rand(made.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) - 0.3
    return made.detach(), *torch.autograd.grad(made, [leaf for leaf in (x, w, b) if leaf is not None], upstream)


def assert_same(one: Any, other: Any) -> None:
    for a, c in zip(one, other, strict=True):
        assert torch.equal(a, c)


def assert_same_but_bias(one: Any, other: Any) -> None:
    """db sums the columns of E, which Triton does in another order where they lie one behind the other."""
    assert_same(one[:3], other[:3])
    for a, c in zip(one[3:], other[3:], strict=True):
        assert error(a.double().cpu().numpy(), c.double().cpu().numpy()) <= GRADIENT["bfloat16"]


SIZES = [(300, 512, 2000), (128, 256, 777), (1, 64, 130), (1000, 1024, 5003), (600, 768, 30001), (2048, 2304, 9000)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 1e-3},
    "smooth": {"label_smoothing": 0.1},
    "cap": {"softcap": 20.0, "logit_scale": 1.5, "return_stats": True},
    "none": {"reduction": "none"},
    "log-probs": {"function": linear_log_probs},
}


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_same_bits_as_beside_dw(sizes: tuple[int, int, int], name: str, ignored: float) -> None:
    of = arrays(*sizes, ignored, bias=name != "cap")
    one, other = (gradients(of, one_chunk(*sizes, lends), **OPTIONS[name]) for lends in (True, False))
    assert_same_but_bias(one, other)


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
def test_rows_that_are_done_again() -> None:
    """Their exponentials are written once more, by pointers: the anchor's logit lies far below the largest."""
    sizes = (200, 512, 3000)
    x, w, y, b = arrays(*sizes)
    with torch.no_grad():
        x[::3] *= 60
    one, other = (gradients((x, w, y, b), one_chunk(*sizes, lends)) for lends in (True, False))
    assert one[0] > 40
    assert_same_but_bias(one, other)


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
def test_every_run_gives_the_same_bits() -> None:
    """Also while other work takes multiprocessors away: nothing hangs, nothing is stored too early."""
    sizes = (2000, 2048, 32000)
    of, chosen = arrays(*sizes), one_chunk(*sizes, True)
    first = gradients(of, chosen)
    for _ in range(200):
        assert_same(first, gradients(of, chosen))
    matrix, side = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            for _ in range(8):
                matrix @ matrix
        assert_same(first, gradients(of, chosen))
    torch.cuda.synchronize()


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
def test_two_at_a_time() -> None:
    """Two products in place on two streams: each takes the GPU when all its programs fit."""
    sizes = (1024, 1024, 32000)
    of, chosen = arrays(*sizes), one_chunk(*sizes, True)
    first, sides = gradients(of, chosen), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        made = []
        for side in sides:
            with torch.cuda.stream(side):
                made.append(gradients(of, chosen))
        torch.cuda.synchronize()
        for each in made:
            assert_same(first, each)


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
def test_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as a row of tiles has columns, on a GPU that is smaller than it was taken for."""
    from logitless.torch_impl.kernels import kernel_call

    sizes = (500, 1024, 4000)
    of, chosen = arrays(*sizes), one_chunk(*sizes, True)
    first = gradients(of, chosen)
    for programs in (4, 7):
        monkeypatch.setattr(kernel_call, "multiprocessors", lambda index, programs=programs: programs)
        made = gradients(of, chosen)
        assert torch.equal(first[2], made[2])  # dW; of dX, other tiles are split


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
def test_in_a_cuda_graph() -> None:
    sizes = (512, 512, 8000)
    of, chosen = arrays(*sizes), one_chunk(*sizes, True)
    first, side = gradients(of, chosen), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x, w, y, b = of

    def step() -> Any:
        loss = linear_cross_entropy(x, w, y, b, plan=chosen)
        return torch.autograd.grad(loss, [x, w, b])

    with torch.cuda.stream(side):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            made = step()
    for _ in range(5):
        for gradient in made:
            gradient.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(expected, made)
    assert len(first) == 4


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("name", ["plain", "cap", "none", "log-probs"])
def test_the_default_keeps_its_promise(name: str) -> None:
    """Without a plan: the exponentials, N × V, are nowhere beside dW, and a retained graph gives the same once more."""
    sizes = tokens, hidden, vocab = 1024, 1024, 32000
    of = x, w, _, b = arrays(*sizes)
    options = dict(OPTIONS[name])
    gradients(of, None, **options)
    made: list[Any] = []
    peak = peak_scratch_bytes(lambda: made.extend(gradients(of, None, **options)))
    scratch = peak - sum(leaf.nbytes for leaf in (x, w, b))
    assert (
        scratch
        <= plan(tokens=tokens, hidden=hidden, vocab=vocab, dtype="bfloat16", fused=True, lends=True).scratch_bytes
    )
    assert scratch < tokens * vocab * 2 // 2
    function = options.pop("function", linear_cross_entropy)
    result = function(*of, **options)
    result = result[0] if isinstance(result, tuple) else result
    ones = torch.ones_like(result)
    once = torch.autograd.grad(result, [x, w, b], ones, retain_graph=True)
    again = torch.autograd.grad(result, [x, w, b], ones)
    for a, c in zip(once, again, strict=True):
        assert (a - c).norm() <= 0.01 * a.norm()


@on_gpu
@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("kind", ["frozen", "into", "no_grad", "entropy", "lse", "float32 weight"])
def test_a_call_without_free_rows_refuses_the_plan(kind: str) -> None:
    sizes = (128, 256, 1000)
    x, w, y, b = arrays(*sizes)
    chosen, options, function = one_chunk(*sizes, True), {}, linear_cross_entropy
    if kind == "frozen":
        w = w.detach()
    elif kind == "into":
        options["accumulate_into"] = torch.zeros(1000, 256, device="cuda")
    elif kind == "entropy":
        function, options["with_entropy"] = linear_log_probs, True
    elif kind == "lse":
        options["return_lse"] = True
    elif kind == "float32 weight":
        w = w.detach().float().requires_grad_()
    grad = torch.no_grad() if kind == "no_grad" else torch.enable_grad()
    with grad, torch.autocast("cuda", torch.bfloat16, enabled=kind == "float32 weight"):
        with pytest.raises(ValueError, match="plan: got one with lends=True"):
            function(x, w, y, b, plan=chosen, **options)
        function(x, w, y, b, **options)  # by default another plan


def test_plain_operations_refuse_the_plan() -> None:
    x, w = (torch.zeros(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (32, 100))
    chosen = one_chunk(32, 64, 100, True)
    assert chosen.lends
    with pytest.raises(ValueError, match="plan: got one with lends=True"):
        linear_cross_entropy(x, w, torch.zeros(32, dtype=torch.int64), plan=chosen, backend="eager")
