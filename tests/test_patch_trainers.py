"""What trainers do around a patched model: replace its forward, compute losses of their own, read logits or not."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

from test_patch import V, ids_and_labels, is_made, make  # noqa: E402

from logitless.tolerances import BOUND, CANCELLED, CHAIN  # noqa: E402
from logitless.torch_impl import patch, unpatch  # noqa: E402
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits  # noqa: E402

# What TRL's trainers do to a model when they are made (trl.trainer.utils.add_fused_lm_head, from 1.9 on).
FUSED = """
import functools, types
def add_fused_lm_head(model):
    original = model.forward
    @functools.wraps(type(model).forward)
    def _fused_forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        return self.get_output_embeddings()(self.base_model(*args, **kwargs).last_hidden_state)
    model.forward = types.MethodType(_fused_forward, model)
"""


def trl() -> Any:
    module = types.ModuleType("trl.trainer.utils")
    exec(FUSED, module.__dict__)
    return module


@pytest.mark.case(42)
def test_a_forward_that_trl_has_replaced_is_refused() -> None:
    model = make()
    trl().add_fused_lm_head(model)
    with pytest.raises(NotImplementedError, match=r"forward of LlamaForCausalLM is TRL's already"):
        patch(model)


@pytest.mark.case(42)
def test_a_forward_that_is_replaced_later_warns_once() -> None:
    model, (ids, labels) = patch(make()), ids_and_labels()
    trl().add_fused_lm_head(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=labels)  # its own road still comes to the patched forward
    with pytest.warns(UserWarning, match=r"trl\.trainer\.utils has replaced the forward .* has no effect here"):
        model(ids, labels=labels, fused_lm_head=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=labels, fused_lm_head=True)


@pytest.mark.case(42)
def test_full_logits_in_training_warn_once() -> None:
    model, (ids, _) = patch(make()), ids_and_labels()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(ids)  # generation
        model.eval()(ids)
    with pytest.warns(UserWarning, match="without labels makes full logits in training"):
        model.train()(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
        assert not unpatch(model)._forward_hooks


@pytest.mark.case(42)
@pytest.mark.parametrize("how", ["label_smoothing_factor", "compute_loss_func"])
def test_trainers_own_losses_warn(how: str, tmp_path: Any) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    data = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(3, V, (4, 10))]
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.float().mean()}
    smooth = how == "label_smoothing_factor"
    trainer = transformers.Trainer(
        patch(make()),
        transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            **({"label_smoothing_factor": 0.1} if smooth else {}),
        ),
        train_dataset=data, **({} if smooth else own),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="without labels makes full logits in training") as caught:
        trainer.train()
    assert len([one for one in caught if "full logits" in str(one.message)]) == 1


@pytest.mark.case(42)
def test_label_smoothing_by_patch_is_trainers(tmp_path: Any) -> None:
    """What the warning's page says to use instead of label_smoothing_factor: the same losses."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    rows = torch.randint(3, V, (32, 10), generator=torch.Generator().manual_seed(0))
    data = [
        {"input_ids": row, "labels": row.where(torch.arange(10) > index % 3, -100)} for index, row in enumerate(rows)
    ]
    losses = []
    for model, factor in ((make(), 0.1), (patch(make(), label_smoothing=0.1), 0.0)):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            label_smoothing_factor=factor, logging_steps=1,
        )  # fmt: skip
        trainer = transformers.Trainer(model, settings, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=BOUND["logged"])  # they are logged with that many digits


@pytest.mark.case(42)
@pytest.mark.parametrize("read", [False, True])
def test_evaluation_makes_logits_when_they_are_read(read: bool, tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    from logitless.torch_impl.huggingface.model_loss import ModelLoss

    made, make_logits = [], ModelLoss._make_logits
    monkeypatch.setattr(ModelLoss, "_make_logits", lambda *a: made.append(1) or make_logits(*a))
    data = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(3, V, (4, 10))]
    model = make()
    results = []
    for one in (model, patch(model)):
        trainer = transformers.Trainer(
            one,
            transformers.TrainingArguments(
                output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, prediction_loss_only=not read,
            ),
            eval_dataset=data,
        )  # fmt: skip
        results.append(trainer.predict(data))
    assert bool(made) == read
    theirs, ours = results
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=CHAIN)
    if read:
        assert ours.predictions.shape == (4, 10, V)
        assert abs(ours.predictions - theirs.predictions).max() < CANCELLED


def test_lazy_logits_are_the_models() -> None:
    model, (ids, labels) = make().eval(), ids_and_labels()
    expected = model(ids).logits
    lazy = patch(model)(ids, labels=labels).logits
    assert isinstance(lazy, LazyLogits)
    assert (lazy.shape, lazy.dtype, len(lazy)) == (expected.shape, expected.dtype, 2)
    assert "logits" in lazy.__dict__
    assert lazy.__dict__["logits"] is None  # a look at its shape makes nothing
    torch.testing.assert_close(lazy.float() + 0, expected)
    (gradient,) = torch.autograd.grad(lazy.sum(), model.lm_head.weight)
    assert gradient.abs().max() > 0
    with torch.no_grad():
        stale = model(ids, labels=labels).logits
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight was changed after the forward"):
        stale.argmax(-1)
    assert not is_made(model.train()(ids, labels=labels).logits)
