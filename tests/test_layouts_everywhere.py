"""Every array argument of every public function, in every layout, gives what its contiguous copy gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from public_calls import ARRAYS, backends, call_of, functions, outcome, parameters_of

from logitless.tolerances import TINY, error

LAYOUTS = ("offset", "step", "step_rows", "transposed", "negative", "expanded", "broadcast")
# The rest is left to the slow tests; of interpreted kernels, which are slow, some of the layouts are enough.
QUICK = ("step", "transposed", "expanded")
INTERPRETED = {False: ("step",), True: ("expanded",)}
# One value along an axis or everywhere; they come last.
REPEATED = LAYOUTS[-2:]
# A buffer to be written to has rules of its own (test_weight_grad_torch.py); the module hands its arguments on.
OTHERS = {"accumulate_into"}
CASES = [
    pytest.param(framework, name, parameter, id=f"{framework}-{name}-{parameter}")
    for framework, name in functions()
    if name != "LinearCrossEntropy"
    for parameter in ARRAYS[name]
    if parameter in parameters_of(framework, name) and parameter not in OTHERS
]


# What the losses on top of JAX's log-probabilities hand on to them, and one array beside it; all become JAX's alike.
HANDED_ON = ("hidden", "target", "mask", "ids", "teacher")


def is_late(parameters: dict[str, Any]) -> bool:
    on_top = parameters["name"].endswith("_loss")
    return parameters["framework"] == "jax" and on_top and parameters["parameter"] not in HANDED_ON


def view_of(values: Any, layout: str) -> Any:
    """A NumPy view that holds the values, with other numbers around them."""
    shape = values.shape
    if layout == "offset":
        view = np.full(values.size + 3, 3, values.dtype)[3:].reshape(shape)
    elif layout == "step":
        view = np.full((*shape[:-1], 2 * shape[-1]), 3, values.dtype)[..., ::2]
    elif layout == "step_rows":
        view = np.full((3 * shape[0], *shape[1:]), 3, values.dtype)[1::3]
    elif layout == "transposed":
        view = np.full(shape[::-1], 3, values.dtype).transpose()
    elif layout == "negative":
        view = np.full(shape, 3, values.dtype)[::-1]
    elif layout == "expanded":
        return np.broadcast_to(values[:1], shape)
    else:
        return np.broadcast_to(values.reshape(-1)[:1].reshape((1,) * values.ndim), shape)
    view[...] = values
    return view


def rounding(a: Any, b: Any, layout: str) -> bool:
    """Whether nothing but rounding differs; beside a weight of one value dhidden is 0, and both are rounding."""
    if layout in REPEATED and np.abs(b).max(initial=0) <= TINY["float32"]:
        return bool(np.abs(a).max(initial=0) <= TINY["float32"])
    return error(a, b) <= TINY["float32"]


@pytest.mark.late(where=is_late)
@pytest.mark.case(33)
@pytest.mark.parametrize(("framework", "name", "parameter"), CASES)
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "rest"])
def test_a_layout_changes_nothing(framework: str, name: str, parameter: str, rest: bool, one_rank: None) -> None:
    made, function, right = call_of(framework, name)
    value = right[parameter]
    values = np.array(value.tolist(), np.int64 if ARRAYS[name][parameter].integers else np.float32)
    if framework == "jax" and values.dtype == np.int64:
        values = values.astype(np.int32)
    for backend in backends(framework, name):
        arguments = right if backend is None else right | {"backend": backend}
        plain = None  # what the same values give, contiguous
        layouts = [layout for layout in LAYOUTS if (layout in QUICK) != rest]
        for layout in INTERPRETED[rest] if backend == "triton" else layouts:
            if framework == "torch" and layout == "negative":
                continue  # torch has no negative steps
            if values.ndim == 1 and layout == "transposed":
                continue
            if ARRAYS[name][parameter].kind == "ids" and layout == "broadcast":
                continue  # the same id twice
            view = view_of(values, layout)
            given, copy = view, np.array(view, order="C")
            if framework == "torch":
                import torch

                needs = value.requires_grad
                given = torch.from_numpy(view).requires_grad_(needs) if view.flags.writeable else expanded(view, needs)
                copy = torch.from_numpy(copy).requires_grad_(needs)
                assert layout == "offset" or given.stride() != copy.stride(), layout
            one = outcome(made, function, arguments | {parameter: given})
            if plain is None or layout in REPEATED:
                plain = outcome(made, function, arguments | {parameter: copy})
            for a, b in zip(one, plain, strict=True):
                assert (a is None) == (b is None)
                assert a is None or rounding(a, b, layout), layout


OF_THE_VOCABULARY = {"weight", "bias", "class_weight", "teacher_weight", "teacher_bias", "accumulate_into"}


@pytest.mark.case(33)
@pytest.mark.parametrize(("framework", "name"), [pair for pair in functions() if pair[1] != "LinearCrossEntropy"])
def test_no_tokens(framework: str, name: str, one_rank: None) -> None:
    """Without tokens the sums are over nothing, and the gradients are 0."""
    made, function, right = call_of(framework, name)
    for key, array in ARRAYS[name].items():
        if key in right and key not in OF_THE_VOCABULARY:
            right[key] = made.right(dataclasses.replace(array, shape=(0, *array.shape[1:])))
    for backend in backends(framework, name):
        for each in outcome(made, function, right if backend is None else right | {"backend": backend}):
            assert each is None or name == "global_normalizer" or not each.any()


def expanded(view: Any, needs: bool) -> Any:
    """A torch tensor with a NumPy view's steps of 0."""
    import torch

    first = view[tuple(slice(0, 1) if step == 0 else slice(None) for step in view.strides)]
    return torch.from_numpy(np.array(first)).expand(view.shape).requires_grad_(needs)
