"""capture_lm_head: hidden states and head of models that are built as Hugging Face's are, without logits."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import ELEMENTS  # noqa: E402
from logitless.torch_impl import capture_lm_head, linear_cross_entropy  # noqa: E402
from logitless.torch_impl.memory import peak_scratch_bytes  # noqa: E402

D, V = 16, 101


class Output(dict):
    """Like transformers' ModelOutput: a dict whose keys are attributes too."""

    __getattr__ = dict.get


class Model(torch.nn.Module):
    """A causal language model with an embedding, one layer and an LM head, as transformers lays it out."""

    def __init__(self, bias: bool = False, tied: bool = False, **config: Any) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(**config)
        self.embed = torch.nn.Embedding(V, D)
        self.layer = torch.nn.Linear(D, D)
        self.lm_head = torch.nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def finish(self, logits: Any) -> Any:
        """What the model does with the head's result."""
        return logits

    def forward(self, ids: Any, labels: Any = None) -> Any:
        logits = self.finish(self.lm_head(torch.tanh(self.layer(self.embed(ids)))))
        return Output(logits=logits.float())


class Gemma2(Model):
    def finish(self, logits: Any) -> Any:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Cohere(Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.logit_scale = self.config.logit_scale

    def finish(self, logits: Any) -> Any:
        return logits * self.logit_scale


class Granite(Model):
    def finish(self, logits: Any) -> Any:
        return logits / self.config.logits_scaling


class FalconH1(Model):
    def finish(self, logits: Any) -> Any:
        return logits * self.config.lm_head_multiplier


class TextConfig(Gemma2):
    """The setting is in the text part of a configuration."""

    def __init__(self) -> None:
        super().__init__()
        text = types.SimpleNamespace(final_logit_softcapping=5.0)
        self.config = types.SimpleNamespace(get_text_config=lambda: text)

    def finish(self, logits: Any) -> Any:
        return torch.tanh(logits / 5.0) * 5.0


MODELS: dict[str, Callable[[], Model]] = {
    "plain": Model,
    "bias": lambda: Model(bias=True),
    "tied": lambda: Model(tied=True),
    "gemma2": lambda: Gemma2(final_logit_softcapping=3.0, tied=True),
    "gemma2_uncapped": lambda: Gemma2(final_logit_softcapping=None),
    "cohere": lambda: Cohere(logit_scale=0.0625, tied=True),
    "granite": lambda: Granite(logits_scaling=8.0),
    "falcon_h1": lambda: FalconH1(lm_head_multiplier=0.4),
    "text_config": TextConfig,
}


def ids_and_target() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (3, 8), generator=generator)
    return ids[:, :-1], ids[:, 1:].clone()


def captured_loss(model: Any, ids: Any, target: Any) -> Any:
    with capture_lm_head(model) as head:
        model(ids)
    return linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_models_own(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        model.lm_head.weight *= 8  # logits that a softcap bends
    ids, target = ids_and_target()
    target[0, :3] = -100
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    expected.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    loss = captured_loss(model, ids, target)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key])
        assert wanted[key].abs().max() > 0
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=0)


def test_what_is_captured_is_the_parameter_itself() -> None:
    model = MODELS["gemma2"]()
    with capture_lm_head(model) as head:
        model(ids_and_target()[0])
    assert head.weight is model.embed.weight
    assert head.bias is None
    assert head.hidden.shape == (3, 7, D)
    assert head.options == {"logit_scale": 1.0, "softcap": 3.0}


def test_the_check_reads_nothing_from_the_models_device() -> None:
    """A meta tensor's numbers cannot be read, as those on a GPU cannot without waiting for it."""
    model = Gemma2(final_logit_softcapping=3.0).to("meta")
    with capture_lm_head(model) as head:
        model(ids_and_target()[0].to("meta"))
    assert head.hidden.device.type == "meta"


def test_no_logits_are_made() -> None:
    model = Model()
    model.lm_head = torch.nn.Linear(D, 50_000, bias=False)
    ids = ids_and_target()[0]
    logits_bytes = ids.numel() * 50_000 * 4

    def plain() -> None:
        model(ids)

    def captured() -> None:
        with capture_lm_head(model):
            model(ids)

    assert peak_scratch_bytes(plain) >= logits_bytes
    assert peak_scratch_bytes(captured) < logits_bytes / 50


class Wrapper(torch.nn.Module):
    """Wraps a model as PEFT and DistributedDataParallel do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.module = inner

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)


class Unnamed(Model):
    """A model that does not say which module its head is."""

    get_output_embeddings = None  # type: ignore[assignment]


@pytest.mark.parametrize("make", [lambda: Gemma2(final_logit_softcapping=2.0), lambda: Unnamed(bias=True)])
def test_nested_and_unnamed(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    ids, target = ids_and_target()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(captured_loss(Wrapper(Wrapper(model)), ids, target), expected)


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict"])
def test_outputs_of_any_shape(shape: str) -> None:
    class Shaped(Model):
        def forward(self, ids: Any) -> Any:
            logits = super().forward(ids)["logits"]
            return {"tensor": logits, "tuple": (logits, None), "dict": {"logits": logits}}[shape]

    model = Shaped()
    ids, target = ids_and_target()
    assert captured_loss(model, ids, target).isfinite()


def test_no_grad_and_autocast() -> None:
    torch.manual_seed(0)
    model, (ids, target) = Gemma2(final_logit_softcapping=3.0, bias=True), ids_and_target()
    with torch.no_grad(), capture_lm_head(model) as head:
        model(ids)
        assert not head.hidden.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        with capture_lm_head(model) as head:
            model(ids)
        loss = linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)
        logits = model(ids).logits
    loss.backward()
    assert head.hidden.dtype == torch.bfloat16
    assert model.lm_head.weight.grad.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected, **ELEMENTS["bfloat16 logits"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_models_pass_the_check(name: str, dtype: Any) -> None:
    model = MODELS[name]().to(dtype)
    with capture_lm_head(model) as head:
        model(ids_and_target()[0])
    assert head.hidden.dtype == dtype


def test_the_module_is_restored_whatever_happens() -> None:
    model, (ids, _) = Model(), ids_and_target()
    before = dict(model.lm_head.__dict__), set(model.__dict__), model(ids).logits
    with pytest.raises(IndexError), capture_lm_head(model):
        model(ids + V)
    with pytest.raises(ValueError, match="labels: got some inside capture_lm_head"), capture_lm_head(model):
        model(ids, labels=ids)
    assert "forward" not in model.lm_head.__dict__
    assert dict(model.lm_head.__dict__) == before[0]
    assert set(model.__dict__) == before[1]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(ids).logits, before[2])


def test_accelerates_forward_comes_back() -> None:
    """accelerate replaces an instance's forward. Its hook, which changes no value, may be left out."""
    hooks = pytest.importorskip("accelerate.hooks", reason="this is about it")
    model, (ids, _) = Model(), ids_and_target()
    hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())
    assert "forward" in model.lm_head.__dict__
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device="cpu"))
    own = model.lm_head.forward
    with capture_lm_head(model) as head:
        model(ids)
    assert head.hidden is not None
    assert model.lm_head.forward is own


@pytest.mark.case(42)
@pytest.mark.parametrize("how", ["a function", "a hook that scales"])
def test_a_head_whose_forward_was_replaced_is_refused(how: str) -> None:
    model, (ids, _) = Model(), ids_and_target()
    if how == "a function":
        model.lm_head.forward = lambda x: 2 * torch.nn.functional.linear(x, model.lm_head.weight)
    else:
        hooks = pytest.importorskip("accelerate.hooks", reason="this is about it")

        class Scaled(hooks.ModelHook):  # type: ignore[misc, name-defined]
            def post_forward(self, module: Any, output: Any) -> Any:
                return 2 * output

        hooks.add_hook_to_module(model.lm_head, Scaled())
    words = r"LM head's forward was replaced on the instance by"
    with pytest.raises(NotImplementedError, match=words), capture_lm_head(model):
        model(ids)


def test_hidden_before_a_forward_and_after_one_that_failed() -> None:
    model, (ids, _) = Model(), ids_and_target()
    with capture_lm_head(model) as head:
        with pytest.raises(RuntimeError, match="no forward of the module"):
            _ = head.hidden
        model(ids)
        first = head.hidden
        with pytest.raises(IndexError):
            model(ids + V)
        with pytest.raises(RuntimeError, match="no forward of the module"):
            _ = head.hidden
        model(ids[:1])
        assert head.hidden.shape[0] == 1 != first.shape[0]


class Doubled(Model):
    def finish(self, logits: Any) -> Any:
        return logits * 2


class Capped(Model):
    def finish(self, logits: Any) -> Any:
        return torch.tanh(logits / 50) * 50


class Shifted(Model):
    def finish(self, logits: Any) -> Any:
        return logits + 0.01


class Hidden(Model):
    def forward(self, ids: Any) -> Any:
        return super().forward(ids)["logits"].mean()


class Twice(Model):
    def finish(self, logits: Any) -> Any:
        return logits + self.lm_head(torch.zeros(3, 7, D))


class Unused(Model):
    def forward(self, ids: Any) -> Any:
        return self.embed(ids)


REFUSED_FORWARDS = {
    "multiplied": (Doubled, r"its logits are not z = f\(hidden @ weight\.T \+ bias\) with the logit_scale = 1 and"),
    "shifted": (Shifted, "its logits are not z"),
    "capped without saying": (Capped, "= None that its configuration says"),
    "says a scale and applies none": (lambda: Model(logits_scaling=8.0), "logit_scale = 0.125"),
    "gives no logits": (Hidden, "its forward gave Tensor without logits that could be checked"),
    "runs its head twice": (Twice, "runs its LM head more than once"),
    "runs no head": (Unused, "its forward did not run the LM head"),
}


@pytest.mark.parametrize("name", REFUSED_FORWARDS)
def test_models_that_do_otherwise_are_refused(name: str) -> None:
    make, words = REFUSED_FORWARDS[name]
    model = make()
    with capture_lm_head(model) as head:
        with pytest.raises(NotImplementedError, match=words):
            model(ids_and_target()[0])
        with pytest.raises(RuntimeError, match="no forward"):
            _ = head.hidden


class Adapter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(D, V)


class Odd(torch.nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input * 2)


def with_head(head: Any) -> Model:
    model = Model()
    model.lm_head = head
    return model


def packed() -> Any:
    head = torch.nn.Linear(D, V)
    head.weight = torch.nn.Parameter(torch.zeros(V * D // 2, 1, dtype=torch.uint8), requires_grad=False)
    return head


REFUSED_MODULES = {
    "no head": (lambda: torch.nn.Linear(D, V), "found 0 LM heads in Linear"),
    "two heads": (
        lambda: torch.nn.ModuleList([Model(), Model()]),
        r"found 2 LM heads in ModuleList: Model \(0\), Model",
    ),
    "adapter": (lambda: with_head(Adapter()), r"its LM head is a \w+\.Adapter, allowed is a torch\.nn\.Linear: merge"),
    "own forward": (lambda: with_head(Odd(D, V)), r"its LM head is a \w+\.Odd,"),
    "quantised": (lambda: with_head(packed()), "its LM head's weight is torch.uint8"),
    "named scale": (lambda: Model(logit_scale="inv_sqrt_d_model"), "its logit_scale is 'inv_sqrt_d_model', allowed is"),
}


@pytest.mark.parametrize("name", REFUSED_MODULES)
def test_modules_without_a_plain_head_are_refused(name: str) -> None:
    make, words = REFUSED_MODULES[name]
    with pytest.raises(NotImplementedError, match=words), capture_lm_head(make()):
        pass


def test_wrong_arguments() -> None:
    with (
        pytest.raises(TypeError, match=r"module: got function, allowed is a torch\.nn\.Module"),
        capture_lm_head(Wrapper.forward),
    ):
        pass
    model = Model()
    with capture_lm_head(model):
        with pytest.raises(RuntimeError, match="captured already"), capture_lm_head(model):
            pass
        model(ids_and_target()[0])  # the outer one still holds
    assert "forward" not in model.lm_head.__dict__


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 3.0, "head_dim": 8},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "GraniteForCausalLM": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the models themselves are in transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, **TRANSFORMERS[name],
    )  # fmt: skip
    model = kind(config).eval()
    ids, target = ids_and_target()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1).float(), target.flatten())
    torch.testing.assert_close(captured_loss(model, ids, target), expected)
