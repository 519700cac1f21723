"""PEFT's own adapters on the LM head, with the model's loss and with ours, in float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
peft = pytest.importorskip("peft", reason="these tests are about PEFT")

from test_patch import V, ids_and_labels, is_made, make  # noqa: E402

from logitless.tolerances import BOUND, GRADIENT, error  # noqa: E402
from logitless.torch_impl import capture_lm_head, linear_cross_entropy, patch  # noqa: E402

LLAMA, GPT, TIED, CAPPED = "LlamaForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"

# Model, and what its LoraConfig has; Phi's head has a bias, Qwen2's is tied, Gemma 2's logits are capped.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": (LLAMA, {"target_modules": ["lm_head"], "lora_alpha": 5}),
    "lora and body": (LLAMA, {"target_modules": ["lm_head", "q_proj"]}),
    "lora, bias": (GPT, {"target_modules": ["lm_head"]}),
    "lora with a bias": (LLAMA, {"target_modules": ["lm_head"], "lora_bias": True}),
    "lora with two biases": (GPT, {"target_modules": ["lm_head"], "lora_bias": True}),
    "lora, dropout": (LLAMA, {"target_modules": ["lm_head"], "lora_dropout": 0.5}),
    "lora, rslora": (LLAMA, {"target_modules": ["lm_head"], "use_rslora": True}),
    "lora, tied": (TIED, {"target_modules": ["lm_head", "q_proj"]}),
    "lora, capped": (CAPPED, {"target_modules": ["lm_head", "q_proj"]}),
    "saved": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved, bias": (GPT, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved, tied": (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    "tokens": (LLAMA, {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 7, 50]}}),
    "tokens, tied": (TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 50]}),
}
pytestmark = [pytest.mark.case(42), pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]


def adapted(name: str, patched: str = "", **more: Any) -> Any:
    """A model in float64 with adapters that are not zero, patched before PEFT has it, after, or not."""
    family, options = CASES[name]
    model = make(family).double()
    if patched == "before":
        patch(model)
    torch.manual_seed(2)
    config = peft.LoraConfig(**{"r": 3, "init_lora_weights": False} | options | more)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter) * (3.0 if "lm_head" in key else 1.0)
    return patch(model) if patched == "after" else model


def run(model: Any, own: bool = False) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients of the patched model; or those of the adapted model's own logits, whose loss in transformers
    is float32."""
    ids, labels = ids_and_labels()
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    loss = truth(model(input_ids=ids).logits, labels) if own else model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def truth(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


def assert_same(ours: tuple[Any, dict[str, Any]], theirs: tuple[Any, dict[str, Any]]) -> None:
    assert error(ours[0], theirs[0]) <= GRADIENT["float64"]
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(gradient.norm()) for gradient in theirs[1].values())
    assert largest > 0
    for key, gradient in theirs[1].items():
        scale = max(float(gradient.norm()), BOUND["share of the largest gradient"] * largest)
        assert float((ours[1][key] - gradient).norm()) <= GRADIENT["float64"] * scale, key


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_adapted_model(name: str, when: str) -> None:
    theirs = run(adapted(name), own=True)
    trained = [key for key in theirs[1] if "lm_head" in key or "embed_tokens" in key]
    assert trained, "the head has nothing that is trained"
    model = adapted(name, when)
    assert_same(run(model), theirs)
    ids, labels = ids_and_labels()
    assert is_made(model(input_ids=ids, labels=labels).logits) is False


@pytest.mark.parametrize("name", CASES)
def test_evaluation_and_adapters_that_are_off(name: str) -> None:
    """Logits in eval mode, disabled adapters, merged ones, and the model without them, each against PEFT's."""
    ids, labels = ids_and_labels()
    plain, model = adapted(name).eval(), adapted(name, "after").eval()

    def compare() -> Any:
        ours, logits = model(input_ids=ids, labels=labels), plain(input_ids=ids).logits
        loss = truth(logits, labels).detach()
        assert error(ours.loss.detach(), loss) <= GRADIENT["float64"]
        assert error((ours.logits + 0).detach(), logits.detach()) <= GRADIENT["float64"]
        return loss

    on = compare()
    with model.disable_adapter(), plain.disable_adapter():
        assert error(compare(), on) > GRADIENT["float32"]
    if name == "lora with a bias":
        return  # PEFT cannot merge it
    for one in (model, plain):
        one.merge_adapter()
    compare()  # where the head is tied, merging changes the embedding too: the loss is another
    for one in (model, plain):
        one.unmerge_adapter()
    compare()
    assert is_made(model.merge_and_unload()(input_ids=ids, labels=labels).logits)


@pytest.mark.parametrize("name", ["lora", "lora, dropout", "saved", "tokens, tied"])
def test_two_adapters(name: str) -> None:
    """The active one counts; for LoRA both together."""
    models = []
    for when in ("", "after"):
        model = adapted(name, when)
        torch.manual_seed(3)
        options = CASES[name][1] | {"r": 2, "init_lora_weights": False}
        model.add_adapter("other", peft.LoraConfig(**options), autocast_adapter_dtype=False)
        model.set_adapter("other")
        models.append(model)
    assert_same(run(models[1]), run(models[0], own=True))
    if "lora" in name:
        for model in models:
            model.base_model.set_adapter(["default", "other"])
        assert_same(run(models[1]), run(models[0], own=True))


@pytest.mark.parametrize("name", CASES)
def test_captured_heads(name: str) -> None:
    ids, labels = ids_and_labels()
    theirs, model = run(adapted(name), own=True), adapted(name)
    torch.manual_seed(5)
    with capture_lm_head(model) as head:
        model(input_ids=ids)
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert_same((loss.detach(), gradients), theirs)


def test_a_variant_of_lora_takes_the_plain_path_before_the_forward_runs() -> None:
    ids, labels = ids_and_labels()
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    reason = "'default' of its LM head is DoraLinearVariant.*merge_adapter"
    theirs, model = run(adapted("lora", use_dora=True), own=True), adapted("lora", use_dora=True)
    forwards: list[int] = []
    model.get_submodule("base_model.model.model").register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(NotImplementedError, match=reason), capture_lm_head(model):
        model(input_ids=ids)
    assert not forwards
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=reason), capture_lm_head(model, fallback="logits") as head:
        model(input_ids=ids)
    assert len(forwards) == 1
    loss = head.linear_cross_entropy(target)
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert_same((loss.detach(), gradients), theirs)
    model.merge_adapter()
    with capture_lm_head(model, fallback="logits") as head:  # the same module, of which nothing was remembered
        model(input_ids=ids)
    assert head.logits is None


def test_bfloat16_models_with_adapters_in_float32() -> None:
    """What PEFT makes of a model in bfloat16: its adapters stay in float32, gradients too."""
    results = []
    for patched in (False, True):
        model = make().bfloat16()
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        results.append(run(patch(model) if patched else model))
    (loss, gradients), (their_loss, their_gradients) = results[1], results[0]
    assert error(loss, their_loss) <= GRADIENT["bfloat16"]
    for key, gradient in their_gradients.items():
        assert gradients[key].dtype == gradient.dtype
        assert error(gradients[key], gradient) <= BOUND["full logits beside ours bfloat16"], key


def test_what_is_no_such_product_is_refused_and_the_remedy_works() -> None:
    ids, labels = ids_and_labels()
    model = adapted("lora", "after", use_dora=True)
    with pytest.raises(NotImplementedError, match=r"'default' of its LM head is DoraLinearVariant.*merge_adapter"):
        model(input_ids=ids, labels=labels)
    expected = truth(adapted("lora", use_dora=True).eval()(input_ids=ids).logits, labels)
    model.merge_adapter()
    found = model.eval()(input_ids=ids, labels=labels).loss
    assert error(found.detach(), expected.detach()) <= GRADIENT["float64"]
    config = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    other = peft.get_peft_model(make(), config)
    with pytest.raises(NotImplementedError, match=r"its LM head is a peft\.tuners\.ia3\..*merge_and_unload"):
        patch(other)
    merged = patch(other.merge_and_unload())
    assert is_made(merged(input_ids=ids, labels=labels).logits) is False
    model = adapted("lora", "after")
    model.get_base_model().lm_head.base_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="forward or backward hooks"):
        model(input_ids=ids, labels=labels)
    assert len(model.get_base_model().lm_head.base_layer.weight) == V
