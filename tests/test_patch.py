"""patch and unpatch: Hugging Face's own models, tiny and random, with their loss and with ours."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from limits import check_refusals, note_plans

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

from logitless.tolerances import BOUND, CHAIN, ELEMENTS, ON_TOP_GRADIENT, ON_TOP_LOSS, TINY, error  # noqa: E402
from logitless.torch_impl import capture_lm_head, patch, unpatch  # noqa: E402
from logitless.torch_impl.huggingface.lazy_logits import LazyLogits  # noqa: E402
from logitless.torch_impl.memory import peak_scratch_bytes  # noqa: E402

V = 101

# Class of transformers → what its tiny configuration has beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 4, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "GraniteForCausalLM": {"logits_scaling": 4.0},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    "MixtralForCausalLM": {"num_local_experts": 4, "output_router_logits": True},
}
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make(name: str = "LlamaForCausalLM", **options: Any) -> Any:
    """A model in training mode, its logits large enough for a softcap to bend them."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES | FAMILIES.get(name, {}) | options))
    with torch.no_grad():
        model.get_output_embeddings().weight *= 8
    return model.train()


def is_made(logits: Any) -> bool:
    """Whether an output has logits. Where it has none, using them raises an error that says how to get them."""
    if not isinstance(logits, LazyLogits):
        return True
    assert logits.shape[-1] == V
    with contextlib.suppress(RuntimeError):
        logits.sum()
        return True
    with pytest.raises(RuntimeError, match=r"patch\(model, return_logits=True\)"):
        logits[0]
    return False


def ids_and_labels() -> tuple[Any, Any]:
    ids = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    ids, labels = ids_and_labels()
    model.zero_grad()
    loss = model(**{"input_ids": ids, "labels": labels} | inputs)["loss"]
    loss.backward()
    return loss.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[Any, dict[str, Any]], theirs: tuple[Any, dict[str, Any]]) -> None:
    """Loss and every gradient agree within the table; each gradient counts on the scale of the largest."""
    assert error(ours[0], theirs[0]) <= ON_TOP_LOSS["float32"]
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(gradient.norm()) for gradient in theirs[1].values())
    assert largest > 0
    for key, gradient in theirs[1].items():
        difference = float((ours[1][key] - gradient).norm())
        scale = max(float(gradient.norm()), BOUND["share of the largest gradient"] * largest)
        assert difference <= ON_TOP_GRADIENT["float32"] * scale, key


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_gradients_and_logits_are_the_models_own(name: str) -> None:
    model, (ids, labels) = make(name), ids_and_labels()
    theirs, output = loss_and_gradients(model), model(ids, labels=labels)
    model.eval()
    evaluated = model(ids, labels=labels)
    assert patch(model) is model
    model.train()
    assert_same(loss_and_gradients(model), theirs)
    made = model(ids, labels=labels)
    assert is_made(made.logits) is False
    assert made.keys() == output.keys()
    model.eval()
    with torch.no_grad():
        made = model(ids, labels=labels)
    assert error(made.loss, evaluated.loss.detach()) <= ON_TOP_LOSS["float32"]
    torch.testing.assert_close(made.logits, evaluated.logits.detach())


def with_image(name: str) -> tuple[Any, dict[str, Any]]:
    """A model of text and images, and inputs with one image of 8 × 8 in each text, whose tokens are 5."""
    generator = torch.Generator().manual_seed(3)
    tower = {"hidden_size": 32, "patch_size": 4}
    if name == "LlavaForConditionalGeneration":
        vision = transformers.CLIPVisionConfig(
            **tower, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8
        )
        text = transformers.LlamaConfig(**SIZES)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=5, image_seq_length=4)
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        tower |= {"depth": 1, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 1}
        config = transformers.Qwen2VLConfig(
            text_config={**SIZES, "rope_parameters": rope},
            vision_config={**tower, "temporal_patch_size": 1, "spatial_merge_size": 1}, image_token_id=5,
            vision_start_token_id=6, vision_end_token_id=7, video_token_id=8,
        )  # fmt: skip
        inputs = {
            "pixel_values": torch.randn(8, 48, generator=generator), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
            "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0]] * 2, dtype=torch.int32),
        }  # fmt: skip
    ids = ids_and_labels()[0].clamp(min=9)
    ids[:, 1], ids[:, 2:6] = 6, 5
    torch.manual_seed(0)
    return getattr(transformers, name)(config).train(), {**inputs, "input_ids": ids}


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_models_of_text_and_images(name: str) -> None:
    model, inputs = with_image(name)
    theirs = loss_and_gradients(model, **inputs)
    assert any("vision" in key or "visual" in key for key in theirs[1])
    assert_same(loss_and_gradients(patch(model), **inputs), theirs)
    assert is_made(model(**inputs, labels=inputs["input_ids"]).logits) is False


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": 29},
        {"num_items_in_batch": torch.tensor(29)},
        {"labels": torch.full((2, 9), 1), "shift_labels": torch.arange(18).reshape(2, 9)},
        {"ignore_index": 5, "labels": torch.arange(18).reshape(2, 9) % 7},
        {"attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6])},
    ],
    ids=["items", "items tensor", "shift_labels", "ignore_index", "attention_mask"],
)
def test_what_the_loss_is_called_with_is_honoured(inputs: dict[str, Any]) -> None:
    model = make()
    plain, theirs = loss_and_gradients(model), loss_and_gradients(model, **inputs)
    assert error(theirs[0], plain[0]) > 1e-3
    assert_same(loss_and_gradients(patch(model), **inputs), theirs)


def test_positions_and_tuples() -> None:
    model, (ids, labels) = make(), ids_and_labels()
    expected = model(ids, labels=labels).loss
    patch(model)
    found = model(ids, None, None, None, None, labels, return_dict=False, use_cache=False)
    assert type(found) is tuple
    assert len(found) == 2
    assert not is_made(found[1])
    torch.testing.assert_close(found[0], expected)
    _, logits = model.eval()(ids, labels=labels, return_dict=False, use_cache=False)
    assert logits.shape == (2, 9, V)
    with pytest.raises(ValueError, match=r"labels: got shape \(2, 9\), allowed is one label for each of \(2, 3\) logi"):
        model(ids, labels=labels, logits_to_keep=3)
    with pytest.raises(ValueError, match=rf"target: got id {V}"):
        model(ids, labels=torch.full_like(labels, V))


def test_options_change_the_loss() -> None:
    model, (ids, labels) = make(), ids_and_labels()
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = model(ids).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    expected = expected + 1e-2 * (logits.logsumexp(-1) ** 2)[target != -100].mean()
    expected.backward()
    theirs = expected.detach(), {key: p.grad.clone() for key, p in model.named_parameters()}
    assert_same(loss_and_gradients(patch(model, label_smoothing=0.1, z_loss=1e-2)), theirs)


@pytest.mark.parametrize("wanted", [True, False])
def test_return_logits(wanted: bool) -> None:
    model, (ids, labels) = patch(make(), return_logits=wanted), ids_and_labels()
    for mode in (True, False):
        assert is_made(model.train(mode)(ids, labels=labels).logits) == wanted
    if wanted:
        model.train()(ids, labels=labels).logits.sum().backward()
        assert model.lm_head.weight.grad.abs().max() > 0


def test_no_logits_are_made_within_the_budget() -> None:
    model = make(vocab_size=20_000)
    ids = torch.randint(3, 20_000, (4, 64))
    logits_bytes, weight_bytes = ids.numel() * 20_000 * 4, 20_000 * 32 * 4

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    assert peak_scratch_bytes(step) > 2 * logits_bytes
    patch(model, memory_budget=4 * 2**20)
    # The gradients of head and embedding, a copy of one, the budget, and the small model's own.
    assert peak_scratch_bytes(step) < 3 * weight_bytes + 6 * 2**20 < logits_bytes


def test_a_budget_that_no_plan_fits_names_the_smallest() -> None:
    model, (ids, labels) = patch(make(), memory_budget=1000), ids_and_labels()
    with pytest.raises(ValueError, match=rf"memory_budget: got 1000 bytes, allowed for tokens=18, .* vocab={V}"):
        model(ids, labels=labels)
    assert "forward" not in model.lm_head.__dict__


def test_a_plan_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = loss_and_gradients(make())
    plans = note_plans(monkeypatch, importlib.import_module("logitless.torch_impl.huggingface.model_loss"))
    assert_same(loss_and_gradients(patch(make(), plan="lean")), theirs)
    assert plans == ["lean"]


def test_gradient_checkpointing() -> None:
    model = make(num_hidden_layers=2)
    theirs = loss_and_gradients(model)
    model.gradient_checkpointing_enable()
    assert_same(loss_and_gradients(patch(model), use_cache=False), theirs)


def test_autocast() -> None:
    model, (ids, labels) = make("Gemma2ForCausalLM"), ids_and_labels()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, labels=labels).loss
        loss = patch(model)(ids, labels=labels).loss
    loss.backward()
    assert loss.dtype == model.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, **ELEMENTS["bfloat16 loss"])


def test_without_labels_nothing_changes() -> None:
    model, (ids, _) = make("Gemma2ForCausalLM").eval(), ids_and_labels()
    generated, logits = model.generate(ids, max_new_tokens=4, do_sample=False), model(ids).logits
    patch(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.train()(ids).logits, logits)
    with capture_lm_head(model) as head:
        model(ids)
    assert head.hidden.shape == (2, 9, 32)
    with pytest.raises(ValueError, match="labels: got some inside capture_lm_head"), capture_lm_head(model):
        model(ids, labels=ids)
    with pytest.raises(RuntimeError, match="its LM head is recorded already"), capture_lm_head(model):
        model.forward(ids, labels=ids)


# ---------------------------------------------------------------------------------------------------------------------
# The model as an object


def test_unpatch_and_saving(tmp_path: Any) -> None:
    model, (ids, labels) = make(), ids_and_labels()
    before, keys, expected = set(model.__dict__), list(model.state_dict()), model(ids, labels=labels)
    patch(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "model.pt")
    for plain in (
        type(model).from_pretrained(tmp_path),
        torch.load(tmp_path / "model.pt", weights_only=False),
        pickle.loads(pickle.dumps(model)),
        unpatch(model),
    ):
        made = plain(ids, labels=labels)
        assert torch.equal(made.logits, expected.logits)
        assert torch.equal(made.loss, expected.loss)
    assert set(model.__dict__) == before
    assert "forward" not in model.lm_head.__dict__


def test_a_copy_has_its_own_weights() -> None:
    model, (ids, labels) = patch(make()), ids_and_labels()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight *= 2
    loss = other(ids, labels=labels)
    assert is_made(loss.logits) is False
    assert error(loss.loss.detach(), model(ids, labels=labels).loss.detach()) > 1e-2
    torch.testing.assert_close(loss.loss, unpatch(other)(ids, labels=labels).loss)
    assert is_made(model(ids, labels=labels).logits) is False


def test_what_failed_leaves_nothing_behind() -> None:
    model, (ids, labels) = patch(make()), ids_and_labels()
    expected = model(ids, labels=labels).loss
    with pytest.raises(IndexError):
        model(ids + V, labels=labels)
    assert not {"_loss_function"} & set(model.__dict__)
    assert "forward" not in model.lm_head.__dict__
    assert torch.equal(model(ids, labels=labels).loss, expected)


def test_patching_twice_and_unpatching_what_is_not() -> None:
    model = patch(make())
    with pytest.raises(RuntimeError, match="patched already"):
        patch(model)
    patched = model.forward
    model.forward = functools.wraps(patched)(lambda *arguments, **named: patched(*arguments, **named))
    with pytest.raises(RuntimeError, match="patched already"):
        patch(model)
    with pytest.raises(RuntimeError, match="its patched forward was wrapped since"):
        unpatch(model)
    model.forward = patched
    unpatch(model)
    with pytest.raises(RuntimeError, match="is not patched"):
        unpatch(model)


def test_an_instances_own_forward_is_kept() -> None:
    """accelerate gives instances a forward of their own."""
    model, (ids, labels) = make(), ids_and_labels()
    plain, calls = model.forward, []

    @functools.wraps(plain)
    def own(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return plain(*arguments, **named)

    model.forward = own
    assert is_made(patch(model)(ids, labels=labels).logits) is False
    assert len(calls) == 1
    assert unpatch(model).forward is own


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def changed(change: Any, name: str = "LlamaForCausalLM", **options: Any) -> Any:
    model = make(name, **options)
    change(model)
    return model


class Bent(torch.nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


REFUSED = {
    "non-linear head": (
        lambda: changed(lambda model: setattr(model, "lm_head", Bent(32, V))), r"its LM head is a \w+\.Bent, allowed",
    ),
    "quantised head": (
        lambda: changed(lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(
            torch.zeros(V, 32, dtype=torch.uint8), requires_grad=False))), r"its LM head's weight is torch\.uint8",
    ),
    "head with hooks": (
        lambda: changed(lambda model: model.lm_head.register_forward_hook(lambda *_: None)), "has forward or backward",
    ),
    "another loss": (
        lambda: changed(lambda model: setattr(model, "loss_function", lambda **_: 0)), "its loss_function is '.*lambda",
    ),
    "no causal model": (lambda: torch.nn.ModuleDict({"lm_head": torch.nn.Linear(4, 4)}), "ModuleDict has no loss_fun"),
    "no head": (lambda: make().model, "found 0 LM heads in LlamaModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_patch_refuses(name: str) -> None:
    build, words = REFUSED[name]
    model = build()
    with pytest.raises(NotImplementedError, match=words):
        patch(model)
    assert "forward" not in model.__dict__


def own_forward(code: Any) -> Any:
    """A model of transformers that computes ``code(model, hidden, labels)`` where others make logits and loss."""

    class Other(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
            loss, logits = code(self, self.model.norm(self.model.embed_tokens(input_ids)), labels)
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    return Other(transformers.LlamaConfig(**SIZES))


def loss_of(change: Any, **options: Any) -> Any:
    def code(model: Any, hidden: Any, labels: Any) -> Any:
        logits = change(model, hidden)
        return model.loss_function(logits=logits, labels=labels, **{"vocab_size": V} | options), logits

    return own_forward(code)


def its_own(model: Any, hidden: Any, labels: Any) -> Any:
    logits = model.lm_head(hidden)
    return torch.nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1)), logits


def none_at_all(model: Any, hidden: Any, labels: Any) -> Any:
    return hidden.sum(), model.lm_head(hidden)


def twice(model: Any, hidden: Any, labels: Any) -> Any:
    logits = model.lm_head(hidden)
    return sum(model.loss_function(logits, labels, V) for _ in range(2)), logits


REFUSED_FORWARDS = {
    "scaled": (lambda: loss_of(lambda m, h: m.lm_head(h) * 2), "its logits are not z"),
    "masked": (
        lambda: loss_of(lambda m, h: m.lm_head(h).index_fill(-1, torch.tensor([7]), 0)),
        "computes its loss its",
    ),
    "cut": (lambda: loss_of(lambda m, h: m.lm_head(h)[:, 1:]), "cuts or rearranges its logits"),
    "fewer classes": (lambda: loss_of(lambda m, h: m.lm_head(h), vocab_size=V - 1), "computes its loss over 100 class"),
    "other logits": (lambda: loss_of(lambda m, h: h), "computes a loss of other logits than its LM head's"),
    "two losses": (lambda: own_forward(twice), "or more than one, allowed is one"),
    "its own loss": (lambda: own_forward(its_own), "computes its loss itself, or does more with its logits"),
    "no loss": (lambda: own_forward(none_at_all), "did not call its loss_function"),
}


@pytest.mark.parametrize("name", REFUSED_FORWARDS)
def test_forwards_that_are_refused(name: str) -> None:
    build, words = REFUSED_FORWARDS[name]
    model, (ids, labels) = patch(build()), ids_and_labels()
    with pytest.raises(NotImplementedError, match=words):
        model(ids, labels=labels)
    assert "forward" not in model.lm_head.__dict__


def test_wrong_arguments() -> None:
    model = make()
    with pytest.raises(TypeError, match=r"model: got str, allowed is a torch\.nn\.Module"):
        patch("gpt2")
    with pytest.raises(TypeError, match=r"model: got str, allowed is a torch\.nn\.Module"):
        unpatch("gpt2")
    with pytest.raises(TypeError, match="return_logits: got 1, allowed are True, False and None"):
        patch(model, return_logits=1)
    with pytest.raises(ValueError, match="label_smoothing: got 2"):
        patch(model, label_smoothing=2)
    check_refusals(functools.partial(patch, model))
    with pytest.raises(TypeError, match=r"memory_budget: got float 1\.5, allowed is an integer"):
        patch(model, memory_budget=1.5)
    with pytest.raises(ValueError, match="backend: got 'pallas'"):
        patch(model, backend="pallas")
    with pytest.raises(NotImplementedError, match="takes no labels"):
        patch(changed(lambda model: setattr(model, "forward", lambda input_ids: None)))
    assert "forward" not in model.__dict__


# ---------------------------------------------------------------------------------------------------------------------
# What others put around a model


def train(patched: bool, folder: Any, **options: Any) -> tuple[list[float], dict[str, float], Any]:
    """Three steps of two micro-batches with different numbers of labels, then an evaluation with a metric."""
    model = make()
    if patched:
        patch(model)
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(3, V, (12, 10), generator=generator)]
    for count, entry in enumerate(data):
        entry["labels"][: count % 8] = -100
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", optim="sgd",
            learning_rate=0.1, max_grad_norm=0.0, **options,
        ),
        train_dataset=data,
        eval_dataset=data[:4],
        compute_metrics=lambda seen: {"largest": float(seen.predictions.max()), "classes": seen.predictions.shape[-1]},
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.evaluate(), model


def test_trainer(tmp_path: Any) -> None:
    """Gradient accumulation by the number of items in all micro-batches, checkpointing, evaluation with logits."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    losses, metrics, model = train(False, tmp_path)
    our_losses, our_metrics, our_model = train(True, tmp_path, gradient_checkpointing=True)
    assert len(set(losses)) == 3
    assert our_losses == pytest.approx(losses, rel=BOUND["logged"])  # they are logged with that many digits
    assert our_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=CHAIN)
    assert our_metrics["eval_largest"] == pytest.approx(metrics["eval_largest"], rel=BOUND["logged"])
    assert our_metrics["eval_classes"] == V
    for ours, theirs in zip(our_model.parameters(), model.parameters(), strict=True):
        assert error(ours.detach(), theirs.detach()) < CHAIN


def test_accelerate_and_mixed_precision() -> None:
    """accelerate's wrapper of the forward is added and removed, and the patch stays."""
    accelerate = pytest.importorskip("accelerate", reason="this is about it")
    model, (ids, labels) = patch(make()), ids_and_labels()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # Trainer's
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare(model)
        assert is_made(prepared(ids, labels=labels).logits) is False
        with pytest.raises(RuntimeError, match="wrapped since"):
            unpatch(model)
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert is_made(model(ids, labels=labels).logits) is False
        assert is_made(unpatch(model)(ids, labels=labels).logits)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_on_the_body(patch_first: bool) -> None:
    peft = pytest.importorskip("peft", reason="this is about it")

    def build(patched: bool) -> Any:
        model = make()
        if patched and patch_first:
            patch(model)
        torch.manual_seed(2)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return patch(model) if patched and not patch_first else model

    ours, theirs = loss_and_gradients(build(True)), loss_and_gradients(build(False))
    assert len(theirs[1]) == 2  # of an adapter alone: the head is frozen
    assert_same(ours, theirs)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_data_parallel_wrappers(wrapper: str) -> None:
    """With one process: where the weight is a DTensor outside of the model's forward, it is whole inside."""
    theirs, (ids, labels) = loss_and_gradients(make()), ids_and_labels()
    with one_process():
        model = patch(make())
        if wrapper == "ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = torch.distributed.fsdp.fully_shard(model, reshard_after_forward=True)
        loss, gradients = loss_and_gradients(wrapped)
        whole = {
            key.removeprefix("module."): gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            for key, gradient in gradients.items()
        }
        assert_same((loss, whole), theirs)
        assert wrapped.eval()(ids, labels=labels).logits.shape == (2, 9, V)


def test_compile_takes_the_body_as_one_graph_once() -> None:
    class Short(transformers.LlamaForCausalLM):  # tracing a whole model takes seconds
        def forward(self, input_ids: Any, labels: Any) -> Any:
            logits = self.lm_head(self.model.norm(self.model.embed_tokens(input_ids)))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
            return {"loss": loss, "logits": logits}

    model = patch(Short(transformers.LlamaConfig(**SIZES)))
    expected = loss_and_gradients(model)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        loss, gradients = loss_and_gradients(compiled)
        assert_same((loss, {key.removeprefix("_orig_mod."): g for key, g in gradients.items()}), expected)
    assert len(graphs) == 1


def test_the_benchmark_runs() -> None:
    """On a tiny model: every loss begins at the same value; the search for a batch finds the largest."""
    from bench import hf

    losses = []
    for variant in ("transformers", "logitless", "logitless, 2 GiB"):
        (row,) = hf.measure(variant, hf.TINY)
        assert row["tokens_per_s"] > 0, row
        losses.append(row["first_loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=TINY["float32"])
    assert [hf.largest(lambda batch: batch <= 11, limit) for limit in (5, 10, 11, 12, 100)] == [5, 10, 11, 11, 11]
    assert hf.largest(lambda batch: False, 8) == 0


def test_the_benchmarks_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the patch. A batch without a plan within the budget does not fit. Any other failure stays one."""
    from bench import hf

    monkeypatch.setattr(hf, "BUDGET", 200_000)
    trainee = hf.Trainee(hf.TINY, "logitless, 2 GiB")
    assert [trainee.fits(batch) for batch in (1, 64, 2)] == [True, False, True]
    monkeypatch.setattr(trainee, "step", lambda batch: int("none"))
    with pytest.raises(ValueError, match="invalid literal"):
        trainee.fits(1)
