"""torch_impl/plain_loss: a loss without options is as right as full logits, and takes few operations.

What GPUs take runs on the CPU, too: with float32 operands, and with rounded ones by a stand-in for the product that a
CPU does not have.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import registry, report  # noqa: E402
from logitless import plan, reference  # noqa: E402
from logitless.ideal import ideal_gradients  # noqa: E402
from logitless.problems import Problem  # noqa: E402
from logitless.spec import LossOptions  # noqa: E402
from logitless.tolerances import TARGET_GRADIENT, allowance, error  # noqa: E402
from logitless.torch_impl import call as calls  # noqa: E402
from logitless.torch_impl import checks, chunk, eager, linear_cross_entropy  # noqa: E402
from logitless.torch_impl.given_logits import fused  # noqa: E402
from logitless.torch_impl.plain_loss import large, row_kernels, small  # noqa: E402

N, D, V = 12, 16, 60
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "normalizer": {"normalizer": 7},
    "normalizer_on_device": {"normalizer": torch.tensor(7)},
    "ignored": {"ignored": slice(None, None, 3)},
    "ignored_inside": {"ignored": slice(None, None, 3), "ignore_index": 5},
    "all_ignored": {"ignored": slice(None)},
    "scale_and_temperature": {"logit_scale": 3.0, "temperature": 0.7},
    "confident": {"logit_scale": 60.0, "own": True},
    "turned": {"weight_layout": "dv"},
    "far_below_zero": {"shift": -300.0},
}


def arrays(case: dict[str, Any], dtype: str) -> tuple[Any, ...]:
    """hidden, weight, target, bias of NumPy, of which the last class of all is banned."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(size).astype(dtype) for size in ((N, D), (V, D), (V,)))
    y = rng.integers(0, V - 1, N)
    if case.get("own"):
        y = (x @ w.T + b)[:, :-1].argmax(1)
    if "ignored" in case:
        y[case["ignored"]] = case.get("ignore_index", -100)
    b += np.array(case.get("shift", 0.0), dtype)
    b[-1] = -np.inf
    return x, w, y, b


def made(case: dict[str, Any], dtype: str) -> list[Any]:
    """The loss and the gradients of hidden, weight and bias."""
    x, w, y, b = map(torch.from_numpy, arrays(case, dtype))
    leaves = [x, w.T if case.get("weight_layout") == "dv" else w, b]
    for leaf in leaves:
        leaf.requires_grad_()
    options = {name: value for name, value in case.items() if name not in ("ignored", "own", "shift")}
    loss = linear_cross_entropy(leaves[0], leaves[1], y, leaves[2], backend="eager", **options)
    dx, dw, db = torch.autograd.grad(loss, leaves)
    return [value.detach().numpy() for value in (loss, dx, dw.T if case.get("weight_layout") == "dv" else dw, db)]


def full_logits(case: dict[str, Any], dtype: str) -> list[Any]:
    """:func:`made` by F.cross_entropy."""
    leaves = [torch.from_numpy(value) for value in arrays(case, dtype)]
    x, w, y, b = (leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves)
    z = (x @ w.T + b) * (case.get("logit_scale", 1.0) / case.get("temperature", 1.0))
    ignore_index = case.get("ignore_index", -100)
    loss = torch.nn.functional.cross_entropy(z, y, ignore_index=ignore_index, reduction="sum")
    if case.get("reduction") != "sum":
        loss = loss / case.get("normalizer", max(1, int((y != ignore_index).sum())))
    return [value.detach().numpy() for value in (loss, *torch.autograd.grad(loss, (x, w, b)))]


INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here")
BY_KERNELS = pytest.param("kernels", marks=INTERPRETED)


def take_large(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """What GPUs take, with kernels between the products or without."""
    monkeypatch.setattr(small, "loss", large.loss)
    monkeypatch.setattr(row_kernels, "are_fused", lambda device, dtype: kernels and dtype != torch.float64)


@pytest.fixture(params=["small", "large", BY_KERNELS])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which of the three is taken."""
    if request.param != "small":
        take_large(monkeypatch, request.param == "kernels")
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("path")
def test_it_is_right(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    options = {key: value for key, value in case.items() if key not in ("ignored", "own", "shift", "weight_layout")}
    if "normalizer" in options:
        options["normalizer"] = float(options["normalizer"])
    true = reference.linear_cross_entropy(*arrays(case, dtype), **options)
    wanted = (true.loss, true.hidden_grad, true.weight_grad, true.bias_grad)
    taken = []
    real = eager.plain_loss
    monkeypatch.setattr(eager, "plain_loss", lambda *given: taken.append(real(*given)) or taken[0])
    found = made(case, dtype)
    assert taken[0] is not None
    for one, full, right in zip(found, full_logits(case, dtype), wanted, strict=True):
        assert error(one, right) <= allowance(error(full, right), dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.usefixtures("path")
def test_a_row_that_is_not_finite_is_as_in_general(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss and its row of dX, and which elements of dW are finite."""

    def results() -> list[Any]:
        x, w, y, _ = map(torch.from_numpy, arrays({}, "float32"))
        x[3, 2], w[7, 1] = value, value
        y[y == 7] = 8
        for leaf in (x, w):
            leaf.requires_grad_()
        loss = linear_cross_entropy(x, w, y, reduction="sum", backend="eager")
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    found = results()
    monkeypatch.setattr(eager, "plain_loss", lambda *_: None)
    for one, other in zip(found, results(), strict=True):
        assert torch.equal(torch.isfinite(one), torch.isfinite(other))


@pytest.mark.parametrize("nats", [10.0, 20.0, 40.0])
@pytest.mark.usefixtures("path")
def test_a_confident_token(nats: float) -> None:
    """Where the target has nearly all, the loss and dX are of the rest, to the last digits."""
    x, w, y, _ = arrays({}, "float32")
    x, w, y = np.zeros_like(x[:1]), np.zeros_like(w), y[:1]
    x[0, 0], w[y[0]] = 1.0, nats
    true = reference.linear_cross_entropy(x, w, y)
    hidden = torch.from_numpy(x).requires_grad_()
    loss = linear_cross_entropy(hidden, torch.from_numpy(w), torch.from_numpy(y), backend="eager")
    assert error(loss.detach().numpy(), true.loss) <= TARGET_GRADIENT["float32"]
    assert error(torch.autograd.grad(loss, hidden)[0].numpy(), true.hidden_grad) <= TARGET_GRADIENT["float32"]


@pytest.mark.usefixtures("path")
def test_a_target_that_is_banned_has_an_infinite_loss() -> None:
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    y[0] = V - 1
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, b, backend="eager")
    assert float(loss) == np.inf
    assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


@pytest.mark.usefixtures("path")
def test_ignored_tokens_beside_no_class_at_all() -> None:
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    b[:] = -torch.inf
    leaves = [leaf.requires_grad_() for leaf in (x, w, b)]
    loss = linear_cross_entropy(x, w, torch.full_like(y, -100), b, backend="eager")
    assert not loss
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))
    y[::2] = -100
    loss = linear_cross_entropy(x, w, y, b, backend="eager")
    assert not torch.autograd.grad(loss, x)[0][::2].any()


@pytest.mark.usefixtures("path")
def test_every_backward_of_a_retained_graph_has_the_same_bits() -> None:
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, b, backend="eager")
    first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_logit_far_above_the_targets_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exponential over the target's is no float32: eager.py moves the anchor."""
    taken = []
    real = eager.plain_loss
    monkeypatch.setattr(eager, "plain_loss", lambda *given: taken.append(real(*given)) or taken[-1])
    x, w, y, _ = arrays({}, "float32")
    x, w, y = np.ones_like(x[:1, :1]), np.zeros_like(w[:, :1]), y[:1]
    for nats in (70.0, 80.0, 200.0):
        w[y[0] - 1] = nats
        true = reference.linear_cross_entropy(x, w, y)
        hidden = torch.from_numpy(x).requires_grad_()
        loss = linear_cross_entropy(hidden, torch.from_numpy(w), torch.from_numpy(y), backend="eager")
        gradient = torch.autograd.grad(loss, hidden)[0]
        assert error(loss.detach().numpy(), true.loss) <= TARGET_GRADIENT["float32"]
        assert error(gradient.numpy(), true.hidden_grad) <= TARGET_GRADIENT["float32"]
    assert [found is None for found in taken] == [False, True, True]


def test_a_loss_alone_has_the_bits_of_one_with_gradients() -> None:
    x, w, y, b = map(torch.from_numpy, arrays(CASES["scale_and_temperature"], "float32"))
    alone = linear_cross_entropy(x, w, y, b, backend="eager")
    assert torch.equal(alone, linear_cross_entropy(x.requires_grad_(), w, y, b, backend="eager"))


@pytest.mark.parametrize(
    "more", [{"label_smoothing": 0.1}, {"z_loss": 0.1}, {"softcap": 5.0}, {"return_stats": True}, {"reduction": "none"},
             {"plan": plan(tokens=N, hidden=D, vocab=V, dtype="float32", device="cpu", order="vocab")}]
)  # fmt: skip
@pytest.mark.usefixtures("path")
def test_it_leaves_the_rest_alone(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = eager.plain_loss
    monkeypatch.setattr(eager, "plain_loss", lambda *given: real(*given) and pytest.fail("taken"))
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    made = linear_cross_entropy(x.requires_grad_(), w, y, b, backend="eager", **more)
    (made[0] if isinstance(made, tuple) else made).sum().backward()
    assert x.grad is not None


def test_it_takes_a_third_of_the_operations() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for more in ({}, {"z_loss": 1e-9}):
        x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
        with Counting() as counting:
            linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), y, b, backend="eager", **more).backward()
        counts.append(counting.count)
    assert counts[0] <= 45
    assert 3 * counts[0] <= counts[1]


def test_small_steps_on_a_cpu_are_measured(tmp_path: Path) -> None:
    registry.main(["small", "--cpu", "--rounds", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "small_cpu.json").read_text())["rows"]
    implementations = ("torch_eager", "jax_xla") if importlib.util.find_spec("jax") else ("torch_eager",)
    assert [row["variant"] for row in rows] == [
        f"{name}, {variant}" for name in implementations for variant in ("full logits", "default")
    ]
    for full, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (full["over_full_logits"], ours["time_ms"] > 0) == (1.0, True)
        assert 0 < ours["scratch_bytes"] < full["scratch_bytes"]
    assert len(report.small_cpu_table(rows).splitlines()) == 2 + len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# A large loss


def _rounded_product(a: Any, b: Any, out: Any, add: bool) -> None:
    """As a GPU's: operands are read as they are, and accumulate in out's dtype."""
    made = a.to(out.dtype) @ b.to(out.dtype)
    _ = out.add_(made) if add else out.copy_(made)


@pytest.fixture(params=["operations", BY_KERNELS])
def rounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read low precision, as on a GPU."""
    if request.param == "kernels":
        gradient, scaled = fused.gradient, row_kernels.scaled

        # What GPUs round to bfloat16 the interpreter cuts off. So it makes float32 here, and PyTorch rounds.
        def rounding(inputs: Any, options: Any, known: Any, out: Any) -> None:
            made = torch.empty(out.shape) if out.dtype == torch.bfloat16 else out
            gradient(inputs, options, known, made)
            _ = out.copy_(made) if made is not out else out

        def rounding_scaled(given: Any, factor: Any, dtype: Any) -> Any:
            return scaled(given, factor, torch.float32 if dtype == torch.bfloat16 else dtype).to(dtype)

        monkeypatch.setattr(row_kernels, "scaled", rounding_scaled)
        monkeypatch.setattr(fused, "gradient", rounding)
    take_large(monkeypatch, request.param == "kernels")
    monkeypatch.setattr(calls, "operand_dtype", lambda dtype, device: dtype)
    monkeypatch.setattr(chunk, "product", _rounded_product)


ROUNDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignored": True},
    "sum and a bias": {"reduction": "sum", "bias": True, "ignored": True},
    "scale": {"logit_scale": 0.5},
    "trained": {"trained": True},
    "trained, a bias": {"trained": True, "bias": True, "ignored": True},
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.usefixtures("rounded")
def test_rounded_operands(name: str, dtype: str, chunks: int) -> None:
    """At most so much further from the truth than full logits in float32, whose gradient is rounded once."""
    case, tokens, size, vocab = dict(ROUNDED[name]), 400, 32, 300
    random = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    w = torch.randn(vocab, size, generator=random).to(kind)
    y = torch.randint(vocab, (tokens,), generator=random)
    x = torch.randn(tokens, size, generator=random)
    if case.pop("trained", False):  # what the tokens' own classes say, and noise
        x = w[y].float() + 0.3 * x
    x = x.to(kind)
    if case.pop("ignored", False):
        y[::3] = -100
        x[0] = torch.nan
    b = torch.randn(vocab, generator=random).to(kind) if case.pop("bias", False) else None
    size_of = plan(tokens=tokens, hidden=size, vocab=vocab, dtype=dtype, eager=True, order="tokens",
                   chunk=-(-tokens // chunks))  # fmt: skip
    leaves = [leaf.requires_grad_() for leaf in (x, w, b) if leaf is not None]
    loss = linear_cross_entropy(x, w, y, b, backend="eager", plan=size_of, **case)
    made = [loss.detach(), *torch.autograd.grad(loss, leaves)]

    true = reference.linear_cross_entropy(
        *(v.detach().double().nan_to_num().numpy() for v in (x, w)), y.numpy(),
        None if b is None else b.detach().double().numpy(), **case,
    )  # fmt: skip
    wanted = [true.loss, true.hidden_grad, true.weight_grad, true.bias_grad][: len(made)]
    problem = Problem("rounded", (tokens,), size, vocab, dtype, LossOptions(**case), bias=b is not None)
    hidden, weight, bias = (None if v is None else v.detach().float().nan_to_num().numpy() for v in (x, w, b))
    given = dataclasses.replace(problem.case(), hidden=hidden, weight=weight, bias=bias, target=y.numpy())
    ideals = list(ideal_gradients(given).values())[: len(made)]
    for one, ideal, right in zip(made, ideals, wanted, strict=True):
        assert error(one.double().numpy(), right) <= allowance(error(ideal, right), dtype)


@pytest.mark.parametrize("nats", [5.0, 12.0, 20.0, 40.0])
@pytest.mark.usefixtures("rounded")
def test_a_confident_token_of_rounded_operands(nats: float) -> None:
    x, w = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(300, 32, dtype=torch.bfloat16)
    x[0, 0], w[7, 0] = 1.0, nats
    y = torch.tensor([7])
    true = reference.linear_cross_entropy(x.double().numpy(), w.double().numpy(), y.numpy())
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, backend="eager")
    (found,) = torch.autograd.grad(loss, x)
    assert error(found.double().numpy(), true.hidden_grad) <= TARGET_GRADIENT["bfloat16"]
    assert error(loss.detach().double().numpy(), true.loss) <= TARGET_GRADIENT["float32"]


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=INTERPRETED)])
@pytest.mark.parametrize("chunk_size", [4, 7])
def test_ids_outside_make_their_rows_nan(chunk_size: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    take_large(monkeypatch, kernels)
    x, w, y, _ = map(torch.from_numpy, arrays({}, "float32"))
    y[5] = V + 3
    monkeypatch.setattr(checks, "check_ids", lambda *_: None)  # on a GPU nobody looks
    x.requires_grad_()
    chosen = plan(tokens=N, hidden=D, vocab=V, dtype="float32", eager=True, order="tokens", chunk=chunk_size)
    loss = linear_cross_entropy(x, w, y, backend="eager", plan=chosen)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.isnan(loss)
    assert torch.isnan(found).all(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("count", [0, 3, 4, 9, 12])
def test_chunks_of_ignored_tokens_are_left_out(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks of four tokens only those that have one that counts, but always the first; the loss is that of all."""
    take_large(monkeypatch, kernels=False)
    monkeypatch.setattr(large, "COUNTED_FLOPS", 0)
    rows: list[int] = []
    real = chunk.logits_block
    monkeypatch.setattr(chunk, "logits_block", lambda x, *given: rows.append(len(x)) or real(x, *given))
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    y[torch.randperm(N, generator=torch.Generator().manual_seed(0))[count:]] = -100
    x[y == -100] = torch.nan
    leaves = [leaf.requires_grad_() for leaf in (x, w, b)]
    chosen = plan(tokens=N, hidden=D, vocab=V, dtype="float32", eager=True, order="tokens", chunk=4)
    loss = linear_cross_entropy(x, w, y, b, backend="eager", plan=chosen)
    found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    assert rows == {0: [4], 3: [4], 4: [4], 9: [4, 4, 1], 12: [4, 4, 4]}[count]
    true = reference.linear_cross_entropy(x.detach().nan_to_num().numpy(), *(v.detach().numpy() for v in (w, y, b)))
    for one, right in zip(found, (true.loss, true.hidden_grad, true.weight_grad, true.bias_grad), strict=True):
        assert error(one.numpy(), right) <= TARGET_GRADIENT["float32"]


@INTERPRETED
@pytest.mark.parametrize("fault", ["launch", "result", None])
def test_kernels_that_fail_a_trial_are_not_used(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on the chips where they were run. One warning says what went wrong."""
    real = fused.gradient

    def faulty(*given: Any) -> None:
        real(*given)
        if fault == "launch":
            raise RuntimeError("out of resource")
        given[-1][0] *= 1.1 if fault else 1.0

    monkeypatch.setattr(fused, "gradient", faulty)
    monkeypatch.setattr(row_kernels, "_failures", {})
    monkeypatch.setattr(row_kernels, "wanted", lambda _: True)
    monkeypatch.setattr(row_kernels, "TYPES", ("cpu",))
    device = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = [row_kernels.are_fused(device, torch.bfloat16) for _ in range(2)]
    assert answers == [fault is None] * 2
    text = {"launch": "RuntimeError: out of resource", "result": "a result is off by"}
    assert [text[fault] in str(warning.message) for warning in caught] == ([True] if fault else [])
    assert not row_kernels.are_fused(device, torch.float64)
