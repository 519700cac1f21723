"""capture_lm_head: hidden states and head of models that are built as Hugging Face's are, without logits."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import AREAL, ELEMENTS, GRADIENT, error  # noqa: E402
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
        return Output(logits=logits if logits.dtype == torch.float64 else logits.float())


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
    "cut logits": (lambda: Model(vocab_size=V - 2), f"has vocab_size {V - 2} and its LM head {V} rows, allowed is one"),
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


# ---------------------------------------------------------------------------------------------------------------------
# The plain path, where the head cannot be captured


class OddHead(Model):
    """A head that is no plain linear map: refused before the forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lm_head = Odd(D, V)


class Masked(Model):
    """Fails on the probes: it writes to logits that they do not have."""

    def finish(self, logits: Any) -> Any:
        logits[..., 50] = -1e4
        return logits


# Of a model, and whether its head is captured.
PATHS = pytest.mark.parametrize(
    ("make", "captured"),
    [pytest.param(MODELS["gemma2"], True, id="captured"), pytest.param(OddHead, False, id="plain")],
)


@contextlib.contextmanager
def quietly() -> Any:
    """Without the one warning of the plain path, whose subject is another test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "logitless: capture_lm_head takes the plain path")
        yield


def either(model: Any, ids: Any) -> Any:
    """The same code for both paths, up to the loss."""
    with quietly(), capture_lm_head(model, fallback="logits") as head:
        model(ids)
    return head


def gradients(model: Any, value: Any) -> dict[str, Any]:
    model.zero_grad()
    value.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters()}


def full_statistics(logits: Any, target: Any) -> tuple[Any, Any, dict[str, Any]]:
    """log p(target), entropy and statistics by their formulas, from full logits."""
    counts = target != -100
    ids = target.clamp(min=0)
    lse = logits.logsumexp(-1)
    log_p = logits - lse.unsqueeze(-1)
    log_prob = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    stats = {
        "nll": -log_prob, "lse": lse, "target_logit": logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1), "max_logit": logits.amax(-1), "min_logit": logits.amin(-1),
        "sum_p_squared": log_p.exp().square().sum(-1),
    }  # fmt: skip
    stats = {name: torch.where(counts, value, 0.0) for name, value in stats.items()}
    return -stats["nll"], stats["entropy"], stats


def some_target() -> tuple[Any, Any]:
    ids, target = ids_and_target()
    target[0, :3] = -100
    return ids, target


def same_gradients(found: dict[str, Any], true: dict[str, Any]) -> None:
    for key, value in true.items():
        assert value.abs().max() > 0, key
        assert error(found[key], value) <= GRADIENT["float64"], key


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, smooth": {"reduction": "sum", "label_smoothing": 0.1},
    "z, temperature": {"z_loss": 0.01, "temperature": 0.7},
    "weights, normalizer": {"token_weight": True, "class_weight": True, "normalizer": 7.0},
    "none": {"reduction": "none", "token_weight": True},
}


@PATHS
@pytest.mark.parametrize("name", LOSSES)
def test_one_program_has_the_loss_of_both_paths(make: Any, captured: bool, name: str) -> None:
    torch.manual_seed(0)
    model, (ids, target) = make().double(), some_target()
    drawn = {"token_weight": torch.rand(3, 7).double(), "class_weight": torch.rand(V).double()}
    options = {key: drawn.get(key, value) if value is True else value for key, value in LOSSES[name].items()}
    z = model(ids).logits.double() / options.get("temperature", 1.0)
    # torch.nn.functional has everything but weights per token and z-loss.
    losses = torch.nn.functional.cross_entropy(
        z.transpose(1, 2), target, options.get("class_weight"), reduction="none",
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    counts = target != -100
    losses = losses + options.get("z_loss", 0.0) * torch.where(counts, z.logsumexp(-1).square(), 0.0)
    losses = losses * options.get("token_weight", 1.0)
    how = options.get("reduction", "mean")
    true = losses if how == "none" else losses.sum()
    true = true / options.get("normalizer", counts.sum()) if how == "mean" else true
    slopes = torch.linspace(0.5, 1.5, true.numel()).double().reshape(true.shape)  # different upstream gradients
    expected = gradients(model, (true * slopes).sum())
    head = either(model, ids)
    assert (head.logits is None) is captured
    found = head.linear_cross_entropy(target, **options)
    torch.testing.assert_close(found, true, **ELEMENTS["float64"])
    same_gradients(gradients(model, (found * slopes).sum()), expected)


@PATHS
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_program_has_the_log_probs_and_statistics_of_both_paths(
    make: Any, captured: bool, temperature: float
) -> None:
    torch.manual_seed(0)
    model, (ids, target) = make().double(), some_target()
    model.lm_head.weight.data *= 8
    log_prob, entropy, true = full_statistics(model(ids).logits / temperature, target)
    head = either(model, ids)
    assert (head.logits is None) is captured
    options = {"temperature": temperature}
    alone, nothing = head.linear_log_probs(target, **options)
    _, other = head.linear_log_probs(target, with_entropy=True, **options)
    found, same, stats = head.linear_log_probs(target, return_stats=True, **options)
    assert nothing is None
    for made, value in ((alone, log_prob), (found, log_prob), (other, entropy), (same, entropy)):
        torch.testing.assert_close(made, value, **ELEMENTS["float64"])
    for name, value in true.items():
        torch.testing.assert_close(getattr(stats, name), value, **ELEMENTS["float64"])
        assert value.abs().max() > 0, name
    highest = (model(ids).logits.argmax(-1)).masked_fill(target == -100, -1)
    assert torch.equal(stats.argmax, highest.int())
    assert torch.equal(stats.correct, highest == target)
    a, b, c, d = torch.randn(4, 3, 7).double()
    expected = gradients(model, (a * log_prob + b * entropy + c * true["lse"] + d * true["sum_p_squared"]).sum())
    made = gradients(model, (a * found + b * same + c * stats.lse + d * stats.sum_p_squared).sum())
    same_gradients(made, expected)


@PATHS
def test_both_paths_give_the_smallest_and_the_largest_logit(make: Any, captured: bool) -> None:
    """The statistics that a trainer logs beside a policy's loss, constants, of the model's own logits."""
    torch.manual_seed(0)
    model, (ids, target) = make(), ids_and_target()
    logits = model(ids).logits
    head = either(model, ids)
    _, _, stats = head.linear_log_probs(target, return_stats=True)
    _, of_loss = head.linear_cross_entropy(target, return_stats=True)
    for found in (stats, of_loss):
        torch.testing.assert_close(found.max_logit, logits.amax(-1))
        torch.testing.assert_close(found.min_logit, logits.amin(-1))
        assert not found.max_logit.requires_grad
        assert not found.min_logit.requires_grad
    assert (head.logits is None) is captured


def test_nothing_of_an_ignored_row_is_read_on_the_plain_path() -> None:
    """NaN in an ignored token, and a class that the model has masked with −inf in all others."""

    class Poisoned(OddHead):
        def finish(self, logits: Any) -> Any:
            added = torch.zeros_like(logits)
            added[..., 5] = -torch.inf
            added[0, :3] = torch.nan
            return logits + added

    model, (ids, target) = Poisoned(), some_target()
    target[target == 5] = 6
    log_prob, entropy, stats = either(model, ids).linear_log_probs(target, return_stats=True)
    made = gradients(model, (log_prob + entropy + stats.lse + stats.sum_p_squared).sum())
    for value in (log_prob, entropy, *made.values()):
        assert value.isfinite().all()
    kept = model(ids).logits[1:]
    kept = kept[..., [i for i in range(V) if i != 5]]
    _, true, _ = full_statistics(kept, target[1:])
    torch.testing.assert_close(entropy[1:], true)


@PATHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_areal_table_of_log_probs_and_entropy(make: Any, captured: bool, dtype: str) -> None:
    """Against full logits in float64 of what goes into the head. tests/test_per_token.py has the table for every
    implementation."""
    torch.manual_seed(0)
    model, (ids, target) = make().to(getattr(torch, dtype)), ids_and_target()
    hidden = torch.tanh(model.layer(model.embed(ids))).detach().double()
    exact = copy.deepcopy(model).double()
    log_prob, entropy, _ = full_statistics(exact.finish(exact.lm_head(hidden)), target)
    found, also, *_ = either(model, ids).linear_log_probs(target, with_entropy=True)
    bound = AREAL[f"forward {dtype}"]
    torch.testing.assert_close(found.double(), log_prob, rtol=bound, atol=bound)
    torch.testing.assert_close(also.double(), entropy, rtol=bound, atol=bound)


@PATHS
def test_areal_table_of_gradients(make: Any, captured: bool) -> None:
    torch.manual_seed(0)
    model, (ids, target) = make(), ids_and_target()
    exact = copy.deepcopy(model).double()
    log_prob, entropy, _ = full_statistics(exact(ids).logits, target)
    g = torch.randn(2, 3, 7)
    expected = gradients(exact, (g[0] * log_prob + g[1] * entropy).sum())
    found, also, *_ = either(model, ids).linear_log_probs(target, with_entropy=True)
    made = gradients(model, (g[0] * found + g[1] * also).sum())
    for key, value in expected.items():
        bound = AREAL["backward weight" if key.startswith("lm_head") else "backward hidden"]
        torch.testing.assert_close(made[key].double(), value, rtol=bound, atol=bound)


class Pair(torch.nn.Module):
    """Two models with heads of their own, as a policy and its critic in one module; the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(), Gemma2(final_logit_softcapping=3.0)

    def forward(self, ids: Any) -> Any:
        return Output(logits=self.first(ids).logits, other=self.second(ids).logits)


PLAIN_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "two heads": (Pair, "found 2 LM heads in Pair"),
    "own forward": (OddHead, r"its LM head is a \w+\.Odd, allowed is"),
    "cut logits": (lambda: Model(vocab_size=V - 2), f"has vocab_size {V - 2} and its LM head {V} rows, allowed is one"),
    "named scale": (lambda: Model(logit_scale="inv_sqrt_d_model"), "its logit_scale is 'inv_sqrt_d_model'"),
}


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_the_plain_path_warns_once_with_reason_and_remedy(name: str) -> None:
    make, reason = PLAIN_MODELS[name]
    torch.manual_seed(0)
    model, (ids, target) = make(), ids_and_target()
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    words = rf"logitless: .*{reason}.*fallback='error'"
    with pytest.warns(UserWarning, match=words) as caught, capture_lm_head(model, fallback="logits") as head:
        output = model(ids)
    assert [(entry.filename, str(entry.message).count("plain path")) for entry in caught] == [(__file__, 1)]
    assert head.logits is output.logits
    assert torch.equal(output.logits, logits)
    torch.testing.assert_close(head.linear_cross_entropy(target), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_lm_head(model, fallback="logits") as head:  # the same module and reason
            model(ids)
    torch.testing.assert_close(head.linear_cross_entropy(target), expected)
    with pytest.warns(UserWarning, match="plain path"), capture_lm_head(make(), fallback="logits"):
        pass  # another module
    with pytest.raises(NotImplementedError, match=reason), capture_lm_head(model):
        pass


def test_a_head_that_can_be_captured_is_and_nothing_is_said() -> None:
    model, (ids, target) = Model(), ids_and_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_lm_head(model, fallback="logits") as head:
            model(ids)
    assert head.logits is None
    assert head.weight is model.lm_head.weight
    assert torch.equal(head.linear_cross_entropy(target), captured_loss(model, ids, target))


class Counting(torch.nn.Module):
    """A buffer that each forward changes."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, ids: Any) -> Any:
        self.forwards += 1
        return self.inner(ids)


SHOWN_BY_A_FORWARD = {
    "multiplied": (Doubled, NotImplementedError, "its logits are not z"),
    "capped without saying": (Capped, NotImplementedError, "its logits are not z"),
    "says a scale and applies none": (lambda: Model(logits_scaling=8.0), NotImplementedError, "logit_scale = 0.125"),
    "runs its head twice": (Twice, NotImplementedError, "more than once"),
    "writes to a logit": (Masked, IndexError, "out of bounds"),
}


@pytest.mark.parametrize("name", SHOWN_BY_A_FORWARD)
def test_what_a_forward_shows_is_an_error_once_and_no_forward_runs_twice(name: str) -> None:
    make, kind, words = SHOWN_BY_A_FORWARD[name]
    torch.manual_seed(0)
    model, (ids, target) = Counting(make()), ids_and_target()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
    model.forwards.zero_()
    noted = rf"(?s){words}.*runs no forward twice.*call it again"
    with pytest.raises(kind, match=noted), capture_lm_head(model, fallback="logits") as head:
        model(ids)
    assert model.forwards == 1
    with pytest.raises(RuntimeError, match="no forward of the module"):
        _ = head.hidden
    with pytest.warns(UserWarning, match="takes the plain path"), capture_lm_head(model, fallback="logits") as head:
        model(ids)
    assert model.forwards == 2
    torch.testing.assert_close(head.linear_cross_entropy(target), expected)
    with pytest.raises(kind, match=words) as caught, capture_lm_head(model):
        model(ids)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", SHOWN_BY_A_FORWARD)
def test_the_next_forward_of_the_same_block_takes_the_plain_path(name: str) -> None:
    make, kind, words = SHOWN_BY_A_FORWARD[name]
    torch.manual_seed(0)
    model, (ids, target) = make(), ids_and_target()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
    with capture_lm_head(model, fallback="logits") as head:
        with pytest.raises(kind, match=words):
            model(ids)
        with pytest.warns(UserWarning, match="takes the plain path"):
            model(ids)
        assert "forward" not in model.lm_head.__dict__
    torch.testing.assert_close(head.linear_cross_entropy(target), expected)
    assert head.options == {"logit_scale": 1.0, "softcap": None}


def test_a_module_that_was_mended_is_captured_after_a_block_with_error() -> None:
    model, (ids, target) = Model(logits_scaling=8.0), ids_and_target()
    with pytest.raises(NotImplementedError), capture_lm_head(model, fallback="logits"):
        model(ids)
    model.config.logits_scaling = 1.0
    assert either(model, ids).logits is not None
    with capture_lm_head(model):
        model(ids)
    head = either(model, ids)
    assert head.logits is None
    assert head.linear_cross_entropy(target).isfinite()


def test_a_failure_before_the_head_says_nothing_of_it() -> None:
    model, (ids, _) = Model(), ids_and_target()
    with pytest.raises(IndexError) as caught, capture_lm_head(model, fallback="logits"):
        model(ids + V)
    assert not hasattr(caught.value, "__notes__")
    assert either(model, ids).logits is None


@pytest.mark.parametrize(
    "make", [Unused, Hidden, lambda: Wrapper(torch.nn.Linear(D, V))], ids=["hidden states", "mean", "no head"]
)
def test_the_plain_path_takes_logits_that_are_named_alone(make: Callable[[], Any]) -> None:
    """A tensor without a name may be hidden states: it would have a loss, and a wrong one."""
    model, (ids, _) = make(), ids_and_target()
    inputs = ids if isinstance(model, Model) else torch.randn(3, 7, D)
    with quietly(), capture_lm_head(model, fallback="logits") as head:
        if isinstance(model, Model):
            with pytest.raises(NotImplementedError):
                model(inputs)
        with pytest.raises(NotImplementedError, match=r"its forward gave Tensor, allowed on the plain path .*\.logits"):
            model(inputs)
        with pytest.raises(RuntimeError, match="logits: no forward"):
            head.linear_cross_entropy(torch.zeros(3, 7).long())


def test_what_the_plain_path_does_not_have_is_an_error_by_name() -> None:
    model, (ids, target) = OddHead(), ids_and_target()
    with quietly(), capture_lm_head(model, fallback="logits") as head:
        for use in (lambda: head.logits, lambda: head.linear_log_probs(target)):
            with pytest.raises(RuntimeError, match="logits: no forward of the module"):
                use()
        model(ids)
        with pytest.raises(IndexError):
            model(ids + V)
        with pytest.raises(RuntimeError, match="logits: no forward of the module"):
            _ = head.logits
        with pytest.raises(ValueError, match="labels: got some inside capture_lm_head"):
            model(ids, labels=ids)
        model(ids)
    for name in ("hidden", "weight", "bias"):
        with pytest.raises(RuntimeError, match=rf"{name}: the head is not captured, a warning has said why"):
            getattr(head, name)
    assert head.options == {"logit_scale": 1.0, "softcap": None}
    assert (head.logit_scale, head.softcap) == (1.0, None)


@pytest.mark.parametrize("make", [Model, OddHead], ids=["captured", "plain"])
def test_the_module_is_restored_on_both_paths(make: Callable[[], Any]) -> None:
    model, (ids, _) = make(), ids_and_target()
    before = dict(model.lm_head.__dict__), set(model.__dict__), model(ids).logits
    with pytest.raises(IndexError), quietly(), capture_lm_head(model, fallback="logits"):
        model(ids + V)
    assert dict(model.lm_head.__dict__) == before[0]
    assert set(model.__dict__) == before[1]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(ids).logits, before[2])


@pytest.mark.parametrize("inner", ["error", "logits"])
@pytest.mark.parametrize(
    ("make", "outer"),
    [(Model, "error"), (Model, "logits"), (OddHead, "logits")],
    ids=["captured-error", "captured-logits", "plain"],
)
def test_nested_blocks_of_one_module_are_refused(make: Callable[[], Any], outer: Any, inner: Any) -> None:
    model, (ids, target) = make(), ids_and_target()
    with quietly(), capture_lm_head(model, fallback=outer) as head:
        for module in (model, Wrapper(model)):
            with pytest.raises(RuntimeError, match="captured already"), capture_lm_head(module, fallback=inner):
                pass
        model(ids)  # the outer block still holds
    assert head.linear_cross_entropy(target).isfinite()
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("inner", ["error", "logits"])
def test_a_block_of_a_part_of_what_is_captured_is_refused(inner: Any) -> None:
    model, (ids, _) = Model(), ids_and_target()
    whole = Wrapper(model)
    with capture_lm_head(whole) as head:
        with pytest.raises(RuntimeError, match="captured already"), capture_lm_head(model, fallback=inner):
            pass
        whole(ids)
    assert head.hidden.shape == (3, 7, D)


def test_a_plain_block_refuses_the_probes_of_another_one() -> None:
    """Blocks of a part and of the whole, whichever comes first: the whole's logits would be a few numbers."""
    pair, (ids, target) = Pair(), ids_and_target()
    with quietly():
        with capture_lm_head(pair, fallback="logits") as whole:
            with capture_lm_head(pair.first) as part, pytest.raises(RuntimeError, match="captured already"):
                pair(ids)
            with pytest.raises(RuntimeError, match="no forward"):
                _ = whole.logits
            pair(ids)
        assert whole.logits.shape[-1] == V
        with capture_lm_head(pair.first) as part:
            with pytest.raises(RuntimeError, match="captured already"), capture_lm_head(pair, fallback="logits"):
                pass
            pair.first(ids)
    assert part.linear_cross_entropy(target).isfinite()


def test_several_heads_are_captured_each_by_its_own_module() -> None:
    torch.manual_seed(0)
    pair, (ids, target) = Pair(), ids_and_target()
    true = pair(ids)
    with capture_lm_head(pair.first) as first, capture_lm_head(pair.second) as second:
        pair(ids)
    for head, logits in ((first, true["logits"]), (second, true["other"])):
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        torch.testing.assert_close(head.linear_cross_entropy(target), expected)


class Checkpointed(Model):
    """Its layer is computed again in the backward, with the same dropout."""

    reentrant: bool | None = None

    def forward(self, ids: Any) -> Any:
        def layer(hidden: Any) -> Any:
            return torch.nn.functional.dropout(torch.tanh(self.layer(hidden)), 0.3)

        hidden = self.embed(ids)
        if self.reentrant is None:
            hidden = layer(hidden)
        else:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return Output(logits=self.lm_head(hidden))


class OddCheckpointed(Checkpointed, OddHead):
    pass


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [Checkpointed, OddCheckpointed], ids=["captured", "plain"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_gradient_checkpointing(make: Callable[[], Any], reentrant: bool, inside: bool) -> None:
    torch.manual_seed(0)
    model, (ids, target) = make(), ids_and_target()
    torch.manual_seed(1)
    logits = model(ids).logits
    expected = gradients(model, torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
    model.reentrant = reentrant
    torch.manual_seed(1)
    with quietly(), capture_lm_head(model, fallback="logits") as head:
        model(ids)
        if inside:
            made = gradients(model, head.linear_cross_entropy(target))
    if not inside:
        made = gradients(model, head.linear_cross_entropy(target))
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value)
        assert value.abs().max() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_module(reentrant: bool) -> None:
    """A reentrant one runs the module without a graph, whatever is captured: the page says so."""
    torch.manual_seed(0)
    model, (ids, target) = Model(), ids_and_target()
    expected = gradients(model, captured_loss(model, ids, target))
    with capture_lm_head(model) as head:
        torch.utils.checkpoint.checkpoint(lambda given: model(given).logits, ids, use_reentrant=reentrant)
    assert head.hidden.requires_grad is not reentrant
    if not reentrant:
        made = gradients(model, head.linear_cross_entropy(target))
        for key, value in expected.items():
            torch.testing.assert_close(made[key], value)


@PATHS
def test_no_grad_on_both_paths(make: Any, captured: bool) -> None:
    model, (ids, target) = make(), ids_and_target()
    with torch.no_grad():
        head = either(model, ids)
        values = [head.linear_cross_entropy(target), *head.linear_log_probs(target, return_stats=True)[:2]]
        expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
    assert not any(value.requires_grad for value in values)
    torch.testing.assert_close(values[0], expected)
    assert not (head.hidden if captured else head.logits).requires_grad
    assert either(model, ids).linear_cross_entropy(target).requires_grad


@PATHS
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs"])
@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("temperature", torch.ones(3, 7), "allowed is a Python number"),
        ("temperature", 0.0, "allowed is"),
        ("plan", "quick", "allowed"),
        ("memory_budget", -1, "allowed"),
        ("backend", "cuda", "allowed"),
        ("ignore_index", 1.5, "allowed"),
        ("return_stats", 1, "allowed are True and False"),
        ("target", torch.zeros(3, 6).long(), "allowed"),
        ("target", torch.zeros(3, 7), "allowed"),
    ],
)
def test_both_paths_refuse_the_same_arguments(
    make: Any, captured: bool, name: str, parameter: str, value: Any, words: str
) -> None:
    model, (ids, target) = make(), ids_and_target()
    head = either(model, ids)
    with pytest.raises((TypeError, ValueError), match=rf"(?s){parameter}: got .*{words}"):
        getattr(head, name)(**({"target": target} | {parameter: value}))


@pytest.mark.parametrize("value", ["plain", None, True])
def test_a_fallback_that_there_is_not(value: Any) -> None:
    words = rf"fallback: got {value!r}, allowed are 'error', 'logits'"
    with pytest.raises(ValueError, match=words), capture_lm_head(Model(), fallback=value):
        pass
