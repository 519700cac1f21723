"""Distillation from sparse and dense teachers, and the hard loss beside it, against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distilling import DISTILLING, DISTILLING_DTYPES, IN_EITHER_ORDER, ORDERS, cut_raggedly, take_order
from implementations import in_every_torch_place, in_jax, in_turn
from test_losses import ARGUMENTS, made, tools

from logitless import reference
from logitless.rounding import round_to
from logitless.tolerances import ELEMENTS, GRADIENT, ON_TOP_GRADIENT, ON_TOP_LOSS, TINY, error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

SHAPE, D, V = (3, 17), 12, 70
DTYPES = ("float64", "float32", "bfloat16", "float16")
OPTIONS = {"temperature": 1.7, "logit_scale": 0.8, "softcap": 4.0}
HARD = {"nll_coef": 0.4}


@dataclasses.dataclass(frozen=True)
class Problem:
    """``rest`` of a sparse teacher, "dense" or "log" of a dense one; what else is special about the data."""

    name: str
    rest: str
    options: dict[str, Any]
    ids: int = 4
    data: str = ""

    @property
    def function(self) -> str:
        return "dense_distillation_loss" if self.rest in ("dense", "log") else "sparse_distillation_loss"

    @property
    def call(self) -> dict[str, Any]:
        """The options of the function."""
        own = {"log_teacher": self.rest == "log"} if self.rest in ("dense", "log") else {"rest": self.rest}
        return own | self.options


PROBLEMS = [
    *(Problem(f"{rest}-{beta}", rest, {"beta": beta}) for rest in ("class", "spread", "dense") for beta in (0, 0.3, 1)),
    *(Problem(f"drop-{beta}", "drop", {"beta": beta}) for beta in (0, 0.3)),
    *(Problem(f"{rest}-options", rest, {"beta": 0.6} | OPTIONS | HARD) for rest in ("class", "spread", "drop", "log")),
    *(Problem(f"{rest}-hard", rest, {"beta": 1} | HARD) for rest in ("class", "spread", "dense")),
    *(
        Problem(f"{rest}-tau", rest, {"beta": 0.3, "softcap": 4.0} | HARD, data="temperatures")
        for rest in ("class", "dense")
    ),
    *(Problem(f"{rest}-fewer", rest, {"ignore_index": 3} | HARD, data="fewer") for rest in ("class", "spread", "drop")),
    *(Problem(f"{rest}-all", rest, {}, ids=V, data="all") for rest in ("class", "spread", "drop")),
    *(Problem(f"{rest}-above", rest, {"beta": 0.3}, data="above") for rest in ("class", "spread")),
    *(Problem(f"{rest}-one", rest, {"reduction": "sum"}, ids=1) for rest in ("class", "spread", "drop")),
    Problem("class-banned", "class", {"beta": 0.3} | HARD, data="banned"),
    Problem("dense-zeros", "dense", {"beta": 0.3}, data="zeros"),
    Problem("log-normalizer", "log", {"normalizer": 7.0}),
]  # fmt: skip


# Compiled by XLA in make test; test_both_frameworks_agree compiles those with a hard loss.
QUICK = (
    *("class-0.3", "spread-0", "drop-0", "dense-0.3", "class-options", "drop-fewer", "class-all", "spread-above"),
    *("log-normalizer", "dense-tau"),
)


def arrays(problem: Problem, dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    """Every array of the call by its argument's name, and in "mask" which tokens count."""
    rng = np.random.default_rng(seed)
    a: dict[str, Any] = {
        "hidden": rng.standard_normal((*SHAPE, D)),
        "weight": rng.standard_normal((V, D)) * D**-0.5,
        "bias": rng.standard_normal(V),
    }
    a = {name: round_to(values, dtype) for name, values in a.items()}
    side = "float64" if dtype == "float64" else "float32"
    a["mask"] = (rng.random(SHAPE) < 0.7).astype(np.int64)
    if "nll_coef" in problem.options:
        a["target"] = rng.integers(4, V, SHAPE)
        a["target"][:, -2:] = problem.options.get("ignore_index", -100)
    z = 2.0 * rng.standard_normal((*SHAPE, V))
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    if problem.data == "temperatures":
        a["temperature"] = round_to(rng.uniform(0.5, 3.0, SHAPE), side)
    if problem.data == "zeros":
        p = np.where(rng.random(p.shape) < 0.5, 0.0, p)
        p /= p.sum(-1, keepdims=True)
    if problem.function == "dense_distillation_loss":
        # In the dtype of the teacher.
        return a | {"teacher": round_to(np.log(p) if problem.rest == "log" else p, dtype)}
    ids = np.argsort(-p if problem.data != "fewer" else -p * (np.arange(V) != 3), axis=-1)[..., : problem.ids]
    probs = np.take_along_axis(p, ids, -1)
    if problem.data == "above":
        probs = probs / probs.sum(-1, keepdims=True) * 1.004
    if problem.data == "fewer":
        ids[0, :, 2:], ids[1, 4] = 3, 3
        probs[ids == 3] = np.nan  # what is no id has no probability
    if problem.data == "banned":
        away = np.setdiff1d(np.arange(V), np.concatenate([ids.ravel()[:40], a["target"].ravel(), np.unique(ids)]))
        a["bias"][away[:3]] = -np.inf
    return a | {"ids": ids, "probs": round_to(probs, side)}


def truth(problem: Problem, a: dict[str, Any]) -> Any:
    return getattr(reference, problem.function)(**a, **problem.call)


def poisoned(problem: Problem, a: dict[str, Any]) -> dict[str, Any]:
    """The arrays, with NaN and wrong ids where a token does not count: nothing may read it."""
    a = {name: np.array(values) for name, values in a.items()}
    gone = a["mask"] == 0
    for name in ("hidden", "probs", "teacher", "temperature"):
        if name in a:
            a[name][gone] = np.nan
    for name in ("target", "ids"):
        if name in a:
            a[name][gone] = V + 5
    return a


def outcome(impl: Any, problem: Problem, a: dict[str, Any], dtype: str, **more: Any) -> Any:
    constants = [name for name in a if name not in ARGUMENTS]
    return made(impl, problem.function, a, constants, dtype, **(problem.call | more))


def assert_true(result: Any, true: Any, dtype: str) -> None:
    loss, grads = result
    assert np.isfinite(true.loss).all()
    assert error(loss, true.loss) <= ON_TOP_LOSS[dtype]
    for name, grad in grads.items():
        expected = getattr(true, f"{name}_grad")
        assert np.abs(expected).max() > 0, name
        assert error(grad, expected) <= ON_TOP_GRADIENT[dtype], name


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    cut_raggedly(monkeypatch, request.param, int(np.prod(SHAPE)), V)
    return str(request.param)


@pytest.mark.late(where=lambda p: in_jax(p) and p["problem"].name not in QUICK)
@pytest.mark.case(47)
@DISTILLING
@pytest.mark.parametrize(("problem", "dtype"), in_turn(PROBLEMS, DTYPES))
def test_problem(impl: Any, problem: Problem, dtype: str, order: str) -> None:
    a = arrays(problem, dtype)
    if problem.data == "fewer" and problem.options.get("reduction", "mean") == "mean":
        assert not truth(problem, a).losses[1, 4]  # a token without ids
    result = outcome(impl, problem, poisoned(problem, a), dtype)
    assert_true(result, truth(problem, a), dtype)
    assert not result[1]["hidden"][a["mask"] == 0].any()


@pytest.mark.case(47)
@in_every_torch_place
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "stepped", "expanded"])
def test_a_dense_teacher_of_any_layout(device: str, backend: str, layout: str, log: bool, order: str) -> None:
    """The kernels read its probabilities along rows, however they lie."""
    torch = pytest.importorskip("torch", reason="JAX's arrays have one layout")
    from logitless.torch_impl import dense_distillation_loss

    random = torch.Generator().manual_seed(0)
    x, w, p = (torch.randn(*size, generator=random) for size in ((17, D), (V, D), (17, V)))
    p = (p.log_softmax(1) if log else p.softmax(1)).to(device)
    if layout == "expanded":
        p = p[:1].expand_as(p)
    plain = p.contiguous()
    laid = {"transposed": plain.T.contiguous().T, "stepped": plain.repeat_interleave(2, 1)[:, ::2], "expanded": p}
    results = []
    for teacher in (plain, laid[layout]):
        leaves = [leaf.to(device).detach().requires_grad_() for leaf in (x, w)]
        loss = dense_distillation_loss(*leaves, teacher, log_teacher=log, beta=1.0, backend=backend)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert laid[layout].stride() != plain.stride()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("rest", ["class", "spread", "drop", "dense"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_reference_is_the_sum_over_full_classes(rest: str, beta: float) -> None:
    """Another computation: probabilities themselves, and quotients of differences for the gradients."""
    if rest == "drop" and beta == 1:
        pytest.skip("dropping has no reverse KL")
    problem = Problem("", rest, {"beta": beta, "reduction": "sum", "temperature": 1.3} | HARD)
    a = arrays(problem, "float64")

    def total(a: dict[str, Any]) -> float:
        r = a["hidden"].reshape(-1, D) @ a["weight"].T + a["bias"]
        q = np.exp(r / 1.3) / np.exp(r / 1.3).sum(1, keepdims=True)
        p = a["teacher"].reshape(-1, V) if rest == "dense" else np.zeros(q.shape)
        if rest != "dense":
            ids, probs = a["ids"].reshape(len(q), -1), a["probs"].reshape(len(q), -1)
            others = 1 - probs.sum(1, keepdims=True)
            p += others / (V - problem.ids) if rest == "spread" else 0.0
            np.put_along_axis(p, ids, probs / (probs.sum(1, keepdims=True) if rest == "drop" else 1.0), 1)
            if rest == "class":
                own = np.take_along_axis(q, ids, 1)
                p, q = (np.concatenate(each, axis=1) for each in ((probs, others), (own, 1 - own.sum(1)[:, None])))
        m = p if beta == 1 else beta * p + (1 - beta) * q
        log_p = np.log(np.where(p > 0, p, 1.0))
        forward = p * (log_p - np.log(q if beta == 0 else m))
        losses = (forward if beta == 0 else beta * forward + (1.0 if beta == 1 else 1 - beta) * q * np.log(q / m)).sum(
            1
        )
        nll = np.log(np.exp(r).sum(1)) - r[np.arange(len(r)), np.where(a["target"] < 0, 0, a["target"]).ravel()]
        counted = ((a["mask"] != 0) & (a["target"] != -100)).ravel()
        return float(((losses + 0.4 * nll) * counted).sum())

    true, rng, step = truth(problem, a), np.random.default_rng(1), 1e-5
    assert error(true.loss, total(a)) <= TINY["float64"]
    for name in ARGUMENTS:
        way = rng.standard_normal(a[name].shape)
        slope = (total(a | {name: a[name] + step * way}) - total(a | {name: a[name] - step * way})) / (2 * step)
        assert error((getattr(true, f"{name}_grad") * way).sum(), slope) <= GRADIENT["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Sure sides


def sure(nats: float) -> dict[str, Any]:
    """A student that gives all but e^−nats of a token to its first id. Numbers that float32 holds exactly."""
    rng = np.random.default_rng(0)
    x, w = np.zeros((8, D), np.float32), np.zeros((V, D), np.float32)
    x[np.arange(8), np.arange(8)] = nats
    w[np.arange(8) * 5, np.arange(8)] = 1.0
    ids = np.stack([np.arange(8) * 5, np.arange(8) * 5 + 1], axis=1)
    b = (rng.integers(-8, 9, V) / 8).astype(np.float32)
    return {"hidden": x, "weight": w, "bias": b, "ids": ids, "target": ids[:, 0]}


@IN_EITHER_ORDER
@pytest.mark.case(44)
@DISTILLING
@pytest.mark.parametrize("nats", [12.0, 25.0, 60.0])
def test_the_rest_of_a_sure_student(impl: Any, nats: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of the rest's mass has its digits: that of 1 − Σ q would have lost them."""
    take_order(monkeypatch, order)
    a = sure(nats) | {"probs": np.full((8, 2), 0.25, np.float32)}
    del a["target"]
    problem = Problem("", "class", {"reduction": "sum"})
    assert_true(outcome(impl, problem, a, "float32"), truth(problem, a), "float32")


@IN_EITHER_ORDER
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_more_ids_than_a_program_holds(beta: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take plain operations. With one id fewer the kernel has no lane to spare."""
    pytest.importorskip("torch", reason="this is about PyTorch's kernels")
    from implementations import TorchTriton

    take_order(monkeypatch, order)
    problem = Problem("", "class", {"beta": beta} | HARD)
    a = arrays(problem)
    count = a["ids"].shape[-1]
    for most in (count, count + 1):
        monkeypatch.setattr("logitless.torch_impl.distillation.api.KERNEL_CLASSES", most)
        assert_true(outcome(TorchTriton(), problem, a, "float32"), truth(problem, a), "float32")


@IN_EITHER_ORDER
@pytest.mark.case(14)
@DISTILLING
@pytest.mark.parametrize("nats", [12.0, 25.0])
def test_the_hard_loss_of_a_sure_student(impl: Any, nats: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that agrees with the student leaves the hard loss alone, whose values are far below float32's 1."""
    take_order(monkeypatch, order)
    a = sure(nats)
    z = a["hidden"] @ a["weight"].T + a["bias"]
    teacher = np.exp(z - z.max(1, keepdims=True)).astype(np.float64)
    a |= {"teacher": (teacher / teacher.sum(1, keepdims=True)).astype(np.float32)}
    del a["ids"]
    alone = {key: a[key] for key in ("hidden", "weight", "target", "bias")}
    true = reference.linear_cross_entropy(**alone, reduction="sum")
    problem = Problem("", "dense", {"nll_coef": 2.0**20, "reduction": "sum"})
    loss, grads = outcome(impl, problem, a, "float32")
    assert error(loss, 2.0**20 * true.loss) <= ON_TOP_LOSS["float32"]
    for name in ("weight", "bias"):
        assert error(grads[name], 2.0**20 * getattr(true, f"{name}_grad")) <= ON_TOP_GRADIENT["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# Of both frameworks, and of a teacher's head


@pytest.mark.late(where=lambda p: p["problem"].name in ("spread-options", "drop-options", "spread-hard", "drop-fewer"))
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.options.get("nll_coef")], ids=lambda p: p.name)
def test_both_frameworks_agree(problem: Problem) -> None:
    pytest.importorskip("torch", reason="compares both frameworks")
    pytest.importorskip("jax", reason="compares both frameworks")
    from implementations import JaxXla, TorchEager

    a = arrays(problem)
    (one, grads), (other, others) = (outcome(impl(), problem, a, "float32") for impl in (TorchEager, JaxXla))
    np.testing.assert_allclose(one, other, **ELEMENTS["another order"])
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, others[name], **ELEMENTS["another order"])


@DISTILLING
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_teachers_head_with_the_hard_loss(impl: Any, beta: float) -> None:
    """It is the dense teacher whose probabilities the head gives."""
    problem = Problem("", "dense", {"beta": beta, "temperature": 1.7, "softcap": 5.0} | HARD)
    a, rng = arrays(problem), np.random.default_rng(5)
    head = {"teacher_hidden": rng.standard_normal((*SHAPE, 7)), "teacher_weight": rng.standard_normal((V, 7))}
    head = {name: values.astype(np.float32) for name, values in head.items()}
    z = head["teacher_hidden"].astype(np.float64) @ head["teacher_weight"].T / 1.7
    a["teacher"] = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    constants = ["mask", "target", *head]
    result = made(impl, "distillation_loss", a | head, constants, "float32", **problem.options)
    assert_true(result, truth(problem, a), "float32")


# ---------------------------------------------------------------------------------------------------------------------
# Where dense teachers come from


def dense(impl: Any, a: dict[str, Any], teacher: Any, dtype: str = "float32", **options: Any) -> Any:
    package, _, framework, context = tools(impl)
    with context(dtype):
        known = {"mask": impl.array(a["mask"]), "teacher": teacher}

        def loss(given: dict[str, Any]) -> Any:
            return package.dense_distillation_loss(**given, **known, backend=impl.backend, **options)

        return framework.value_and_grads(impl, loss, {name: a[name] for name in ARGUMENTS}, dtype)


class Rows:
    """Rows of an array, for a function that generates them."""

    def __init__(self, array: Any, shift: int = 0) -> None:
        self.array, self.shift, self.calls = array.reshape(-1, array.shape[-1]), shift, []

    def torch(self, start: int, count: int) -> Any:
        self.calls.append((start, count))
        return self.array[start : start + count, self.shift :]

    def jax(self, start: Any, count: int) -> Any:
        import jax

        self.calls.append((start, count))
        return jax.lax.dynamic_slice_in_dim(self.array, start, count)[:, self.shift :]

    def of(self, impl: Any) -> Callable[..., Any]:
        return self.torch if impl.name.startswith("torch") else self.jax


@DISTILLING_DTYPES
@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_generated_rows(impl: Any, beta: float, order: str) -> None:
    problem = Problem("", "dense", {"beta": beta})
    a = arrays(problem)
    impl.takes("float32")
    rows = Rows(impl.array(a["teacher"], "float32"))
    assert_true(dense(impl, a, rows.of(impl), beta=beta), truth(problem, a), "float32")
    tokens = int(np.prod(SHAPE))
    if impl.name.startswith("torch"):  # every chunk once in the forward, and again in the backward
        assert rows.calls == [(0, 32), (32, tokens - 32)] * (1 if order == "held" else 2)
    wrong = Rows(impl.array(a["teacher"], "float32"), shift=1)
    with pytest.raises(
        ValueError, match=r"teacher: got a function that returns \(\d+, 69\) of float32, allowed is \[c"
    ):
        dense(impl, a, wrong.of(impl))
    with pytest.raises(TypeError, match="teacher: got a function that returns int, allowed is an array"):
        dense(impl, a, lambda start, count: 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_memory_mapped_teacher(dtype: str, tmp_path: Path, order: str) -> None:
    pytest.importorskip("torch", reason="JAX has no arrays in files")
    from implementations import TorchEager

    problem = Problem("", "log", {"beta": 0.3})
    a = arrays(problem)
    a["teacher"] = round_to(a["teacher"], dtype)
    kept = np.memmap(tmp_path / "teacher", a["teacher"].dtype, "w+", shape=a["teacher"].shape)
    kept[:] = a["teacher"]
    if dtype == "bfloat16":
        import ml_dtypes

        kept = np.array(a["teacher"].astype(ml_dtypes.bfloat16))
    for array in (kept, np.asarray(kept)[:, ::-1][:, ::-1]):
        assert_true(dense(TorchEager(), a, array, log_teacher=True, beta=0.3), truth(problem, a), "float32")


@pytest.mark.case(33)
def test_a_teacher_of_any_layout() -> None:
    """Leading axes without a common stride are never copied as a whole."""
    torch = pytest.importorskip("torch", reason="JAX's arrays have one layout")
    from implementations import TorchEager

    problem = Problem("", "dense", {"beta": 0.3})
    a = arrays(problem)
    values = torch.tensor(a["teacher"])
    turned = values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    few = values[:, :1].expand(*SHAPE, V)
    for teacher in (turned, few):
        true = truth(problem, a | {"teacher": teacher.numpy()})
        assert_true(dense(TorchEager(), a, teacher, beta=0.3), true, "float32")


def test_a_teacher_that_the_host_computes(order: str) -> None:
    """What the page says of files: a callback of JAX, inside of jax.jit. A held gradient has its rows made once."""
    jax = pytest.importorskip("jax", reason="this is about JAX")
    from logitless.jax_impl import dense_distillation_loss

    problem = Problem("", "dense", {})
    a = arrays(problem)
    flat, calls = a["teacher"].reshape(-1, V), []

    def rows(start: Any, count: int) -> Any:
        shape = jax.ShapeDtypeStruct((count, V), flat.dtype)

        def read(first: Any) -> Any:
            calls.append((int(first), count))
            return flat[int(first) : int(first) + count]

        return jax.pure_callback(read, shape, start)

    @jax.jit
    def loss(hidden: Any) -> Any:
        return dense_distillation_loss(hidden, a["weight"], rows, a["bias"], mask=a["mask"])

    value, grad = jax.block_until_ready(jax.value_and_grad(loss)(a["hidden"]))
    assert calls == [(0, 32), (32, len(flat) - 32)] * (1 if order == "held" else 2)
    assert error(value, truth(problem, a).loss) <= ON_TOP_LOSS["float32"]
    assert error(grad, truth(problem, a).hidden_grad) <= ON_TOP_GRADIENT["float32"]


@pytest.mark.case(32)
@pytest.mark.parametrize("way", ["jit", "checkpoint", "vmap", "the teacher's gradient"])
def test_a_function_may_close_over_what_is_traced(way: str) -> None:
    """As a training step does whose teacher's weight is an argument."""
    jax = pytest.importorskip("jax", reason="this is about JAX")
    import jax.numpy as jnp

    from logitless.jax_impl import dense_distillation_loss

    a = arrays(Problem("", "dense", {}))
    teacher = jnp.log(jnp.asarray(a["teacher"]))

    def loss(hidden: Any, logits: Any) -> Any:
        def rows(start: Any, count: int) -> Any:
            part = jax.lax.dynamic_slice_in_dim(logits.reshape(-1, V), start, count)
            return jax.nn.log_softmax(part)

        return dense_distillation_loss(hidden, a["weight"], rows, a["bias"], log_teacher=True, mask=a["mask"])

    if way == "the teacher's gradient":
        assert not np.asarray(jax.grad(loss, 1)(a["hidden"], teacher)).any()
        return
    gradient = jax.grad(jax.checkpoint(loss) if way == "checkpoint" else loss)
    made = jax.jit(gradient)(a["hidden"], teacher)
    if way == "vmap":
        made = jax.vmap(gradient)(a["hidden"][None], teacher[None])[0]
    assert error(made, truth(Problem("", "dense", {}), a).hidden_grad) <= ON_TOP_GRADIENT["float32"]


# ---------------------------------------------------------------------------------------------------------------------
# What is no distribution, and bad input


WRONG: dict[str, tuple[str, Any, str]] = {
    "outside": ("ids", V, r"ids: got id 70 at index \(1, 2, 0\), allowed are 0 to 69"),
    "below": ("ids", -7, r"ids: got id -7 at index \(1, 2, 0\)"),
    "repeated": ("ids", None, r"ids: got an id more than once for the token \(1, 2\), allowed are different ids"),
    "negative": ("probs", -0.1, r"probs: got probabilities that are no distribution's for the token \(1, 2\), allowed"),
    "nan": ("probs", np.nan, "probs: got probabilities that are no distribution's"),
    "above": ("probs", 0.9, "probs: got probabilities that are no distribution's .* sum is at most 1, or 1.01"),
    "target": ("target", V, r"target: got id 70 at index \(1, 2\), allowed are 0 to 69"),
}


def spoiled(problem: Problem, kind: str) -> dict[str, Any]:
    a, (name, value, _) = arrays(problem), WRONG[kind]
    a["mask"][1, 2], a["target"][1, 2] = 1, 5
    if name == "target":
        a[name][1, 2] = value
    else:
        a[name][1, 2, 0] = a[name][1, 2, 1] if value is None else value
    if kind == "above":
        a["probs"][1, 2] = 0.3
    return a


@DISTILLING_DTYPES
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("rest", ["class", "spread", "drop"])
def test_what_is_no_distribution_is_refused(impl: Any, kind: str, rest: str) -> None:
    if impl.on_gpu:
        pytest.skip("on a GPU nothing looks at values")
    problem = Problem("", rest, dict(HARD))
    a = spoiled(problem, kind)
    with pytest.raises(ValueError, match=WRONG[kind][2]):
        outcome(impl, problem, a, "float32")
    a["mask"][1, 2] = 0  # nobody looks at a token that does not count
    outcome(impl, problem, a, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("rest", ["class", "spread"])
def test_on_a_gpu_that_token_alone_is_nan(kind: str, rest: str) -> None:
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    from logitless.torch_impl import sparse_distillation_loss

    problem = Problem("", rest, dict(HARD))
    a = {name: torch.tensor(values, device="cuda") for name, values in spoiled(problem, kind).items()}
    a["hidden"].requires_grad_()
    losses = sparse_distillation_loss(**a, rest=rest, reduction="none", **HARD)
    wrong = losses.isnan().nonzero().tolist()
    assert wrong == [[1, 2]]
    losses.sum().backward()
    assert not a["hidden"].grad[1, 2].any()
    assert a["hidden"].grad.isfinite().all()


@functools.cache
def jitted(rest: str) -> tuple[Any, Any]:
    """Losses of hidden, weight and a dictionary of the rest, and the gradients of their sum; compiled once."""
    import jax

    from logitless.jax_impl import sparse_distillation_loss

    bias = arrays(Problem("", rest, dict(HARD)))["bias"]

    def losses(hidden: Any, weight: Any, known: Any) -> Any:
        return sparse_distillation_loss(hidden, weight, bias=bias, rest=rest, reduction="none", **known, **HARD)

    return jax.jit(losses), jax.jit(jax.grad(lambda *given: losses(*given).sum(), (0, 1)))


@pytest.mark.case(47)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("rest", ["class", "spread"])
def test_where_nobody_looks_that_token_alone_is_nan(kind: str, rest: str) -> None:
    pytest.importorskip("jax", reason="jax.jit hides values")
    import jax.numpy as jnp

    problem = Problem("", rest, dict(HARD))
    a, clean = spoiled(problem, kind), arrays(problem)
    constants = ("ids", "probs", "target", "mask")
    known = {name: jnp.asarray(a[name]) for name in constants}

    losses, gradients = jitted(rest)
    found = np.array(losses(a["hidden"], a["weight"], known))
    assert np.isnan(found[1, 2])
    found[1, 2] = 0
    clean["mask"][1, 2] = 0
    true = reference.sparse_distillation_loss(**clean, rest=rest, **HARD, reduction="sum")
    assert error(found, true.losses) <= ON_TOP_LOSS["float32"]
    grads = gradients(a["hidden"], a["weight"], known)
    for grad, name in zip(grads, ARGUMENTS, strict=False):
        assert error(grad, getattr(true, f"{name}_grad")) <= ON_TOP_GRADIENT["float32"]


@DISTILLING_DTYPES
def test_one_token_that_is_no_number(impl: Any) -> None:
    for rest in ("class", "spread", "dense"):
        problem = Problem("", rest, {"beta": 0.3, "reduction": "sum"})
        a = arrays(problem, impl.dtype)
        a["mask"][:] = 1
        _, clean = outcome(impl, problem, a, impl.dtype)
        a["hidden"][1, 3] = np.nan
        loss, grads = outcome(impl, problem, a, impl.dtype)
        assert np.isnan(loss)
        assert np.isnan(grads["hidden"][1, 3]).all()
        others = np.ones(SHAPE, bool)
        others[1, 3] = False
        assert error(grads["hidden"][others], clean["hidden"][others]) <= GRADIENT[impl.dtype]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("drop", {"beta": 1.0}, "beta: got 1.0 beside rest='drop', allowed is less than 1: the reverse KL is infinite"),
    ("class", {"rest": "keep"}, "rest: got 'keep', allowed are 'class', 'spread', 'drop'"),
    ("class", {"nll_coef": 0.1}, "target: got None beside nll_coef=0.1, allowed is an array"),
    ("dense", {"nll_coef": -1.0}, "nll_coef: got -1.0, allowed"),
    ("class", {"target": np.zeros(SHAPE, np.int64)}, "nll_coef: got 0 beside a target, allowed is a number greater"),
    (
        "class",
        {"ids": np.zeros(4, np.int64)},
        r"ids: got shape \(4,\), allowed is \[..., K\] with hidden's leading axes",
    ),
    ("class", {"probs": np.zeros((*SHAPE, 3), np.float32)}, r"probs: got shape \(3, 17, 3\), allowed is that of ids"),
    ("dense", {"teacher": np.zeros((*SHAPE, V + 1), np.float32)}, r"teacher: got shape .*, allowed is \[..., V\] = "),
    ("dense", {"teacher": np.zeros((51, V), np.float32)}, r"teacher: got shape \(51, 70\), allowed is"),
    ("class", {"memory_budget": 1000}, "memory_budget: got 1000 bytes, allowed for"),
    ("spread", {"normalizer": 2.0, "reduction": "sum"}, "normalizer: got a value beside reduction='sum'"),
]


@DISTILLING_DTYPES
@pytest.mark.parametrize(("rest", "changes", "words"), BAD, ids=[f"{r}-{next(iter(c))}" for r, c, _ in BAD])
def test_bad_arguments(impl: Any, rest: str, changes: dict[str, Any], words: str) -> None:
    problem = Problem("", rest, {})
    a = arrays(problem, impl.dtype) | {key: value for key, value in changes.items() if isinstance(value, np.ndarray)}
    options = {key: value for key, value in changes.items() if not isinstance(value, np.ndarray)}
    with pytest.raises(ValueError, match=words):
        outcome(impl, problem, a, impl.dtype, **options)


@DISTILLING_DTYPES
@pytest.mark.parametrize("rest", ["class", "spread", "drop", "dense"])
def test_no_token_counts(impl: Any, rest: str) -> None:
    problem = Problem("", rest, dict(HARD))
    a = arrays(problem, impl.dtype)
    a["mask"][:] = 0
    loss, grads = outcome(impl, problem, a, impl.dtype)
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.every_value
@pytest.mark.parametrize("rest", ["class", "spread", "drop", "dense"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gradcheck(rest: str, beta: float) -> None:
    torch = pytest.importorskip("torch", reason="torch.autograd.gradcheck")
    from logitless import torch_impl

    if rest == "drop" and beta == 1:
        pytest.skip("dropping has no reverse KL")
    problem = Problem("", rest, {"beta": beta, "reduction": "none", "softcap": 3.0, "temperature": 1.5} | HARD)
    a = {name: torch.tensor(values[:1, :4] if values.shape[:1] == SHAPE[:1] else values) for name, values in arrays(
        problem, "float64").items()}  # fmt: skip
    known = {name: values for name, values in a.items() if name not in ARGUMENTS}
    loss = getattr(torch_impl, problem.function)
    leaves = [a["hidden"].requires_grad_(), a["bias"].requires_grad_()]

    def losses(hidden: Any, bias: Any) -> Any:
        return loss(hidden=hidden, weight=a["weight"], bias=bias, **known, **problem.call)

    assert torch.autograd.gradcheck(losses, leaves)
