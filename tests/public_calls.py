"""A valid call of every public function, by name, for tests that go over all arguments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from implementations import INTERPRETS

N, D, V = 4, 3, 7
FRAMEWORKS = {"torch": "logitless.torch_impl", "jax": "logitless.jax_impl"}
# Of the module: torch.nn.Linear's own.
OF_LINEAR = ("in_features", "out_features", "bias", "device", "dtype")


@dataclasses.dataclass(frozen=True)
class Array:
    """A valid array: its shape, and ``float`` (the dtype of all others), ``index``, ``ids`` (different ones along the
    last axis), ``weights`` (any float dtype) or ``shares`` (the same, with a sum of at most 1 along the last axis)."""

    shape: tuple[int, ...]
    kind: str = "float"
    optional: bool = True
    fixed: bool = True
    """Whether no other shape is right beside the other arguments."""
    numpy: bool = False
    """Whether PyTorch's function takes NumPy's arrays, too."""

    @property
    def integers(self) -> bool:
        return self.kind in ("index", "ids")


HEAD = {
    "hidden": Array((N, D), optional=False), "weight": Array((V, D), optional=False),
    "target": Array((N,), "index", optional=False), "bias": Array((V,)),
}  # fmt: skip
PER_TOKEN = Array((N,), "weights")
OPTIONAL_TARGET = Array((N,), "index")
PER_PLACE = Array((2, 5), "weights")
PER_SEQUENCE = Array((2,), "weights", optional=False)
ROWS = HEAD | {"hidden": Array((2, 5, D), optional=False), "target": Array((2, 5), "index", optional=False)}
FACTORS = {"token_weight": PER_TOKEN, "class_weight": Array((V,), "weights")}
ARRAYS: dict[str, dict[str, Array]] = {
    "linear_cross_entropy": HEAD | FACTORS | {"accumulate_into": Array((V, D), "into")},
    "linear_cross_entropy_value_and_grad": HEAD | FACTORS,
    "linear_log_probs": HEAD,
    "linear_token_log_probs": {name: array for name, array in HEAD.items() if name != "target"}
    | {"ids": Array((N, 3), "index", optional=False, fixed=False)},
    "linear_top_k": {
        "hidden": dataclasses.replace(HEAD["hidden"], fixed=False),
        "weight": HEAD["weight"],
        "bias": HEAD["bias"],
    },
    "cross_entropy": FACTORS | {"logits": Array((N, V), optional=False), "target": HEAD["target"]},
    "clipped_policy_loss": ROWS
    | {
        "advantage": dataclasses.replace(PER_PLACE, optional=False),
        "old_log_prob": PER_PLACE,
        "reference_log_prob": PER_PLACE,
        "sampler_log_prob": PER_PLACE,
        "mask": PER_PLACE,
    },
    "dpo_loss": ROWS | {"reference_log_prob": PER_SEQUENCE, "mask": PER_PLACE},
    "kto_loss": ROWS
    | {
        "desirable": PER_SEQUENCE,
        "reference_log_prob": PER_SEQUENCE,
        "mask": PER_PLACE,
    },
    "distillation_loss": {
        "hidden": HEAD["hidden"],
        "weight": HEAD["weight"],
        "bias": HEAD["bias"],
        "teacher_hidden": Array((N, 2), optional=False),
        "teacher_weight": Array((V, 2), optional=False),
        "teacher_bias": Array((V,)),
        "mask": PER_TOKEN,
        "target": OPTIONAL_TARGET,
    },
    "sparse_distillation_loss": {
        "hidden": HEAD["hidden"],
        "weight": HEAD["weight"],
        "bias": HEAD["bias"],
        "ids": Array((N, 3), "ids", optional=False),
        "probs": Array((N, 3), "shares", optional=False),
        "mask": PER_TOKEN,
        "target": OPTIONAL_TARGET,
    },
    "dense_distillation_loss": {
        "hidden": HEAD["hidden"],
        "weight": HEAD["weight"],
        "bias": HEAD["bias"],
        "teacher": Array((N, V), "shares", optional=False, numpy=True),
        "mask": PER_TOKEN,
        "target": OPTIONAL_TARGET,
    },
    "LinearCrossEntropy": {"class_weight": Array((V,), "weights")},
    "global_normalizer": FACTORS | {"target": HEAD["target"], "class_weight": Array((V,), "weights", fixed=False)},
    "padded_index_gather": {
        "input": Array((N, D), optional=False, fixed=False),
        "index": Array((N,), "index", optional=False, fixed=False),
    },
}
MORE: dict[str, dict[str, Any]] = {
    "clipped_policy_loss": {"kl_coef": 0.1},
    "kto_loss": {"kl": 0.1},
    "distillation_loss": {"nll_coef": 0.3},
    "sparse_distillation_loss": {"nll_coef": 0.3, "rest": "spread"},
    "dense_distillation_loss": {"nll_coef": 0.3},
    "linear_top_k": {"k": 3},
}


class Made:
    """A framework's arrays."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.module = importlib.import_module(FRAMEWORKS[framework])

    def array(self, values: Any, differentiable: bool = False) -> Any:
        if self.framework == "jax":
            import jax

            return jax.device_put(values.astype(np.int32) if values.dtype == np.int64 else values)
        import torch

        return torch.from_numpy(values.copy()).requires_grad_(differentiable)

    def right(self, array: Array) -> Any:
        rng = np.random.default_rng(0)
        if array.kind == "index":
            return self.array(rng.integers(0, min(V, N), array.shape))
        if array.kind == "ids":
            return self.array(np.argsort(rng.random((*array.shape[:-1], V)), axis=-1)[..., : array.shape[-1]])
        values = rng.uniform(0.1, 1.0, array.shape).astype(np.float32)
        if array.kind == "shares":
            values /= array.shape[-1]
        return self.array(values, array.kind == "float")


def parameters_of(framework: str, name: str) -> list[str]:
    """A public function's parameters."""
    names = list(inspect.signature(getattr(importlib.import_module(FRAMEWORKS[framework]), name)).parameters)
    return [each for each in names if each not in OF_LINEAR] if name == "LinearCrossEntropy" else names


def call_of(framework: str, name: str) -> tuple[Made, Callable[..., Any], dict[str, Any]]:
    """A public function and valid arguments for it."""
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


def functions() -> Iterator[tuple[str, str]]:
    for framework, module in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is not None:
            for name in importlib.import_module(module).__all__:
                if name in ARRAYS:
                    yield framework, name


def backends(framework: str, name: str) -> list[str | None]:
    """Those that run without a GPU; [None] of a function that has none."""
    if "backend" not in parameters_of(framework, name):
        return [None]
    return ["xla"] if framework == "jax" else ["eager", "triton"] if INTERPRETS else ["eager"]


def leaves_of(results: Any) -> list[Any]:
    """Tensors in tuples, and in tuples within them."""
    if isinstance(results, tuple):
        return [leaf for each in results for leaf in leaves_of(each)]
    return [] if results is None else [results]


def outcome(made: Made, function: Any, arguments: dict[str, Any]) -> list[Any]:
    """Results and gradients, as NumPy arrays."""
    if made.framework == "torch":
        import torch

        leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        results = leaves_of(function(**arguments))
        if leaves and results[0].requires_grad:
            total = sum(each.sum() for each in results if each.is_floating_point())
            results += torch.autograd.grad(total, leaves, allow_unused=True)
        return [None if each is None else each.detach().numpy() for each in results]
    import jax
    import jax.numpy as jnp

    floats = {key: value for key, value in arguments.items() if getattr(value, "dtype", None) == np.float32}
    names = () if function.__name__.endswith("value_and_grad") else ("hidden", "weight", "logits", "input")
    differentiable = {key: value for key, value in floats.items() if key in names}
    rest = {key: value for key, value in arguments.items() if key not in differentiable}

    def summed(chosen: dict[str, Any]) -> tuple[Any, list[Any]]:
        results = [each for each in jax.tree.leaves(function(**chosen, **rest)) if each is not None]
        return sum(each.sum() for each in results if jnp.issubdtype(each.dtype, jnp.floating)), results

    if not differentiable:
        return [np.asarray(each) for each in summed({})[1]]
    grads, results = jax.grad(summed, has_aux=True)(differentiable)
    return [np.asarray(each) for each in (*results, *grads.values())]
