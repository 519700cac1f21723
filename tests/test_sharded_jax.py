"""JAX on a mesh: the vocabulary, the tokens and the weight cut over four devices, against one device's float64 truth.

On a machine without GPUs the devices are four of the host's (tests/conftest.py).
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
from compiled_text import copies  # noqa: E402
from implementations import JaxXla, assert_within, problem_named, run_case, truth  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.scale import Split, Step  # noqa: E402
from bench.shapes import Shape  # noqa: E402
from logitless import plan, reference  # noqa: E402
from logitless.jax_impl import (  # noqa: E402
    global_normalizer,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_log_probs,
    linear_top_k,
    sharded_linear_cross_entropy,
    sharded_linear_log_probs,
)
from logitless.jax_impl.kernels.architecture import can_interpret  # noqa: E402
from logitless.jax_impl.memory import temp_bytes  # noqa: E402
from logitless.problems import Problem  # noqa: E402
from logitless.spec import LossOptions, WeightLayout  # noqa: E402
from logitless.tolerances import TINY, error  # noqa: E402

DEVICES = 4
if len(jax.devices()) < DEVICES:
    pytest.skip(f"needs {DEVICES} devices of JAX, here are {len(jax.devices())}", allow_module_level=True)


def mesh_of(types: Any = AxisType.Auto, **axes: int) -> Any:
    shape, names = tuple(axes.values()), tuple(axes)
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=(types,) * len(names), devices=jax.devices()[:count])


VOCAB = mesh_of(vocab=DEVICES)
BOTH = mesh_of(data=2, vocab=2)


def padded(array: Any, devices: int, value: float) -> Any:
    """An array along the vocabulary with rows up to the next multiple of ``devices``."""
    if array is None:
        return None
    more = -array.shape[0] % devices
    return jnp.concatenate([array, jnp.full((more, *array.shape[1:]), value, array.dtype)])


class Sharded(JaxXla):
    """The function on four devices, padding filled with what would be seen if it took part."""

    def __init__(self, how: str) -> None:
        self.name = how

    def function(self) -> Any:
        def loss(x: Any, w: Any, y: Any, b: Any, **options: Any) -> Any:
            devices = DEVICES if self.name in ("shard_map", "sequence") else 2
            vocab = w.shape[0]
            w, b = padded(w, devices, 50.0), padded(b, devices, 50.0)
            k, t = padded(options.pop("class_weight", None), devices, 50.0), options.pop("token_weight", None)
            if devices == 2:
                mesh, data = (BOTH, "data") if self.name == "wrapper" else (mesh_of(vocab=2), None)
                sharded = sharded_linear_cross_entropy(mesh, vocab_axis="vocab", data_axis=data, vocab=vocab)
                return jax.jit(lambda x, w, b: sharded(x, w, y, b, class_weight=k, token_weight=t, **options))(x, w, b)
            tokens = self.name == "sequence"

            def body(x: Any, w: Any, b: Any, k: Any) -> Any:
                return linear_cross_entropy(
                    x, w, y, b, class_weight=k, token_weight=t, axis_name="vocab", vocab=vocab,
                    sequence_parallel=tokens, **options,
                )  # fmt: skip

            specs = (P("vocab") if tokens else P(), P("vocab"), P("vocab"), P("vocab"))
            return jax.jit(jax.shard_map(body, mesh=VOCAB, in_specs=specs, out_specs=P()))(x, w, b, k)

        return loss


# Together: both passes, every option, padding (123 over 4), devices with nothing but padding (1 over 4), rescue.
RUNS = (
    ("shard_map", "odd_all", "float32"),
    ("shard_map", "odd_softcap", "bfloat16"),
    ("shard_map", "confident_wrong_none", "float32"),
    ("shard_map", "one_class", "float32"),
    ("sequence", "odd_most", "bfloat16"),
    ("wrapper", "odd_most", "float32"),
    ("wrapper", "odd_none_all", "bfloat16"),
)


@pytest.mark.late(
    where=lambda p: (p["how"], p["name"]) in (("shard_map", "confident_wrong_none"), ("wrapper", "odd_most"))
)
@pytest.mark.case(26)
@pytest.mark.parametrize(("how", "name", "dtype"), RUNS)
def test_equal_to_one_device(how: str, name: str, dtype: str) -> None:
    problem = problem_named(name).with_dtype(dtype)
    cut = {"odd_softcap": ("vocab", 10), "odd_most": ("both", 64) if how == "shard_map" else None}.get(name)
    chosen = None if cut is None else plan_of(problem, *cut)
    assert_within(problem, run_case(Sharded(how), problem.case(), plan=chosen))


def plan_of(problem: Problem, order: Any, chunk: int) -> Any:
    """One device's plan."""
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": -(-problem.vocab // DEVICES)}
    return plan(**sizes, dtype=problem.dtype, order=order, chunk=chunk, device="cpu")


@pytest.mark.case(26)
def test_chunks_and_statistics() -> None:
    problem = problem_named("odd_most")
    chosen = plan_of(problem, "tokens", 72)
    outcome = run_case(Sharded("shard_map"), problem.case(), plan=chosen, return_stats=True)
    assert_within(problem, outcome)
    true = truth(problem).stats
    for field in ("nll", "lse", "target_logit", "entropy", "max_logit", "min_logit"):
        assert error(getattr(outcome.stats, field), getattr(true, field)) <= TINY["float32"], field
    assert (outcome.stats.argmax == true.argmax).all()
    assert (outcome.stats.correct == true.correct).all()


def arrays(tokens: int = 24, size: int = 8, vocab: int = 60, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((tokens, size)), rng.standard_normal((vocab, size))
    y = rng.integers(0, vocab, tokens).astype(np.int32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(y)


def over_vocab(**options: Any) -> Any:
    """The function inside of jax.shard_map, hidden and target on every device."""

    def body(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, axis_name="vocab", **options)

    return jax.jit(jax.shard_map(body, mesh=VOCAB, in_specs=(P(), P("vocab"), P()), out_specs=P()))


@pytest.mark.case(20)
@pytest.mark.case(26)
def test_ties_take_the_lowest_id_and_outside_ids_are_nan() -> None:
    x, w, y = arrays()
    w = w.at[jnp.array([20, 50])].set(30 * jnp.sign(x[0]))  # of devices 1 and 3, and the largest for token 0
    y = y.at[:4].set(jnp.array([20, -1, 60, 58]))
    function = over_vocab(vocab=58)
    losses, stats = over_vocab(reduction="none", return_stats=True, vocab=58)(x, w, y)
    assert int(stats.argmax[0]) == 20
    assert bool(stats.correct[0])
    assert np.flatnonzero(np.isnan(losses)).tolist() == [1, 2, 3]  # 58 is a row of the last device, and padding
    # Other tokens' logits are far above their targets', which other devices have: anchors move on all.
    assert (losses[4:] > 80).any()
    dx, dw = jax.grad(function, (0, 1))(x[4:], w, y[4:])
    true = reference.linear_cross_entropy(np.asarray(x[4:]), np.asarray(w[:58]), np.asarray(y[4:]))
    assert error(dx, true.hidden_grad) <= TINY["float32"]
    assert error(dw[:58], true.weight_grad) <= TINY["float32"]


@pytest.mark.case(26)
@pytest.mark.parametrize("how", ["shard_map", "wrapper"])
@pytest.mark.parametrize("asked", ["with_entropy", "return_stats"])
def test_log_probs_and_entropy(how: str, asked: str) -> None:
    x, w, y = arrays()
    given = {asked: True, "softcap": 5.0}
    names = ("log_prob", "entropy", "lse", "squared")[: 2 if asked == "with_entropy" else 4]
    upstream = np.random.default_rng(6).standard_normal((len(names), len(y))).astype(np.float32)

    def body(x: Any, w: Any, y: Any) -> Any:
        return linear_log_probs(x, w, y, axis_name="vocab", vocab=58, **given)

    def values(x: Any, w: Any) -> Any:
        if how == "shard_map":
            return jax.shard_map(body, mesh=VOCAB, in_specs=(P(), P("vocab"), P()), out_specs=P())(x, w, y % 58)
        sharded = sharded_linear_log_probs(BOTH, vocab_axis="vocab", data_axis="data", vocab=58)
        return sharded(x, w, y % 58, **given)

    def differentiable(x: Any, w: Any) -> Any:
        made = values(x, w)
        return (*made[:2], *((made[2].lse, made[2].sum_p_squared) if len(made) == 3 else ())), made[2:]

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        made, backward, stats = jax.vjp(differentiable, x, w, has_aux=True)
        return made[:2], stats, backward(tuple(jnp.asarray(upstream)))

    (log_prob, entropy), stats, (dx, dw) = run(x, w)
    upstreams = {f"{name}_upstream": g for name, g in zip(names, upstream, strict=True)}
    true = reference.linear_log_probs(np.asarray(x), np.asarray(w[:58]), np.asarray(y % 58), softcap=5.0, **upstreams)
    for field, value in (stats[0]._asdict() if stats else {}).items():
        assert error(value, getattr(true.stats, field)) <= 2 * TINY["float32"], field
    for made, wanted in ((log_prob, true.log_prob), (entropy, true.entropy), (dx, true.hidden_grad)):
        assert error(made, wanted) <= 2 * TINY["float32"]
    assert error(dw[:58], true.weight_grad) <= 2 * TINY["float32"]
    assert not np.asarray(dw[58:]).any()


@pytest.mark.case(26, 46)
@pytest.mark.parametrize("how", ["shard_map", "wrapper"])
def test_a_temperature_per_token(how: str) -> None:
    """Over the mesh's axes the temperatures are cut as the target is. No number is one where a token is ignored."""
    x, w, y = arrays()
    y = (y % 58).at[3].set(-100)
    tau = np.random.default_rng(5).uniform(0.4, 2.5, len(y)).astype(np.float32)
    tau[3] = np.nan
    mesh = VOCAB if how == "shard_map" else BOTH

    def values(x: Any, w: Any) -> Any:
        if how == "wrapper":
            wrapped = (
                make(mesh, vocab_axis="vocab", data_axis="data", vocab=58)
                for make in (sharded_linear_cross_entropy, sharded_linear_log_probs)
            )
            loss, log_probs = wrapped
            given = {"temperature": tau, "softcap": 5.0}
            return loss(x, w, y, **given), log_probs(x, w, y, **given)[0]

        def body(x: Any, w: Any, y: Any, tau: Any) -> Any:
            given = {"temperature": tau, "softcap": 5.0, "axis_name": "vocab", "vocab": 58}
            return linear_cross_entropy(x, w, y, **given), linear_log_probs(x, w, y, **given)[0]

        specs = (P(), P("vocab"), P(), P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())(x, w, y, jnp.asarray(tau))

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        (loss, log_prob), pull = jax.vjp(values, x, w)
        return loss, log_prob, pull((jnp.ones(()), 0 * log_prob)), pull((jnp.zeros(()), jnp.ones_like(log_prob)))

    loss, log_prob, first, second = run(x, w)
    given = (np.asarray(x), np.asarray(w[:58]), np.asarray(y))
    true = reference.linear_cross_entropy(*given, softcap=5.0, temperature=tau)
    other = reference.linear_log_probs(*given, softcap=5.0, temperature=tau)
    assert error(loss, true.loss) <= 2 * TINY["float32"]
    assert error(log_prob, other.log_prob) <= 2 * TINY["float32"]
    for (dx, dw), expected in ((first, true), (second, other)):
        assert error(dx, expected.hidden_grad) <= 2 * TINY["float32"]
        assert error(dw[:58], expected.weight_grad) <= 2 * TINY["float32"]


@pytest.mark.every_value
@pytest.mark.case(26, 45)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_given_ids_and_the_largest(shared: bool, sequence: bool) -> None:
    """Over four devices, two rows of padding: ids on every device, some twice, some ignored, all of one token."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 3, 12)).astype(np.float32), rng.standard_normal((60, 12)).astype(np.float32)
    w[58:] = 50.0
    ids = rng.integers(0, 58, (6,) if shared else (4, 3, 6)).astype(np.int32)
    ids[..., 1], ids[..., 3], ids[..., 4] = ids[..., 0], -100, 57
    if not shared:
        ids[1, 2] = -100
    x[2, 0] = 12 * w[7]
    g, h = rng.standard_normal((4, 3, 6)).astype(np.float32), rng.standard_normal((4, 3, 30)).astype(np.float32)

    def body(x: Any, w: Any, ids: Any) -> Any:
        more = {"axis_name": "vocab", "vocab": 58, "sequence_parallel": sequence, "softcap": 50.0}
        return linear_token_log_probs(x, w, ids, **more), *linear_top_k(x, w, 30, **more)

    specs = (P("vocab") if sequence else P(), P("vocab"), P())

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        mapped = jax.shard_map(body, mesh=VOCAB, in_specs=specs, out_specs=P())
        (log_prob, largest, found), pull = jax.vjp(lambda x, w: mapped(x, w, ids), x, w)
        nothing = np.zeros(found.shape, jax.dtypes.float0)
        return log_prob, largest, found, pull((g, 0 * h, nothing)), pull((0 * g, h, nothing))

    log_prob, largest, found, first, second = run(x, w)
    true = reference.linear_token_log_probs(x, w[:58], ids, upstream=g, softcap=50.0)
    expected, of_found = reference.linear_top_k(x, w[:58], 30, softcap=50.0)
    other = reference.linear_token_log_probs(x, w[:58], of_found, upstream=h, softcap=50.0)
    np.testing.assert_array_equal(found, of_found)
    assert error(log_prob, true.log_prob) <= 4 * TINY["float32"]
    assert error(largest, expected) <= 4 * TINY["float32"]
    for (dx, dw), wanted in ((first, true), (second, other)):
        assert error(dx, wanted.hidden_grad) <= 4 * TINY["float32"]
        assert error(dw[:58], wanted.weight_grad) <= 4 * TINY["float32"]
        assert not np.asarray(dw[58:]).any()


@pytest.mark.case(9, 45)
def test_ids_that_differ_between_devices_are_refused() -> None:
    x, w, ids = np.ones((2, 3), np.float32), np.ones((8, 3), np.float32), np.zeros((8,), np.int32)

    def body(w: Any, ids: Any) -> Any:
        return linear_token_log_probs(x, w, ids, axis_name="vocab")

    with pytest.raises(ValueError, match="ids: got an array that varies over 'vocab', allowed is the same one"):
        jax.shard_map(body, mesh=VOCAB, in_specs=(P("vocab"), P("vocab")), out_specs=P())(w, ids)


LOSSES_ON_TOP: dict[str, dict[str, Any]] = {
    "dpo_loss": {"loss_type": "ipo", "nll_coef": 0.3},
    "kto_loss": {"kl": 0.2},
    "clipped_policy_loss": {"ratio": "sequence", "entropy_coef": 0.1, "kl_coef": 0.1, "kl_times_ratio": True},
}


@pytest.mark.every_value
@pytest.mark.case(26)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LOSSES_ON_TOP)
def test_losses_on_top_of_a_vocabulary_on_four_devices(name: str, sequence: bool) -> None:
    from logitless import jax_impl

    rng = np.random.default_rng(0)
    per_token = (DEVICES, 6)
    known: dict[str, Any] = {"target": rng.integers(0, 58, per_token), "mask": rng.random(per_token) < 0.7}
    names = {"dpo_loss": (), "kto_loss": ()}.get(name, ("old_log_prob", "sampler_log_prob"))
    known |= {key: rng.standard_normal(per_token) - 4 for key in ("reference_log_prob", *names)}
    known |= {"kto_loss": {"desirable": np.arange(4) % 2}, "dpo_loss": {}}.get(name, {"advantage": np.arange(4) - 1.5})
    known = {
        key: jnp.asarray(value, jnp.float32 if value.dtype == np.float64 else None) for key, value in known.items()
    }
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((*per_token, 12), (58, 12)))

    def alone(x: Any, w: Any) -> Any:
        return getattr(jax_impl, name)(x, w, **known, **LOSSES_ON_TOP[name])

    def body(x: Any, w: Any) -> Any:
        more = {"axis_name": "vocab", "vocab": 58, "sequence_parallel": sequence}
        return getattr(jax_impl, name)(x, w, **known, **LOSSES_ON_TOP[name], **more)

    def over(x: Any, w: Any) -> Any:
        specs = (P("vocab") if sequence else P(), P("vocab"))
        return jax.shard_map(body, mesh=VOCAB, in_specs=specs, out_specs=P())(x, padded(w, DEVICES, 50.0))

    loss, grads = jax.jit(jax.value_and_grad(over, (0, 1)))(x, w)
    true_loss, true_grads = jax.value_and_grad(alone, (0, 1))(x, w)
    assert error(loss, true_loss) <= 4 * TINY["float32"]
    for made, wanted in zip(grads, true_grads, strict=True):
        assert error(made, wanted) <= 4 * TINY["float32"]


@pytest.mark.case(26)
def test_a_policy_on_a_mesh_of_data_and_vocabulary() -> None:
    """Each device has its sequences; a normalizer makes the sum of their losses the mean over all tokens."""
    from logitless.jax_impl import clipped_policy_loss

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 6, 12), (58, 12)))
    y = jnp.asarray(np.where(rng.random((4, 6)) < 0.3, -100, rng.integers(0, 58, (4, 6))))
    advantage = jnp.asarray(rng.standard_normal(4), jnp.float32)

    def body(x: Any, w: Any, y: Any, advantage: Any) -> Any:
        normalizer = global_normalizer(y, "data")
        loss = clipped_policy_loss(x, w, y, advantage=advantage, normalizer=normalizer, axis_name="vocab")
        return jax.lax.psum(loss, "data")

    specs = (P("data"), P("vocab"), P("data"), P("data"))
    over = jax.shard_map(body, mesh=BOTH, in_specs=specs, out_specs=P())
    loss, grads = jax.jit(jax.value_and_grad(over, (0, 1)))(x, w, y, advantage)
    true_loss, true_grads = jax.value_and_grad(
        lambda x, w: clipped_policy_loss(x, w, y, advantage=advantage), (0, 1)
    )(x, w)  # fmt: skip
    assert error(loss, true_loss) <= 4 * TINY["float32"]
    for made, wanted in zip(grads, true_grads, strict=True):
        assert error(made, wanted) <= 4 * TINY["float32"]


@pytest.mark.every_value
@pytest.mark.case(18, 21, 26)
@pytest.mark.parametrize("how", ["shard_map", "wrapper", "explicit", "sequence"])
@pytest.mark.parametrize("rows", [1, 4])
def test_lse_and_the_shift(how: str, rows: int) -> None:
    """One row of tokens as well, which the data axis cuts: a position's target may be another device's."""
    x, w, y = arrays()
    h = np.random.default_rng(6).standard_normal(24).astype(np.float32)
    if rows > 1:
        x, y, h = x.reshape(rows, -1, x.shape[-1]), y.reshape(rows, -1), h.reshape(rows, -1)
    options = {"softcap": 5.0, "label_smoothing": 0.1, "return_lse": True, "shift": 2}
    true = reference.linear_cross_entropy(
        *map(np.asarray, (x, w, y)), softcap=5.0, label_smoothing=0.1, shift=2, upstream=3.0, lse_upstream=h
    )
    mesh = mesh_of(AxisType.Explicit if how == "explicit" else AxisType.Auto, data=2, vocab=2)
    sharded = sharded_linear_cross_entropy(
        mesh, vocab_axis="vocab", data_axis="data", sequence_parallel=how == "sequence"
    )

    def body(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, axis_name="vocab", **options)

    def values(x: Any, w: Any, y: Any) -> Any:
        if how == "shard_map":
            return jax.shard_map(body, mesh=VOCAB, in_specs=(P(), P("vocab"), P()), out_specs=P())(x, w, y)
        return sharded(x, w, y, **options)

    @jax.jit
    def run(x: Any, w: Any, y: Any, h: Any) -> Any:
        made, backward = jax.vjp(lambda x, w: values(x, w, y), x, w)
        loss, lse = made
        upstream = jnp.full_like(loss, 3.0), (lse * 0 + h if how == "explicit" else h)
        return made, backward(upstream)

    given = (x, w, y, jnp.asarray(h))
    if how == "explicit":
        specs = (P("data"), P("vocab"), P("data"), P("data"))
        given = tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(given, specs, strict=True))
    (loss, lse), (dx, dw) = run(*given)
    expected = (true.loss, true.stats.lse, true.hidden_grad, true.weight_grad)
    for made, wanted in zip((loss, lse, dx, dw), expected, strict=True):
        assert error(made, wanted) <= 2 * TINY["float32"]
    assert not np.asarray(lse)[..., -2:].any()


# ---------------------------------------------------------------------------------------------------------------------
# Data parallel, FSDP, and what is communicated


def collectives(function: Any, *arguments: Any) -> dict[str, int]:
    """How many collectives of each kind a jitted function's program has, loops counted once."""
    text = jax.jit(function).lower(*arguments).as_text()
    names = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)\b", text)
    return {name: names.count(name) for name in sorted(set(names))}


def modelled(sequence: bool) -> dict[str, int]:
    """As :func:`collectives`, by the model of docs/scale.md."""
    step = Step(Shape(16, 8, 64), Split(DEVICES, sequence), "jax")
    names = [one.kind.replace("-", "_") for one in step.collectives() for _ in range(one.count)]
    return {name: names.count(name) for name in sorted(set(names))}


@pytest.mark.case(26)
@pytest.mark.case(27)
@pytest.mark.case(30)
def test_data_parallel_with_the_vocabulary_or_the_weight_gathered() -> None:
    """data × vocab, and FSDP: the head cut over the data axis, gathered once, its gradient scattered once."""
    x, w, y = arrays()
    y = y.at[::5].set(-100).at[12:].set(-100)  # the second half of the devices has no valid token
    true = reference.linear_cross_entropy(np.asarray(x), np.asarray(w), np.asarray(y))

    def vocabulary(x: Any, w: Any, y: Any) -> Any:
        norm = global_normalizer(y, "data")
        return lax.psum(linear_cross_entropy(x, w, y, normalizer=norm, axis_name="vocab"), "data")

    def fsdp(x: Any, w: Any, y: Any) -> Any:
        whole = lax.all_gather(w, "data", axis=0, tiled=True)
        return lax.psum(linear_cross_entropy(x, whole, y, normalizer=global_normalizer(y, "data")), "data")

    data = mesh_of(data=DEVICES)
    for mesh, body, weight_spec in ((BOTH, vocabulary, P("vocab")), (data, fsdp, P("data"))):
        specs = (P("data"), weight_spec, P("data"))
        step = jax.value_and_grad(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1))
        loss, (dx, dw) = jax.jit(step)(x, w, y)
        assert error(loss, true.loss) <= TINY["float32"]
        assert error(dx, true.hidden_grad) <= TINY["float32"]
        assert error(dw, true.weight_grad) <= TINY["float32"]
        if mesh is data:  # what is left are the loss and the two numbers of the normalizer
            assert collectives(step, x, w, y) == {"all_gather": 1, "all_reduce": 3, "reduce_scatter": 1}


def test_normalizer_with_weights_and_without_a_token() -> None:
    y = jnp.array([0, 2, -100, -100, -100, 1, 1, -100])
    t, k = jnp.arange(8.0), jnp.array([2.0, 0.5, 3.0])

    def body(y: Any, t: Any) -> Any:
        nothing = global_normalizer(jnp.full_like(y, -100), "vocab")
        return nothing, global_normalizer(y, "vocab", token_weight=t, class_weight=k)

    nothing, total = jax.jit(jax.shard_map(body, mesh=VOCAB, in_specs=P("vocab"), out_specs=P()))(y, t)
    assert (float(nothing), float(total)) == (1.0, 1 * 3.0 + 5 * 0.5 + 6 * 0.5)


@pytest.mark.case(26)
def test_what_is_communicated() -> None:
    """The anchors, a chunk's largest logit and sums, and dX; no dX where hidden is frozen. Each once."""
    x, w, y = arrays()
    step = jax.value_and_grad(over_vocab(), (0, 1))
    assert collectives(step, x, w, y) == modelled(sequence=False) == {"all_reduce": 4}
    assert collectives(jax.value_and_grad(over_vocab(), 1), x, w, y) == {"all_reduce": 3}

    def body(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, y, axis_name="vocab", sequence_parallel=True)

    scattered = jax.shard_map(body, mesh=VOCAB, in_specs=(P("vocab"), P("vocab")), out_specs=P())
    wanted = modelled(sequence=True)
    assert wanted == {"all_gather": 1, "all_reduce": 3, "reduce_scatter": 1}
    assert collectives(jax.value_and_grad(scattered, (0, 1)), x, w) == wanted
    both = [jax.jit(step)(x, w, y) for _ in range(2)]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        assert np.array_equal(one, other)


def test_temporary_memory_is_within_the_budget() -> None:
    """Compiled for one device, gathered hidden states and the device's share of dX included."""

    def step(budget: int) -> Any:
        def body(x: Any, w: Any, y: Any) -> Any:
            return linear_cross_entropy(x, w, y, axis_name="vocab", sequence_parallel=True, memory_budget=budget)

        specs = (P("vocab"), P("vocab"), P())
        return jax.value_and_grad(jax.shard_map(body, mesh=VOCAB, in_specs=specs, out_specs=P()), (0, 1))

    shape, beyond = jax.ShapeDtypeStruct, 512 * (128 * (4 + 2) + 8 * 4)
    x, w, y = shape((512, 128), jnp.bfloat16), shape((16384, 128), jnp.bfloat16), shape((512,), jnp.int32)
    assert temp_bytes(step(4 * 2**20), x, w, y) <= 4 * 2**20
    with pytest.raises(ValueError, match=f"memory_budget: got {beyond} bytes, allowed beside axis_name is more than"):
        jax.eval_shape(step(beyond), x, w, y)
    with pytest.raises(ValueError, match=r"memory_budget: got 1000 bytes, allowed for tokens=512, .* vocab=4096"):
        jax.eval_shape(step(beyond + 1000), x, w, y)


def test_hidden_of_each_device_has_its_own_gradient() -> None:
    """What JAX knows as varying is not summed here. The transpose of what made it varying sums it, once."""
    x, w, y = arrays()
    true = reference.linear_cross_entropy(np.asarray(x), np.asarray(w), np.asarray(y))

    def body(x: Any, w: Any) -> Any:
        return linear_cross_entropy(lax.all_gather(x, "vocab", axis=0, tiled=True), w, y, axis_name="vocab")

    mapped = jax.shard_map(body, mesh=VOCAB, in_specs=(P("vocab"), P("vocab")), out_specs=P())
    assert error(jax.jit(jax.grad(mapped))(x, w), true.hidden_grad) <= TINY["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Outside of jax.shard_map


@pytest.mark.case(27)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("weight_layout", ["vd", "dv"])
def test_global_arrays(weight_layout: WeightLayout, types: Any) -> None:
    """The wrapper takes both kinds of axes; the plain function Auto ones, and says what to do about Explicit ones."""
    mesh = mesh_of(types, data=2, vocab=2)
    x, w, y = arrays()
    true = reference.linear_cross_entropy(np.asarray(x), np.asarray(w), np.asarray(y), z_loss=1e-3)
    cut, true_grads = P("vocab", "data"), (true.hidden_grad, true.weight_grad)
    if weight_layout == "dv":
        w, cut, true_grads = w.T, P("data", "vocab"), (true.hidden_grad, true.weight_grad.T)
    specs = (P("data"), cut, P())
    placed = tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, y), specs, strict=True))
    sharded = sharded_linear_cross_entropy(mesh, vocab_axis="vocab", data_axis="data")

    def step(function: Any) -> Any:
        def loss(x: Any, w: Any, y: Any) -> Any:
            return function(x, w, y, z_loss=1e-3, weight_layout=weight_layout)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed)

    functions = [sharded]
    if types is AxisType.Auto:
        functions.append(linear_cross_entropy)
    else:
        with pytest.raises(ValueError, match=r"hidden: got .* Explicit axes .*sharded_linear_cross_entropy"):
            step(linear_cross_entropy)
    for function in functions:
        loss, grads = step(function)
        for made, wanted in zip((loss, *grads), (true.loss, *true_grads), strict=True):
            assert error(made, wanted) <= TINY["float32"]
    if types is AxisType.Explicit:
        assert [jax.typeof(made).sharding.spec for made in grads] == [P("data", None), cut]


@pytest.mark.parametrize("function", [sharded_linear_cross_entropy, sharded_linear_log_probs])
def test_a_turned_weight_on_a_mesh_is_not_copied(function: Any) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 16384)))
    y = jax.ShapeDtypeStruct((64,), jnp.int32)

    def compiled(layout: WeightLayout) -> Any:
        cut = (P("data"), P("vocab") if layout == "vd" else P(None, "vocab"), P("data"))
        at = tuple(NamedSharding(BOTH, spec) for spec in cut)

        def total(x: Any, w: Any, y: Any) -> Any:
            mapped = function(BOTH, vocab_axis="vocab", data_axis="data")
            found = mapped(x, w, y, weight_layout=layout, backend="xla", plan="lean")
            return jax.tree.leaves(found)[0].sum()

        step = jax.jit(jax.grad(total, (0, 1)), in_shardings=at, out_shardings=at[:2])
        return step.lower(x, w if layout == "dv" else jax.ShapeDtypeStruct(w.shape[::-1], w.dtype), y).compile()

    turned = compiled("dv")
    share = w.size // BOTH.shape["vocab"] * w.dtype.itemsize
    assert copies(turned.as_text(), share) == copies(compiled("vd").as_text(), share)
    scratch = {layout: compiled(layout).memory_analysis().temp_size_in_bytes for layout in ("vd", "dv")}
    assert scratch["dv"] <= scratch["vd"]


def test_kernels_are_refused_where_they_cannot_run() -> None:
    x, w, y = arrays(dtype=jnp.bfloat16)
    cut = jax.device_put(w, NamedSharding(VOCAB, P("vocab")))
    with pytest.raises(NotImplementedError, match=r"sharded_linear_cross_entropy .*backend='xla' can"):
        linear_cross_entropy(x, cut, y, backend="pallas")
    with pytest.raises(NotImplementedError, match=r"check_vma=True.*backend='xla' can"):
        over_vocab(backend="pallas")(x, w, y)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use


def test_errors_inside_of_shard_map() -> None:
    x, w, y = arrays()
    with pytest.raises(ValueError, match=r"axis_name: got 'vocab', allowed are the axes of a jax.shard_map .* \(\)"):
        linear_cross_entropy(x, w, y, axis_name="vocab")
    with pytest.raises(ValueError, match=r"vocab: got 58 without axis_name"):
        linear_cross_entropy(x, w, y, vocab=58)
    with pytest.raises(ValueError, match=r"sequence_parallel: got True without axis_name"):
        linear_log_probs(x, w, y, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"vocab: got 61, allowed is 1 to 60: 4 devices hold 15 rows each"):
        over_vocab(vocab=61)(x, w, y)
    with pytest.raises(ValueError, match=r"target: got shape \(24,\), allowed is hidden's leading axes \(96,\)"):
        over_vocab(sequence_parallel=True)(x, w, y)

    def mapped(specs: Any, **more: Any) -> Any:
        def body(x: Any, w: Any, y: Any) -> Any:
            return linear_cross_entropy(x, w, y, axis_name="vocab")

        return jax.shard_map(body, mesh=VOCAB, in_specs=specs, out_specs=P(), **more)(x, w, y)

    with pytest.raises(ValueError, match=r"weight: got an array that is the same on all devices of 'vocab'"):
        mapped((P(), P(), P()))
    with pytest.raises(ValueError, match=r"target: got an array that varies over 'vocab'"):
        mapped((P("vocab"), P("vocab"), P("vocab")))

    specs = (P(), P("vocab"), P())
    unchecked = jax.jit(
        jax.shard_map(
            lambda x, w, y: linear_cross_entropy(x, w, y, axis_name="vocab"), mesh=VOCAB, in_specs=specs,
            out_specs=P(), check_vma=False,
        )
    )  # fmt: skip
    assert float(unchecked(x, w, y)) == pytest.approx(float(linear_cross_entropy(x, w, y)), rel=TINY["float32"])
    with pytest.raises(ValueError, match=r"check_vma=False, allowed for gradients is check_vma=True"):
        jax.grad(unchecked)(x, w, y)


def test_errors_of_the_wrapper() -> None:
    x, w, y = arrays()
    with pytest.raises(TypeError, match=r"mesh: got str"):
        sharded_linear_cross_entropy("mesh", vocab_axis="vocab")
    with pytest.raises(ValueError, match=r"vocab_axis: got \('rows',\), allowed are the mesh's axes"):
        sharded_linear_cross_entropy(BOTH, vocab_axis="rows")
    with pytest.raises(ValueError, match=r"data_axis: got 'vocab', allowed is another one"):
        sharded_linear_cross_entropy(BOTH, vocab_axis="vocab", data_axis="vocab")
    with pytest.raises(ValueError, match=r"vocab_axis: got None beside data_axis=None"):
        sharded_linear_cross_entropy(BOTH)
    with pytest.raises(ValueError, match=r"vocab: got 3 without vocab_axis"):
        sharded_linear_log_probs(BOTH, data_axis="data", vocab=3)
    sharded = sharded_linear_cross_entropy(VOCAB, vocab_axis="vocab")
    with pytest.raises(ValueError, match=r"weight: got shape \(59, 8\), .* multiple of 4, .*pad it with rows of zeros"):
        sharded(x, w[:59], y)
    with pytest.raises(ValueError, match=r"target: got id 60 at index \(2\), allowed are 0 to 59"):
        sharded(x, w, y.at[2].set(60))
    with pytest.raises(TypeError, match="unexpected keyword argument 'axis_name'"):
        sharded(x, w, y, axis_name="vocab")


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


@pytest.mark.case(26)
@pytest.mark.parametrize("name", ["one_pass", pytest.param("two_pass", marks=pytest.mark.slow)])
def test_kernels_lower_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second with sequence parallelism; all with padding, bias, class weights and label smoothing."""
    pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "0")
    tokens, hidden, vocab = 200, 192, 999
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4}
    if name == "two_pass":
        options |= {"softcap": 30.0, "return_stats": True}
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((tokens, hidden), "bfloat16"), shape((1000, hidden), "bfloat16"), shape((tokens,), jnp.int32)
    b, k = shape((1000,), "bfloat16"), shape((1000,), jnp.float32)
    sharded = sharded_linear_cross_entropy(
        BOTH, vocab_axis="vocab", data_axis="data", vocab=vocab, sequence_parallel=name == "two_pass"
    )

    def loss(x: Any, w: Any, b: Any, y: Any, k: Any) -> Any:
        made = sharded(x, w, y, b, class_weight=k, backend="pallas", **options)
        return made[0] if options.get("return_stats") else made

    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, w, b, y, k)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "dot_general" not in text
    assert ("reduce_scatter" in text) == (name == "two_pass")


# A rescue that one device asks for and both carry out, padding, smoothing, class weights.
RESCUED = Problem(
    "kernels", (8,), 16, 69, "bfloat16", LossOptions(label_smoothing=0.1, z_loss=1e-4, logit_scale=8.0),
    bias=True, class_weight="positive", seed=80,  # one row, whose largest logit the second device has
)  # fmt: skip


@pytest.mark.case(26)
@pytest.mark.skipif(
    not can_interpret() or jax.default_backend() != "cpu",
    reason=f"interpreting takes jax 0.11 and a CPU as JAX's device, this is {jax.__version__}",
)
def test_kernels_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "1")
    # The interpreter asks, when one device is done, that no device holds a barrier.
    interpret = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.shared_memory")
    monkeypatch.setattr(interpret.GPUSharedMemory, "assert_no_barriers_allocated", lambda memory: None)
    sharded = Sharded("kernels")
    sharded.backend = "pallas"
    assert_within(RESCUED, run_case(sharded, RESCUED.case()))
