"""The frameworks' own switches, which hold for a whole process, change nothing of what a public function gives."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from public_calls import backends, call_of, functions, outcome

from logitless.tolerances import TINY, error

Switch = Callable[[Any], AbstractContextManager[Any]]
"""Of a framework, whose module it is given: on while it lasts."""


@contextlib.contextmanager
def put_back(switch: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


def mode_that_changes_nothing(torch: Any) -> AbstractContextManager[Any]:
    class Same(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    return Same()


TORCH: dict[str, Switch] = {
    "float64 by default": lambda torch: put_back(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda torch: put_back(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "another device by default": lambda torch: put_back(torch.set_default_device, "meta", None),
    "deterministic": lambda torch: put_back(torch.use_deterministic_algorithms, True, False),
    "anomalies": lambda torch: torch.autograd.detect_anomaly(),
    "a mode": mode_that_changes_nothing,
    "no oneDNN": lambda torch: torch.backends.mkldnn.flags(enabled=False),
}
JAX: dict[str, Switch] = {
    "strict dtypes": lambda jax: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda jax: jax.numpy_rank_promotion("raise"),
    "64 bits": lambda jax: jax.enable_x64(True),
    "NaN is an error": lambda jax: jax.debug_nans(True),
    "infinity is an error": lambda jax: jax.debug_infs(True),
    "nothing compiled": lambda jax: jax.disable_jit(True),
    "no leaks": lambda jax: jax.checking_leaks(),
}
SWITCHES = {"torch": TORCH, "jax": JAX}
SELDOM = ("infinity is an error", "nothing compiled", "no leaks")
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}
MORE: dict[str, list[dict[str, Any]]] = {
    "linear_cross_entropy": [EVERYTHING | {"reduction": "none", "return_stats": True}, {"label_smoothing": 0.1}],
    "linear_log_probs": [{"with_entropy": True}, {"return_stats": True}],
}
# The module hands its arguments on, and its weight has the dtype and the device that are the default.
CALLS = [(framework, name) for framework, name in functions() if name != "LinearCrossEntropy"]


def outcomes(framework: str, name: str) -> list[list[Any]]:
    """Of every backend and every set of options."""
    found = []
    for options in ({}, *MORE.get(name, [])):
        for backend in backends(framework, name):
            made, function, arguments = call_of(framework, name)
            if options:
                arguments.pop("accumulate_into", None)
            found.append(outcome(made, function, arguments | options | ({"backend": backend} if backend else {})))
    return found


@pytest.mark.late(where=lambda p: p["switch"] in SELDOM and p["name"] not in MORE)
@pytest.mark.parametrize(
    ("framework", "name", "switch"), [(*call, switch) for call in CALLS for switch in SWITCHES[call[0]]]
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_switch_changes_nothing(framework: str, name: str, switch: str, one_rank: None) -> None:
    module = importlib.import_module(framework)
    expected = outcomes(framework, name)
    if framework == "jax":
        module.clear_caches()  # or the programs of before would run
    with SWITCHES[framework][switch](module):
        found = outcomes(framework, name)
    for one, other in zip(found, expected, strict=True):
        for value, before in zip(one, other, strict=True):
            if before is None:
                assert value is None
                continue
            assert (value.dtype, value.shape) == (before.dtype, before.shape)
            exact = framework == "torch" or not np.issubdtype(before.dtype, np.floating)
            assert np.array_equal(value, before) if exact else error(value, before) <= TINY["float32"]
