"""GPUs that the kernels were not built for take the portable path, and the refusal says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def on_chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes PyTorch's first GPU such a chip."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("triton", reason="the refusal would be about triton")
    from logitless.torch_impl.kernels import architecture

    def become(chip: str) -> None:
        amd = chip.startswith("gfx")
        major, _, minor = ("0.0" if amd else chip).partition(".")
        properties = SimpleNamespace(major=major, minor=minor, gcnArchName=f"{chip}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
        architecture.chip_of.cache_clear()

    yield become
    architecture.chip_of.cache_clear()


@pytest.mark.parametrize(
    ("chip", "runs"),
    [("7.5", False), ("8.0", True), ("8.9", True), ("9.0", True), ("10.0", True), ("11.0", False), ("12.1", True),
     ("gfx942", True), ("gfx90a", False)],
)  # fmt: skip
def test_triton_knows_what_it_was_built_for(chip: str, runs: bool, on_chip: Callable[[str], None]) -> None:
    import torch

    from logitless.torch_impl.kernels import fused

    on_chip(chip)
    reason = fused.unavailable(torch.device("cuda", 0), torch.bfloat16)
    assert reason is None if runs else f"not {chip}" in str(reason)


@pytest.mark.parametrize(("capability", "runs"), [("8.0", False), ("9.0", True), ("10.0", False), ("12.0", False)])
def test_pallas_knows_what_it_was_built_for(capability: str, runs: bool) -> None:
    pytest.importorskip("jax", reason="needs jax")
    from logitless.jax_impl.given_logits import fused as logits_fused
    from logitless.jax_impl.kernels import fused

    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    for module in (fused, logits_fused):
        reason = module.unavailable(device, "bfloat16")
        assert reason is None if runs else f"not {capability}" in str(reason)


def test_the_backend_is_then_the_portable_one(on_chip: Callable[[str], None]) -> None:
    """The api chooses it, and an error names it; doctor shows that error."""
    import torch

    from logitless.torch_impl.backend import chosen_backend

    on_chip("7.5")
    device = torch.device("cuda", 0)
    assert chosen_backend(None, device, torch.bfloat16) == "eager"
    with pytest.raises(NotImplementedError, match=r"8\.x.*not 7\.5; backend='eager' can"):
        chosen_backend("triton", device, torch.bfloat16)
