"""Every argument of every public function, given what it is not: an error that names the argument, what came and what
is allowed; and every other argument is what it was.

The table is by an argument's name. A new argument that has no row, or a new function without a right call, fails
``test_the_table_is_whole``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from implementations import HAVE_BOTH

N, D, V = 4, 3, 7
FRAMEWORKS = {"torch": "logitless.torch_impl", "jax": "logitless.jax_impl"}
# What takes a module or a function, and what only hands its arguments on: their tests are elsewhere.
ELSEWHERE = {
    "CapturedHead": "test_capture.py", "DeferredWeightGrad": "test_weight_grad_torch.py",
    "capture_lm_head": "test_capture.py", "patch": "test_patch.py", "unpatch": "test_patch.py",
    "profile_losses": "test_companions.py", "profile_saved_tensors": "test_companions.py",
    "profile_saved_residuals": "test_companions.py", "sharded_linear_cross_entropy": "test_sharded_jax.py",
    "sharded_linear_log_probs": "test_sharded_jax.py",
}  # fmt: skip
# Of the module: torch.nn.Linear's own.
OF_LINEAR = ("in_features", "out_features", "bias", "device", "dtype")


# ---------------------------------------------------------------------------------------------------------------------
# What is right


@dataclasses.dataclass(frozen=True)
class Array:
    """A right array: its shape, and ``float`` (the dtype of all others), ``index`` or ``weights`` (any float dtype)."""

    shape: tuple[int, ...]
    kind: str = "float"
    optional: bool = True
    fixed: bool = True
    """Whether no other shape is right beside the other arguments."""


HEAD = {
    "hidden": Array((N, D), optional=False), "weight": Array((V, D), optional=False),
    "target": Array((N,), "index", optional=False), "bias": Array((V,)),
}  # fmt: skip
PER_TOKEN = Array((N,), "weights")
PER_PLACE = Array((2, 5), "weights")
ROWS = HEAD | {"hidden": Array((2, 5, D), optional=False), "target": Array((2, 5), "index", optional=False)}
FACTORS = {"token_weight": PER_TOKEN, "class_weight": Array((V,), "weights")}
ARRAYS: dict[str, dict[str, Array]] = {
    "linear_cross_entropy": HEAD | FACTORS | {"accumulate_into": Array((V, D), "into")},
    "linear_log_probs": HEAD,
    "filtered_share": HEAD | FACTORS,
    "cross_entropy": FACTORS | {"logits": Array((N, V), optional=False), "target": HEAD["target"]},
    "clipped_policy_loss": ROWS
    | {
        "advantage": dataclasses.replace(PER_PLACE, optional=False),
        "old_log_prob": PER_PLACE,
        "reference_log_prob": PER_PLACE,
        "mask": PER_PLACE,
    },
    "dpo_loss": ROWS | {"reference_log_prob": Array((2,), "weights", optional=False), "mask": PER_PLACE},
    "distillation_loss": {
        "hidden": HEAD["hidden"],
        "weight": HEAD["weight"],
        "bias": HEAD["bias"],
        "teacher_hidden": Array((N, 2), optional=False),
        "teacher_weight": Array((V, 2), optional=False),
        "teacher_bias": Array((V,)),
        "mask": PER_TOKEN,
    },
    "LinearCrossEntropy": {"class_weight": Array((V,), "weights")},
    "global_normalizer": FACTORS | {"target": HEAD["target"], "class_weight": Array((V,), "weights", fixed=False)},
    "padded_index_gather": {
        "input": Array((N, D), optional=False, fixed=False),
        "index": Array((N,), "index", optional=False, fixed=False),
    },
}
MORE: dict[str, dict[str, Any]] = {"filtered_share": {"filter_eps": 1e-3}, "clipped_policy_loss": {"kl_coef": 0.1}}

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
    "filter_eps": OPTIONAL_POSITIVE, "beta": (*NO_NUMBERS, -0.1), "clip_low": FROM_ZERO, "clip_high": FROM_ZERO,
    "entropy_coef": NO_NUMBERS, "kl_coef": FROM_ZERO,
    "normalizer": (NAN, INF, "1", True, [1.0], 1j, 0.0),
    "plan": (3, "tokens", {"order": "tokens"}, [1]), "memory_budget": (0, -1, 1.5, NAN, "1", True, [1]),
    "backend": ("cuda", 1, ["eager"], True),
    "return_stats": NO_FLAGS, "with_entropy": NO_FLAGS, "sequence_parallel": NO_FLAGS, "defer_weight_grad": NO_FLAGS,
    "inplace_backward": NO_FLAGS, "averaged": NO_FLAGS,
    "process_group": (1, "world", [0]), "axis_name": (1.5, [1]), "vocab": (1.5, "7", 0, -1, True, [7]),
    "pad_to_multiple": (*NO_INTEGERS, 0, -1),
}  # fmt: skip


class Made:
    """A framework's arrays."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.module = importlib.import_module(FRAMEWORKS[framework])

    def array(self, values: Any, differentiable: bool = False) -> Any:
        if self.framework == "jax":
            import jax.numpy as jnp

            return jnp.asarray(values.astype(np.int32) if values.dtype == np.int64 else values)
        import torch

        return torch.from_numpy(values.copy()).requires_grad_(differentiable)

    def right(self, array: Array) -> Any:
        rng = np.random.default_rng(0)
        if array.kind == "index":
            return self.array(rng.integers(0, min(V, N), array.shape))
        values = rng.uniform(0.1, 1.0, array.shape).astype(np.float32)
        return self.array(values, array.kind == "float")

    def wrong_shapes(self, array: Array) -> Iterator[Any]:
        values = np.ones(array.shape, np.int64 if array.kind == "index" else np.float32)
        if array.fixed:
            yield self.array(np.stack([values, values]))
            yield self.array(np.concatenate([values, values[..., :1]], axis=-1))
            yield self.array(np.asarray(values[0]))

    def wrong(self, array: Array) -> Iterator[Any]:
        values = np.ones(array.shape, np.int64 if array.kind == "index" else np.float32)
        yield self.array(values.astype(np.float32 if array.kind == "index" else np.complex64))
        yield values.tolist()
        yield "array"
        yield values.astype(object)
        if not array.optional:
            yield None
        if self.framework == "torch":
            yield values
            yield self.array(values).to("meta")
        if HAVE_BOTH:
            yield Made("jax" if self.framework == "torch" else "torch").array(values)


def parameters_of(framework: str, name: str) -> list[str]:
    """A public function's parameters."""
    names = list(inspect.signature(getattr(importlib.import_module(FRAMEWORKS[framework]), name)).parameters)
    return [each for each in names if each not in OF_LINEAR] if name == "LinearCrossEntropy" else names


def call_of(framework: str, name: str) -> tuple[Made, Callable[..., Any], dict[str, Any]]:
    """A public function, and arguments that it takes."""
    made = Made(framework)
    function = getattr(made.module, name)
    parameters = parameters_of(framework, name)
    arrays = {key: made.right(array) for key, array in ARRAYS[name].items() if key in parameters}
    arguments = arrays | MORE.get(name, {})
    if name == "LinearCrossEntropy":
        head = [made.right(HEAD[each]) for each in ("hidden", "target")]
        return made, lambda **given: function(D, V, **given)(*head), arguments
    if (framework, name) == ("jax", "global_normalizer"):
        import jax

        def inside(**given: Any) -> Any:
            return jax.vmap(lambda _: function(**given), axis_name="data", axis_size=1, in_axes=None)(0)

        return made, inside, arguments | {"axis_name": "data"}
    return made, function, arguments


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group, which torch's global_normalizer sums over."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def functions() -> Iterator[tuple[str, str]]:
    for framework, module in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is not None:
            for name in importlib.import_module(module).__all__:
                if name in ARRAYS:
                    yield framework, name


ARGUMENTS = [
    pytest.param(framework, name, parameter, id=f"{framework}-{name}-{parameter}")
    for framework, name in functions()
    for parameter in parameters_of(framework, name)
]


def wrong_values(made: Made, name: str, parameter: str) -> list[Any]:
    if parameter in ARRAYS[name]:
        return list(made.wrong(ARRAYS[name][parameter]))
    values = list(VALUES[parameter])
    if (name, parameter) == ("filtered_share", "filter_eps"):
        values.append(None)
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
    """What the error says that it is about, and what it says in all."""
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
def test_a_wrong_argument_is_named(framework: str, name: str, parameter: str) -> None:
    made, function, right = call_of(framework, name)
    before = snapshot(right)
    for value in wrong_values(made, name, parameter):
        _, words = refusal(function, right, parameter, value)
        assert re.search(rf"\b{parameter}\b", words), f"{described(value)}: {words}"
    for value in made.wrong_shapes(ARRAYS[name][parameter]) if parameter in ARRAYS[name] else ():
        # Of two shapes that do not fit, the error may be about either.
        named, words = refusal(function, right, parameter, value)
        assert set(named.split(", ")) <= set(ARRAYS[name]), f"{described(value)}: {words}"
    for key, (values, requires) in snapshot(right).items():
        assert np.array_equal(values, before[key][0]), key
        assert requires == before[key][1], key
        assert getattr(right[key], "grad", None) is None, key
    function(**right)


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
