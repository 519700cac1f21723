"""TRL's trainers with and without our losses (torch_impl.integrations.trl), and what stands for TRL's functions.

The trainers run where TRL is installed, whichever version that is. The rest has a stand-in for TRL, with the signatures
of its versions.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from limits import check_refusals, note_plans

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import CHAIN, GRADIENT, error  # noqa: E402
from logitless.torch_impl import patch  # noqa: E402
from logitless.torch_impl.integrations.trl import patch_trl, unpatch_trl  # noqa: E402

NO_TRL = "TRL's own trainers are compared here, and TRL is not installed (pip install trl)"
D, V, N = 16, 37, 11


@contextlib.contextmanager
def patched(**options: Any) -> Iterator[None]:
    patch_trl(**options)
    try:
        yield
    finally:
        unpatch_trl()


# ---------------------------------------------------------------------------------------------------------------------
# TRL's own trainers


@pytest.fixture
def training() -> Any:
    pytest.importorskip("trl", reason=NO_TRL)
    return importlib.import_module("trl_trainers")


def computes_here(kind: str) -> bool:
    """Whether the installed TRL computes what a trainer needs in a function that is replaced."""
    import trl.trainer.sft_trainer

    return fused() or (kind == "sft" and hasattr(trl.trainer.sft_trainer, "_chunked_cross_entropy_loss"))


def fused() -> bool:
    import trl.trainer.utils

    return hasattr(trl.trainer.utils, "add_fused_lm_head")


def assert_same(ours: Any, theirs: Any) -> None:
    (losses, logs), (their_losses, their_logs) = ours, theirs
    assert len(set(their_losses)) > 1
    assert losses == pytest.approx(their_losses, rel=CHAIN, abs=CHAIN)
    for step, their_step in zip(logs, their_logs, strict=True):
        assert step.keys() == their_step.keys()
        for key in ("entropy", "mean_token_accuracy", "grad_norm", "logits/chosen", "logits/rejected"):
            if key in step:
                assert step[key] == pytest.approx(their_step[key], rel=CHAIN, abs=CHAIN), key


@pytest.mark.case(42)
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trainers_have_the_losses_that_they_have_without(
    kind: str, training: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    if not computes_here(kind):
        pytest.skip(f"this version of TRL computes {kind} from full logits")
    options = {"loss_type": "chunked_nll"} if kind == "sft" and not fused() else {}
    options |= {"loss_type": ["sigmoid"], "use_weighting": True} if kind == "dpo" and fused() else {}
    theirs = training.train(kind, training.make(), tmp_path, **options)
    calls = []
    losses = importlib.import_module("logitless.torch_impl.integrations.trl_losses")
    for name in ("linear_log_probs", "linear_cross_entropy"):
        own = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *a, own=own, **k: calls.append(k["memory_budget"]) or own(*a, **k))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="logitless: in TRL")
        with patched(memory_budget=2**26):
            ours = training.train(kind, training.make(), tmp_path, **options)
    assert set(calls) == {2**26}
    assert_same(ours, theirs)
    calls.clear()
    training.train(kind, training.make(), tmp_path, **options)
    assert not calls


@pytest.mark.case(42)
def test_a_head_that_peft_saves_is_trained(training: Any, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft", reason="this is about it")
    if not fused():
        pytest.skip("this version of TRL makes full logits by default, or reads the head that is not trained")
    results = []
    for context in (contextlib.nullcontext(), patched()):
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(training.make(), config)
        with context:
            results.append(training.train("sft", model, tmp_path))
        saved = model.get_base_model().lm_head
        assert not torch.equal(saved.weight, saved.original_module.weight)
    assert_same(*results)


@pytest.mark.case(42)
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_patched_model_trains_or_says_why_not(kind: str, training: Any, tmp_path: Any) -> None:
    """patch(model), where the trainer uses the model's own loss; else a warning names what helps."""
    theirs = training.train(kind, training.make(), tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = training.train(kind, patch(training.make(), return_logits=True), tmp_path)
    assert_same(ours, theirs)
    said = [str(one.message) for one in caught if str(one.message).startswith("logitless")]
    config = training.trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    if kind == "sft" and getattr(config, "loss_type", "nll") == "nll" and not fused():
        assert not said
    else:
        assert len(said) == 1
        assert "patch_trl" in said[0]


# ---------------------------------------------------------------------------------------------------------------------
# What stands for TRL's functions, against float64

# TRL's versions → what their function takes.
SIGNATURES = {
    "1.12": "last_hidden, weight, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0",
    "1.14": "last_hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, "
    "logit_scale=1.0",
    "1.16": "hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, "
    "outputs=('entropy',)",
}
LOSS = "hidden_states, lm_head_weight, chunk_size, labels=None, shift_labels=None, num_items_in_batch=None, "
LOSS += "logit_scale=1.0, final_logit_softcapping=None, lm_head_bias=None"
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def stand_in(monkeypatch: Any, version: str, signature: str, with_loss: bool = True) -> Any:
    """Modules called as TRL's, and the function that its trainers call."""
    names = ("trl", "trl.trainer", "trl.trainer.utils", "trl.trainer.sft_trainer")
    found = {name: types.ModuleType(name) for name in names}
    for name, module in found.items():
        module.__dict__["__path__"] = []
        monkeypatch.setitem(sys.modules, name, module)
    found["trl"].__dict__["__version__"] = version
    utils, sft = found["trl.trainer.utils"].__dict__, found["trl.trainer.sft_trainer"].__dict__
    exec(f"class F:\n    @staticmethod\n    def forward(ctx, {signature}): ...\n    apply = None\ndel F.apply", utils)
    utils["_ChunkedLogProbFunction"] = utils["F"]
    if version >= "1.15":
        utils["add_fused_lm_head"] = None
    if with_loss:
        exec(f"def _chunked_cross_entropy_loss({LOSS}): ...", sft)
    return utils["F"], found["trl.trainer.sft_trainer"]


def inputs(dtype: Any = torch.float64) -> tuple[Any, Any, Any, Any]:
    """A hidden state that is a slice of a longer one, as TRL's is, and a head with large logits."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N + 1, D, generator=generator, dtype=torch.float64)[:-1].to(dtype)
    weight = torch.randn(D, V, generator=generator, dtype=torch.float64).T.to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, V, (N,), generator=generator)
    target[0] = (hidden[0].double() @ weight.double().T + bias.double()).argmax()
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target


def truth(hidden: Any, weight: Any, bias: Any, target: Any, cap: float | None, scale: float, t: float) -> Any:
    z = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    z = (z if cap is None else cap * torch.tanh(z / cap)) / t
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    values = log_p.gather(-1, target[:, None])[:, 0], entropy, (2 * log_p).logsumexp(-1), z.mean(-1)
    return dict(zip(ALL, (*values, z.argmax(-1) == target), strict=True))


@pytest.mark.parametrize(("cap", "scale", "temperature"), [(None, 1.0, 1.0), (3.0, 0.5, 0.7)])
@pytest.mark.parametrize("version", SIGNATURES)
def test_values_and_gradients_per_token(
    version: str, cap: float | None, scale: float, temperature: float, monkeypatch: Any
) -> None:
    function, _ = stand_in(monkeypatch, version, SIGNATURES[version])
    hidden, weight, bias, target = inputs()
    leaves = [hidden, weight] if version == "1.12" else [hidden, weight, bias]
    known = truth(hidden, weight, bias if version > "1.12" else None, target, cap, scale, temperature)
    g = torch.randn(2, N, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = torch.autograd.grad((known["log_probs"] * g[0] + known["entropy"] * g[1]).sum(), leaves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_trl()
    try:
        more = [ALL] if version == "1.16" else []
        found = function.apply(*leaves, target, temperature, 7, cap, scale, *more)
    finally:
        unpatch_trl()
    assert len(found) == (5 if version == "1.16" else 2)
    for name, value in zip(ALL, found, strict=False):
        assert error(value.detach(), known[name].detach()) <= GRADIENT["float64"], name
        assert value.requires_grad == (name in ("log_probs", "entropy"))
    assert not known["is_top1"].all()
    assert known["is_top1"].any()
    gradients = torch.autograd.grad((found[0] * g[0] + found[1] * g[1]).sum(), leaves)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert error(ours, theirs) <= GRADIENT["float64"]
    assert "apply" not in vars(function)


def test_what_is_not_asked_for_is_none_and_no_token_is_no_error(monkeypatch: Any) -> None:
    function, _ = stand_in(monkeypatch, "1.16", SIGNATURES["1.16"])
    hidden, weight, bias, target = inputs()
    with patched():
        found = function.apply(hidden, weight, bias, target, 1.0, 7, None, 1.0, ("log_probs", "is_top1"))
        assert [value is None for value in found] == [False, True, True, True, False]
        (empty, *_) = function.apply(hidden[:0], weight, bias, target[:0], 1.0, 7, None, 1.0, ALL)
    assert empty.shape == (0,)
    empty.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_plan_reaches_every_call(monkeypatch: Any) -> None:
    function, sft = stand_in(monkeypatch, "1.16", SIGNATURES["1.16"])
    hidden, weight, bias, target = inputs()
    losses = importlib.import_module("logitless.torch_impl.integrations.trl_losses")
    plans = note_plans(monkeypatch, losses, "linear_log_probs", "linear_cross_entropy")
    with patched(plan="lean"):
        function.apply(hidden, weight, bias, target, 1.0, 7, None, 1.0, ALL)
        sft._chunked_cross_entropy_loss(hidden[None], weight, 256, labels=target[None])
    assert plans == ["lean"] * 3


def test_a_wide_hidden_state_meets_a_narrow_head(monkeypatch: Any) -> None:
    """TRL's cast_lm_head_to_fp32, and gradients in the head's own dtype."""
    function, _ = stand_in(monkeypatch, "1.16", SIGNATURES["1.16"])
    hidden, weight, bias, target = inputs(torch.bfloat16)
    hidden = hidden.detach().float().requires_grad_()
    known = truth(hidden, weight, bias, target, None, 1.0, 1.0)["log_probs"]
    with patched():
        found, *_ = function.apply(hidden, weight, bias, target, 1.0, 7)
    assert found.dtype == torch.float32
    assert error(found.detach(), known.detach()) <= GRADIENT["float32"]
    found.sum().backward()
    assert (weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("items", [None, 29, torch.tensor(29)])
def test_the_loss_of_fine_tuning(shifted: bool, items: Any, monkeypatch: Any) -> None:
    _, sft = stand_in(monkeypatch, "1.14", SIGNATURES["1.14"])
    own = sft._chunked_cross_entropy_loss
    hidden, weight, bias, target = inputs()
    labels = target.clone()
    labels[2:5] = -100
    used = labels if shifted else torch.nn.functional.pad(labels[1:], (0, 1), value=-100)
    known = truth(hidden, weight, bias, used.clamp(min=0), 3.0, 0.5, 1.0)
    mask, count = used != -100, (used != -100).sum()
    expected = -(known["log_probs"] * mask).sum() / (count if items is None else items)
    named = {"shift_labels" if shifted else "labels": labels[None]}
    with patched():
        loss, correct, entropy, number = sft._chunked_cross_entropy_loss(
            hidden[None], weight, 256, num_items_in_batch=items, logit_scale=0.5, final_logit_softcapping=3.0,
            lm_head_bias=bias, **named,
        )  # fmt: skip
    assert sft._chunked_cross_entropy_loss is own
    assert error(loss.detach(), expected.detach()) <= GRADIENT["float64"]
    assert error(entropy, (known["entropy"] * mask).sum().detach()) <= GRADIENT["float64"]
    assert (int(correct), int(number)) == (int((known["is_top1"] & mask).sum()), int(count))
    for ours, theirs in zip(
        *(torch.autograd.grad(one, [hidden, weight, bias]) for one in (loss, expected)), strict=True
    ):
        assert error(ours, theirs) <= GRADIENT["float64"]


def test_what_is_refused(monkeypatch: Any) -> None:
    with pytest.raises(RuntimeError, match="its losses are not replaced"):
        unpatch_trl()
    with pytest.raises(ValueError, match="backend: got 'pallas'"):
        patch_trl(backend="pallas")
    check_refusals(patch_trl)
    function, sft = stand_in(monkeypatch, "1.12", SIGNATURES["1.12"])
    with pytest.warns(UserWarning, match=r"in TRL 1\.12 patch_trl replaces .* loss_type='chunked_nll' alone"):
        patch_trl()
    try:
        with pytest.raises(RuntimeError, match="replaced already, allowed is one patch_trl"):
            patch_trl()
        hidden, weight, _, target = inputs()
        weight.ds_id = 3
        with pytest.raises(NotImplementedError, match=r"DeepSpeed's \(ZeRO-3\)"):
            function.apply(hidden, weight, target, 1.0, 7)
    finally:
        unpatch_trl()
    own = sft._chunked_cross_entropy_loss
    function, sft = stand_in(monkeypatch, "1.17", SIGNATURES["1.16"] + ", prize=0")
    with pytest.raises(NotImplementedError, match=r"in version 1\.17 F\.forward takes prize, which is not known here"):
        patch_trl()
    assert "apply" not in vars(function)
    assert sft._chunked_cross_entropy_loss is not own
    sys.modules["trl.trainer.utils"].__dict__.pop("_ChunkedLogProbFunction")
    with pytest.raises(NotImplementedError, match=r"version 1\.17 has no _ChunkedLogProbFunction .* patch\(model\)"):
        patch_trl()
