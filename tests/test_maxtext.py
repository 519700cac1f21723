"""jax_impl.integrations.maxtext: MaxText's tiled loss, against full logits in float64 on a stand-in of its models; and,
where MaxText is installed, on its own models against its own loss."""

from __future__ import annotations

import dataclasses
import importlib
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest
import stand_ins
from limits import check_refusals, note_plans

jax = pytest.importorskip("jax", reason="these tests are about JAX")
nnx = pytest.importorskip("flax.nnx", reason="MaxText's models are of Flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from logitless.jax_impl.integrations import maxtext as ours  # noqa: E402
from logitless.tolerances import CHAIN, GRADIENT, ON_TOP_LOSS, error  # noqa: E402

B, T, D, V = 4, 6, 16, 64
TRAINER = "maxtext.trainers.pre_train.train"
AXES = ("data", "fsdp", "context", "tensor")


@pytest.fixture(autouse=True)
def maxtext() -> Iterator[None]:
    with stand_ins.without("maxtext", ""):
        stand_ins.maxtext()
        yield


def stands_in() -> bool:
    return not stand_ins.is_installed("maxtext")


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@dataclasses.dataclass
class Config:
    """What the head and its loss read of MaxText's configuration."""

    logits_via_embedding: bool = False
    normalize_embedding_logits: bool = True
    final_logits_soft_cap: float = 0.0
    logits_dot_in_fp32: bool = False
    parameter_memory_host_offload: bool = False
    z_loss_multiplier: float = 0.0
    enable_dropout: bool = False
    shard_mode: str = "auto"
    dtype: str = "float64"
    emb_dim: int = D


class Dense(nnx.Module):  # type: ignore[misc]
    def __init__(self, dtype: str, rngs: Any) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (D, V), dtype))
        self.bias, self.kernel_scale, self.dtype = None, None, dtype


class Model(nnx.Module):  # type: ignore[misc]
    """A model's norm, dropout and head, with MaxText's names."""

    def __init__(self, config: Config, devices: tuple[int, ...] = (1, 1, 1, 1), dropout: float = 0.0) -> None:
        rngs = nnx.Rngs(params=0, dropout=1)
        self.mesh = Mesh(np.array(jax.devices()[: int(np.prod(devices))]).reshape(devices), AXES)
        self.decoder = nnx.Module()
        self.decoder.decoder_norm = nnx.RMSNorm(D, param_dtype=config.dtype, rngs=rngs)
        self.decoder.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.decoder.logits_dense = Dense(config.dtype, rngs)
        self.token_embedder = nnx.Embed(V, D, param_dtype=config.dtype, rngs=rngs)

    def logits(self, config: Config, hidden: Any, deterministic: bool = True) -> Any:
        """As MaxText's ``apply_output_head`` makes them."""
        y = self.decoder.dropout(self.decoder.decoder_norm(hidden), deterministic=deterministic)
        if not config.logits_via_embedding:
            return y @ self.decoder.logits_dense.kernel[...]
        z = y @ self.token_embedder.embedding[...].T / (D**0.5 if config.normalize_embedding_logits else 1.0)
        cap = config.final_logits_soft_cap
        return jnp.tanh(z / cap) * cap if cap else z


def batch(dtype: str = "float64") -> tuple[Any, dict[str, Any]]:
    """Hidden states and a batch whose third document is padding."""
    keys = jax.random.split(jax.random.key(3), 2)
    segments = jnp.ones((B, T), "int32").at[:, -2:].set(2).at[2].set(0)
    data = {"targets": jax.random.randint(keys[0], (B, T), 0, V), "targets_segmentation": segments}
    return 2 * jax.random.normal(keys[1], (B, T, D), dtype), data


def full(model: Any, hidden: Any, data: Any, config: Config, is_train: bool = True) -> tuple[Any, Any]:
    z = nnx.clone(model).logits(config, hidden, not (is_train and config.enable_dropout))
    lse = jax.nn.logsumexp(z, axis=-1)
    counts = data["targets_segmentation"] != 0
    z_losses = config.z_loss_multiplier * lse**2
    losses = lse - jnp.take_along_axis(z, data["targets"][..., None], -1)[..., 0] + z_losses
    return (losses * counts).sum(), jax.lax.stop_gradient((z_losses * counts).sum())


def outcome(loss_fn: Any, model: Any, hidden: Any, *more: Any) -> list[Any]:
    """Loss, z-loss, and all gradients of 0.7 times the first."""

    @nnx.jit
    def step(model: Any, hidden: Any) -> Any:
        def total(model: Any, hidden: Any) -> tuple[Any, Any]:
            loss, z_loss = loss_fn(model, hidden, *more)
            return 0.7 * loss + z_loss, (loss, z_loss)

        return nnx.value_and_grad(total, argnums=(0, 1), has_aux=True)(model, hidden)

    (_, values), gradients = step(model, hidden)
    return [*values, *jax.tree.leaves(gradients)]


def compared(made: list[Any], right: list[Any]) -> None:
    assert any(np.asarray(gradient).any() for gradient in right[2:])
    for number, (a, b) in enumerate(zip(made, right, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= (ON_TOP_LOSS if number < 2 else GRADIENT)["float64"], number


@pytest.mark.every_value
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_against_full_logits(x64: None, z_loss: float, tied: bool, cap: float) -> None:
    """An own head has no softcap in MaxText, and is not scaled."""
    config = Config(logits_via_embedding=tied, final_logits_soft_cap=cap, z_loss_multiplier=z_loss)
    model, (hidden, data) = Model(config), batch()
    made = outcome(ours.vocab_tiling_nnx_loss, model, hidden, data, config, True)
    compared(made, outcome(full, model, hidden, data, config, True))


def test_dropout_is_the_models(x64: None) -> None:
    config = Config(enable_dropout=True)
    model, (hidden, data) = Model(config, dropout=0.4), batch()
    for is_train in (True, False):
        made = outcome(ours.vocab_tiling_nnx_loss, model, hidden, data, config, is_train)
        compared(made, outcome(full, model, hidden, data, config, is_train))
    assert model.decoder.dropout.rngs.count[...] == 0


def test_dtypes_of_mixed_precision() -> None:
    """bfloat16 hidden states beside float32 parameters."""
    config = Config(dtype="bfloat16", z_loss_multiplier=1e-3)
    model = Model(dataclasses.replace(config, dtype="float32"))
    model.decoder.logits_dense.dtype = "bfloat16"
    hidden, data = batch("bfloat16")
    loss, z_loss, *gradients = outcome(ours.vocab_tiling_nnx_loss, model, hidden, data, config, True)
    assert (loss.dtype, z_loss.dtype) == ("float32", "float32")
    assert [gradient.dtype for gradient in gradients] == ["float32"] * 3 + ["bfloat16"]


@pytest.mark.late(where=lambda p: p["devices"] == (1, 2, 1, 2))
@pytest.mark.parametrize("devices", [(2, 2, 1, 1), (1, 2, 1, 2), (1, 1, 1, 4)])
def test_on_a_mesh(x64: None, devices: tuple[int, ...]) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    if not stands_in():
        pytest.skip("the stand-in has the mesh's rules")
    for tied in (False, True):
        config = Config(logits_via_embedding=tied, z_loss_multiplier=1e-2)
        model, (hidden, data) = Model(config, devices), batch()
        made = outcome(ours.vocab_tiling_nnx_loss, model, hidden, data, config, True)
        compared(made, outcome(full, model, hidden, data, config, True))


def test_what_is_refused() -> None:
    hidden, data = batch("float32")

    def refused(match: str, devices: tuple[int, ...] = (1, 1, 1, 1), scale: Any = None, **changed: Any) -> None:
        config = Config(**{"dtype": "float32", **changed})
        model = Model(config, devices)
        model.decoder.logits_dense.kernel_scale = scale
        with pytest.raises(NotImplementedError, match=match):
            ours.vocab_tiling_nnx_loss(model, hidden, data, config, True)

    refused(r"^shard_mode: got explicit, allowed is auto", shard_mode="explicit")
    refused(r"^parameter_memory_host_offload: got True", parameter_memory_host_offload=True)
    refused(r"^logits_dense: got a kernel with a scale", scale=1.0)
    if jax.device_count() >= 2 and stands_in():
        refused(r"^mesh: got one that cuts sequences over \('context',\)", devices=(1, 1, 2, 1))
    model = Model(Config(dtype="float32"))
    del model.decoder.dropout
    with pytest.raises(NotImplementedError, match=r"^model: got one with Module, allowed is MaxText's NNXDecoder"):
        ours.vocab_tiling_nnx_loss(model, hidden, data, Config(dtype="float32"), True)


def test_the_trainer_gets_it_and_gives_it_back() -> None:
    places = [importlib.import_module(name) for name in (ours.MODULE, TRAINER) if name == ours.MODULE or stands_in()]
    theirs = places[0].vocab_tiling_nnx_loss
    ours.patch_maxtext(memory_budget=2**20)
    try:
        config = Config(dtype="float32")
        model, (hidden, data) = Model(config), batch("float32")
        for place in places:
            loss, _ = place.vocab_tiling_nnx_loss(model, hidden, data, config, True)
            assert error(loss, full(model, hidden, data, config)[0]) <= ON_TOP_LOSS["float32"]
            if hasattr(place, ours.LINEN):
                with pytest.raises(NotImplementedError, match=r"^model: got a Linen model"):
                    place.vocab_tiling_linen_loss(hidden, data, config, model, {}, True)
        with pytest.raises(RuntimeError, match=r"^maxtext: its loss is replaced already"):
            ours.patch_maxtext()
    finally:
        ours.unpatch_maxtext()
    assert all(place.vocab_tiling_nnx_loss is theirs for place in places)
    with pytest.raises(RuntimeError, match=r"^maxtext: its loss is not replaced"):
        ours.unpatch_maxtext()
    with pytest.raises(ValueError, match=r"^backend: got 'fast'"):
        ours.patch_maxtext(backend="fast")
    check_refusals(ours.patch_maxtext)


def test_a_plan_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours.patch_maxtext(plan="lean")
    try:
        plans = note_plans(monkeypatch, importlib.import_module("logitless.jax_impl.integrations.maxtext_head"))
        config = Config(dtype="float32")
        model, (hidden, data) = Model(config), batch("float32")
        loss, _ = importlib.import_module(ours.MODULE).vocab_tiling_nnx_loss(model, hidden, data, config, True)
    finally:
        ours.unpatch_maxtext()
    assert error(loss, full(model, hidden, data, config)[0]) <= ON_TOP_LOSS["float32"]
    assert plans == ["lean"]


def test_a_maxtext_without_the_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.sys.modules, ours.MODULE, types.ModuleType(ours.MODULE))  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match=r"^maxtext: this version has no vocab_tiling_nnx_loss"):
        ours.patch_maxtext()


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_its_models_against_its_loss(tied: bool, devices: int) -> None:
    """MaxText's own model and loss, alone and on a mesh of 2 × fsdp and 2 × tensor."""
    if stands_in():
        pytest.skip("maxtext is not installed")
    if jax.device_count() < devices:
        pytest.skip("needs four devices")
    from flax.linen import partitioning
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import vocabulary_tiling

    axes = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2} if devices == 4 else {}
    base = os.path.join(os.path.dirname(importlib.import_module("maxtext").__file__ or ""), "configs", "base.yml")
    config = pyconfig.initialize(
        ["", base], run_name="test", enable_checkpointing=False, skip_jax_distributed_system=True, enable_dropout=False,
        max_target_length=T, per_device_batch_size=B // devices, base_num_decoder_layers=1, base_num_query_heads=2,
        base_num_kv_heads=2, head_dim=8, base_emb_dim=D, base_mlp_dim=32, vocab_size=V, dtype="float32",
        num_vocab_tiling=2, z_loss_multiplier=1e-2, logits_via_embedding=tied, final_logits_soft_cap=3.0 * tied, **axes,
    )  # fmt: skip
    shape = [2 if f"ici_{name}_parallelism" in axes else 1 for name in config.mesh_axes]
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(shape), config.mesh_axes)
    hidden, data = batch("float32")
    with mesh, partitioning.axis_rules(config.logical_axis_rules):
        rngs = nnx.Rngs(params=0, dropout=1)
        model = models.Transformer(config, mesh=mesh, quant=None, model_mode="train", rngs=rngs)
        if tied:  # MaxText rounds a tied head and its gradient to bfloat16 even beside float32
            table = model.token_embedder.embedding
            table[...] = table[...].astype("bfloat16").astype("float32")
        made = outcome(ours.vocab_tiling_nnx_loss, model, hidden, data, config, True)
        right = outcome(vocabulary_tiling.vocab_tiling_nnx_loss, model, hidden, data, config, True)
    for number, (a, b) in enumerate(zip(made, right, strict=True)):
        assert error(a, b) <= (GRADIENT["bfloat16"] if tied else CHAIN), number
