"""The benchmark of GRPO: its heads, its loss, its sampler, and a small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benchmark trains in PyTorch")
pytest.importorskip("tokenizers", reason="the demo's text is read with it")

from bench import grpo, registry, report  # noqa: E402
from logitless.interop.demo import torch_model  # noqa: E402
from logitless.interop.demo.settings import DemoSettings, initial_parameters  # noqa: E402
from logitless.tolerances import BOUND, CANCELLED, GRADIENT  # noqa: E402
from logitless.torch_impl import clipped_policy_loss  # noqa: E402

RIGHT = BOUND["log-probs, absolute"]

TINY = {"vocabulary": 512, "width": 32, "layers": 2, "heads": 4, "sequence": 20, "batch": 4, "steps": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "MODEL", {**grpo.MODEL, **TINY, "text_bytes": 30_000})
    sizes = {"PROMPTS": 2, "GROUP": 3, "PROMPT_TOKENS": 8, "NEW_TOKENS": 12}
    for name, size in sizes.items():
        monkeypatch.setattr(grpo, name, size)


def arrays() -> tuple[Any, Any, Any]:
    """Hidden states and a weight in bfloat16 whose logits are about 3 in size, and targets."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 12, 32, generator=generator), torch.randn(512, 32, generator=generator) * 0.5
    return x.bfloat16(), w.bfloat16(), torch.randint(0, 512, (6, 12), generator=generator)


def model() -> tuple[DemoSettings, dict[str, Any]]:
    """Larger parameters than the demo's first ones, so that the sampler's choices are not uniform."""
    settings = DemoSettings(**TINY)  # type: ignore[arg-type]
    return settings, {name: 4 * torch.from_numpy(array) for name, array in initial_parameters(settings, 512).items()}


def test_ours_is_float64s_and_rounded_logits_are_not() -> None:
    x, w, y = arrays()
    truth = grpo.exact(x, w, y)
    assert (grpo.logitless(x, w, y) - truth).abs().max() < RIGHT
    assert 1e-3 < (grpo.rounded(x, w, y) - truth).abs().max() < BOUND["log-probs of bfloat16 logits, absolute"]


def test_both_heads_have_one_loss() -> None:
    """The written-out loss is the package's, also where ratios are clipped; and so is its gradient."""
    x, w, y = arrays()
    old = grpo.exact(x, w, y).float() + 0.3 * torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    made = []
    for written_out in (True, False):
        hidden = x.clone().requires_grad_()
        if written_out:
            loss = grpo.loss_of(grpo.logitless(hidden, w, y), advantage, old)
        else:
            loss, log_prob = grpo.loss_and_log_prob("logitless", hidden, w, y, advantage, old)
            assert (log_prob - grpo.exact(x, w, y)).abs().max() < RIGHT
        made.append((loss.detach(), torch.autograd.grad(loss, hidden)[0]))
    torch.testing.assert_close(*made)
    stats = clipped_policy_loss(x, w, y, advantage=advantage, old_log_prob=old, return_stats=True)[1]  # type: ignore[index]
    assert 0 < stats.clipped.float().mean() < 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sampler_reads_what_the_trainer_reads(dtype: Any) -> None:
    """One token at a time with a cache, and all at once: in float64 the same, in bfloat16 to its rounding."""
    settings, parameters = model()
    parameters = {name: tensor.to(dtype) for name, tensor in parameters.items()}
    tokens = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(2))
    whole = torch_model.hidden_states(parameters, tokens, settings)
    decoder = grpo.Decoder(parameters, settings, 3)
    single = torch.stack([decoder.hidden(tokens[:, place]) for place in range(20)], dim=1)
    error = (single - whole).abs().max() / whole.abs().max()
    assert error < (GRADIENT["float64"] if dtype == torch.float64 else BOUND["decoder bfloat16"])


def test_samples_follow_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of −log p over samples is the entropy, and the hidden states are those of the tokens that follow."""
    monkeypatch.setattr(grpo, "NEW_TOKENS", 1)
    settings, parameters = model()
    given = grpo.in_bfloat16(parameters)
    prompts = torch.arange(8).expand(4000, -1)
    for head in grpo.HEADS:
        tokens, seen = grpo.sample(given, settings, head, prompts, 3)
        assert tokens.shape == (4000, 9)
        log_prob = grpo.exact(seen, given["head"], tokens[:, 8:])
        log_probs = torch.log_softmax(seen[0, 0].double() @ given["head"].double().T, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum()
        spread = (log_probs.exp() * (log_probs + entropy).square()).sum().sqrt() / 4000**0.5
        assert abs(log_prob.mean() + entropy) < 4 * spread
        assert entropy < 6.0  # of 6.24 that a uniform one has


def test_a_small_run(tmp_path: Path) -> None:
    """With ours on both sides only the body keeps the ratio from 1."""
    start = grpo.prepared()
    values = {name: grpo.grpo(start, name, 0, 2) for name in grpo.VARIANTS}
    for step in values["logitless in both"]:
        assert max(step["trainer_error_max"], step["sampler_error_max"]) < RIGHT
        assert abs(step["mismatch_max"] - step["body_max"]) < BOUND["mismatch of log-probs, absolute"]
        assert step["outside"] == 0
    for step in values["bfloat16 logits in both"]:
        assert min(step["trainer_error_max"], step["sampler_error_max"]) > 1e-4
    for step in values["logitless in the trainer"]:
        assert step["trainer_error_max"] < RIGHT
        assert step["sampler_error_max"] > 1e-4

    assert registry.main(["grpo", "--output", str(tmp_path), "--steps", "2", "--seeds", "1"]) == 0
    results = json.loads((tmp_path / "grpo.json").read_text())
    assert [row["variant"] for row in results["rows"]] == list(grpo.VARIANTS)
    assert [len(row["by_step"]["reward"]) for row in results["rows"]] == [2, 2, 2]
    assert "| logitless in both | " in report.grpo_table(results["rows"])


def test_with_one_body_the_first_ratios_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one head is on both sides; also for rounded logits, whose roundings are then the same."""
    sample = grpo.sample

    def with_the_trainers_body(parameters: Any, settings: Any, head: str, *others: Any) -> tuple[Any, Any]:
        tokens, _ = sample(parameters, settings, head, *others)
        hidden = torch_model.hidden_states(parameters, tokens[:, :-1], settings)
        return tokens, hidden[:, grpo.PROMPT_TOKENS - 1 :]

    monkeypatch.setattr(grpo, "sample", with_the_trainers_body)
    start = grpo.prepared()
    values = {name: grpo.grpo(start, name, 0, 2) for name in grpo.VARIANTS}
    for name, steps in values.items():
        for step in steps:
            assert (step["body_max"], step["same_hidden"]) == (0, 1)
            if name == "logitless in the trainer":
                assert step["mismatch_max"] > 1e-4
            else:
                assert step["mismatch_max"] < RIGHT


def test_what_is_measured_of_a_step() -> None:
    sampler = torch.tensor([[-1.0, -2.0]])
    trainer = sampler + torch.tensor([[0.0, 0.3]])
    found = grpo.measured(trainer, sampler, trainer + 0.01, sampler - 0.02, torch.tensor([[True, False]]))
    assert found["mismatch_mean"] == pytest.approx(0.15)
    assert found["mismatch_max"] == pytest.approx(0.3)
    assert found["trainer_error_mean"] == pytest.approx(0.01, rel=CANCELLED)
    assert found["sampler_error_max"] == pytest.approx(0.02, rel=CANCELLED)
    assert found["body_max"] == pytest.approx(0.33)
    assert found["outside"] == found["same_hidden"] == 0.5  # exp(0.3) is above 1.2
    assert found["kl"] == pytest.approx((2.718281828**0.3 - 1 - 0.3) / 2)


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import plots

    results = report.read("grpo.json")
    page = report.FIGURES / "grpo.md"
    assert page.read_text() == report.grpo_table(results["rows"])
    plots.grpo(results, tmp_path / "grpo.png")
    assert (tmp_path / "grpo.png").stat().st_size > 1000
