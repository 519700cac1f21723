"""GPUs that the kernels were not built for take the portable path, and the refusal says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_triton_knows_what_it_was_built_for(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("triton", reason="the refusal would be about triton")
    from logitless.torch_impl.kernels import fused

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fused.unavailable(torch.device("cuda", 0), torch.bfloat16)
    assert reason is None if runs else f"not {capability[0]}.{capability[1]}" in str(reason)


@pytest.mark.parametrize(("capability", "runs"), [("8.0", False), ("9.0", True), ("10.0", False), ("12.0", False)])
def test_pallas_knows_what_it_was_built_for(capability: str, runs: bool) -> None:
    pytest.importorskip("jax", reason="needs jax")
    from logitless.jax_impl.given_logits import fused as logits_fused
    from logitless.jax_impl.kernels import fused

    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    for module in (fused, logits_fused):
        reason = module.unavailable(device, "bfloat16")
        assert reason is None if runs else f"not {capability}" in str(reason)


def test_the_backend_is_then_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The api chooses it, and an error names it; doctor shows that error."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("triton", reason="the refusal would be about triton")
    from logitless.torch_impl.backend import chosen_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    device = torch.device("cuda", 0)
    assert chosen_backend(None, device, torch.bfloat16) == "eager"
    with pytest.raises(NotImplementedError, match=r"Hopper.*not 12\.0; backend='eager' can"):
        chosen_backend("triton", device, torch.bfloat16)
