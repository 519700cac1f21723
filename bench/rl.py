"""Log-probabilities of a trained head by how logits are rounded: ``python -m bench rl``.

Reads .scratch/real_head.npz, which ``python -m bench real_head FOLDER`` makes: hidden states of text, SmolLM2-135M's
head and the ids that follow, all in bfloat16. The truth is float64 arithmetic on these numbers. What differs from it is
the arithmetic's own: two samplers with one model differ by no less. Runs on a CPU.

A row has, in nats, the error of log p(target) of a token (mean, the 99th of 100, largest, and ``quantiles``) and of a
piece of text (the sum over its tokens, largest); the share of tokens whose probability is off by more than 1 %; and, of
what makes logits, KL(truth ‖ variant) = Σ p log(p / q) − p + q of a token's whole distribution (mean, largest). So it
is at least 0, also where rounding took the sum of q from 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.real_head import FILE, PIECE
from bench.registry import Results, register

# Tokens whose whole distributions are held at a time, in float64.
CHUNK = 128
QUANTILES = 200


def read() -> tuple[Any, Any, Any]:
    """Hidden states [N, D] and weight [V, D] in bfloat16, targets [N]."""
    import torch

    if not FILE.exists():
        raise SystemExit(f"{FILE}: is not there; python -m bench real_head FOLDER makes it")
    arrays = np.load(FILE)
    weight = torch.from_numpy(arrays["weight"]).float() * torch.from_numpy(arrays["scale"])
    hidden = torch.from_numpy(arrays["hidden"]).view(torch.bfloat16)
    return hidden, weight.bfloat16(), torch.from_numpy(arrays["target"]).long()


def of_logits() -> dict[str, Callable[[Any], Any]]:
    """log softmax of logits that products in float32 gave, by variant."""
    import torch

    def rounded(dtype: Any, softmax: Any) -> Callable[[Any], Any]:
        return lambda z: torch.log_softmax(z.to(dtype).to(softmax), dim=-1)

    return {
        "bfloat16 logits and softmax": rounded(torch.bfloat16, torch.bfloat16),
        "bfloat16 logits, float32 softmax": rounded(torch.bfloat16, torch.float32),
        "float16 logits, float32 softmax": rounded(torch.float16, torch.float32),
        "float32 logits": rounded(torch.float32, torch.float32),
    }


def ours(hidden: Any, weight: Any, target: Any) -> Iterator[tuple[str, Any]]:
    """log p(target) [N] of both frameworks, as they run here."""
    import jax
    import torch

    from logitless.interop import to_jax
    from logitless.jax_impl import linear_log_probs as in_jax
    from logitless.torch_impl import linear_log_probs as in_torch

    with torch.no_grad():
        yield "logitless, PyTorch", in_torch(hidden, weight, target)[0].double().numpy()
    arrays = [to_jax(array) for array in (hidden, weight, target.int())]
    log_prob, _ = jax.jit(in_jax)(*arrays)
    yield "logitless, JAX", np.asarray(log_prob, np.float64)


def row_of(variant: str, log_prob: Any, truth: Any, kl: Any = None) -> dict[str, Any]:
    errors = log_prob - truth
    size = np.abs(errors)
    pieces = [abs(errors[start : start + PIECE - 1].sum()) for start in range(0, len(errors), PIECE - 1)]
    shares = np.linspace(0.0, 1.0, QUANTILES + 1)
    return {
        "variant": variant,
        "mean_error": float(size.mean()),
        "p99_error": float(np.quantile(size, 0.99)),
        "max_error": float(size.max()),
        "text_error": float(max(pieces)),
        "off_by_1_percent": float((np.abs(np.expm1(errors)) > 0.01).mean()),
        "kl_mean": None if kl is None else float(kl.mean()),
        "kl_max": None if kl is None else float(kl.max()),
        "quantiles": [float(f"{value:.3g}") for value in np.quantile(size, shares)],
    }


@register("errors of log-probabilities by the logits' rounding, on a real head", file="rl.json")
def run(options: argparse.Namespace, results: Results) -> None:
    import torch

    hidden, weight, target = read()
    variants = of_logits()
    truth, found, kl = [], {name: [] for name in variants}, {name: [] for name in variants}  # type: ignore[var-annotated]
    for start in range(0, len(target), CHUNK):
        x, y = hidden[start : start + CHUNK], target[start : start + CHUNK, None]
        exact = torch.log_softmax(x.double() @ weight.double().T, dim=-1)
        z = x.float() @ weight.float().T
        truth.append(exact.gather(1, y)[:, 0].numpy())
        for name, function in variants.items():
            log_q = function(z).double()
            found[name].append(log_q.gather(1, y)[:, 0].numpy())
            kl[name].append((exact.exp() * (exact - log_q - 1.0) + log_q.exp()).sum(-1).numpy())
        print(f"\r{start + len(y)} of {len(target)} tokens", end="", flush=True)
    print()
    right = np.concatenate(truth)
    sizes = {"tokens": len(target), "hidden": weight.shape[1], "vocab": weight.shape[0]}
    rows = [row_of(name, np.concatenate(found[name]), right, np.concatenate(kl[name])) for name in variants]
    rows += [row_of(name, log_prob, right) for name, log_prob in ours(hidden, weight, target)]
    results.add([sizes | row for row in rows])
