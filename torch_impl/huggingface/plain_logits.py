"""Log-probabilities and statistics of logits that a model has made itself, as ``linear_log_probs`` returns them."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless import spec
from logitless.spec import LogProbResults, Statistics
from logitless.torch_impl.given_logits.api import cross_entropy


def log_probs(
    logits: Tensor, target: Tensor, temperature: float, ignore_index: int, wanted: Statistics, backend: str | None
) -> LogProbResults[Tensor]:
    """:func:`linear_log_probs` of logits [..., V]: the same results, all differentiable ones included.

    log p is that of :func:`cross_entropy`, exact as p → 1, which also checks the arguments. What else has a gradient is
    made by plain operations, and so takes several times the logits' memory in float32 (float64 for float64).
    """
    found = cross_entropy(
        logits, target, reduction="none", ignore_index=ignore_index, temperature=temperature, backend=backend,
        return_stats=wanted is True,
    )  # fmt: skip
    nll, stats = found if isinstance(found, tuple) else (found, None)
    values = {} if stats is None else stats._asdict()
    if wanted:
        ignored = target == ignore_index
        # Zeros: what stands in an ignored row, NaN too, reaches neither value nor gradient.
        z = logits.to(nll.dtype).masked_fill(ignored.unsqueeze(-1), 0.0) / temperature
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        made = {
            "lse": torch.logsumexp(z, -1),
            "entropy": -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1),  # a logit of −inf: 0 log 0 = 0
            "sum_p_squared": p.square().sum(-1),
        }
        values |= {name: made[name].masked_fill(ignored, 0.0) for name in spec.differentiable_statistics(wanted)}
    return spec.log_prob_results(wanted, -nll, [values[name] for name in spec.log_prob_statistics(wanted)])
