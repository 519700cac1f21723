"""integrations.verl: verl's call, against full logits in float64, and on two ranks against the whole vocabulary."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import stand_ins

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from ranks import Ranks, group_of  # noqa: E402

from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl.integrations import verl as ours  # noqa: E402

B, S, D, V = 2, 6, 16, 36
KERNEL, FUSED = "verl.utils.kernel.linear_cross_entropy", "verl.models.mcore.model_forward_fused"


@pytest.fixture(autouse=True)
def verl() -> Iterator[None]:
    with stand_ins.without("verl", ""):
        stand_ins.verl()
        yield


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, S, 2 * D, generator=generator, dtype=torch.float64)[..., ::2]
    weight = torch.randn(D, V, generator=generator, dtype=torch.float64).T
    labels = torch.randint(0, V, (B, S), generator=generator)
    return hidden.detach().requires_grad_(), weight.detach().requires_grad_(), labels


def total(log_probs: Any, entropy: Any) -> Any:
    weights = torch.linspace(0.5, 1.5, B * S, dtype=torch.float64)
    return (weights * log_probs).sum() + (weights.flip(0) * entropy).sum()


def right(temperature: Any) -> list[Any]:
    """Log-probabilities, entropies and gradients from full logits."""
    hidden, weight, labels = inputs()
    divisor = temperature.reshape(-1, 1) if isinstance(temperature, torch.Tensor) else temperature
    log_p = (hidden.flatten(0, 1) @ weight.T / divisor).log_softmax(-1)
    log_probs = log_p.gather(-1, labels.flatten()[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad(total(log_probs, entropy), [hidden, weight])
    return [log_probs.detach(), entropy.detach(), *gradients]


def compared(made: list[Any], expected: list[Any]) -> None:
    for number, (a, b) in enumerate(zip(made, expected, strict=True)):
        assert error(a, b) <= (ON_TOP_LOSS if number < 2 else GRADIENT)["float64"], number


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 2.0, B * S).reshape(B, S)])
def test_against_full_logits(temperature: Any) -> None:
    hidden, weight, labels = inputs()
    found = ours.linear_cross_entropy(hidden, weight, labels, temperature, "none", None)
    assert all(value.shape == (B * S,) for value in found)
    gradients = torch.autograd.grad(total(*found), [hidden, weight])
    compared([*(value.detach() for value in found), *gradients], right(temperature))


class _GatherFromSequenceParallelRegion(torch.autograd.Function):  # type: ignore[misc]
    """Megatron's, whose backward sums over the ranks and keeps this rank's share."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: Any) -> Any:
        ctx.group, ctx.rows = group, own.shape[0]
        parts = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(2)[torch.distributed.get_rank(ctx.group)], None


def parallel_run(rank: int, gathered: bool) -> Any:
    group = group_of(2)
    hidden, weight, labels = inputs()
    own_weight = weight.detach().chunk(2)[rank].requires_grad_()
    own = hidden.detach().chunk(2)[rank].requires_grad_() if gathered else hidden
    given = own
    if gathered:
        try:
            from megatron.core.tensor_parallel import mappings

            device: Any = torch.device("cpu")
            torch.cuda.current_device = lambda: device
            given = mappings.gather_from_sequence_parallel_region(own, group=group)
            assert type(given.grad_fn).__name__ == ours.GATHER
        except ImportError:
            given = _GatherFromSequenceParallelRegion.apply(own, group)
    found = ours.linear_cross_entropy(given, own_weight, labels, 0.7, "none", group)
    gradients = torch.autograd.grad(total(*found), [own, own_weight])
    return [value.detach().numpy() for value in (*found, *gradients)]


@pytest.mark.parametrize("gathered", [False, True])
def test_a_gathered_hidden_is_summed_once(gathered: bool) -> None:
    log_probs, entropy, hidden, weight = right(0.7)
    with Ranks(2, sizes=(2,)) as pool:
        for rank, made in enumerate(pool.run(parallel_run, gathered)):
            share = hidden.chunk(2)[rank] if gathered else hidden
            compared(made, [log_probs, entropy, share, weight.chunk(2)[rank]])


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^reduction: got 'mean', allowed is 'none'"):
        ours.linear_cross_entropy(*inputs(), 1.0, "mean")
    with pytest.raises(ValueError, match=r"^temperature: got 0"):
        ours.linear_cross_entropy(*inputs(), 0.0)
    with pytest.raises(ValueError, match=r"^temperature: "):
        ours.linear_cross_entropy(*inputs(), torch.ones(B, 1))


def test_verls_modules_get_it_and_give_it_back() -> None:
    kernel = importlib.import_module(KERNEL)
    theirs, places = kernel.linear_cross_entropy, [kernel]
    with contextlib.suppress(ImportError):  # some versions of the package need Transformer Engine here
        places.append(importlib.import_module(FUSED))
    assert len(places) == 2 or stand_ins.is_installed("verl")
    ours.patch_verl()
    try:
        assert all(place.linear_cross_entropy is ours.linear_cross_entropy for place in places)
        with pytest.raises(RuntimeError, match=r"^verl: its function is replaced already"):
            ours.patch_verl()
    finally:
        ours.unpatch_verl()
    assert all(place.linear_cross_entropy is theirs for place in places)
    with pytest.raises(RuntimeError, match=r"^verl: its function is not replaced"):
        ours.unpatch_verl()


def test_its_arguments_are_verls() -> None:
    if not stand_ins.is_installed("verl"):
        pytest.skip("verl is not installed")
    own = inspect.signature(importlib.import_module(KERNEL).LinearCrossEntropy.forward).parameters
    expected = [(name, value.default) for name, value in own.items() if name != "ctx"]
    found = inspect.signature(ours.linear_cross_entropy).parameters
    assert [(name, value.default) for name, value in found.items()] == expected
