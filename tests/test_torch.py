"""What only PyTorch has: autograd's graph, autocast, modules."""

from __future__ import annotations

import copy
import functools
import importlib
import subprocess
import sys
from typing import Any

import pytest
from limits import check_refusals

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from implementations import every_implementation, in_every_torch_place, options_of, problem_named  # noqa: E402

from logitless import plan  # noqa: E402
from logitless.scratch import TOKENS_ORDER_BLOCK  # noqa: E402
from logitless.tolerances import BOUND, ELEMENTS, ON_TOP_GRADIENT, TINY, error  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    LinearCrossEntropy,
    cross_entropy,
    distillation_loss,
    eager,
    linear_cross_entropy,
    linear_log_probs,
)


def tensors(tokens: int = 40, hidden: int = 12, vocab: int = 50, dtype: Any = None) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    w = torch.randn(vocab, hidden, generator=generator) * hidden**-0.5
    b = torch.randn(vocab, generator=generator)
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    y[::4] = -100
    return *(t.to(dtype or t.dtype).requires_grad_() for t in (x, w, b)), y


def full_logits(x: Any, w: Any, b: Any, y: Any, **options: Any) -> Any:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w, b).float(), y, **options)


@pytest.mark.case(4)
def test_strided_and_expanded_upstream_gradients() -> None:
    x, w, b, y = tensors()
    upstream = torch.randn(80)[::2]
    for reduce in (
        lambda losses: (losses * upstream).sum(),
        lambda losses: losses.sum(),
        lambda losses: losses[::3].sum(),
    ):
        ours = torch.autograd.grad(reduce(linear_cross_entropy(x, w, y, b, reduction="none")), (x, w, b))
        theirs = torch.autograd.grad(reduce(full_logits(x, w, b, y, reduction="none")), (x, w, b))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, **ELEMENTS["long sums"])
    losses = linear_cross_entropy(x, w, y, b, reduction="none")
    strided = torch.autograd.grad(losses, x, upstream, retain_graph=True)[0]
    assert torch.equal(strided, torch.autograd.grad(losses, x, upstream.contiguous())[0])


@pytest.mark.case(5)
@pytest.mark.parametrize("order", ["tokens", "vocab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_backwards_with_different_scalars(order: Any, dtype: Any) -> None:
    x, w, b, y = tensors(dtype=dtype)
    chosen = plan(tokens=40, hidden=12, vocab=50, dtype=str(dtype)[6:], order=order, chunk=16)
    loss = linear_cross_entropy(x, w, y, b, plan=chosen)
    first = torch.autograd.grad(loss * 3, (x, w, b), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss * -0.5, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(loss, (x, w, b))
    for one, before, two, plain in zip(first, kept, second, third, strict=True):
        assert torch.equal(one, before)
        limit = 2 * TINY["float32"] if dtype == torch.float32 else ON_TOP_GRADIENT["bfloat16"]
        assert error(two.double(), -0.5 * plain.double()) <= limit
        assert error(one.double(), 3 * plain.double()) <= limit
    x.grad = None
    torch.autograd.backward((full_logits(x, w, b, y)), inputs=[x])
    limit = 2 * TINY["float32"] if dtype == torch.float32 else BOUND["full logits beside ours bfloat16"]
    assert error(third[0].double(), x.grad.double()) <= limit


def test_not_the_last_layer() -> None:
    x, w, b, y = tensors()
    scale = torch.tensor(1.7, requires_grad=True)
    total = (linear_cross_entropy(x * scale, w, y, b) * scale) ** 2
    ours = torch.autograd.grad(total, (scale, x, w))
    theirs = torch.autograd.grad((full_logits(x * scale, w, b, y) * scale) ** 2, (scale, x, w))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **ELEMENTS["another order"])


def differentiated() -> dict[str, Any]:
    """Losses of hidden states x, from functions that are differentiable once."""
    x, w, b, y = tensors()
    return {
        "linear_cross_entropy": (linear_cross_entropy(x, w, y, b), x),
        "linear_log_probs": (linear_log_probs(x, w, y, b)[0].sum(), x),
        "cross_entropy": (cross_entropy(x @ w.t(), y), x),
        "distillation_loss": (distillation_loss(x, w, x.detach(), w.detach()), x),
    }


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", differentiated())
def test_second_derivatives_are_refused(name: str, constant: bool) -> None:
    """Also where the upstream gradient is a constant: otherwise a gradient penalty would silently lose its own
    gradient."""
    loss, x = differentiated()[name]
    (grad,) = torch.autograd.grad(loss if constant else loss**2, x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{name} is differentiable once: .*create_graph=True"):
        (loss.detach() + grad.square().sum()).backward()


def test_an_input_changed_in_place_is_noticed() -> None:
    x, w, b, y = tensors()
    losses = linear_cross_entropy(x, w, y, b, reduction="none")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.case(6)
def test_unwanted_products_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flops of the products, counted by PyTorch: 6, 4 or 2 · N·D·V as the wanted gradients need. On a CPU N counts no
    ignored token."""
    from torch.utils.flop_counter import FlopCounterMode

    x, w, b, y = tensors(64, 16, 128)
    counted = int((y != -100).sum())
    assert counted < 64
    unit = counted * 16 * 128
    chosen = plan(tokens=64, hidden=16, vocab=128, dtype="float32", order="tokens", chunk=32)
    for wrt, expected in (((x, w, b), 6), ((x,), 4), ((w,), 4), ((b,), 2)):
        for tensor in (x, w, b):
            tensor.requires_grad_(any(tensor is wanted for wanted in wrt))
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(x, w, y, b, plan=chosen).backward()
        assert counter.get_total_flops() == pytest.approx(expected * unit, rel=BOUND["flops"]), expected
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        linear_cross_entropy(x, w, y, b, plan=chosen)
    assert counter.get_total_flops() == pytest.approx(2 * unit, rel=BOUND["flops"])
    x.requires_grad_(), w.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, w, y, b, reduction="none").sum().backward()
    assert counter.get_total_flops() == pytest.approx(8 * unit, rel=BOUND["flops"])


@pytest.mark.case(25)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(with_bias: bool, hidden_dtype: Any, reduction: Any) -> None:
    x, w, b, y = tensors()
    x = x.detach().to(hidden_dtype).requires_grad_()
    bias = b if with_bias else None
    low = [None if t is None else t.detach().bfloat16().requires_grad_() for t in (x, w, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, w, y, bias, reduction=reduction).sum()
    loss.backward()
    plain = linear_cross_entropy(low[0], low[1], y, low[2], reduction=reduction).sum()
    plain.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == float(plain.detach())
    for given, cast in zip((x, w, bias), low, strict=True):
        if given is not None:
            assert given.grad.dtype == given.dtype
            assert error(given.grad.double(), cast.grad.double()) <= BOUND["autocast bfloat16"]
    # float32 parameters get their gradient from the float32 accumulator, not from a bfloat16 one.
    assert w.grad.bfloat16().float().ne(w.grad).any()


@pytest.mark.case(25)
def test_autocast_log_probs() -> None:
    x, w, b, y = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, entropy = linear_log_probs(x, w, y, b, with_entropy=True)
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.dtype == torch.float32
    assert all(t.grad.dtype == torch.float32 for t in (x, w, b))


@pytest.mark.case(29)
def test_no_grad_makes_no_gradient_buffers() -> None:
    from logitless.torch_impl.memory import peak_scratch_bytes

    x, w, b, y = tensors(256, 64, 4096)
    chosen = plan(tokens=256, hidden=64, vocab=4096, dtype="float32", order="tokens", chunk=64)

    def evaluate() -> None:
        with torch.no_grad():
            linear_cross_entropy(x, w, y, b, plan=chosen)

    evaluate()
    assert peak_scratch_bytes(evaluate) < min(chosen.scratch_bytes, w.nbytes + x.nbytes)


def test_checkpointing_and_functional_call() -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, b, y = tensors()
    plain = torch.autograd.grad(linear_cross_entropy(x, w, y, b), (x, w, b))
    again = torch.autograd.grad(checkpoint(linear_cross_entropy, x, w, y, b, use_reentrant=False), (x, w, b))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_int32_targets_and_strided_inputs() -> None:
    x, w, b, y = tensors()
    plain = linear_cross_entropy(x, w, y, b)
    wide = torch.stack([w.detach(), w.detach()], dim=2)[:, :, 0]
    assert not wide.is_contiguous()
    flipped = x.detach().t().contiguous().t()
    assert float(linear_cross_entropy(flipped, wide, y.int(), b.detach())) == pytest.approx(
        float(plain.detach()), rel=TINY["float32"]
    )


class TestModule:
    def test_is_the_function(self) -> None:
        x, _, _, y = tensors()
        head = LinearCrossEntropy(12, 50, bias=True, z_loss=1e-3, softcap=10.0, label_smoothing=0.1)
        expected = linear_cross_entropy(x, head.weight, y, head.bias, z_loss=1e-3, softcap=10.0, label_smoothing=0.1)
        assert torch.equal(head(x, y), expected)
        head(x, y).backward()
        assert head.weight.grad.shape == (50, 12)
        logits = head.logits(x)
        assert logits.abs().max() < 10
        loss = torch.nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
        lse = torch.logsumexp(logits, -1)[y >= 0]
        torch.testing.assert_close(expected, loss + 1e-3 * lse.square().mean())

    def test_saves_moves_and_ties_as_a_linear(self) -> None:
        head = LinearCrossEntropy(12, 50, dtype=torch.float64, class_weight=torch.ones(50))
        assert set(head.state_dict()) == {"weight", "class_weight"}
        linear = torch.nn.Linear(12, 50, bias=False, dtype=torch.float64)
        head.load_state_dict(linear.state_dict() | {"class_weight": torch.ones(50)})
        assert torch.equal(head.weight, linear.weight)
        embedding = torch.nn.Embedding(50, 12, dtype=torch.float64)
        head.weight = embedding.weight
        x, y = torch.randn(5, 12, dtype=torch.float64), torch.arange(5)
        head(x, y).backward()
        assert embedding.weight.grad is not None
        assert "label_smoothing=0.0" in repr(head)
        assert copy.deepcopy(head).options == head.options

    def test_a_plan_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, _, _, y = tensors()
        calls = []
        module = importlib.import_module("logitless.torch_impl.module")
        monkeypatch.setattr(
            module, "linear_cross_entropy", lambda *_, **k: calls.append((k["plan"], k["memory_budget"]))
        )
        for head in (LinearCrossEntropy(12, 50, plan="lean"), LinearCrossEntropy(12, 50, memory_budget=2**20)):
            head(x, y)
            head(x, y, plan="fast")
        assert calls == [("lean", None), ("fast", None), (None, 2**20), ("fast", None)]
        check_refusals(functools.partial(LinearCrossEntropy, 12, 50))

    def test_statistics_and_weights(self) -> None:
        x, _, _, y = tensors()
        head = LinearCrossEntropy(12, 50, reduction="sum")
        loss, stats = head(x, y, token_weight=torch.ones(40), return_stats=True)
        assert float(stats.nll.sum()) == pytest.approx(float(loss.detach()), rel=TINY["float32"])
        assert not stats.nll.requires_grad


@every_implementation
def test_options_of_a_case_are_accepted(impl: Any) -> None:
    """The helper that feeds all tests passes every option of the API that changes the loss."""
    import inspect

    from logitless import torch_impl

    names = set(inspect.signature(torch_impl.linear_cross_entropy).parameters)
    passed = set(options_of(problem_named("odd_most").case()))
    assert names - passed == {
        "hidden", "weight", "target", "bias", "plan", "memory_budget", "backend", "return_stats",
        "process_group", "sequence_parallel", "accumulate_into", "defer_weight_grad", "temperature",
        "return_lse", "shift", "weight_layout",
    }  # fmt: skip


def test_no_host_synchronisation_in_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is turned into a Python value in forward or backward, but for what is asked on a CPU alone: whether the
    targets are right, which tokens are ignored, and whether the upstream gradient is 1."""
    from logitless.torch_impl import call, checks, chunk

    x, w, b, y = tensors()
    monkeypatch.setattr(checks, "check_ids", lambda *_: None)
    monkeypatch.setattr(chunk, "counted", lambda inputs: inputs)
    monkeypatch.setattr(call, "is_one", lambda _: False)
    called: list[str] = []
    for name in ("item", "__bool__", "tolist", "nonzero", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, name=name, **k: called.append(name))
    linear_cross_entropy(x, w, y, b, label_smoothing=0.1, z_loss=0.1, softcap=3.0, return_stats=True)[0].backward()
    linear_cross_entropy(x, w, y, b, label_smoothing=0.1, token_weight=torch.ones(40)).backward()
    assert called == []


def test_dispatch_module_is_the_tested_one() -> None:
    assert linear_cross_entropy.__module__ == "logitless.torch_impl.api"
    assert eager.__name__ == "logitless.torch_impl.eager"


def test_a_plan_for_xla_has_narrow_blocks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    used, held = [], eager._Held

    def seen(inputs: Any, plan: Any) -> Any:
        used.append(plan)
        return held(inputs, plan)

    monkeypatch.setattr(eager, "_Held", seen)
    wide = plan(tokens=8, hidden=4, vocab=2 * TOKENS_ORDER_BLOCK, dtype="float64", order="tokens", chunk=8)
    x, w = torch.ones(8, 4, dtype=torch.float64), torch.ones(wide.vocab, 4, dtype=torch.float64)
    linear_cross_entropy(x.requires_grad_(), w, torch.zeros(8, dtype=torch.int64), plan=wide, backend="eager")
    assert [plan.vocab_chunk for plan in used] == [TOKENS_ORDER_BLOCK]
    assert wide.vocab_chunk > TOKENS_ORDER_BLOCK


def test_the_import_brings_no_compiler() -> None:
    """Neither torch's, which takes seconds, nor Triton, which only its own backend needs."""
    program = (
        "import sys, torch, logitless.torch_impl; print([n for n in ('torch._dynamo', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.case(19)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probs_and_statistics_pass_gradcheck(softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 4), (9, 4), (9,)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    target = torch.tensor([1, -100, 8, 3, 0])

    def values(x: Any, w: Any, b: Any) -> Any:
        log_prob, entropy, stats = linear_log_probs(x, w, target, b, softcap=softcap, return_stats=True)
        return log_prob, entropy, stats.lse, stats.sum_p_squared

    assert torch.autograd.gradcheck(values, leaves)


def test_statistics_without_gradient_have_none() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    stats = linear_log_probs(x, w, torch.tensor([0, 1, 2]), return_stats=True)[2]
    with_gradient = {name for name, value in stats._asdict().items() if value.requires_grad}
    assert with_gradient == {"lse", "entropy", "sum_p_squared"}


@in_every_torch_place
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_normalizers_dtype_is_not_the_losss(dtype: Any, smoothing: float, device: str, backend: str) -> None:
    x, w = (torch.randn(rows, 16, device=device) for rows in (40, 50))
    y, options = torch.arange(40, device=device), {"label_smoothing": smoothing, "backend": backend}
    loss = linear_cross_entropy(x, w, y, normalizer=torch.tensor(7, dtype=dtype, device=device), **options)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(x, w, y, normalizer=7, **options))
