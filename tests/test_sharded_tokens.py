"""bench/sharded_tokens.py: its materialised logits are right, and two ranks measure what one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import registry, report, sharded_tokens  # noqa: E402
from logitless.tolerances import TINY, error  # noqa: E402


def test_materialised_logits_have_the_gradients_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, upstream = (torch.randn(*size, generator=generator) for size in ((12, 8), (37, 8), (2, 12)))
    y = torch.randint(37, (12,), generator=generator)
    x.requires_grad_()
    w.requires_grad_()
    log_p = torch.log_softmax(x @ w.T, 1)
    values = log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    made = sharded_tokens.Materialised.apply(x, w, y, 0, None)
    pairs = [*zip(made, values, strict=True)]
    gradients = (torch.autograd.grad(both, (x, w), tuple(upstream)) for both in (made, values))
    for one, other in [*pairs, *zip(*gradients, strict=True)]:
        assert error(one.detach().numpy(), other.detach().numpy()) <= 4 * TINY["float32"]


@pytest.mark.slow  # it starts two processes
def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    command = ["sharded", "--per-token", "--cpu", "--dtype", "float32", "--shapes", "24x16x66", "--rounds", "1"]
    registry.main([*command, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "sharded_tokens.json").read_text())["rows"]
    assert [(row["variant"], row["ranks"]) for row in rows] == [
        (variant, ranks) for ranks in (1, 2) for variant in ("logitless", "materialised")
    ]
    assert all(row["forward_ms"] > 0 and row["step_ms"] > 0 for row in rows)
    assert max(row["difference"] for row in rows) <= 4 * TINY["float32"]
    assert max(row["dhidden_difference"] for row in rows) <= 4 * TINY["float32"]
    assert len(report.sharded_tokens_table(rows).splitlines()) == 2 + len(rows)
