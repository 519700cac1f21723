"""The kernels hub's layer against transformers' own loss, called as itself and put in by kernels where it is there."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="its loss is the yardstick")

from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl.integrations.kernels_hub import ForCausalLMLoss  # noqa: E402

B, T, D, V = 2, 7, 16, 41


def inputs() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, 2 * D, generator=generator)[..., ::2].detach().requires_grad_()
    weight = torch.randn(D, V, generator=generator).T.detach().requires_grad_()
    bias = torch.randn(V, generator=generator).requires_grad_()
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 2] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("items", [None, 5, torch.tensor(5)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("by_hidden", [False, True])
def test_against_transformers(items: Any, shifted: bool, has_bias: bool, by_hidden: bool) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss as theirs

    hidden, weight, bias, labels = inputs()
    b = bias if has_bias else None
    leaves = [hidden, weight, bias] if has_bias else [hidden, weight]
    given: dict[str, Any] = {"shift_labels": labels} if shifted else {}
    options = {"vocab_size": V, "num_items_in_batch": items, "labels": None if shifted else labels, **given}
    logits = torch.nn.functional.linear(hidden, weight, b)
    right = theirs(torch.nn.functional.linear(hidden, weight, b), **options)
    if by_hidden:
        options |= {"hidden_states": hidden, "lm_head_weight": weight, "lm_head_bias": b}
        logits = None
    made = ForCausalLMLoss()(logits, **options, unknown=3)
    assert error(made.detach(), right.detach()) <= ON_TOP_LOSS["float32"]
    for ours, own in zip(torch.autograd.grad(made, leaves), torch.autograd.grad(right, leaves), strict=True):
        assert error(ours, own) <= GRADIENT["float32"]


def test_what_is_refused() -> None:
    hidden, weight, _, labels = inputs()
    layer, z = ForCausalLMLoss(), hidden @ weight.T
    with pytest.raises(ValueError, match=r"^labels: got None beside shift_labels=None"):
        layer(z, None, V)
    with pytest.raises(ValueError, match=r"^lm_head_weight: got one of"):
        layer(None, labels, V, hidden_states=hidden)
    with pytest.raises(ValueError, match=r"^logits: got None without hidden_states"):
        layer(None, labels, V)
    with pytest.raises(ValueError, match=rf"^vocab_size: got {V + 1}, allowed is the V = {V}"):
        layer(z, labels, V + 1)


def test_by_kernels_itself(tmp_path: Path) -> None:
    """A repository on this disk, for a module that is marked as the hub's layers are."""
    kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
    package = tmp_path / "build" / "torch-cpu"
    package.mkdir(parents=True)
    text = "from logitless.torch_impl.integrations.kernels_hub import ForCausalLMLoss\n"
    (package / "__init__.py").write_text("from . import layers\n")
    (package / "layers.py").write_text(f"{text}__all__ = ['ForCausalLMLoss']\n")
    # kernels imports it by its id, so that may not be the name of our package.
    metadata = {"name": "a-loss", "id": "a_loss", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (package / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))

    def own(*_: Any, **__: Any) -> Any:
        raise AssertionError("the marked module's own forward")

    @kernels.use_kernel_forward_from_hub("ForCausalLMLoss")
    class Loss(torch.nn.Module):  # type: ignore[misc]
        forward = functools.wraps(ForCausalLMLoss.forward)(own)

    where = kernels.LocalLayerRepository(repo_path=tmp_path, layer_name="ForCausalLMLoss")
    hidden, weight, _, labels = inputs()
    with kernels.use_kernel_mapping({"ForCausalLMLoss": {"cpu": where}}):
        loss = kernels.kernelize(Loss(), mode=kernels.Mode.TRAINING, device="cpu")
    z = hidden @ weight.T
    right = torch.nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert error(loss(z, labels, V).detach(), right.detach()) <= ON_TOP_LOSS["float32"]
