"""capture_lm_head in JAX: hidden states and head of Flax and Equinox models, and of functions, against full logits."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from logitless.jax_impl import capture_lm_head, linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.tolerances import ELEMENTS, GRADIENT, error  # noqa: E402

B, T, D, V = 2, 5, 6, 23
IDS = np.random.default_rng(0).integers(0, V, (B, T))
TARGET = np.random.default_rng(1).integers(0, V, (B, T))
TARGET[0, :2] = -100


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Subject(NamedTuple):
    """A model as its library runs it."""

    parameters: Any
    forward: Callable[..., Any]
    """Logits of parameters and ids."""
    layout: str
    options: tuple[float, float | None] = (1.0, None)
    """logit_scale and softcap."""


# ---------------------------------------------------------------------------------------------------------------------
# Models


def nnx_model(*, tied: bool = False, bias: bool = True, finish: Any = lambda z: z, remat: bool = False) -> Subject:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Model(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(V, D, param_dtype=jnp.float64, rngs=rngs)
            self.layer = nnx.Linear(D, D, param_dtype=jnp.float64, rngs=rngs)
            if not tied:
                self.lm_head = nnx.Linear(D, V, use_bias=bias, param_dtype=jnp.float64, rngs=rngs)
                if bias:
                    self.lm_head.bias[...] = jnp.linspace(-1, 1, V)

        def block(self, ids: Any) -> Any:
            return jnp.tanh(self.layer(3 * self.embed(ids)))

        def __call__(self, ids: Any) -> Any:
            hidden = (nnx.remat(Model.block) if remat else Model.block)(self, ids)
            return finish(self.embed.attend(hidden) if tied else self.lm_head(hidden))

    graph, parameters = nnx.split(Model(nnx.Rngs(0)))
    return Subject(parameters, lambda given, ids: nnx.merge(graph, given)(ids), "vd" if tied else "dv")


def linen_model(
    *, tied: bool = False, bias: bool = True, finish: Any = lambda z: z, wrap: Any = lambda one: one
) -> Subject:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            embed = nn.Embed(V, D, param_dtype=jnp.float64)
            hidden = jnp.tanh(nn.Dense(D, param_dtype=jnp.float64)(3 * embed(ids)))
            if tied:
                return finish(embed.attend(hidden))
            initial = nn.initializers.normal(0.5)
            return finish(nn.Dense(V, use_bias=bias, bias_init=initial, param_dtype=jnp.float64)(hidden))

    model = wrap(Model)()
    return Subject(model.init(jax.random.key(0), IDS), model.apply, "vd" if tied else "dv")


def equinox_model(*, tied: bool = False, bias: bool = True, finish: Any = lambda z: z, wrap: Any = None) -> Subject:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    class Model(eqx.Module):  # type: ignore[misc, name-defined]
        parts: Any
        layer: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            head = eqx.nn.Linear(D, V, use_bias=bias, key=keys[0])
            self.parts = (eqx.nn.Embedding(V, D, key=keys[1]), head)
            if tied:
                self.parts = eqx.nn.Shared(self.parts, lambda two: two[1].weight, lambda two: two[0].weight)
            self.layer = eqx.nn.Linear(D, D, key=keys[2])

        def __call__(self, ids: Any) -> Any:
            embed, head = self.parts() if tied else self.parts
            hidden = jax.vmap(lambda one: jnp.tanh(self.layer(embed(one))))(ids)
            return finish(jax.vmap(head)(hidden))

    parameters, rest = eqx.partition(Model(jax.random.key(0)), eqx.is_array)

    def forward(parameters: Any, ids: Any) -> Any:
        model = eqx.combine(parameters, rest)
        return jax.vmap(model if wrap is None else wrap(model))(ids)

    return Subject(parameters, forward, "vd")


def function(finish: Callable[[Any, Any], Any], layout: str = "vd", options: Any = (1.0, None)) -> Subject:
    """No library: logits made of hidden states and a dictionary of parameters by any function."""
    rng = np.random.default_rng(2)
    shapes = {"embed": (V, D), "turned": (D, V), "bias": (V,)}
    parameters = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return Subject(parameters, lambda given, ids: finish(jnp.sin(given["embed"][ids]), given), layout, options)


def softcapped(z: Any) -> Any:
    return jnp.tanh(z / 3.0) * 3.0


@jax.jit
def softcapped_by_a_call(z: Any) -> Any:
    return 2 * jnp.tanh(z * 0.25)


@jax.jit
def halved(z: Any) -> Any:
    return z / 2


MODELS: dict[str, Callable[[], Subject]] = {
    "nnx": nnx_model,
    "nnx, tied": lambda: nnx_model(tied=True),
    "nnx, softcap, checkpoint": lambda: nnx_model(bias=False, finish=softcapped, remat=True)._replace(
        options=(1.0, 3.0)
    ),
    "linen": linen_model,
    "linen, tied, softcap": lambda: linen_model(tied=True, finish=softcapped)._replace(options=(1.0, 3.0)),
    "linen, scale": lambda: linen_model(bias=False, finish=lambda z: z / 8.0)._replace(options=(0.125, None)),
    "linen, all in checkpoint": lambda: linen_model(
        finish=softcapped_by_a_call, wrap=pytest.importorskip("flax.linen", reason="flax is not installed").remat
    )._replace(options=(0.5, 2.0)),
    "equinox": equinox_model,
    "equinox, tied": lambda: equinox_model(tied=True, bias=False),
    "equinox, tied, bias, scale": lambda: equinox_model(
        tied=True, finish=lambda z: z * jnp.sqrt(jnp.float64(D)) * 2
    )._replace(options=(2 * D**0.5, None)),
    "equinox, checkpoint, jit": lambda: equinox_model(wrap=lambda model: jax.jit(jax.checkpoint(lambda x: model(x)))),
    "einsum": lambda: function(lambda h, p: jnp.einsum("btd,vd->btv", h, p["embed"]) + p["bias"]),
    "weight first": lambda: function(lambda h, p: jnp.einsum("dv,btd->vtb", p["turned"], h).T, "dv"),
    "flat tokens": lambda: function(
        lambda h, p: softcapped((h.reshape(-1, D) @ p["turned"] + p["bias"]).reshape(B, T, V)), "dv", (1.0, 3.0)
    ),
    "checkpoint twice": lambda: function(
        lambda h, p: jax.checkpoint(lambda h: jnp.cos(jax.checkpoint(jnp.sin)(h)) @ p["turned"] + p["bias"])(h), "dv"
    ),
    "two calls of one function": lambda: function(
        lambda h, p: halved(halved(h @ p["turned"])), "dv", (0.25, None)
    ),
}  # fmt: skip


def full_loss(logits: Any, target: Any) -> Any:
    counts = target != -100
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, jnp.where(counts, target, 0)[..., None], -1)[..., 0]
    return -jnp.where(counts, picked, 0.0).sum() / counts.sum()


def captured_loss(head: Any, target: Any) -> Any:
    return linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)


def assert_same_trees(made: Any, right: Any) -> None:
    assert jax.tree.structure(made) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jnp.floating):
            assert error(one, other) <= GRADIENT[str(one.dtype)]
        else:
            np.testing.assert_array_equal(one, other)


# How a loss of parameters, given as a function of a "forward to loss", is run. Each must give the same.
def in_checkpoint(loss: Any) -> Any:
    return jax.value_and_grad(jax.checkpoint(loss))


def in_vmap(loss: Any) -> Any:
    """Two copies of the parameters at a time."""

    def run(parameters: Any) -> Any:
        twice = jax.tree.map(lambda x: jnp.stack([x + 0.5, x]), parameters)
        return jax.tree.map(lambda x: x[1], jax.vmap(jax.value_and_grad(loss))(twice))

    return run


def in_scan(loss: Any) -> Any:
    def run(parameters: Any) -> Any:
        made = jax.lax.scan(lambda carry, _: (carry, jax.value_and_grad(loss)(parameters)), 0, None, length=2)[1]
        return jax.tree.map(lambda x: x[1], made)

    return run


RUNS: dict[str, Callable[[Any], Any]] = {
    "eager": jax.value_and_grad,
    "jit": lambda loss: jax.jit(jax.value_and_grad(loss)),
    "grad of jit": lambda loss: jax.value_and_grad(jax.jit(loss)),
    "checkpoint": in_checkpoint,
    "vmap": in_vmap,
    "scan": in_scan,
}


def compare(subject: Subject, run: Callable[[Any], Any]) -> None:
    def ours(parameters: Any) -> Any:
        return captured_loss(capture_lm_head(subject.forward)(parameters, IDS), TARGET)

    def full(parameters: Any) -> Any:
        return full_loss(subject.forward(parameters, IDS), jnp.asarray(TARGET))

    expected, wanted = jax.jit(jax.value_and_grad(full))(subject.parameters)
    loss, gradients = run(ours)(subject.parameters)
    assert error(loss, expected) <= GRADIENT["float64"]
    leaves = jax.tree.leaves_with_path(wanted)
    assert len(leaves) >= 3
    for (path, right), made in zip(leaves, jax.tree.leaves(gradients), strict=True):
        if np.abs(right).max() > 0:
            assert error(made, right) <= GRADIENT["float64"], jax.tree_util.keystr(path)
        else:
            np.testing.assert_array_equal(made, right)


# Their gradients are taken under the transformations below, or go the ways of the others.
LATE = (
    *("nnx, tied", "linen, all in checkpoint", "equinox, tied, bias, scale"),
    *("linen", "equinox, tied", "equinox, checkpoint, jit"),
)


@pytest.mark.late(where=lambda p: p["name"] in LATE)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_of_full_logits(name: str) -> None:
    subject = MODELS[name]()
    with jax.check_tracer_leaks():
        compare(subject, RUNS["jit"])
    head = capture_lm_head(subject.forward)(subject.parameters, IDS)
    scale, softcap = subject.options
    assert head.hidden.shape == (B, T, D)
    assert head.weight.shape == {"vd": (V, D), "dv": (D, V)}[subject.layout]
    assert head.weight_layout == subject.layout
    assert head.logit_scale == pytest.approx(scale, rel=GRADIENT["float64"])
    assert head.softcap == softcap
    assert head.output is None


@pytest.mark.every_value
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["nnx, tied", "linen, all in checkpoint", "equinox, tied, bias, scale"])
def test_under_transforms(name: str, run: str) -> None:
    compare(MODELS[name](), RUNS[run])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_captured_is_the_parameter_itself(name: str) -> None:
    subject = MODELS[name]()
    head = capture_lm_head(subject.forward)(subject.parameters, IDS)
    leaves = jax.tree.leaves(subject.parameters)
    assert any(head.weight is leaf for leaf in leaves)
    assert head.bias is None or any(head.bias is leaf for leaf in leaves)


@pytest.mark.parametrize("name", MODELS)
def test_no_logits_are_made(name: str) -> None:
    """Neither they nor a bias for every token: nothing in the captured program has a token's V numbers."""
    subject = MODELS[name]()

    def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
        for equation in jaxpr.eqns:
            yield from (tuple(var.aval.shape) for var in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from shapes(inner)

    def of_logits(forward: Any) -> bool:
        made = jax.make_jaxpr(lambda given: jax.tree.leaves(forward(given, IDS)))(subject.parameters)
        return any(np.prod(shape) >= B * T * V for shape in shapes(made.jaxpr))

    assert of_logits(subject.forward)
    assert not of_logits(capture_lm_head(subject.forward))


def test_checkpoint_stays_around_what_it_held() -> None:
    subject = MODELS["linen, all in checkpoint"]()
    made = jax.make_jaxpr(lambda given: capture_lm_head(subject.forward)(given, IDS))(subject.parameters)
    (block,) = [one for one in made.jaxpr.eqns if one.primitive.name in ("checkpoint", "remat", "remat2")]
    inside = block.params["jaxpr"]
    names = {one.primitive.name for one in getattr(inside, "jaxpr", inside).eqns}
    assert "dot_general" in names  # the layer before the head
    assert [var.aval.shape for var in block.outvars] == [(B, T, D)]


@pytest.mark.parametrize("cut", [np.s_[:, :-1], np.s_[:, 1::2], np.s_[1], np.s_[:, -1]], ids=str)
def test_tokens_may_be_cut(cut: Any) -> None:
    subject = function(lambda h, p: (h @ p["turned"] + p["bias"])[cut])
    head = capture_lm_head(subject.forward)(subject.parameters, IDS)
    target = jnp.asarray(TARGET[cut])
    full = full_loss(subject.forward(subject.parameters, IDS), target)
    assert error(captured_loss(head, target), full) <= GRADIENT["float64"]


def test_one_token() -> None:
    """Equinox without a vmap: logits [V], which look like a bias."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    layer, x = eqx.nn.Linear(D, V, key=jax.random.key(0)), jnp.linspace(-1, 1, D)

    def ours(layer: Any) -> Any:
        head = capture_lm_head(lambda x: softcapped(layer(x)))(x)
        return linear_cross_entropy(head.hidden[None], head.weight, jnp.array([3]), head.bias, **head.options)

    def full(layer: Any) -> Any:
        return -jax.nn.log_softmax(softcapped(layer(x)))[3]

    assert_same_trees(*(jax.value_and_grad(each)(layer) for each in (ours, full)))


def test_two_calls_of_one_function() -> None:
    """JAX traces it once, and both calls are opened: for the logits, and for a bias that must be computed."""
    widened = jax.jit(lambda x: x.astype(jnp.float64))
    rng = np.random.default_rng(3)
    weight, bias, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((V, D), V, D))
    head = capture_lm_head(lambda x: widened(weight @ x) + widened(bias))(x)
    np.testing.assert_array_equal(head.bias, bias)
    np.testing.assert_array_equal(head.weight, weight)


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_bfloat16_with_float32_parameters(library: str) -> None:
    """The parameters are captured before they are rounded, and their gradients are float32."""
    x = jax.random.normal(jax.random.key(1), (B, T, D), jnp.float32)
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
        graph, weights = nnx.split(nnx.Linear(D, V, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        forward = lambda weights: nnx.merge(graph, weights)(x)  # noqa: E731
    elif library == "linen":
        nn = pytest.importorskip("flax.linen", reason="flax is not installed")
        layer = nn.Dense(V, dtype=jnp.bfloat16)
        weights, forward = layer.init(jax.random.key(0), x), lambda weights: layer.apply(weights, x)
    else:
        eqx = pytest.importorskip("equinox", reason="equinox is not installed")
        weights = eqx.nn.Linear(D, V, dtype=jnp.float32, key=jax.random.key(0))

        def forward(weights: Any) -> Any:
            narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
            return jax.vmap(jax.vmap(narrow))(x.astype(jnp.bfloat16)).astype(jnp.float32)

    head = capture_lm_head(forward)(weights)
    assert head.hidden.dtype == jnp.bfloat16
    assert head.weight.dtype == head.bias.dtype == jnp.float32
    loss, gradient = jax.value_and_grad(lambda w: captured_loss(capture_lm_head(forward)(w), TARGET))(weights)
    wide = jax.value_and_grad(lambda w: full_loss(forward(w).astype(jnp.float32), jnp.asarray(TARGET)))(weights)
    np.testing.assert_allclose(loss, wide[0], **ELEMENTS["bfloat16 logits"])
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide[1]), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, **ELEMENTS["bfloat16 logits"])


def test_a_bias_of_another_dtype() -> None:
    weight, bias = jnp.ones((V, D), jnp.bfloat16), jnp.linspace(0, 1, V, dtype=jnp.float32)
    head = capture_lm_head(lambda x: (x @ weight.T) + bias)(jnp.ones((T, D), jnp.bfloat16))
    assert head.weight.dtype == head.bias.dtype == jnp.float32
    np.testing.assert_array_equal(head.weight, weight.astype(jnp.float32))


# ---------------------------------------------------------------------------------------------------------------------
# What else a forward gives and does


def test_other_outputs() -> None:
    class Output(NamedTuple):
        logits: Any
        aux: Any
        name: str

    def forward(shape: Any) -> Any:
        hidden = jnp.ones((B, T, D))
        logits = hidden @ jnp.ones((D, V))
        return shape(logits, hidden.sum())

    for make, right in (
        (lambda z, aux: (z, aux, "name"), (None, 60.0, "name")),
        (lambda z, aux: {"aux": aux, "logits": z}, {"aux": 60.0, "logits": None}),
        (lambda z, aux: Output(z, aux, "name"), Output(None, 60.0, "name")),
        (lambda z, aux: [z, z, None], [None, None, None]),
    ):
        assert capture_lm_head(forward)(make).output == right


def test_linens_variables() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, ids: Any, train: bool) -> Any:
            hidden = nn.BatchNorm(use_running_average=not train)(nn.Embed(V, D)(ids))
            return nn.Dense(V)(nn.Dropout(0.5, deterministic=not train)(hidden))

    model = Model()
    variables = model.init(jax.random.key(0), IDS, train=False)
    call = functools.partial(model.apply, rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats"])
    head = jax.jit(lambda variables: capture_lm_head(call)(variables, IDS, train=True))(variables)
    logits, updates = call(variables, IDS, train=True)
    assert error(head.hidden @ head.weight + head.bias, logits) <= GRADIENT["float32"]
    assert head.output[0] is None
    assert_same_trees(head.output[1], updates)


def stateful() -> Any:
    """A module with dropout and batch statistics."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Model(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, ids: Any, fail: bool = False) -> Any:
            hidden = self.dropout(self.norm(self.embed(ids)))
            if fail:
                raise ZeroDivisionError
            return self.embed.attend(hidden)

        logits = __call__

    return nnx, Model(nnx.Rngs(0))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "the module": lambda model, ids: capture_lm_head(model)(ids),
    "its method": lambda model, ids: capture_lm_head(model.logits)(ids),
    "a partial of it": lambda model, ids: capture_lm_head(functools.partial(model, fail=False))(ids),
    "an argument": lambda model, ids: capture_lm_head(lambda one, ids: one(ids))(model, ids),
    "a named argument": lambda model, ids: capture_lm_head(lambda one, ids: one(ids))(ids=ids, one=model),
}


@pytest.mark.every_value
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_state_of_nnx_modules(way: str, jit: bool) -> None:
    """Dropout and batch statistics change as in the forward itself, under nnx.jit and nnx.grad too."""
    nnx, model = stateful()
    other = nnx.clone(model)

    def ours(model: Any) -> Any:
        return captured_loss(WAYS[way](model, IDS), TARGET)

    def full(model: Any) -> Any:
        return full_loss(model(IDS), jnp.asarray(TARGET))

    transformed = [nnx.value_and_grad(each) for each in (ours, full)]
    first, second = map(nnx.jit, transformed) if jit else transformed
    for _ in range(2):
        made, right = first(model), second(other)
        assert_same_trees(made, right)
    assert_same_trees(*(nnx.state(each, nnx.Not(nnx.RngKey)) for each in (model, other)))
    assert model.dropout.rngs.count[...] == 2


def test_nothing_is_left_behind_by_what_fails() -> None:
    nnx, model = stateful()

    def state() -> Any:
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))

    before = state()
    with jax.check_tracer_leaks():
        with pytest.raises(ZeroDivisionError):
            capture_lm_head(model)(IDS, fail=True)
        with pytest.raises(NotImplementedError, match="go through exp"):
            capture_lm_head(lambda model, ids: jnp.exp(model(ids)))(model, IDS)
    jax.tree.map(np.testing.assert_array_equal, before, state())
    assert capture_lm_head(model)(IDS).hidden.shape == (B, T, D)


def test_a_module_that_a_function_closes_over() -> None:
    """It can be read; flax itself refuses changes."""
    _, model = stateful()
    with pytest.raises(Exception, match=r"Cannot mutate .* from a different trace level"):
        capture_lm_head(lambda ids: model(ids))(IDS)
    model.eval()
    assert capture_lm_head(lambda ids: model(ids))(IDS).weight is model.embed.embedding[...]
    assert capture_lm_head(model)(IDS).weight is model.embed.embedding[...]


def test_new_variables_of_nnx_are_refused() -> None:
    nnx, model = stateful()

    def forward(model: Any) -> Any:
        model.extra = nnx.Variable(jnp.ones(3))
        return model(IDS)

    with pytest.raises(NotImplementedError, match="it makes new variables"):
        capture_lm_head(forward)(model)
    assert not hasattr(model, "extra")


def test_effects_stay(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(x: Any) -> Any:
        jax.debug.print("seen {}", x.sum())
        return x @ jnp.ones((D, V))

    capture_lm_head(forward)(jnp.ones((T, D)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "seen 30.0\n"


def test_the_head_leaves_jit_and_goes_to_log_probs() -> None:
    subject = MODELS["linen, tied, softcap"]()
    head = jax.jit(capture_lm_head(subject.forward))(subject.parameters, IDS)
    log_prob, _ = linear_log_probs(head.hidden, head.weight, jnp.asarray(IDS), bias=head.bias, **head.options)
    right = jax.nn.log_softmax(subject.forward(subject.parameters, IDS))
    picked = jnp.take_along_axis(right, jnp.asarray(IDS)[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_prob, picked, **ELEMENTS["float64"])


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def lora(h: Any, p: Any) -> Any:
    return h @ p["turned"] + (h @ jnp.ones((D, 2))) @ jnp.ones((2, V))


@jax.custom_vjp
def clipped(z: Any) -> Any:
    return z


clipped.defvjp(lambda z: (z, None), lambda _, g: (jnp.clip(g, -1, 1),))


def in_a_loop(h: Any, p: Any) -> Any:
    return jax.lax.map(lambda one: one @ p["turned"], h)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "LoRA": (lora, r"another sum than that of one product and one bias \[V\] \(LoRA is: merge it\)"),
    "two biases": (lambda h, p: h @ p["turned"] + p["bias"] + p["bias"], "another sum"),
    "a bias per token": (lambda h, p: h @ p["turned"] + jnp.ones((T, 1)), "another sum"),
    "a number added": (lambda h, p: h @ p["turned"] + 1.0, "another sum"),
    "an array of one number added": (lambda h, p: h @ p["turned"] + p["bias"][:1], "another sum"),
    "a mask": (lambda h, p: jnp.where(jnp.arange(V) < 9, h @ p["turned"], -1e9), "go through select_n"),
    "a cut vocabulary": (lambda h, p: (h @ p["turned"])[..., : V - 2], "go through slice"),
    "a sorted vocabulary": (lambda h, p: jnp.sort(h @ p["turned"]), "go through sort"),
    "a trained scale": (lambda h, p: h @ p["turned"] * p["bias"][0], "mul with something else than a constant"),
    "divided by logits": (lambda h, p: 2.0 / (h @ p["turned"]), "div with something else than a constant"),
    "a scale per class": (lambda h, p: h @ p["turned"] * jnp.arange(1.0, V + 1), "mul with something else"),
    "a scale before the bias": (lambda h, p: 2 * (h @ p["turned"]) + p["bias"], "a bias is added after mul"),
    "a bias after the softcap": (lambda h, p: softcapped(h @ p["turned"]) + p["bias"], "a bias is added after mul"),
    "a negative scale": (lambda h, p: -2 * (h @ p["turned"]), "have the scale -2"),
    "repeated by a number": (
        lambda h, p: (h[:1] @ p["turned"]) * jax.lax.full((B, 1, 1), 2.0, h.dtype), "repeated by mul"
    ),
    "repeated by a bias": (
        lambda h, p: (h[:1] @ p["turned"]) + jnp.broadcast_to(p["bias"], (B, 1, V)), "repeated by add"
    ),
    "two softcaps": (lambda h, p: softcapped(softcapped(h @ p["turned"])), "two tanh"),
    "softmax": (lambda h, p: jax.nn.softmax(h @ p["turned"]), "div with something else"),
    "stopped": (lambda h, p: jax.lax.stop_gradient(h @ p["turned"]), "go through stop_gradient"),
    "another gradient": (lambda h, p: clipped(h @ p["turned"]), "go through custom_vjp_call"),
    "a loop": (in_a_loop, "go through scan"),
    "a head per sequence": (lambda h, p: jnp.einsum("btd,bdv->btv", h, p["turned"] * h[:, :1, :1]), "multiplies f"),
    "no product": (lambda h, p: h * p["bias"][0], "mul with something else"),
    "hidden axes": (lambda h, p: jnp.einsum("btd,bdv->tv", h, jnp.stack([p["turned"]] * B)), "not .* of two axes"),
    "a parameter": (lambda h, p: p["turned"], "its logits are no product"),
    "integers": (lambda h, p: (h @ p["turned"]).astype(jnp.int32), "it gives int32"),
    "int8": (lambda h, p: (h.astype(jnp.int8) @ p["turned"].astype(jnp.int8)).astype(float), "not floating numbers"),
    "rounded to integers": (
        lambda h, p: (h @ p["turned"]).astype(jnp.int32).astype(h.dtype), "go through convert_element_type"
    ),
    "hidden states per class": (
        lambda h, p: jnp.einsum("btvd,vd->btv", h[:, :, None] * p["bias"][:, None], p["embed"]), "multiplies f"
    ),
    "the loss": (lambda h, p: full_loss(h @ p["turned"], jnp.asarray(TARGET)), r"it gives float64\[\]"),
    "a precision": (lambda h, p: jnp.dot(h, p["turned"], precision="highest"), "precision=.*HIGHEST"),
    "no logits": (lambda h, p: {"hidden": h}, "it gave dict without logits"),
    "no array": (lambda h, p: (None, h), "it gave tuple without logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_head_is_refused(name: str) -> None:
    finish, words = REFUSED[name]
    subject = function(finish)

    def run(parameters: Any) -> Any:
        return capture_lm_head(subject.forward)(parameters, IDS)

    with jax.check_tracer_leaks(), pytest.raises(NotImplementedError, match=rf"^forward: .*{words}"):
        jax.jit(run)(subject.parameters)


def test_adapters_of_flax_are_refused() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    with pytest.raises(NotImplementedError, match="LoRA is: merge it"):
        capture_lm_head(nnx.LoRALinear(D, V, lora_rank=2, rngs=nnx.Rngs(0)))(jnp.ones((T, D)))


def test_the_precision_that_jax_is_set_to_is_no_precision_of_the_heads() -> None:
    with jax.default_matmul_precision("highest"):
        assert capture_lm_head(lambda x: x @ jnp.ones((D, V)))(jnp.ones((T, D))).softcap is None


def test_a_scale_that_is_an_array_is_read_where_it_is_constant() -> None:
    scale = jnp.full((1,), 3.0)

    def scaled(scale: Any) -> Any:
        return capture_lm_head(lambda x: (x @ jnp.ones((D, V))) * scale)(jnp.ones((T, D)))

    assert scaled(scale).logit_scale == jax.jit(lambda: scaled(scale))().logit_scale == 3.0
    with pytest.raises(NotImplementedError, match="mul with something else than a constant"):
        jax.grad(lambda scale: scaled(scale).hidden.sum())(scale)


def test_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="forward: got int, allowed is a function that gives logits"):
        capture_lm_head(3)  # type: ignore[arg-type]


def test_no_library_of_layers_is_imported() -> None:
    code = "import sys, logitless.jax_impl; print([one for one in ('flax', 'equinox') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
