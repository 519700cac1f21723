"""Every argument of every public function gets a wrong value. The error names the argument, what came and what is
allowed, and every other argument stays as it was.

The table goes by an argument's name. A new argument without a row, or a new function without a valid call, fails
``test_the_table_is_whole``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from implementations import HAVE_BOTH
from public_calls import ARRAYS, FRAMEWORKS, Array, Made, call_of, functions, parameters_of

# What takes a module or a function, and what only hands its arguments on: their tests are elsewhere.
ELSEWHERE = {
    "CapturedHead": "test_capture.py", "DeferredWeightGrad": "test_weight_grad_torch.py",
    "capture_lm_head": "test_capture.py", "patch": "test_patch.py", "unpatch": "test_patch.py",
    "profile_losses": "test_companions.py", "profile_saved_tensors": "test_companions.py",
    "profile_saved_residuals": "test_companions.py", "sharded_linear_cross_entropy": "test_sharded_jax.py",
    "sharded_linear_log_probs": "test_sharded_jax.py",
    "WeightGradQueue": "test_weight_grad_torch.py",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong, by an argument's name

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = (NAN, INF, -INF, "1", True, [1.0], 1j, None)
NO_INTEGERS = (1.5, NAN, "1", True, [1], None)
NO_FLAGS = (None, "yes", 2, [True], NAN)
POSITIVE = (*NO_NUMBERS, 0.0, -1.0)
FROM_ZERO = (*NO_NUMBERS, -1e-3)
SHARES = (*FROM_ZERO, 1.5)
OPTIONAL_POSITIVE = tuple(value for value in POSITIVE if value is not None)
WORDS = ("average", 1, ["mean"], None)
VALUES: dict[str, tuple[Any, ...]] = {
    "reduction": WORDS, "aggregation": WORDS, "ignore_index": NO_INTEGERS,
    "label_smoothing": SHARES, "z_loss": FROM_ZERO, "logit_scale": POSITIVE, "temperature": POSITIVE,
    "softcap": OPTIONAL_POSITIVE, "teacher_logit_scale": POSITIVE, "teacher_softcap": OPTIONAL_POSITIVE,
    "beta": (*NO_NUMBERS, -0.1), "clip_low": FROM_ZERO, "clip_high": FROM_ZERO,
    "entropy_coef": NO_NUMBERS, "kl_coef": FROM_ZERO, "dual_clip": (*OPTIONAL_POSITIVE, 1.0),
    "rest": WORDS, "log_teacher": NO_FLAGS,
    "objective": WORDS, "ratio": WORDS, "kl_estimator": WORDS, "sampler_correction": WORDS, "loss_type": WORDS,
    "kl_times_ratio": NO_FLAGS, "sampler_limit": POSITIVE, "margin": FROM_ZERO,
    "nll_coef": tuple(value for value in FROM_ZERO if value is not None), "kl": NO_NUMBERS,
    "desirable_weight": FROM_ZERO, "undesirable_weight": FROM_ZERO,
    "normalizer": (NAN, INF, "1", True, [1.0], 1j, 0.0),
    "plan": (3, "tokens", {"order": "tokens"}, [1]), "memory_budget": (0, -1, 1.5, NAN, "1", True, [1]),
    "backend": ("cuda", 1, ["eager"], True),
    "return_stats": NO_FLAGS, "return_lse": NO_FLAGS, "with_entropy": NO_FLAGS, "sequence_parallel": NO_FLAGS,
    "defer_weight_grad": NO_FLAGS, "accumulate_into": (3, "array", [1.0]), "upstream": NO_NUMBERS,
    "shift": (*NO_INTEGERS, -1, 4, 100), "weight_layout": WORDS,
    "inplace_backward": NO_FLAGS, "averaged": NO_FLAGS,
    "process_group": (1, "world", [0]), "axis_name": (1.5, [1]), "vocab": (1.5, "7", 0, -1, True, [7]),
    "group_sizes": (3, "array", [1.5], [True, 3], [], [-1, 5], [1], (1,)),
    "pad_to_multiple": (*NO_INTEGERS, 0, -1), "k": (*NO_INTEGERS, 0, -1, 100),
}  # fmt: skip


def wrong_shapes(made: Made, array: Array) -> Iterator[Any]:
    values = np.ones(array.shape, np.int64 if array.integers else np.float32)
    if array.fixed:
        yield made.array(np.stack([values, values]))
        yield made.array(np.concatenate([values, values[..., :1]], axis=-1))
        yield made.array(np.asarray(values[0]))


def wrong(made: Made, array: Array) -> Iterator[Any]:
    values = np.ones(array.shape, np.int64 if array.integers else np.float32)
    yield made.array(values.astype(np.float32 if array.integers else np.complex64))
    yield values.tolist()
    yield "array"
    yield values.astype(object)
    if not array.optional:
        yield None
    if made.framework == "torch":
        if not array.numpy:
            yield values
        yield made.array(values).to("meta")
    if HAVE_BOTH:
        yield Made("jax" if made.framework == "torch" else "torch").array(values)


ARGUMENTS = [
    pytest.param(framework, name, parameter, id=f"{framework}-{name}-{parameter}")
    for framework, name in functions()
    for parameter in parameters_of(framework, name)
]


def wrong_values(made: Made, name: str, parameter: str) -> list[Any]:
    if parameter in ARRAYS[name]:
        return list(wrong(made, ARRAYS[name][parameter]))
    values = list(VALUES[parameter])
    if parameter == "normalizer":
        values.append(made.array(np.ones(2, np.float32)))
    return values


def snapshot(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (np.array(value.tolist()), getattr(value, "requires_grad", None))
        for name, value in arguments.items()
        if hasattr(value, "shape")
    }


def described(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')}"


def refusal(function: Callable[..., Any], right: dict[str, Any], parameter: str, value: Any) -> tuple[str, str]:
    """The argument that the error names, and the whole message."""
    try:
        function(**(right | {parameter: value}))
    except (TypeError, ValueError, NotImplementedError) as error:
        words = str(error)
    else:
        pytest.fail(f"{described(value)} passed")
    match = re.match(r"([\w, ]+): got .+allowed ", words, re.DOTALL)
    assert match, f"{described(value)}: {words}"
    return match[1], words


@pytest.mark.case(9)
@pytest.mark.parametrize(("framework", "name", "parameter"), ARGUMENTS)
def test_a_wrong_argument_is_named(framework: str, name: str, parameter: str, one_rank: None) -> None:
    made, function, right = call_of(framework, name)
    before = snapshot(right)
    for value in wrong_values(made, name, parameter):
        _, words = refusal(function, right, parameter, value)
        assert re.search(rf"\b{parameter}\b", words), f"{described(value)}: {words}"
    for value in wrong_shapes(made, ARRAYS[name][parameter]) if parameter in ARRAYS[name] else ():
        # Of two shapes that do not fit, the error may be about either.
        named, words = refusal(function, right, parameter, value)
        assert set(named.split(", ")) <= set(ARRAYS[name]), f"{described(value)}: {words}"
    for key, (values, requires) in snapshot(right).items():
        assert np.array_equal(values, before[key][0]), key
        assert requires == before[key][1], key
        assert getattr(right[key], "grad", None) is None, key
    function(**right)


NO_SIZES = (*NO_INTEGERS, -1)
OPTIONAL_SIZES = (0, -1, 1.5, NAN, "1", True, [1])
COSTS = ("1", True, NAN, -1.0, None)
# Of what takes no framework's arrays, or another's: right arguments, and wrong values by a parameter's name.
OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, tuple[Any, ...]]]] = {
    "logitless.plan": (
        lambda: {"tokens": 8, "hidden": 4, "vocab": 16, "dtype": "float32"},
        {
            "tokens": NO_SIZES, "hidden": (*NO_SIZES, 0), "vocab": (*NO_SIZES, 0), "dtype": ("int8", None, 1),
            "memory_budget": OPTIONAL_SIZES, "order": ("rows", 1, ["tokens"]), "chunk": OPTIONAL_SIZES,
            "one_pass": NO_FLAGS, "device": ("xpu", None, 1), "fused": NO_FLAGS, "padded": NO_FLAGS, "hold": NO_FLAGS,
            "eager": NO_FLAGS, "lends": NO_FLAGS, "weight_layout": ("vv", None, 1), "prefer": ("quick", None, 1),
        },
    ),
    "logitless.layer_partition": (
        lambda: {"layers": 8, "stages": 2},
        {
            "layers": NO_SIZES, "stages": (*NO_SIZES, 0), "head_cost": COSTS, "embedding_cost": COSTS,
            "min_layers": NO_SIZES, "v_shaped": NO_FLAGS,
        },
    ),
    "logitless.interop.to_jax": (
        lambda: {"tensor": Made("torch").array(np.ones(2))}, {"tensor": (3, "x", [1.0]), "copy": ("yes", 2, [1])}
    ),
    "logitless.interop.to_torch": (
        lambda: {"array": Made("jax").array(np.ones(2))}, {"array": (3, "x", [1.0]), "copy": ("yes", 2, [1])}
    ),
    "logitless.interop.jax_in_torch": (
        lambda: {"fn": lambda x: x}, {"fn": (3, "x", None), "autocast": (3, "x", ("y",), (1,))}
    ),
    "logitless.interop.torch_in_jax": (lambda: {"fn": lambda x: x}, {"fn": (3, "x", None)}),
    "logitless.interop.compare": (
        lambda: {"problem": "odd_none_all", "implementations": ["reference"]},
        {"problem": (3, "nothing", None), "implementations": (3, ["nothing"], "reference")},
    ),
    "logitless.interop.load_case": (
        lambda: {"path": __file__},
        {"path": (3, None, "none.npz", __file__), "dtype": ("int8", 1), "options": (3, {"softcap": 1.0}, "x")},
    ),
}  # fmt: skip


@pytest.mark.case(9)
@pytest.mark.parametrize("name", OTHERS)
def test_a_wrong_argument_elsewhere_is_named(name: str, tmp_path: Path) -> None:
    if "interop" in name and not HAVE_BOTH:
        pytest.skip("a bridge needs both frameworks")
    module, _, short = name.rpartition(".")
    function = getattr(importlib.import_module(module), short)
    make, rows = OTHERS[name]
    right = make()
    if short == "load_case":
        right = {"path": tmp_path / "some.npz"}
        right["path"].touch()
    assert set(rows) == set(inspect.signature(function).parameters)
    for parameter, values in rows.items():
        for value in values:
            # The bridges' errors are about a leaf of a pytree: "at [0]: tensor must be a torch.Tensor, got ...".
            words = rf"^{parameter}: got .+allowed |\b{parameter} must be .+, got "
            with pytest.raises((TypeError, ValueError), match=words):
                pytest.fail(f"{parameter}={value!r} gave {function(**(right | {parameter: value}))}")


def test_the_table_is_whole() -> None:
    for name in ELSEWHERE.values():
        assert (Path(__file__).parent / name).exists()
    for framework, module in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is None:
            continue
        for name in importlib.import_module(module).__all__:
            if not callable(getattr(importlib.import_module(module), name)) or name in ELSEWHERE:
                continue
            assert name in ARRAYS, f"{framework}: {name} has no right call here"
            for parameter in parameters_of(framework, name):
                assert parameter in ARRAYS[name] or parameter in VALUES, f"{name}: {parameter} has no row"
    for module in ("logitless", *(["logitless.interop"] if HAVE_BOTH else [])):
        for name in importlib.import_module(module).__all__:
            if inspect.isfunction(getattr(importlib.import_module(module), name)):
                assert f"{module}.{name}" in OTHERS, f"{module}: {name} has no row"
