"""integrations.axolotl: the plugin's hooks, by Axolotl's own manager of plugins where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import stand_ins

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
trl = pytest.importorskip("trl", reason="the plugin replaces TRL's losses for rl")

from logitless.tolerances import ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl.integrations.trl import unpatch_trl  # noqa: E402

ADAPTER = "logitless.torch_impl.integrations.axolotl"


@pytest.fixture(scope="module")
def axolotl() -> Iterator[Any]:
    with stand_ins.without("axolotl", ADAPTER):
        stand_ins.axolotl()
        from logitless.torch_impl.integrations import axolotl

        yield axolotl


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
        )
    )


def test_the_model_is_patched_after_it_is_loaded(axolotl: Any) -> None:
    plain, ids = model(), torch.arange(20).reshape(2, 10)
    cfg = {"logitless_z_loss": 0.1, "logitless_memory_budget": 2**22}
    plugin = axolotl.LogitlessPlugin()
    patched = model()
    plugin.pre_model_load(cfg)
    assert plugin.post_model_load(cfg, patched) is None
    made, z = patched(ids, labels=ids).loss, plain(ids).logits[:, :-1]
    right = (
        torch.nn.functional.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten()) + 0.1 * (z.logsumexp(-1) ** 2).mean()
    )
    assert error(made.detach(), right.detach()) <= ON_TOP_LOSS["float32"]
    with pytest.raises(RuntimeError, match="patched already"):
        plugin.post_model_load(cfg, patched)


def test_rl_replaces_trls_losses(axolotl: Any) -> None:
    plugin, own = axolotl.LogitlessPlugin(), model()
    plugin.pre_model_load({"rl": "dpo"})
    try:
        plugin.post_model_load({"rl": "dpo"}, own)
        assert "forward" not in own.__dict__
        with pytest.raises(RuntimeError, match=r"^trl: its losses are replaced already"):
            plugin.pre_model_load({"rl": "dpo"})
    finally:
        unpatch_trl()


def test_a_plan_by_name(axolotl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    for name in ("patch", "patch_trl"):
        monkeypatch.setattr(axolotl, name, lambda *_, **options: plans.append(options["plan"]))
    plugin, cfg = axolotl.LogitlessPlugin(), {"logitless_plan": "lean"}
    plugin.post_model_load(cfg, model())
    plugin.pre_model_load(cfg | {"rl": "dpo"})
    assert plans == ["lean", "lean"]


def test_its_entries(axolotl: Any) -> None:
    module, _, name = axolotl.LogitlessPlugin().get_input_args().rpartition(".")
    assert (module, name) == (ADAPTER, "LogitlessArgs")
    assert axolotl.LogitlessArgs().logitless_memory_budget is None
    with pytest.raises(ValueError, match="logitless_memory_budget"):
        axolotl.LogitlessArgs(logitless_memory_budget="much")
    with pytest.raises(ValueError, match=r"logitless_plan\n.* 'fast', 'balanced' or 'lean'"):
        axolotl.LogitlessArgs(logitless_plan="quick")
    plugin = axolotl.LogitlessPlugin()
    with pytest.raises(ValueError, match=r"^cut_cross_entropy: got True beside LogitlessPlugin"):
        plugin.pre_model_load({"cut_cross_entropy": True})
    with pytest.raises(ValueError, match=r"^logitless_z_loss: got a value beside rl"):
        plugin.pre_model_load({"rl": "dpo", "logitless_z_loss": 0.1})
    with pytest.raises(ValueError, match=r"^backend: got 'fast'"):
        plugin.post_model_load({"logitless_backend": "fast"}, model())
    both = {"logitless_plan": "lean", "logitless_memory_budget": 2**22}
    with pytest.raises(ValueError, match=r"^memory_budget: got a value beside a plan"):
        plugin.post_model_load(both, model())
    with pytest.raises(ValueError, match=r"^memory_budget: got a value beside a plan"):
        plugin.pre_model_load(both | {"rl": "dpo"})


def test_by_its_manager_of_plugins(axolotl: Any) -> None:
    if not stand_ins.is_installed("axolotl"):
        pytest.skip("Axolotl is not installed")
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register(f"{ADAPTER}.LogitlessPlugin")
    assert any(isinstance(plugin, BasePlugin) for plugin in manager.plugins.values())
    assert manager.get_input_args() == [f"{ADAPTER}.LogitlessArgs"]
    cfg, own = DictDefault({}), model()
    manager.pre_model_load(cfg)
    manager.post_model_load(cfg, own)
    assert "forward" in own.__dict__
