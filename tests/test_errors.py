"""Bad input raises an error that names the argument, what came and what is allowed. Nothing is computed, and nothing
changes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import every_implementation, in_its_own_dtype, uninterpreted

from logitless import plan, spec
from logitless.spec import ArrayInfo, LossOptions
from logitless.tolerances import TINY


def call(impl: Any, **changes: Any) -> Any:
    rng = np.random.default_rng(0)
    arguments: dict[str, Any] = {
        "hidden": rng.standard_normal((6, 4)),
        "weight": rng.standard_normal((10, 4)),
        "target": rng.integers(0, 10, 6),
        "bias": rng.standard_normal(10),
    }
    return impl.run(**(arguments | changes))


BAD_VALUES = {
    "reduction": ("average", "reduction: got 'average', allowed are 'mean', 'sum', 'none'"),
    "label_smoothing": (1.5, r"label_smoothing: got 1.5, allowed is a finite number in \[0, 1\]"),
    "z_loss": (-1e-4, r"z_loss: got -0.0001, allowed is a finite number in \[0, 1e\+15\]"),
    "logit_scale": (float("nan"), r"logit_scale: got nan, allowed is a finite number in \[1e-15, 1e\+15\]"),
    "softcap": (0.0, r"softcap: got 0.0, allowed is a finite number in \[1e-15, 1e\+15\]"),
    "normalizer": (0.0, "normalizer: got 0, allowed is a finite number other than 0"),
    "backend": ("cuda", "backend: got 'cuda', allowed are None, "),
    "memory_budget": (-1, "memory_budget: got -1, allowed is at least 1"),
}


@in_its_own_dtype
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_options(impl: Any, name: str) -> None:
    if name == "backend":
        impl = type(impl)()
        impl.backend = "cuda"
        with pytest.raises(ValueError, match=BAD_VALUES[name][1]):
            call(impl)
        return
    value, words = BAD_VALUES[name]
    with pytest.raises(ValueError, match=words):
        call(impl, **{name: value})


@in_its_own_dtype
def test_other_infinities_and_types(impl: Any) -> None:
    for name in ("label_smoothing", "z_loss", "logit_scale", "softcap", "normalizer"):
        for value in (float("inf"), float("nan"), -float("inf")):
            with pytest.raises(ValueError, match=f"{name}: got"):
                call(impl, **{name: value})
        for value in ("1", True, [1.0], 1j):
            with pytest.raises((TypeError, ValueError), match=f"{name}: got"):
                call(impl, **{name: value})
    with pytest.raises(TypeError, match=r"ignore_index: got 1\.5, allowed is an integer"):
        call(impl, ignore_index=1.5)
    with pytest.raises(TypeError, match="plan: got int, allowed is a ChunkPlan"):
        call(impl, plan=512)


@every_implementation
def test_backends_that_cannot_run_name_one_that_can(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterpreted(monkeypatch)
    kernel = {"eager": "triton", "xla": "pallas"}.get(impl.backend)
    if kernel is not None and not (kernel == "triton" and impl.on_gpu):  # what is called here is float32
        other = type(impl)()
        other.backend = kernel
        with pytest.raises(NotImplementedError, match=f"'{kernel}' cannot run here: .*; backend='{impl.backend}' can"):
            call(other)


@in_its_own_dtype
def test_bad_shapes(impl: Any) -> None:
    rng = np.random.default_rng(0)
    for change, words in (
        ({"weight": rng.standard_normal((10, 4, 1))}, r"weight: got shape \(10, 4, 1\), allowed is \[V, D\]"),
        ({"hidden": np.float32(1.0)}, r"hidden: got shape \(\), allowed is"),
        ({"hidden": rng.standard_normal((6, 5))}, "hidden: got last axis 5, allowed is weight's D = 4"),
        ({"target": np.zeros(7, np.int64)}, r"target: got shape \(7,\), allowed is hidden's leading axes \(6,\)"),
        ({"bias": rng.standard_normal(9)}, r"bias: got shape \(9,\), allowed is \[V\] = \(10,\)"),
        ({"token_weight": np.ones(5, np.float32)}, r"token_weight: got shape \(5,\), allowed is target's shape"),
        ({"class_weight": np.ones(6, np.float32)}, r"class_weight: got shape \(6,\), allowed is \[V\] = \(10,\)"),
        ({"weight": np.zeros((0, 4)), "bias": None}, r"weight: got shape \(0, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call(impl, **change)


@in_its_own_dtype
def test_bad_dtypes(impl: Any) -> None:
    for change, words in (
        ({"target": np.zeros(6, np.float32)}, "target: got dtype float32, allowed are int32, int64"),
        ({"target": np.zeros(6, bool)}, "target: got dtype bool"),
        ({"token_weight": np.ones(6, np.int32)}, "token_weight: got dtype int32"),
        ({"class_weight": np.ones(10, bool)}, "class_weight: got dtype bool"),
    ):
        with pytest.raises(TypeError, match=words):
            call(impl, **change)
    with pytest.raises(TypeError, match="hidden: got dtype int32, allowed are bfloat16, float16, float32, float64"):
        call(impl, dtype="int32", wrt=())


@pytest.mark.case(9)
@in_its_own_dtype
@pytest.mark.parametrize("bad", [10, -1, 2**31 - 1, -(2**31)])
def test_a_target_outside_the_vocabulary_is_named(impl: Any, bad: int) -> None:
    y = np.zeros((2, 3), np.int64)
    y[1, 2] = bad
    if impl.on_gpu:  # looking would synchronise
        assert np.isnan(call(impl, hidden=np.ones((2, 3, 4)), target=y).loss)
        return
    words = rf"target: got id {bad} at index \(1, 2\), allowed are 0 to 9 and ignore_index = -100"
    with pytest.raises(ValueError, match=words):
        call(impl, hidden=np.ones((2, 3, 4)), target=y)
    # As ignore_index the same id is fine.
    assert np.isfinite(call(impl, hidden=np.ones((2, 3, 4)), target=y, ignore_index=bad).loss)


@in_its_own_dtype
def test_a_plan_for_other_sizes(impl: Any) -> None:
    made, name = plan(tokens=7, hidden=4, vocab=10, dtype=impl.dtype), impl.dtype
    words = rf"plan: got one for .*\(7, 4, 10, '{name}'\), allowed is .*\(6, 4, 10, '{name}'\)"
    with pytest.raises(ValueError, match=words):
        call(impl, plan=made)
    with pytest.raises(ValueError, match="memory_budget: got a value beside a plan"):
        call(impl, plan=plan(tokens=6, hidden=4, vocab=10, dtype=impl.dtype), memory_budget=10**9)
    with pytest.raises(ValueError, match="memory_budget: got 10 bytes, allowed for tokens=6"):
        call(impl, memory_budget=10)


@in_its_own_dtype
def test_normalizer_belongs_to_mean(impl: Any) -> None:
    for reduction in ("sum", "none"):
        with pytest.raises(ValueError, match=f"normalizer: got a value beside reduction='{reduction}'"):
            call(impl, reduction=reduction, normalizer=4.0)
    with pytest.raises(ValueError, match=r"normalizer: got shape \(1,\), allowed is a number or an array without axes"):
        call(impl, normalizer=impl.array(np.ones(1, np.float32)))
    as_array = call(impl, normalizer=impl.array(np.float32(4.0)))
    assert float(as_array.loss) == pytest.approx(float(call(impl, normalizer=4).loss), rel=TINY["float32"])


@every_implementation
def test_not_an_array(impl: Any) -> None:
    rng = np.random.default_rng(0)
    arguments = [
        impl.array(rng.standard_normal((6, 4)).astype(np.float32)),
        [[1.0] * 4] * 10,
        impl.array(np.zeros(6, np.int64)),
    ]
    with pytest.raises(TypeError, match="weight: got list"):
        functions(impl)[0](*arguments)


def functions(impl: Any) -> tuple[Any, Any]:
    if impl.name.startswith("torch"):
        from logitless.torch_impl import linear_cross_entropy, linear_log_probs
    else:
        from logitless.jax_impl import linear_cross_entropy, linear_log_probs
    return linear_cross_entropy, linear_log_probs


@in_its_own_dtype
def test_log_probs_check_the_same_things(impl: Any) -> None:
    x, w, y = np.ones((3, 4)), np.ones((5, 4)), np.zeros(3, np.int64)
    for change, words in (
        ({"logit_scale": -1.0}, "logit_scale: got -1.0"),
        ({"softcap": float("inf")}, "softcap: got inf"),
        ({"memory_budget": 0}, "memory_budget: got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            impl.run_log_probs(x, w, y, **change)
    if impl.on_gpu:
        assert np.isnan(impl.run_log_probs(x, w, y + 5).log_prob).all()
        return
    with pytest.raises(ValueError, match=r"target: got id 5 at index \(0\),"):
        impl.run_log_probs(x, w, y + 5)


@every_implementation
def test_signatures_are_the_same_in_both_frameworks(impl: Any) -> None:
    """Names, order and defaults of the public surface; everything after bias is keyword-only."""
    import inspect

    expected = [
        "hidden",
        "weight",
        "target",
        "bias",
        "reduction",
        "ignore_index",
        "token_weight",
        "class_weight",
        "label_smoothing",
        "z_loss",
        "logit_scale",
        "softcap",
        "temperature",
        "normalizer",
        "plan",
        "memory_budget",
        "backend",
        "return_stats",
        "return_lse",
        "shift",
        "weight_layout",
    ]
    defaults = {
        "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "logit_scale": 1.0,
        "temperature": 1.0, "return_stats": False, "return_lse": False, "shift": 0, "with_entropy": False,
        "weight_layout": "vd",
    }  # fmt: skip
    loss, log_probs = functions(impl)
    expected_log_probs = [
        "hidden",
        "weight",
        "target",
        "bias",
        "logit_scale",
        "softcap",
        "temperature",
        "ignore_index",
        "with_entropy",
        "return_stats",
        "plan",
        "memory_budget",
        "backend",
        "weight_layout",
    ]
    if impl.name.startswith("torch"):  # what only one framework has comes last
        expected += ["process_group", "sequence_parallel", "accumulate_into", "defer_weight_grad"]
        expected_log_probs += ["process_group", "sequence_parallel"]
        defaults |= {"sequence_parallel": False, "defer_weight_grad": False}
    if impl.name.startswith("jax"):
        expected += ["axis_name", "vocab", "sequence_parallel"]
        expected_log_probs += ["axis_name", "vocab", "sequence_parallel"]
        defaults |= {"sequence_parallel": False}
    for function, names in ((loss, expected), (log_probs, expected_log_probs)):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == names
        for position, (name, parameter) in enumerate(parameters.items()):
            keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert keyword_only == (position > 3), name
            if position >= 3:
                assert parameter.default == defaults.get(name), name


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
infos = st.builds(ArrayInfo, shapes, st.sampled_from([*spec.FLOAT_DTYPES, "int32", "int64", "bool", "int8"]))


def refusal(check: Callable[[], object]) -> str | None:
    """The text of the refusal, or None."""
    try:
        check()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@settings(deadline=None, max_examples=300)
@given(infos, infos, infos, st.none() | infos, st.none() | infos, st.none() | infos)
def test_any_mix_of_arrays_passes_or_names_an_argument(
    hidden: ArrayInfo,
    weight: ArrayInfo,
    target: ArrayInfo,
    bias: ArrayInfo | None,
    token_weight: ArrayInfo | None,
    class_weight: ArrayInfo | None,
) -> None:
    floats = spec.FLOAT_DTYPES
    fits = (
        hidden.dtype == weight.dtype
        and hidden.dtype in floats
        and target.dtype in spec.TARGET_DTYPES
        and len(weight.shape) == 2
        and min(weight.shape) > 0
        and hidden.shape == (*target.shape, weight.shape[-1])
        and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1]))
        and (token_weight is None or (token_weight.dtype in floats and token_weight.shape == target.shape))
        and (class_weight is None or (class_weight.dtype in floats and class_weight.shape == weight.shape[:1]))
    )
    words = refusal(lambda: spec.check_arrays(hidden, weight, target, bias, token_weight, class_weight))
    assert fits == (words is None), words
    if words is not None:
        name, rest = words.split(":", 1)
        assert name in ("hidden", "weight", "target", "bias", "token_weight", "class_weight")
        assert rest.startswith(" got ")
        assert "allowed" in rest


@settings(deadline=None, max_examples=200)
@given(
    st.fixed_dictionaries(
        {
            "label_smoothing": st.floats(),
            "z_loss": st.floats(),
            "logit_scale": st.floats(),
            "softcap": st.none() | st.floats(),
        }
    )
)
def test_any_numbers_pass_or_name_an_option(values: dict[str, Any]) -> None:
    def inside(name: str, value: Any) -> bool:
        if name in ("logit_scale", "softcap"):
            return bool(1e-15 <= value <= 1e15)
        return bool(value >= 0 and value <= (1 if name == "label_smoothing" else 1e15))

    fits = all(value is None or inside(name, value) for name, value in values.items())
    words = refusal(lambda: LossOptions(**values))
    assert fits == (words is None), words
    if words is not None:
        name = words.split(":")[0]
        assert not inside(name, values[name])


@pytest.mark.case(9)
def test_torch_ids_past_int32_are_not_wrapped() -> None:
    torch = pytest.importorskip("torch", reason="int64 ids are torch's")
    from logitless.torch_impl import linear_cross_entropy

    with pytest.raises(ValueError, match=f"target: got id {2**32} at index"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 2**32]))


@pytest.mark.case(9)
@in_its_own_dtype
def test_unchecked_ids_make_nan_and_nothing_else(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are not checked on a GPU and in compiled code. A wrong id makes its token's loss NaN and touches no other
    row."""
    package = "torch_impl" if impl.name.startswith("torch") else "jax_impl"
    monkeypatch.setattr(importlib.import_module(f"logitless.{package}.checks"), "check_ids", lambda *_: None)
    rng = np.random.default_rng(0)
    x, w, y = rng.standard_normal((8, 4)), rng.standard_normal((10, 4)), rng.integers(0, 10, 8)
    clean = impl.run(x, w, y, reduction="none")
    y[[2, 5, 6]] = 10, -1, 2**31 - 1
    made = impl.run(x, w, y, reduction="none")
    outside = np.isin(np.arange(8), [2, 5, 6])
    assert np.isnan(made.loss[outside]).all()
    assert np.array_equal(made.loss[~outside], clean.loss[~outside])
    assert np.array_equal(made.grads["hidden"][~outside], clean.grads["hidden"][~outside])
    assert np.isnan(impl.run(x, w, y).loss)


def test_torch_only_refusals() -> None:
    torch = pytest.importorskip("torch", reason="these refusals are torch's")
    from logitless.torch_impl import linear_cross_entropy

    x, w, y = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="token_weight: got a tensor that requires grad, allowed is a constant"):
        linear_cross_entropy(x, w, y, token_weight=torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="normalizer: got a tensor that requires grad"):
        linear_cross_entropy(x, w, y, normalizer=torch.ones((), requires_grad=True))
    with pytest.raises(TypeError, match="weight: got dtype bfloat16 beside hidden's float32"):
        linear_cross_entropy(x, w.bfloat16(), y)
    with pytest.raises(ValueError, match="weight: got device meta, allowed is hidden's cpu"):
        linear_cross_entropy(x, w.to("meta"), y)
    with pytest.raises(TypeError, match=r"hidden: got layout torch\.sparse_coo"):
        linear_cross_entropy(x.to_sparse(), w, y)


def test_nothing_is_computed_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="counts torch operations")
    from logitless.torch_impl import linear_cross_entropy
    from logitless.torch_impl.backend import BACKENDS, backend_named

    uninterpreted(monkeypatch)
    for name in BACKENDS:
        monkeypatch.setattr(
            backend_named(name), "prepare", lambda *_: pytest.fail("computed before the checks were done")
        )
    x, w, y = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.long)
    for bad in ({"softcap": -1.0}, {"memory_budget": 1}, {"backend": "triton"}, {"token_weight": torch.ones(3)}):
        with pytest.raises((ValueError, NotImplementedError)):
            linear_cross_entropy(x, w, y, **bad)
