"""integrations.sharded_head: the loss inside of a head that FSDP2, FSDP1 or DeepSpeed's ZeRO-3 has cut, on two ranks
with data of their own, against the whole model on all of it."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from ranks import Failed, Ranks  # noqa: E402

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl.integrations.sharded_head import head_cross_entropy  # noqa: E402

D, V, N = 16, 61, 12


class Model(torch.nn.Module):  # type: ignore[misc]
    """Two layers, a norm and a head, whose forward gives the loss."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(D, D), torch.nn.LayerNorm(D)
        self.head = torch.nn.Linear(D, V, bias=bias)

    def forward(self, x: Any, y: Any, ours: bool = True) -> Any:
        hidden = self.norm(self.body(x))
        if ours:
            return head_cross_entropy(self.head, hidden, y, z_loss=0.1)
        z = self.head(hidden)
        counts = (y != -100).sum()
        z_loss = torch.where(y == -100, 0.0, z.logsumexp(-1) ** 2).sum() / counts
        return torch.nn.functional.cross_entropy(z, y) + 0.1 * z_loss


def batch(rank: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(2 * D, N, generator=generator).T[:, ::2]
    y = torch.randint(0, V, (N,), generator=generator)
    y[rank] = -100
    return x, y


def whole(ranks: int, bias: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """The losses of the ranks, and the gradients of their mean."""
    model = Model(bias)
    losses = [model(*batch(rank), ours=False) for rank in range(ranks)]
    (sum(losses) / ranks).backward()
    return losses, {name: value.grad for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def compared(made: list[Any], ranks: int, bias: bool = False) -> None:
    losses, gradients = whole(ranks, bias)
    for rank, (loss, found) in enumerate(made):
        assert error(loss, losses[rank].detach()) <= ON_TOP_LOSS["float32"]
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            assert error(gradient, gradients[name]) <= ON_TOP_GRADIENT["float32"], name


# ---------------------------------------------------------------------------------------------------------------------
# FSDP2


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, int]]:
    """How often FSDP2 gathers and scatters."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    counts = {"foreach_all_gather": 0, "foreach_reduce": 0}
    kept = {name: getattr(group, name) for name in counts}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return kept[name](*arguments, **named)

        return call

    try:
        for name in counts:
            setattr(group, name, counted(name))
        yield counts
    finally:
        for name, function in kept.items():
            setattr(group, name, function)


def fsdp2_run(rank: int, unit: str, bias: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(bias), init_device_mesh("cpu", (2,))
    units = {"head": model.head, "norm and head": [model.norm, model.head]}
    fully_shard(units[unit], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    with collectives() as counts:
        loss = model(*batch(rank))
        loss.backward()
    gradients = {name: value.grad.full_tensor().numpy() for name, value in model.named_parameters()}
    return (loss.detach().numpy(), gradients), counts


@pytest.mark.case(27)
@pytest.mark.parametrize("unit", ["head", "norm and head"])
@pytest.mark.parametrize("bias", [False, True])
def test_fsdp2_gathers_and_reduces_a_unit_once(pool: Ranks, unit: str, bias: bool) -> None:
    made = pool.run(fsdp2_run, unit, bias)
    compared([outcome for outcome, _ in made], 2, bias)
    for _, counts in made:  # the head's unit and the root's
        assert counts == {"foreach_all_gather": 2, "foreach_reduce": 2}


# ---------------------------------------------------------------------------------------------------------------------
# FSDP1


def fsdp1_run(rank: int, use_orig_params: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model, cpu = Model(bias=True), torch.device("cpu")
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy.FULL_SHARD, "device_id": cpu}
    model.head = FullyShardedDataParallel(model.head, **options)
    model = FullyShardedDataParallel(model, **options)
    loss = model(*batch(rank))
    loss.backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        names = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        gradients = {name: value.grad.clone().numpy() for name, value in names.items()}
    return loss.detach().numpy(), gradients


@pytest.mark.case(40)
def test_fsdp1(pool: Ranks) -> None:
    compared(pool.run(fsdp1_run, True), 2, bias=True)


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed's ZeRO-3


def zero3_run(rank: int, port: int) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed("gloo", verbose=False)
    model = Model()
    settings = {
        "train_micro_batch_size_per_gpu": N,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    assert model.head.weight.numel() == 0
    loss = engine(*batch(rank))
    engine.backward(loss)
    gradients = {name: safe_get_full_grad(value).numpy() for name, value in model.named_parameters()}
    return loss.detach().numpy(), gradients


@pytest.mark.case(40)
def test_deepspeeds_zero_3() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; the next test has its hooks")
    with Ranks(2) as own:  # its groups stay
        compared(own.run(zero3_run, 29541), 2)


class Gathered:
    """A stand-in for ``deepspeed.zero.GatheredParameters``: within the block a parameter has all of its data.

    Outside it is empty, as ZeRO-3 leaves it.
    """

    def __init__(self, parameter: Any) -> None:
        self.parameter, self.kept = parameter, parameter.data
        self.gathers = 0
        parameter.data = torch.empty(0)

    def __enter__(self) -> None:
        self.gathers += 1
        self.parameter.data = self.kept

    def __exit__(self, *_: object) -> None:
        self.parameter.data = torch.empty(0)


class BeforeBackward(torch.autograd.Function):  # type: ignore[misc]
    """What ZeRO-3 puts on a module's results: the weights are whole again before its backward."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, value: Any) -> Any:
        ctx.gathered = gathered
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.gathered.__enter__()
        return None, gradient


@pytest.mark.case(40)
def test_hooks_that_gather_around_forward_and_backward() -> None:
    model = Model()
    gathered = Gathered(model.head.weight)
    model.head.register_forward_pre_hook(lambda *_: gathered.__enter__())

    def after(_: Any, __: Any, loss: Any) -> Any:
        gathered.__exit__()
        return BeforeBackward.apply(gathered, loss)

    model.head.register_forward_hook(after)
    loss = model(*batch(0))
    assert model.head.weight.numel() == 0
    loss.backward()
    assert gathered.gathers == 2
    compared([(loss.detach(), {name: value.grad for name, value in model.named_parameters()})], 1)


# ---------------------------------------------------------------------------------------------------------------------
# A patched model of transformers


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=D, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def ids_of(rank: int) -> tuple[Any, Any]:
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(20 + rank))
    labels = ids.clone()
    labels[:, rank] = -100
    return ids, labels


def patched_run(rank: int, unit: str, reshard: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from logitless.torch_impl import patch

    model, mesh = llama(), init_device_mesh("cpu", (2,))
    units = {"head": model.lm_head, "norm and head": [model.model.norm, model.lm_head]}
    fully_shard(units[unit], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    patch(model)
    ids, labels = ids_of(rank)
    with collectives() as counts:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
    gradients = {name: value.grad.full_tensor().numpy() for name, value in model.named_parameters()}
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, labels=labels).logits
    return (loss.detach().numpy(), gradients), counts, (logits.numpy(), model(input_ids=ids).logits.detach().numpy())


@pytest.mark.every_value
@pytest.mark.case(27)
@pytest.mark.parametrize("unit", ["head", "norm and head"])
@pytest.mark.parametrize("reshard", [False, True])
def test_a_patched_model_whose_head_is_a_unit(pool: Ranks, unit: str, reshard: bool) -> None:
    """Its weight is gathered for the loss, again for the backward if it was let go, and its gradient reduced once."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    model = llama()
    losses = [model(input_ids=ids, labels=labels).loss for ids, labels in map(ids_of, range(2))]
    (sum(losses) / 2).backward()
    for rank, ((loss, found), counts, (logits, full)) in enumerate(pool.run(patched_run, unit, reshard)):
        assert error(loss, losses[rank].detach()) <= ON_TOP_LOSS["float32"]
        for name, value in model.named_parameters():
            assert error(found[name], value.grad) <= ON_TOP_GRADIENT["float32"], name
        assert counts == {"foreach_all_gather": 3 if reshard else 2, "foreach_reduce": 2}
        assert error(logits, full) <= ON_TOP_LOSS["float32"]


def test_a_patched_model_whose_weight_zero_takes() -> None:
    """A stand-in for ZeRO-3's hooks, under the name of the module that they are in."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    from logitless.torch_impl import patch

    model = llama()
    ids, labels = ids_of(0)
    expected = llama()
    expected_loss = expected(input_ids=ids, labels=labels).loss
    expected_loss.backward()
    model.lm_head.weight.ds_shape = model.lm_head.weight.shape
    gathered = Gathered(model.lm_head.weight)

    def before(*_: Any) -> None:
        gathered.__enter__()

    def after(_: Any, __: Any, results: Any) -> Any:
        gathered.__exit__()
        return tuple(BeforeBackward.apply(gathered, r) if isinstance(r, torch.Tensor) else r for r in results)

    before.__module__ = after.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_pre_hook(before)
    model.lm_head.register_forward_hook(after)
    patch(model)
    output = model(input_ids=ids, labels=labels)
    loss = output.loss
    assert output.logits.detach().shape == (2, 9, V)  # as DeepSpeed does with all that the model returns
    with pytest.raises(RuntimeError, match="return_logits=True"):
        output.logits.detach().sum()
    assert model.lm_head.weight.numel() == 0
    loss.backward()
    assert gathered.gathers == 2
    assert error(loss.detach(), expected_loss.detach()) <= ON_TOP_LOSS["float32"]
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert error(value.grad, other.grad) <= ON_TOP_GRADIENT["float32"], name


def test_somebody_elses_hooks_are_refused() -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    from logitless.torch_impl import patch

    model = llama()
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="those alone by which FSDP2 or DeepSpeed gather its weight"):
        patch(model)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def refused_run(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from logitless.torch_impl import linear_cross_entropy

    head = torch.nn.Linear(D, V)
    fully_shard(head, mesh=init_device_mesh("cpu", (2,)))
    linear_cross_entropy(*batch(rank)[:1], head.weight, batch(rank)[1])


def test_a_weight_beside_its_head_names_the_remedy(pool: Ranks) -> None:
    for made in pool.outcomes(refused_run):
        assert isinstance(made, Failed)
        assert "logitless.torch_impl.integrations.sharded_head.head_cross_entropy" in made.words


def test_what_is_no_plain_head_is_refused() -> None:
    x, y = batch(0)
    with pytest.raises(TypeError, match=r"^head: got Tensor, allowed is a torch.nn.Module"):
        head_cross_entropy(x, x, y)
    with pytest.raises(NotImplementedError, match=r"its LM head is a torch.*Sequential, allowed"):
        head_cross_entropy(torch.nn.Sequential(torch.nn.Linear(D, V)), x, y)
    head = torch.nn.Linear(D, V)
    doubled = copy.deepcopy(head)
    doubled.forward = lambda x: 2 * head(x)
    with pytest.raises(NotImplementedError, match="forward was replaced on the instance"):
        head_cross_entropy(doubled, x, y)
    with pytest.raises(ValueError, match=r"^reduction: got 'average'"):
        head_cross_entropy(head, x, y, reduction="average")  # type: ignore[arg-type]
    assert "forward" not in head.__dict__
