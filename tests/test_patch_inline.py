"""patch on encoder-decoders and masked language models, whose loss is not shifted: Hugging Face's own models, tiny and
random, with their loss and with ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import patch, unpatch  # noqa: E402
from logitless.torch_impl.huggingface.inline_loss import INLINE  # noqa: E402
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits  # noqa: E402

V = 101
SIZES: dict[str, Any] = dict.fromkeys(
    ("d_model", "d_ff", "hidden_size", "intermediate_size", "dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim",
     "embedding_size"), 32,
)  # fmt: skip
SIZES |= dict.fromkeys(
    ("num_heads", "num_attention_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
SIZES |= dict.fromkeys(("num_layers", "num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"), 1)
SIZES |= dict.fromkeys(
    ("dropout", "dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0
)
SIZES |= {"vocab_size": V, "d_kv": 8, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "cls_token_id": 3}
SIZES |= {"decoder_start_token_id": 2, "sep_token_id": 4, "max_position_embeddings": 64, "attention_window": 4}
# ModernBERT calls its loss_function.
MODELS = [*sorted(INLINE), "ModernBertForMaskedLM", "sparse ModernBertForMaskedLM", "untied T5ForConditionalGeneration"]


def model(name: str) -> Any:
    options = dict(SIZES)
    kind = getattr(transformers, name.split()[-1])
    if name.startswith("sparse"):
        options["sparse_prediction"] = True
    if name.startswith("untied"):
        options["tie_word_embeddings"] = False
    torch.manual_seed(0)
    made = kind(kind.config_class(**options))
    if hasattr(made, "final_logits_bias"):
        made.final_logits_bias.normal_()
    return made


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(5, V, (2, 2, 9), generator=generator)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.case(42)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_models_own(name: str) -> None:
    plain = model(name)
    ours = copy.deepcopy(plain)
    assert patch(ours) is ours
    theirs, made = plain(**batch()), ours(**batch())
    assert list(made) == list(theirs)
    assert isinstance(made.logits, LazyLogits)
    assert made.logits.shape == theirs.logits.shape
    assert error(made.loss.detach(), theirs.loss.detach()) <= ON_TOP_LOSS["float32"]
    theirs.loss.backward()
    made.loss.backward()
    for (parameter, one), two in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert (one.grad is None) == (two[1].grad is None), parameter
    # All of them together: those of the keys' biases are 0 but for rounding.
    every = [torch.cat([v.grad.flatten() for v in one.parameters() if v.grad is not None]) for one in (ours, plain)]
    assert error(*every) <= ON_TOP_GRADIENT["float32"]
    heads = [one.get_output_embeddings().weight.grad for one in (ours, plain)]
    assert error(*heads) <= ON_TOP_GRADIENT["float32"]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM"])
def test_tuples_evaluation_and_the_way_back(name: str) -> None:
    plain = model(name).eval()
    ours = patch(copy.deepcopy(plain))
    with torch.no_grad():
        theirs, made = plain(**batch(), return_dict=False), ours(**batch(), return_dict=False)
        assert len(made) == len(theirs)
        for number in range(2):
            assert error(torch.as_tensor(made[number]), theirs[number]) <= ON_TOP_LOSS["float32"]
        positional = ours(batch()["input_ids"], labels=batch()["labels"])
        assert torch.equal(positional.loss, made[0])
        assert torch.equal(unpatch(ours)(**batch()).loss, plain(**batch()).loss)


def test_a_decoders_own_ids_are_kept() -> None:
    plain = model("T5ForConditionalGeneration").eval()
    ours, own = patch(copy.deepcopy(plain)), torch.full((2, 9), 7)
    made, theirs = (one(**batch(), decoder_input_ids=own).loss.detach() for one in (ours, plain))
    assert error(made, theirs) <= ON_TOP_LOSS["float32"]
    assert error(theirs, plain(**batch()).loss.detach()) > ON_TOP_LOSS["float32"]


@pytest.mark.parametrize("name", ["LongT5ForConditionalGeneration", "MPNetForMaskedLM"])
def test_others_are_refused_by_name(name: str) -> None:
    kind = getattr(transformers, name)
    with pytest.raises(NotImplementedError, match=rf"^model: {name} computes its loss itself, .*BertForMaskedLM"):
        patch(kind(kind.config_class(**{k: v for k, v in SIZES.items() if k in vars(kind.config_class())})))


def test_options_reach_the_loss() -> None:
    plain = model("BertForMaskedLM").eval()
    ours, given = patch(copy.deepcopy(plain), label_smoothing=0.1), batch()
    z = plain(**given).logits.flatten(0, 1)
    right = torch.nn.functional.cross_entropy(z, given["labels"].flatten(), label_smoothing=0.1)
    assert error(ours(**given).loss.detach(), right.detach()) <= ON_TOP_LOSS["float32"]
