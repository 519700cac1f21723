"""integrations.megatron against megatron-core's own unfused path, on two ranks: GPTModels under Megatron's
DistributedDataParallel with overlap_grad_reduce, and the layer alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
if not importlib.util.find_spec("megatron"):  # which is imported by the ranks' processes alone
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from limits import check_refusals, note_plans  # noqa: E402
from ranks import Failed, Ranks  # noqa: E402

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402

S, B, D, V = 8, 2, 16, 32


def start(tensor_parallel: int) -> None:
    """Megatron's groups on the CPU, where it asks CUDA for the current device and for random states."""
    device: Any = torch.device("cpu")
    torch.cuda.current_device = lambda: device
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # Its norm for CPUs refuses sequence parallelism, because its gradients would have to be summed. Both models do not.
    WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps=1e-5: torch.nn.LayerNorm(hidden_size, eps)
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def config_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=D, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, **options,
    )  # fmt: skip


def gpt(config: Any, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    layer = get_gpt_layer_local_spec()
    more = {}
    if config.mtp_num_layers:
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    torch.manual_seed(0)
    return GPTModel(
        config, layer, vocab_size=V, max_sequence_length=S, share_embeddings_and_output_weights=tied, **more
    )


def model_run(rank: int, ranks: int, tied: bool, options: dict[str, Any]) -> Any:
    """Losses, main_grads and what is left in .grad of the patched model and of its twin after two micro-batches."""
    start(ranks)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from logitless.torch_impl.integrations.megatron_model import patch_megatron

    config = config_of(tensor_model_parallel_size=ranks, **options)
    plain = gpt(config, tied)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    ours = DistributedDataParallel(config, settings, patch_megatron(gpt(config, tied)))
    theirs = DistributedDataParallel(config, settings, plain)
    generator = torch.Generator().manual_seed(rank if ranks == 1 else 0)  # other data on data-parallel ranks
    ids = torch.randint(0, V, (2, B, S + 1), generator=generator)
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    found = []
    for model in (ours, theirs):
        model.zero_grad_buffer()
        losses = []
        for synchronizes, batch in zip((False, True), ids, strict=True):
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                loss = model(batch[:, :-1], torch.arange(S).expand(B, S), mask, labels=batch[:, 1:])
                losses.append(loss.detach().numpy())
                (loss * torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)).sum().backward()
        model.finish_grad_sync()
        gradients = {name: value.main_grad.numpy() for name, value in model.module.named_parameters()}
        left = [name for name, value in model.module.named_parameters() if value.grad is not None]
        found.append((losses, gradients, left))
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.case(40)
@pytest.mark.parametrize(
    ("ranks", "tied", "options"),
    [
        (2, False, {}),
        (2, True, {}),
        (2, False, {"sequence_parallel": True}),
        (2, True, {"sequence_parallel": True, "mtp_num_layers": 2}),
        (1, False, {}),
        (1, False, {"mtp_num_layers": 2}),
    ],
)
def test_models_losses_and_gradients(pool: Ranks, ranks: int, tied: bool, options: dict[str, Any]) -> None:
    for (losses, gradients, left), (their_losses, their_gradients, _) in pool.run(model_run, ranks, tied, options):
        assert not left
        for made, right in zip(losses, their_losses, strict=True):
            assert made.shape == (B, S)
            assert error(made, right) <= ON_TOP_LOSS["float32"]
        assert gradients.keys() == their_gradients.keys()
        for name, right in their_gradients.items():
            assert error(gradients[name], right) <= ON_TOP_GRADIENT["float32"], name


def layer_run(rank: int, sequence_parallel: bool) -> Any:
    """The module, the function and the output processor against ColumnParallelLinear and its loss, which is float32."""
    start(2)
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from logitless.torch_impl.integrations import megatron as ours

    group = get_tensor_model_parallel_group()
    config = config_of(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    layer = ours.LinearCrossEntropyModule(D, V, config=config, init_method=torch.nn.init.normal_, bias=False)
    rows = slice(rank * S // 2, (rank + 1) * S // 2) if sequence_parallel else slice(None)
    hidden = torch.randn(S, B, 2 * D)[rows, :, ::2].detach().requires_grad_()
    labels = torch.randint(0, V, (B, S))
    seen = []
    layer.register_forward_pre_hook(lambda *_: seen.append("hook"))

    def outcome(loss: Any, weights: Any) -> Any:
        gradients = torch.autograd.grad((loss * weights).sum(), [hidden, layer.weight])
        return [loss.detach().numpy(), *(value.numpy() for value in gradients)]

    weights = torch.linspace(0.5, 1.5, B * S).reshape(B, S)
    logits, bias = layer(hidden)
    assert bias is None
    right = outcome(vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T, weights)
    halved, _ = layer(hidden)
    scaled = outcome(vocab_parallel_cross_entropy(halved / 2, labels.T.contiguous()).T, weights)
    module = outcome(layer(hidden, output_cross_entropy_loss=True, labels=labels), weights)
    plain = ours.linear_cross_entropy(hidden, layer.weight, labels.T, group, sequence_parallel=sequence_parallel)
    hooks = len(seen)
    given: dict[str, Any] = {"hidden_states": hidden, "output_layer": layer, "labels": labels, "config": config}
    processed = ours.output_processor(**given, output_weight=None, context=None, scale_logits=lambda z: z * 0.5)
    assert len(seen) == hooks + 1
    assert "forward" not in layer.__dict__
    tempered = ours.output_processor(**given, output_weight=layer.weight, context={"temperature": 2.0, "plan": "lean"})
    pairs = [(module, right), (outcome(plain.T, weights), right)]
    return pairs + [(outcome(value, weights), scaled) for value in (processed, tempered)]


@pytest.mark.case(40)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_layer_alone(pool: Ranks, sequence_parallel: bool) -> None:
    for pairs in pool.run(layer_run, sequence_parallel):
        for made, right in pairs:
            assert error(made[0], right[0]) <= ON_TOP_LOSS["float32"]
            for ours, theirs in zip(made[1:], right[1:], strict=True):
                assert error(ours, theirs) <= ON_TOP_GRADIENT["float32"]


def refused_run(rank: int) -> None:
    start(1)
    from logitless.torch_impl import api
    from logitless.torch_impl.integrations import megatron as ours
    from logitless.torch_impl.integrations.megatron_model import patch_megatron, unpatch_megatron

    layer = ours.LinearCrossEntropyModule(D, V, config=config_of(), init_method=torch.nn.init.normal_, bias=True)
    x, y = torch.randn(S, B, D), torch.zeros(B, S, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"^output_layer: got one with bias, allowed is one without bias"):
        layer(x, output_cross_entropy_loss=True, labels=y)
    with pytest.raises(ValueError, match=r"^labels: got None beside output_cross_entropy_loss=True, allowed are ids"):
        layer(x, output_cross_entropy_loss=True)
    with pytest.raises(ValueError, match=r"^labels: got None beside output_processor"):
        ours.output_processor(hidden_states=x, output_layer=layer, output_weight=None, labels=None)
    with pytest.raises(NotImplementedError, match="its logits are not z"):
        ours.output_processor(
            hidden_states=x, output_layer=layer, output_weight=None, labels=y, scale_logits=torch.tanh
        )
    with pytest.raises(NotImplementedError, match=r"^model: found 0 modules with compute_language_model_loss"):
        patch_megatron(torch.nn.Linear(2, 2))
    check_refusals(functools.partial(patch_megatron, gpt(config_of(), False)))
    model = patch_megatron(gpt(config_of(), False), plan="lean")
    given = (y % V, torch.arange(S).expand(B, S), torch.ones(S, S, dtype=torch.bool).triu(1)[None, None])
    with pytest.raises(RuntimeError, match=r"^model: got one that is patched already"):
        patch_megatron(model)
    logits = model(*given)
    assert logits.shape == (B, S, V)
    with pytest.warns(UserWarning, match="computes a loss of full logits"):
        full = model.compute_language_model_loss(y, logits.transpose(0, 1).contiguous())
    with pytest.MonkeyPatch.context() as monkeypatch:
        plans = note_plans(monkeypatch, api)
        assert error(model(*given, labels=y).detach(), full.detach()) <= ON_TOP_LOSS["float32"]
    assert plans == ["lean"]
    own = model.output_layer.forward
    model.compute_language_model_loss, kept = (
        lambda labels, z: kept(labels, z.tanh()),
        model.compute_language_model_loss,
    )
    with pytest.raises(NotImplementedError, match="its logits are not z"):
        model(*given, labels=y)
    model.compute_language_model_loss = kept
    unpatch_megatron(model)
    assert model.output_layer.forward != own
    assert "compute_language_model_loss" not in model.__dict__
    assert torch.equal(model(*given, labels=y), full)
    with pytest.raises(RuntimeError, match=r"^model: got one that is not patched"):
        unpatch_megatron(model)


def test_what_is_refused_and_taken_back(pool: Ranks) -> None:
    for made in pool.outcomes(refused_run):
        assert not isinstance(made, Failed), made
