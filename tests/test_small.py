"""eager.small_loss: a small loss on a CPU is as right as full logits, and takes few operations."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import registry, report  # noqa: E402
from logitless import plan, reference  # noqa: E402
from logitless.tolerances import TARGET_GRADIENT, allowance, error  # noqa: E402
from logitless.torch_impl import eager, linear_cross_entropy  # noqa: E402

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    options = {key: value for key, value in case.items() if key not in ("ignored", "own", "shift", "weight_layout")}
    if "normalizer" in options:
        options["normalizer"] = float(options["normalizer"])
    true = reference.linear_cross_entropy(*arrays(case, dtype), **options)
    wanted = (true.loss, true.hidden_grad, true.weight_grad, true.bias_grad)
    taken = []
    small = eager.small_loss
    monkeypatch.setattr(eager, "small_loss", lambda *given: taken.append(small(*given)) or taken[0])
    found = made(case, dtype)
    assert taken[0] is not None
    for one, full, right in zip(found, full_logits(case, dtype), wanted, strict=True):
        assert error(one, right) <= allowance(error(full, right), dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
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
    monkeypatch.setattr(eager, "small_loss", lambda *_: None)
    for one, other in zip(found, results(), strict=True):
        assert torch.equal(torch.isfinite(one), torch.isfinite(other))


@pytest.mark.parametrize("nats", [10.0, 20.0, 40.0])
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


def test_a_target_that_is_banned_has_an_infinite_loss() -> None:
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    y[0] = V - 1
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, b, backend="eager")
    assert float(loss) == np.inf
    assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


def test_every_backward_of_a_retained_graph_has_the_same_bits() -> None:
    x, w, y, b = map(torch.from_numpy, arrays({}, "float32"))
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, b, backend="eager")
    first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "more", [{"label_smoothing": 0.1}, {"z_loss": 0.1}, {"softcap": 5.0}, {"return_stats": True}, {"reduction": "none"},
             {"plan": plan(tokens=N, hidden=D, vocab=V, dtype="float32", device="cpu", order="vocab")}]
)  # fmt: skip
def test_it_leaves_the_rest_alone(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small = eager.small_loss
    monkeypatch.setattr(eager, "small_loss", lambda *given: small(*given) and pytest.fail("taken"))
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
