"""The losses on top beside TRL, verl and Liger-Kernel: their own functions, on log-probabilities from full logits.

Each package is needed for its own tests only. What their formulas say is in full_losses.py, which every test of
test_losses.py is held to; these tests show that it is what they compute.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the peers are made of it")

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import clipped_policy_loss, dpo_loss, kto_loss  # noqa: E402

B, T, D, V = 6, 7, 8, 40


def peer(name: str, package: str) -> Any:
    return pytest.importorskip(name, reason=f"{package} is not installed", exc_type=ImportError)


class Data:
    """A head in float64, its log-probabilities on full logits, and what a loss knows of others."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def some(*shape: int) -> Any:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight = some(B, T, D).requires_grad_(), (some(V, D) * 0.5).requires_grad_()
        self.target = torch.randint(0, V, (B, T), generator=generator)
        self.mask = (torch.arange(T) < torch.tensor([[7], [5], [3], [6], [1], [4]])).double()
        self.head = self.hidden, self.weight, self.target
        log_p = torch.log_softmax(self.hidden @ self.weight.T, -1)
        self.log_prob = log_p.gather(-1, self.target[..., None])[..., 0]
        self.entropy = -(log_p.exp() * log_p).sum(-1)
        near = self.log_prob.detach()
        self.old, self.reference = near + 0.4 * some(B, T), near + 0.4 * some(B, T)
        self.sampler = self.old + 0.3 * some(B, T)
        self.advantage = some(B)

    def same(self, ours: Any, theirs: Any, dtype: str = "float64") -> None:
        """Loss and both gradients."""
        leaves = self.hidden, self.weight
        assert error(ours.item(), theirs.item()) <= ON_TOP_LOSS[dtype]
        expected = torch.autograd.grad(theirs, leaves, retain_graph=True)
        for grad, value in zip(torch.autograd.grad(ours, leaves), expected, strict=True):
            assert value.abs().max() > 0
            assert error(grad.numpy(), value.numpy()) <= ON_TOP_GRADIENT[dtype]


# ---------------------------------------------------------------------------------------------------------------------
# TRL's GRPO


def trl_grpo(data: Data, loss_type: str, **changes: Any) -> Any:
    """GRPOTrainer's loss on the data's log-probabilities."""
    module = peer("trl.trainer.grpo_trainer", "TRL")
    inputs = {
        "prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.zeros(B, 1), "completion_ids": data.target,
        "completion_mask": data.mask, "advantages": data.advantage, "old_per_token_logps": data.old,
        "ref_per_token_logps": data.reference, "num_items_in_batch": data.mask.sum(),
    } | changes.pop("inputs", {})  # fmt: skip
    arguments = {"use_bias_correction_kl": True, "delta": None, "steps_per_generation": 1}
    arguments |= {key: changes.pop(key) for key in arguments if key in changes}
    trainer = SimpleNamespace(
        **{
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0,
            "importance_sampling_level": "token", "loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": 0.2,
            "use_vllm": False, "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False, "entropy_coef": 0.0, "max_completion_length": T,
            "current_gradient_accumulation_steps": 1,
        }
        | changes,
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(training=False),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (data.log_prob, data.entropy, None),
    )  # fmt: skip
    return module.GRPOTrainer._compute_loss(trainer, None, inputs)


def ours(data: Data, **options: Any) -> Any:
    return clipped_policy_loss(
        *data.head, mask=data.mask, **({"advantage": data.advantage, "old_log_prob": data.old} | options)
    )


GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
# Theirs: loss_type and settings; ours.
TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"aggregation": "sequence_mean"}),
    "bnpo": ("bnpo", {"epsilon_high": 0.28}, {"clip_high": 0.28}),
    "dapo": ("dapo", {}, {}),
    "dr_grpo": ("dr_grpo", {}, {"normalizer": float(B * T)}),
    "delta": ("dapo", {"delta": 1.3}, {"dual_clip": 1.3}),
    "cispo": ("cispo", {"epsilon_high": 1.3}, {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3}),
    "gspo": ("grpo", GSPO, {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.15, "aggregation": "sequence_mean"}),
    "gspo of tokens": ("dapo", GSPO, {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.15}),
    "kl": ("dapo", {"beta": 0.3}, {"kl_coef": 0.3, "kl_times_ratio": True}),
    "kl alone": ("dapo", {"beta": 0.3, "use_bias_correction_kl": False}, {"kl_coef": 0.3}),
    "gspo kl": (
        "dapo", GSPO | {"beta": 0.3},
        {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.15, "kl_coef": 0.3, "kl_times_ratio": True},
    ),
    "entropy": ("dapo", {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}, {"entropy_coef": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_policies_are_trls(name: str) -> None:
    data, (loss_type, theirs, options) = Data(), TRL[name]
    reference = {"reference_log_prob": data.reference} if "kl_coef" in options else {}
    data.same(ours(data, **reference, **options), trl_grpo(data, loss_type, **theirs))


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_another_samplers_weights_are_trls(correction: str) -> None:
    """TRL makes the weights while it samples, as here."""
    data, limit = Data(), 1.1
    gap = (data.old - data.sampler) * data.mask
    weight = (gap if correction.startswith("token") else gap.sum(-1, keepdim=True)).exp()
    weight = weight.clamp(max=limit) if correction.endswith("truncate") else weight.masked_fill(weight > limit, 0.0)
    assert (weight != 1).any()
    theirs = trl_grpo(data, "dapo", use_vllm=True, beta=0.1, inputs={"importance_sampling_ratio": weight})
    options = {"sampler_correction": correction, "sampler_limit": limit, "kl_coef": 0.1, "kl_times_ratio": True}
    data.same(ours(data, sampler_log_prob=data.sampler, reference_log_prob=data.reference, **options), theirs)


# ---------------------------------------------------------------------------------------------------------------------
# verl


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vanilla", {"dual_clip": 1.3}),
        ("gspo", {"ratio": "sequence"}),
        ("cispo", {"objective": "cispo"}),
    ],
)
@pytest.mark.parametrize(
    ("mode", "aggregation"), [("token-mean", "token_mean"), ("seq-mean-token-mean", "sequence_mean")]
)
def test_policies_are_verls(name: str, options: dict[str, Any], mode: str, aggregation: Any, per_token: bool) -> None:
    algorithms = peer("verl.trainer.ppo.core_algos", "verl")
    from verl.workers.config import ActorConfig

    data = Data()
    advantage = data.advantage[:, None] + (torch.linspace(-1, 1, T, dtype=torch.float64) if per_token else 0 * data.old)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.15,
        clip_ratio_c=1.3,
    )  # fmt: skip
    weight = (data.old - data.sampler).exp().clamp(max=1.2)
    theirs, _ = algorithms.get_policy_loss_fn(name)(
        old_log_prob=data.old, log_prob=data.log_prob, advantages=advantage, response_mask=data.mask,
        loss_agg_mode=mode, config=config, rollout_is_weights=weight,
    )  # fmt: skip
    loss = ours(
        data, clip_low=0.1, clip_high=0.15, aggregation=aggregation, sampler_log_prob=data.sampler, sampler_limit=1.2,
        advantage=advantage, **options,
    )  # fmt: skip
    # verl divides by a number of tokens that 1e-8 was added to.
    data.same(loss, theirs, "float32" if aggregation == "sequence_mean" else "float64")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_verls(estimator: Any) -> None:
    algorithms = peer("verl.trainer.ppo.core_algos", "verl")
    data = Data()
    kl = algorithms.kl_penalty(data.log_prob, data.reference, estimator)
    theirs = (kl * data.mask).sum() / data.mask.sum()
    options = {"kl_coef": 1.0, "kl_estimator": estimator, "reference_log_prob": data.reference}
    data.same(ours(data, advantage=0 * data.advantage, **options), theirs)


# ---------------------------------------------------------------------------------------------------------------------
# Preferences


def means(data: Data) -> Any:
    return (data.log_prob * data.mask).sum(-1) / data.mask.sum(-1)


def chosen_nll(data: Data) -> Any:
    half = data.mask[: B // 2]
    return -(data.log_prob[: B // 2] * half).sum() / half.sum()


def trl_cpo(data: Data, loss_type: str, scores: Any, **settings: Any) -> Any:
    module = peer("trl.experimental.cpo.cpo_trainer", "TRL")
    trainer = SimpleNamespace(
        alpha=0.0, loss_type=loss_type, accelerator=SimpleNamespace(device="cpu"), **settings
    )  # fmt: skip
    return module.CPOTrainer.cpo_loss(trainer, scores[: B // 2], scores[B // 2 :])[0].mean()


def test_cpo_is_trls() -> None:
    data = Data()
    theirs = trl_cpo(data, "sigmoid", (data.log_prob * data.mask).sum(-1), beta=0.2, label_smoothing=0.1)
    options = {"loss_type": "cpo", "beta": 0.2, "label_smoothing": 0.1}
    data.same(dpo_loss(*data.head, mask=data.mask, nll_coef=0.7, **options), theirs + 0.7 * chosen_nll(data))


def test_simpo_is_trls() -> None:
    data = Data()
    theirs = trl_cpo(data, "simpo", means(data), beta=2.0, label_smoothing=0.1, simpo_gamma=0.5)
    options = {"loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.1, "margin": 0.5}
    data.same(dpo_loss(*data.head, mask=data.mask, **options), theirs)


def test_ipo_is_trls() -> None:
    data = Data()
    gap = means(data) - (data.reference * data.mask).sum(-1) / data.mask.sum(-1)
    theirs = trl_cpo(data, "ipo", gap, beta=0.3)
    data.same(
        dpo_loss(*data.head, mask=data.mask, reference_log_prob=data.reference, loss_type="ipo", beta=0.3), theirs
    )


def test_orpo_is_trls() -> None:
    module, data = peer("trl.experimental.orpo.orpo_trainer", "TRL"), Data()
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    scores = means(data)
    odds = module.ORPOTrainer.odds_ratio_loss(trainer, scores[: B // 2], scores[B // 2 :])[0]  # in float32
    data.same(
        dpo_loss(*data.head, mask=data.mask, loss_type="orpo", beta=0.3), chosen_nll(data) - odds.mean(), "float32"
    )


def liger(name: str, forward: Callable[[Any, Data, Any], Any], **settings: Any) -> tuple[Data, Any]:
    """The data, and the loss of one of Liger's chunked modules, which computes in float32."""
    module = peer("liger_kernel.chunked_loss", "Liger-Kernel")
    data = Data()
    labels = data.target.masked_fill(data.mask == 0, -100)
    return data, forward(getattr(module, f"LigerFusedLinear{name}Loss")(compiled=False, **settings), data, labels)


def test_pairs_are_ligers() -> None:
    def forward(loss: Any, data: Data, labels: Any) -> Any:
        return loss(data.weight, data.hidden, labels)[0]

    for name, settings, options in (
        (
            "SimPO",
            {"beta": 2.0, "gamma": 0.5, "compute_nll_loss": False},
            {"loss_type": "simpo", "beta": 2.0, "margin": 0.5},
        ),
        ("CPO", {"beta": 0.2, "alpha": 0.7}, {"loss_type": "cpo", "beta": 0.2, "nll_coef": 0.7}),
        ("ORPO", {"beta": 0.3}, {"loss_type": "orpo", "beta": 0.3}),
    ):
        data, theirs = liger(name, forward, **settings)
        data.same(dpo_loss(*data.head, mask=data.mask, **options), theirs, "float32")


def test_kto_is_ligers() -> None:
    desirable = torch.tensor([True, False, True, True, False, False])

    def forward(loss: Any, data: Data, labels: Any) -> Any:
        kl = torch.tensor(0.3, dtype=torch.float64)
        return loss(data.hidden, data.weight, labels, preference_labels=desirable, kl=kl)[0]

    data, theirs = liger("KTO", forward, beta=0.4)
    reference = torch.zeros(B, dtype=torch.float64)  # Liger's of this call
    options = {"desirable": desirable, "reference_log_prob": reference, "kl": 0.3, "beta": 0.4}
    data.same(kto_loss(*data.head, mask=data.mask, **options), theirs, "float32")
