"""``plan="fast"``, ``"balanced"`` or ``"lean"`` of every call that takes a plan, in both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import HAVE_BOTH, JaxXla, TorchEager

from logitless.planning import SLACK, choose
from logitless.tolerances import TINY, error

FRAMEWORKS = ["torch", "jax"] if HAVE_BOTH else ["jax"]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What plans were chosen for, in order."""
    asked: list[Any] = []

    def noting(request: Any) -> Any:
        asked.append(request)
        return choose(request)

    for framework in FRAMEWORKS:
        module = __import__(f"logitless.{framework}_impl.checks", fromlist=["checks"])
        monkeypatch.setattr(module, "choose_plan", noting)
        if framework == "torch":  # which keeps the plans of signatures that it has seen
            monkeypatch.setattr(module, "_signature", lambda *_: None)
    return asked


def arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((40, 16)), rng.standard_normal((90, 16)), rng.integers(0, 90, 40)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("prefer", [None, *SLACK])
def test_a_call_prefers_what_it_says(framework: str, prefer: Any, chosen: list[Any]) -> None:
    x, w, y = arrays()
    impl: Any = TorchEager() if framework == "torch" else JaxXla()
    expected = impl.run(x, w, y, plan="fast")
    chosen.clear()
    made = impl.run(x, w, y, plan=prefer)
    assert {request.prefer for request in chosen} == {prefer or "balanced"}
    assert error(made.loss, expected.loss) <= TINY["float32"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_log_probs_and_losses_on_top(framework: str, chosen: list[Any]) -> None:
    module = __import__(f"logitless.{framework}_impl", fromlist=["linear_log_probs"])
    impl: Any = TorchEager() if framework == "torch" else JaxXla()
    x, w, y = arrays()
    given = impl.array(x, "float32"), impl.array(w, "float32"), impl.array(y)
    module.linear_log_probs(*given, plan="lean")
    ones = impl.array(np.ones(40), "float32")
    module.clipped_policy_loss(*given, old_log_prob=-ones, advantage=ones, plan="lean")
    assert [request.prefer for request in chosen] == ["lean", "lean"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_name_is_refused(framework: str) -> None:
    x, w, y = arrays()
    impl: Any = TorchEager() if framework == "torch" else JaxXla()
    with pytest.raises(ValueError, match="plan: got 'quick', allowed are 'fast', 'balanced', 'lean'"):
        impl.run(x, w, y, plan="quick")
    with pytest.raises(ValueError, match="memory_budget: got a value beside a plan"):
        impl.run(x, w, y, plan="lean", memory_budget=2**30)
    with pytest.raises(TypeError, match=r"plan: got int, allowed is a ChunkPlan .*'lean' or None"):
        impl.run(x, w, y, plan=3)


@pytest.mark.skipif(not HAVE_BOTH, reason="this test is about PyTorch")
@pytest.mark.parametrize("one_pass", [False, True])
def test_compiled_for_any_number_of_tokens(one_pass: bool, chosen: list[Any]) -> None:
    """Where the plan is chosen when the graph runs, and where it is chosen before."""
    import torch

    from logitless.torch_impl import linear_cross_entropy, linear_log_probs

    def loss(x: Any, w: Any, y: Any) -> Any:
        if one_pass:
            return linear_cross_entropy(x, w, y, plan="lean")
        return linear_log_probs(x, w, y, plan="lean")[0].sum()

    compiled = torch.compile(loss, backend="aot_eager", dynamic=True)
    for tokens in (24, 40):
        x, w, y = (torch.from_numpy(a).float() if a.dtype == float else torch.from_numpy(a) for a in arrays())
        compiled(x[:tokens].requires_grad_(), w.requires_grad_(), y[:tokens]).backward()
    assert {request.prefer for request in chosen} == {"lean"}
