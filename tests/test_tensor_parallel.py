"""patch on a model that transformers' own tensor parallelism has cut, on two processes: training, then evaluation."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the model is one of transformers")

from ranks import Ranks  # noqa: E402

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import patch  # noqa: E402


def parallel_run(rank: int, folder: str) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    ids = torch.arange(20).reshape(2, 10)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder).train()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").train()
    assert model.lm_head.weight.placements[0].is_shard(0)
    patch(model)
    made = []
    for one in (model, plain):
        loss = one(ids, labels=ids).loss
        loss.backward()
        gradients = (one.lm_head.weight.grad, one.model.norm.weight.grad)
        made.append([loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)])
    with torch.no_grad():
        logits = [torch.as_tensor(one.eval()(ids, labels=ids).logits) for one in (model, plain)]
    return [[value.numpy() for value in values] for values in (*made, logits)]


@pytest.mark.case(40)
@pytest.mark.case(42)
def test_training_and_then_evaluation(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with Ranks(2) as pool:
        for ours, theirs, (logits, their_logits) in pool.run(parallel_run, str(tmp_path)):
            assert error(ours[0], theirs[0]) <= ON_TOP_LOSS["float32"]
            for made, expected in zip(ours[1:], theirs[1:], strict=True):
                assert error(made, expected) <= ON_TOP_GRADIENT["float32"]
            assert error(logits, their_logits) <= ON_TOP_LOSS["float32"]
