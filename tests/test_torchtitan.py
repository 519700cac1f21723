"""integrations.torchtitan: in the place of torchtitan's ChunkedLossWrapper, against it where torchtitan is installed,
else against full logits; on two ranks under FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import stand_ins
from limits import check_refusals, note_plans

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from ranks import Ranks  # noqa: E402

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402

ADAPTER = "logitless.torch_impl.integrations.torchtitan"
B, L, D, V = 2, 8, 16, 61


@pytest.fixture(scope="module")
def titan() -> Iterator[Any]:
    with stand_ins.without("torchtitan", ADAPTER):
        stand_ins.torchtitan()
        from logitless.torch_impl.integrations import torchtitan

        yield torchtitan


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """What torchtitan's Decoder does with the head."""

    _skip_lm_head = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(D, D), torch.nn.LayerNorm(D)
        self.lm_head = torch.nn.Linear(D, V, bias=False)

    def forward(self, x: Any) -> Any:
        hidden = self.norm(self.body(x))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def batch(rank: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(0, V, (B, L), generator=generator)
    labels[rank, :3] = -100
    return torch.randn(B, L, D, generator=generator), labels


def outcome(model: Any, loss: Any) -> list[Any]:
    loss.backward()
    gradients = [value.grad for value in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]


def sharded_run(rank: int, unit: str, valid: float | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stand_ins.torchtitan()
    from logitless.torch_impl.integrations.torchtitan import LinearCrossEntropyLoss

    mesh, (x, labels) = init_device_mesh("cpu", (2,)), batch(rank)
    count = None if valid is None else torch.tensor(valid)

    def run(loss_fn: Any) -> list[Any]:
        model = Decoder()
        fully_shard([model.norm, model.lm_head] if unit == "norm and head" else model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss_fn.set_lm_head(model.lm_head)
        loss, metrics = loss_fn(model(x), labels, count)
        assert metrics == {}
        assert loss.shape == ()
        return [value.numpy() for value in outcome(model, loss)]

    made = [run(LinearCrossEntropyLoss(LinearCrossEntropyLoss.Config()))]
    # Its own needs the head in a unit of its own.
    if stand_ins.is_installed("torchtitan") and unit == "head":
        from torchtitan.components.loss import ChunkedLossWrapper

        made.append(run(ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=4))))
    return made


@pytest.mark.every_value
@pytest.mark.case(27)
@pytest.mark.parametrize("valid", [None, 26.0])
@pytest.mark.parametrize("unit", ["head", "norm and head"])
def test_against_full_logits_and_its_own(titan: Any, unit: str, valid: float | None) -> None:
    model = Decoder()
    model._skip_lm_head = False
    losses = []
    for rank in range(2):
        x, labels = batch(rank)
        total = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
        losses.append(total / (valid or 1.0))
    _, *gradients = outcome(model, sum(losses) / 2)  # FSDP2 averages
    with Ranks(2) as pool:
        for rank, variants in enumerate(pool.run(sharded_run, unit, valid)):
            for loss, *found in variants:
                assert error(loss, losses[rank].detach()) <= ON_TOP_LOSS["float32"]
                for made, right in zip(found, gradients, strict=True):
                    assert error(made, right) <= ON_TOP_GRADIENT["float32"]


def test_validation_has_no_gradient(titan: Any) -> None:
    model, (x, labels) = Decoder(), batch(0)
    loss_fn = titan.LinearCrossEntropyLoss(titan.LinearCrossEntropyLoss.Config(memory_budget=2**20))
    loss_fn.set_lm_head(model.lm_head)
    with torch.no_grad():
        loss, _ = loss_fn(model(x), labels, torch.tensor(13.0), positions=None)
        z = model.lm_head(model(x)).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(z, labels.flatten(), reduction="sum") / 13
    assert error(loss, right) <= ON_TOP_LOSS["float32"]
    assert not loss.requires_grad


def test_its_options(titan: Any) -> None:
    model, (x, labels) = Decoder(), batch(0)
    loss_fn = titan.LinearCrossEntropyLoss(titan.LinearCrossEntropyLoss.Config(label_smoothing=0.1))
    loss_fn.set_lm_head(model.lm_head)
    z = model.lm_head(model(x)).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(z, labels.flatten(), reduction="sum", label_smoothing=0.1)
    assert error(loss_fn(model(x), labels)[0].detach(), right.detach()) <= ON_TOP_LOSS["float32"]


def test_a_plan_by_name(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, labels) = Decoder(), batch(0)
    loss_fn = titan.LinearCrossEntropyLoss(titan.LinearCrossEntropyLoss.Config(plan="lean"))
    loss_fn.set_lm_head(model.lm_head)
    plans = note_plans(monkeypatch, importlib.import_module("logitless.torch_impl.integrations.sharded_head"))
    right = torch.nn.functional.cross_entropy(model.lm_head(model(x)).flatten(0, 1), labels.flatten(), reduction="sum")
    assert error(loss_fn(model(x), labels)[0].detach(), right.detach()) <= ON_TOP_LOSS["float32"]
    assert plans == ["lean"]


def test_what_is_refused(titan: Any) -> None:
    config = titan.LinearCrossEntropyLoss.Config
    with pytest.raises(RuntimeError, match=r"^lm_head: got none yet"):
        titan.LinearCrossEntropyLoss(config())(*batch(0))
    with pytest.raises(NotImplementedError, match=r"^loss_fn: got int, allowed is CrossEntropyLoss.Config"):
        titan.LinearCrossEntropyLoss(config(loss_fn=3))
    with pytest.raises(ValueError, match=r"^backend: got 'fast'"):
        titan.LinearCrossEntropyLoss(config(backend="fast"))
    with pytest.raises(ValueError, match=r"^z_loss: got -1"):
        titan.LinearCrossEntropyLoss(config(z_loss=-1.0))
    check_refusals(lambda **limits: titan.LinearCrossEntropyLoss(config(**limits)))
