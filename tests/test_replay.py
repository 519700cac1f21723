"""Repeated steps of the Triton kernels: other values, the same launches and the same bits.

Interpreted on the CPU, where steps are repeated only if a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
pytest.importorskip("triton", reason="triton is not installed")

from logitless import plan  # noqa: E402
from logitless.torch_impl import linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.kernels import replay  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled where there is a GPU"
)

TOKENS, HIDDEN, VOCAB = 37, 32, 140
SIZES = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": "float32", "fused": True}
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "logit_scale": 2.0}
CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "bias": True, "class_weight": True},
    "everything": {**EVERYTHING, "bias": True, "class_weight": True, "token_weight": True, "return_stats": True},
    "chunks": {"plan": {"order": "tokens", "chunk": 16}, "bias": True},
    "slices": {"plan": {"order": "vocab", "chunk": 50}, "label_smoothing": 0.1},
    "per token": {"reduction": "none"},
    "held per token": {"reduction": "none", "memory_budget": 2**30},
    "lse": {"return_lse": True, "z_loss": 1e-3},
    "a number": {"normalizer": 11.5},
    "shifted": {"shift": 1},
    "no gradient": {"gradients": False, "return_stats": True},
    "hidden alone": {"frozen": True},
    "log-probs": {"function": linear_log_probs},
    "log-probs and entropy": {"function": linear_log_probs, "with_entropy": True},
    "held log-probs": {"function": linear_log_probs, "memory_budget": 2**30},
}


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Steps of the interpreter are repeated; what was, in order."""
    ran: list[Any] = []
    real = replay.Program.run

    def run(self: Any, *arguments: Any) -> Any:
        ran.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(replay.Program, "run", run)
    monkeypatch.setattr(replay, "programs", {})
    monkeypatch.setattr(replay, "seen", set())
    monkeypatch.setattr(replay.settings, "interpreted", True)
    yield ran


def arrays(seed: int, options: dict[str, Any], tokens: int = TOKENS) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments of a call: other values, and other ignored tokens, for every seed."""
    options, random = dict(options), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    gradients, frozen = options.pop("gradients", True), options.pop("frozen", False)
    hidden, weight = normal(tokens, HIDDEN), normal(VOCAB, HIDDEN)
    target = torch.randint(VOCAB, (tokens,), generator=random)
    target[torch.rand(tokens, generator=random) < 0.3] = -100
    hidden.requires_grad_(gradients)
    weight.requires_grad_(gradients and not frozen)
    for name, shape in (("bias", VOCAB), ("class_weight", VOCAB), ("token_weight", tokens)):
        if options.pop(name, False):
            options[name] = normal(shape).abs().requires_grad_(name == "bias")
    if "plan" in options:
        options["plan"] = plan(**SIZES, **options["plan"])
    return (hidden, weight, target), options


def results(seed: int, options: dict[str, Any], tokens: int = TOKENS) -> list[Any]:
    """Values and gradients of a call with these random numbers."""
    options = dict(options)
    function: Callable[..., Any] = options.pop("function", linear_cross_entropy)
    given, named = arrays(seed, options, tokens)
    found = function(*given, backend="triton", **named)
    values = []
    for value in found if isinstance(found, tuple) else (found,):
        values += value if isinstance(value, tuple) else [value]
    values = [value for value in values if value is not None]
    leaves = [v for v in (*given, *named.values()) if torch.is_tensor(v) and v.requires_grad]
    total = sum((i + seed + 1) * (v * v.detach().cos()).sum() for i, v in enumerate(values) if v.requires_grad)
    return values + (list(torch.autograd.grad(total, leaves)) if leaves else [])


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_step_has_the_same_bits(
    name: str, repeated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call runs, the second is written down, the third and the fourth are repeated."""
    calls = [results(seed, CALLS[name]) for seed in range(4)]
    assert repeated, "nothing was repeated"
    steps = len(replay.programs)
    assert len(repeated) == 2 * steps
    monkeypatch.setattr(replay.settings, "interpreted", False)
    for seed, found in enumerate(calls):
        assert_same(found, results(seed, CALLS[name]))
    assert len(repeated) == 2 * steps
