"""Distillations of a vocabulary that the devices of a mesh share, against the float64 truth and against one device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")

import jax.numpy as jnp  # noqa: E402
from distilling import cut_raggedly, rows_of, take_order  # noqa: E402
from implementations import JaxXla  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from parted_teachers import EVERY, HEAD_OPTIONS, TOKENS, case_of, is_head, outcome_of  # noqa: E402
from test_losses import ARGUMENTS  # noqa: E402
from test_sharded_jax import mesh_of  # noqa: E402
from test_teachers import DTYPES, ORDERS, QUICK, Problem, V, assert_true  # noqa: E402

from logitless import jax_impl, reference  # noqa: E402
from logitless.jax_impl.distributed.parallel import Shard  # noqa: E402
from logitless.jax_impl.memory import temp_bytes  # noqa: E402
from logitless.objectives import DistillationSizes, distillation_order  # noqa: E402
from logitless.tolerances import ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402

XLA = JaxXla()
# (devices, rows of each). 70 entries are 41 and 29, with a tile of nothing but padding; 24, 24, 22 and none; 35 and 35.
CUTS = ((2, 41), (4, 24), (2, 35))
OF_VOCABULARY = ("weight", "bias", "teacher_weight", "teacher_bias")


def spec_of(name: str) -> Any:
    return P(None, None, "vocab") if name == "teacher" else P("vocab") if name in OF_VOCABULARY else P()


def on_mesh(problem: Problem, names: Any, cut: tuple[int, int], check: bool = True, **more: Any) -> Any:
    """The function of the whole, padded arrays by their names."""
    name = "distillation_loss" if is_head(problem) else problem.function
    options = (problem.options | HEAD_OPTIONS if is_head(problem) else problem.call) | {"backend": "xla"} | more

    def body(given: dict[str, Any]) -> Any:
        return getattr(jax_impl, name)(**given, axis_name="vocab", vocab=V, **options)

    specs = {name: spec_of(name) for name in names}
    return jax.shard_map(body, mesh=mesh_of(vocab=cut[0]), in_specs=(specs,), out_specs=P(), check_vma=check)


def laid_out(a: dict[str, Any], dtype: str, cut: tuple[int, int]) -> dict[str, Any]:
    """The arrays, with padding that would be seen if it took part."""
    devices, columns = cut
    made = {}
    for name, values in a.items():
        array = XLA.array(values, dtype if name in ARGUMENTS or name.startswith("teacher") else None)
        if name in OF_VOCABULARY:
            array = jnp.pad(array, ((0, devices * columns - V), *((0, 0),) * (array.ndim - 1)), constant_values=9.0)
        elif name == "teacher":
            array = jnp.pad(array, ((0, 0), (0, 0), (0, devices * columns - V)), constant_values=0.9)
        made[name] = array
    return made


def outcome(problem: Problem, a: dict[str, Any], dtype: str, cut: tuple[int, int]) -> Any:
    """Loss and gradients, those of padding checked and cut off."""
    with XLA.precision(dtype):
        given = laid_out(a, dtype, cut)
        function, known = on_mesh(problem, given, cut), {name: given[name] for name in given if name not in ARGUMENTS}
        floats = {name: given[name] for name in ARGUMENTS}
        step = jax.jit(jax.value_and_grad(lambda floats, known: function(floats | known)))
        loss, grads = step(floats, known)
        found = {name: XLA.numpy(grad) for name, grad in grads.items()}
    assert not any(found[name][V:].any() for name in ("weight", "bias"))
    return XLA.numpy(loss), found | {name: found[name][:V] for name in ("weight", "bias")}


RUNS = [
    pytest.param(problem, DTYPES[i % 4], ORDERS[i // 4 % 2 ^ i % 2], CUTS[i % 3], id=f"{problem.name}-{DTYPES[i % 4]}")
    for i, problem in enumerate(EVERY)
]


@pytest.mark.late(where=lambda p: p["problem"].name not in QUICK and not is_head(p["problem"]))
@pytest.mark.case(26, 47)
@pytest.mark.parametrize(("problem", "dtype", "order", "cut"), RUNS)
def test_equal_to_the_truth_and_to_one_device(
    problem: Problem, dtype: str, order: str, cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, true = case_of(problem, dtype)
    alone, grads = outcome_of(XLA, problem, a, dtype)
    cut_raggedly(monkeypatch, order, TOKENS, cut[1])
    result = outcome(problem, a, dtype, cut)
    assert_true(result, true, dtype)
    assert not result[1]["hidden"][a["mask"] == 0].any()
    assert error(result[0], alone) <= 2 * ON_TOP_LOSS[dtype]
    for name, grad in grads.items():
        assert error(result[1][name], grad) <= 2 * ON_TOP_GRADIENT[dtype], name


@pytest.mark.case(26)
@pytest.mark.parametrize("order", ORDERS)
def test_a_function_of_columns_and_tokens_that_are_cut_too(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own tokens and its own columns. dW and db are summed over the axis of the tokens."""
    take_order(monkeypatch, order)
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 12), (V, 12), (V,)))
    p, y = rng.dirichlet(np.ones(V), 8).astype(np.float32), rng.integers(0, V, 8).astype(np.int32)
    y[[0, 5]] = -100
    options = {"beta": 0.3, "nll_coef": 0.4, "reduction": "sum"}

    def body(x: Any, w: Any, b: Any, p: Any, y: Any) -> Any:
        def rows(start: Any, count: int) -> Any:
            return lax.dynamic_slice_in_dim(p, start, count)

        loss = jax_impl.dense_distillation_loss(x, w, rows, b, target=y, axis_name="vocab", vocab=V, **options)
        return lax.psum(loss, "data")

    specs = P("data"), P("vocab"), P("vocab"), P("data", "vocab"), P("data")
    function = jax.shard_map(body, mesh=mesh_of(data=2, vocab=2), in_specs=specs, out_specs=P())
    loss, grads = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(x, w, b, p, y)
    true = reference.dense_distillation_loss(x, w, p, b, target=y, **options)
    assert_true((loss, dict(zip(ARGUMENTS, grads, strict=True))), true, "float32")


@pytest.mark.case(26)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_token_that_is_no_number_spoils_itself_alone(beta: float) -> None:
    problem = Problem("head", "dense", {"beta": beta, "reduction": "none"})
    a, _ = case_of(problem, "float32")
    a["hidden"], a["teacher_hidden"] = np.nan_to_num(a["hidden"]), np.nan_to_num(a["teacher_hidden"])
    given = laid_out(a | {"mask": np.ones_like(a["mask"])}, "float32", CUTS[0])
    function = jax.jit(on_mesh(problem, given, CUTS[0]))
    bad = jnp.zeros(given["mask"].shape, bool).at[1, 3].set(True)
    losses, pull = jax.vjp(
        lambda x: function(given | {"hidden": x}), jnp.where(bad[..., None], jnp.nan, given["hidden"])
    )
    rest, pull_rest = jax.vjp(lambda x: function(given | {"hidden": x, "mask": ~bad}), given["hidden"])
    np.testing.assert_array_equal(np.isnan(losses), bad)
    np.testing.assert_array_equal(losses[~bad], rest[~bad])
    (dx,), (dx_rest,) = pull(jnp.ones_like(losses)), pull_rest(jnp.ones_like(losses))
    assert np.isnan(dx[bad]).all()
    np.testing.assert_array_equal(dx[~bad], dx_rest[~bad])
    assert not dx_rest[bad].any()


@pytest.mark.case(26)
def test_values_without_tracked_types_and_what_is_refused() -> None:
    for name in ("head-0.3", "class-options", "dense-hard"):
        problem = next(problem for problem in EVERY if problem.name == name)
        a, true = case_of(problem, "float32")
        given = laid_out(a, "float32", CUTS[1])
        loss = jax.jit(on_mesh(problem, given, CUTS[1], check=False))(given)
        assert error(loss, true.loss) <= ON_TOP_LOSS["float32"]
        untracked = on_mesh(problem, given, CUTS[1], check=False)
        with pytest.raises(ValueError, match=r"axis_name: got 'vocab' of a jax\.shard_map with check_vma=False"):
            jax.grad(lambda w, f=untracked, g=given: f(g | {"weight": w}))(given["weight"])
        with pytest.raises(ValueError, match="vocab: got 70 without axis_name"):
            outcome_of(XLA, problem, a, "float32", vocab=70)


WRONG = {
    "weight": ("head-0", P(), "weight: got an array that is the same on all devices of 'vocab'"),
    "teacher_weight": ("head-0", P(), "teacher_weight: got an array that is the same on all devices of 'vocab'"),
    "mask": ("head-0", P("vocab"), "mask: got an array that varies over 'vocab'"),
    "ids": ("class-0.3", P("vocab"), "ids: got an array that varies over 'vocab'"),
    "probs": ("spread-0", P("vocab"), "probs: got an array that varies over 'vocab'"),
    "target": ("dense-hard", P("vocab"), "target: got an array that varies over 'vocab'"),
    "temperature": ("head-tau", P("vocab"), "temperature: got an array that varies over 'vocab'"),
}


@pytest.mark.case(9, 26)
@pytest.mark.parametrize("name", WRONG)
def test_an_array_that_lies_wrong_is_named(name: str) -> None:
    """Each device gets what has the right shape, and JAX knows that it is another's, or the same as another's."""
    which, spec, words = WRONG[name]
    problem = next(problem for problem in EVERY if problem.name == which)
    given = laid_out(case_of(problem, "float32")[0], "float32", CUTS[2])
    kind = jax_impl.distillation_loss if is_head(problem) else getattr(jax_impl, problem.function)
    options = problem.options if is_head(problem) else problem.call

    def body(given: dict[str, Any]) -> Any:
        part = {key: value[: CUTS[2][1]] if key == name and spec == P() else value for key, value in given.items()}
        return kind(**part, axis_name="vocab", **options)

    specs = {key: spec if key == name else spec_of(key) for key in given}
    if spec == P("vocab"):
        given[name] = jnp.concatenate([given[name]] * 2)
    with pytest.raises(ValueError, match=words):
        jax.shard_map(body, mesh=mesh_of(vocab=2), in_specs=(specs,), out_specs=P())(given)


# ---------------------------------------------------------------------------------------------------------------------
# Memory

N, D, D_TEACHER, COLUMNS, K = 512, 64, 96, 4096, 60
WAYS = ("head", "class", "spread", "dense")


def scratch(way: str, dtype: str, budget: int) -> int:
    """Bytes of a device, compiled."""
    kind, ints = getattr(jnp, dtype), jnp.int32
    entries = 2 * COLUMNS - 5
    shapes = {"hidden": ((N, D), kind), "weight": ((2 * COLUMNS, D), kind), "bias": ((2 * COLUMNS,), kind)}
    more: dict[str, Any] = {"beta": 0.5, "softcap": 30.0, "axis_name": "vocab", "vocab": entries, "backend": "xla"}
    name = {"head": "distillation_loss", "dense": "dense_distillation_loss"}.get(way, "sparse_distillation_loss")
    if way == "head":
        shapes |= {"teacher_hidden": ((N, D_TEACHER), kind), "teacher_weight": ((2 * COLUMNS, D_TEACHER), kind)}
    else:
        shapes["target"], more["nll_coef"] = ((N,), ints), 0.5
    if way == "dense":
        shapes["teacher"] = ((N, 2 * COLUMNS), kind)
    elif way != "head":
        shapes |= {"ids": ((N, K), ints), "probs": ((N, K), jnp.float32)}
        more["rest"] = way
    given = {key: jax.ShapeDtypeStruct(*value) for key, value in shapes.items()}
    specs = {key: P(None, "vocab") if key == "teacher" else spec_of(key) for key in given}

    def body(given: dict[str, Any]) -> Any:
        return getattr(jax_impl, name)(**given, memory_budget=budget, **more)

    function = jax.shard_map(body, mesh=mesh_of(vocab=2), in_specs=(specs,), out_specs=P())
    floats = {key: given.pop(key) for key in ARGUMENTS}
    return temp_bytes(jax.value_and_grad(lambda floats, known: function(floats | known)), floats, given)


@pytest.mark.every_value
@pytest.mark.case(26, 31)
@pytest.mark.parametrize(("way", "dtype"), list(itertools.product(WAYS, ["float32", "bfloat16"])))
def test_a_device_holds_its_rows(way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(monkeypatch, 64)
    ids, itemsize = (K + 1) * (way in ("class", "spread")), jnp.dtype(dtype).itemsize
    sizes = DistillationSizes(N, D, COLUMNS, dtype, D_TEACHER * (way == "head"), ids)
    order = distillation_order(sizes, operand_itemsize=itemsize, by="xla")
    promised = order.scratch_bytes + Shard("vocab", 2, COLUMNS, 2 * COLUMNS).scratch_bytes(N, D, itemsize)
    used = scratch(way, dtype, promised)
    assert itemsize * N * COLUMNS <= used <= promised, f"{used / 2**20:.2f} MiB of {promised / 2**20:.2f} promised"


@pytest.mark.case(9, 31)
def test_the_smallest_budget_counts_what_is_exchanged() -> None:
    beyond = Shard("vocab", 2, COLUMNS, 2 * COLUMNS).scratch_bytes(N, D, 4)
    sizes = DistillationSizes(N, D, COLUMNS, "float32", ids=K + 1)
    with pytest.raises(ValueError, match="is at least") as raised:
        distillation_order(sizes, operand_itemsize=4, by="xla", memory_budget=1000)
    least = int(str(raised.value).split()[-1])
    assert scratch("class", "float32", beyond + least) <= beyond + least
    with pytest.raises(ValueError, match=f"memory_budget: got {least - 1} bytes, allowed for tokens={N}, "):
        scratch("class", "float32", beyond + least - 1)


@pytest.mark.every_value
@pytest.mark.case(26, 31)
@pytest.mark.parametrize(("way", "dtype"), list(itertools.product(WAYS, ["float32", "bfloat16"])))
def test_a_device_stays_within_its_budget(way: str, dtype: str) -> None:
    budget = 4 * N * COLUMNS // 2
    used = scratch(way, dtype, budget)
    assert budget // 50 <= used <= budget, f"{used / 2**20:.2f} MiB of {budget / 2**20:.2f}"
