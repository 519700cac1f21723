"""Every implementation behind one interface of NumPy arrays, so that each test is written once and runs on all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from logitless import plan as make_plan
from logitless import reference
from logitless.doctor import cuda_device_count
from logitless.ideal import ideal_gradients
from logitless.problems import BY_NAME, PROBLEMS, Case, Problem
from logitless.tolerances import COMMONEST, ROUNDED_ONCE, allowance, error

ARGUMENTS = ("hidden", "weight", "bias")
TRAINED = [problem for problem in PROBLEMS if "trained" in problem.tags]
# Of every kind, for the sizes of the trained problems.
PLANS: dict[str, dict[str, Any]] = {
    "one_chunk": {"order": "tokens"},
    "chunks": {"order": "tokens", "chunk": 128},
    "two_pass": {"order": "tokens", "chunk": 256, "one_pass": False},
    "vocab": {"order": "vocab", "chunk": 256},
    "both": {"order": "both", "chunk": 256},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call gave, as float64 NumPy arrays; a gradient that was not asked for is None."""

    loss: Any
    grads: dict[str, Any]
    stats: Any = None
    lse: Any = None


@dataclasses.dataclass(frozen=True)
class LogProbOutcome:
    log_prob: Any
    entropy: Any
    grads: dict[str, Any]
    stats: Any = None


class Implementation:
    """What the tests ask of each implementation."""

    name: str
    backend: str
    on_gpu = False
    dtype = "float32"
    """What a test takes where the dtype is not its subject."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")

    product = staticmethod(np.matmul)
    """Two float32 matrices multiplied as the ideal path that this implementation is held to does."""

    @property
    def fused(self) -> bool:
        """Whether its plans are those of the kernels."""
        return self.backend in ("triton", "pallas")

    @property
    def padded(self) -> bool:
        return self.backend == "pallas"

    def takes(self, dtype: str | None) -> str:
        """The dtype, or the implementation's own; skips the test where its kernels lack that floating-point dtype."""
        dtype = dtype or self.dtype
        if dtype in Implementation.dtypes and dtype not in self.dtypes:
            pytest.skip(f"{self.name} takes {', '.join(self.dtypes)}, not {dtype}")
        return dtype


class TorchEager(Implementation):
    """torch_impl with backend="eager"."""

    name = "torch_eager"
    backend = "eager"

    def product(self, a: Any, b: Any) -> Any:
        """On a CPU by torch's own BLAS: MKL adds a narrow product's terms one after another on AMD's processors."""
        if self.on_gpu or self.backend != "eager":
            return super().product(a, b)
        import torch

        return (torch.as_tensor(a) @ torch.as_tensor(b)).numpy()

    def array(self, values: Any, dtype: str | None = None) -> Any:
        import torch

        if values is None:
            return None
        tensor = torch.tensor(np.asarray(values))
        return tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def function(self) -> Any:
        from logitless import torch_impl

        return torch_impl.linear_cross_entropy

    def numpy(self, tensor: Any) -> Any:
        if tensor is None:
            return None
        return tensor.detach().double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()

    def run(
        self, hidden: Any, weight: Any, target: Any, bias: Any = None, *, dtype: str | None = None,
        wrt: Any = ARGUMENTS, upstream: Any = 1.0, lse_upstream: Any = 0.0, **options: Any,
    ) -> Outcome:  # fmt: skip
        import torch

        dtype = self.takes(dtype)
        arrays = {
            "hidden": self.array(hidden, dtype),
            "weight": self.array(weight, dtype),
            "bias": self.array(bias, dtype),
        }
        for name in wrt:
            if arrays[name] is not None:
                arrays[name].requires_grad_()
        for name in ("token_weight", "class_weight"):
            if options.get(name) is not None:
                options[name] = self.array(options[name])
        result = self.function()(
            arrays["hidden"], arrays["weight"], self.array(target), arrays["bias"], backend=self.backend, **options
        )
        loss, *more = result if isinstance(result, tuple) else (result,)
        lse = more.pop(0) if options.get("return_lse") else None
        if loss.requires_grad:
            given = [(loss, upstream)] if lse is None else [(loss, upstream), (lse, lse_upstream)]
            gs = [torch.as_tensor(np.array(g), dtype=m.dtype, device=m.device).expand_as(m) for m, g in given]
            torch.autograd.backward([m for m, _ in given], gs)
        grads = {name: None if a is None else self.numpy(a.grad) for name, a in arrays.items()}
        stats = [type(found)(*map(self.numpy, found)) for found in more]
        return Outcome(self.numpy(loss), grads, stats[0] if stats else None, self.numpy(lse))

    def run_log_probs(
        self, hidden: Any, weight: Any, target: Any, bias: Any = None, *, dtype: str | None = None,
        wrt: Any = ARGUMENTS, log_prob_upstream: Any = 1.0, entropy_upstream: Any = None, stats_upstream: Any = None,
        **options: Any,
    ) -> LogProbOutcome:  # fmt: skip
        """``stats_upstream``: upstream gradients of statistics, by name; None: statistics are not asked for."""
        import torch

        from logitless import torch_impl

        dtype = self.takes(dtype)
        arrays = {
            "hidden": self.array(hidden, dtype),
            "weight": self.array(weight, dtype),
            "bias": self.array(bias, dtype),
        }
        for name in wrt:
            if arrays[name] is not None:
                arrays[name].requires_grad_()
        log_prob, entropy, *more = torch_impl.linear_log_probs(
            arrays["hidden"], arrays["weight"], self.array(target), arrays["bias"],
            with_entropy=entropy_upstream is not None, return_stats=stats_upstream is not None, backend=self.backend,
            **options,
        )  # fmt: skip
        given = [(log_prob, log_prob_upstream)] + [(entropy, entropy_upstream)] * (entropy_upstream is not None)
        given += [(getattr(more[0], name), upstream) for name, upstream in (stats_upstream or {}).items()]
        torch.stack([(m * torch.as_tensor(np.array(g)).to(m)).sum() for m, g in given]).sum().backward()
        grads = {name: None if a is None else self.numpy(a.grad) for name, a in arrays.items()}
        stats = [type(found)(*map(self.numpy, found)) for found in more]
        return LogProbOutcome(self.numpy(log_prob), self.numpy(entropy), grads, stats[0] if stats else None)


class TorchTriton(TorchEager):
    """torch_impl with backend="triton" on the CPU: interpreted."""

    name = "torch_triton"
    backend = "triton"
    dtypes = ("float32", "bfloat16", "float16")


class TorchEagerCuda(TorchEager):
    """The same on the GPU: products read the input dtype, ids are not looked at."""

    name = "torch_eager_cuda"
    on_gpu = True

    def array(self, values: Any, dtype: str | None = None) -> Any:
        tensor = super().array(values, dtype)
        return None if tensor is None else tensor.cuda()


class TorchTritonCuda(TorchEagerCuda):
    """torch_impl with backend="triton" on the GPU."""

    name = "torch_triton_cuda"
    backend = "triton"
    dtypes = ("float32", "bfloat16", "float16")


class TorchTritonCudaBfloat16(TorchTritonCuda):
    """The same in bfloat16, for tests whose subject is not the dtype: 16-bit kernels are not the 32-bit ones."""

    name = "torch_triton_cuda_bfloat16"
    dtype = "bfloat16"


class JaxXla(Implementation):
    """jax_impl with backend="xla", through jax.vjp; on the GPU where JAX has one."""

    name = "jax_xla"
    backend = "xla"
    on_gpu = cuda_device_count() > 0
    x64 = False
    """Whether x64 is on also where the dtype does not ask for it."""

    def function(self) -> Any:
        from logitless import jax_impl

        return jax_impl.linear_cross_entropy

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        import jax

        with jax.enable_x64(self.x64 or dtype == "float64"):
            yield

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """A JAX array, of NumPy's conversions: JAX would compile a program for each of its own, for every shape."""
        import jax

        if values is None:
            return None
        values = np.asarray(values)
        if values.dtype == np.int64 and values.size and np.abs(values).max() < 2**31:
            values = values.astype(np.int32)
        values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
        return jax.device_put(values if dtype is None else values.astype(dtype))

    def upstream(self, gradient: Any, like: Any) -> Any:
        """An upstream gradient for the result ``like``."""
        import jax

        return jax.device_put(np.broadcast_to(np.asarray(gradient, like.dtype), like.shape))

    def numpy(self, array: Any) -> Any:
        if array is None:
            return None
        return np.asarray(array, np.float64) if array.dtype.kind not in "ib" else np.asarray(array)

    def run(
        self, hidden: Any, weight: Any, target: Any, bias: Any = None, *, dtype: str | None = None,
        wrt: Any = ARGUMENTS, upstream: Any = 1.0, lse_upstream: Any = 0.0, **options: Any,
    ) -> Outcome:  # fmt: skip
        import jax

        dtype = self.takes(dtype)
        with self.precision(dtype):
            given = {"hidden": hidden, "weight": weight, "bias": bias}
            arrays = {name: self.array(values, dtype) for name, values in given.items()}
            for name in ("token_weight", "class_weight"):
                if options.get(name) is not None:
                    options[name] = self.array(options[name])
            wrt = tuple(name for name in wrt if arrays[name] is not None)
            ids = self.array(target)

            def loss(chosen: dict[str, Any]) -> Any:
                a = arrays | chosen
                return self.function()(a["hidden"], a["weight"], ids, a["bias"], backend=self.backend, **options)

            count = 2 if options.get("return_lse") else 1

            def split(chosen: dict[str, Any]) -> Any:
                made = loss(chosen)
                made = made if isinstance(made, tuple) else (made,)
                return made[:count], made[count:]

            values, backward, stats = jax.vjp(split, {name: arrays[name] for name in wrt}, has_aux=True)
            upstreams = zip(values, (upstream, lse_upstream), strict=False)
            (made,) = backward(tuple(self.upstream(g, m) for m, g in upstreams))
            grads = {name: self.numpy(made[name]) if name in wrt else None for name in ARGUMENTS}
            stats = [type(found)(*map(self.numpy, found)) for found in stats]
            lse = self.numpy(values[1]) if count == 2 else None
            return Outcome(self.numpy(values[0]), grads, stats[0] if stats else None, lse)

    def run_log_probs(
        self, hidden: Any, weight: Any, target: Any, bias: Any = None, *, dtype: str | None = None,
        wrt: Any = ARGUMENTS, log_prob_upstream: Any = 1.0, entropy_upstream: Any = None, stats_upstream: Any = None,
        **options: Any,
    ) -> LogProbOutcome:  # fmt: skip
        """``stats_upstream``: upstream gradients of statistics, by name; None: statistics are not asked for."""
        import jax

        from logitless import jax_impl

        dtype = self.takes(dtype)
        with self.precision(dtype):
            given = {"hidden": hidden, "weight": weight, "bias": bias}
            arrays = {name: self.array(values, dtype) for name, values in given.items()}
            wrt = tuple(name for name in wrt if arrays[name] is not None)
            ids = self.array(target)

            def values(chosen: dict[str, Any]) -> Any:
                """What has an upstream gradient, and all results."""
                a = arrays | chosen
                made = jax_impl.linear_log_probs(
                    a["hidden"], a["weight"], ids, a["bias"], with_entropy=entropy_upstream is not None,
                    return_stats=stats_upstream is not None, backend=self.backend, **options,
                )  # fmt: skip
                first = made[:1] if entropy_upstream is None else made[:2]
                return (*first, *(getattr(made[2], name) for name in stats_upstream or {})), made

            first, backward, (log_prob, entropy, *stats) = jax.vjp(
                values, {name: arrays[name] for name in wrt}, has_aux=True
            )
            given = [log_prob_upstream] + [entropy_upstream] * (entropy_upstream is not None)
            given += (stats_upstream or {}).values()
            (made,) = backward(tuple(map(self.upstream, given, first)))
            grads = {name: self.numpy(made[name]) if name in wrt else None for name in ARGUMENTS}
            stats = [type(found)(*map(self.numpy, found)) for found in stats]
            return LogProbOutcome(self.numpy(log_prob), self.numpy(entropy), grads, stats[0] if stats else None)


class JaxPallas(JaxXla):
    """jax_impl with backend="pallas", on the GPU or, under LOGITLESS_PALLAS_INTERPRET=1, interpreted."""

    name = "jax_pallas"
    backend = "pallas"
    dtype = "bfloat16"
    dtypes = ("bfloat16", "float16")


class JaxPallasCuda(JaxPallas):
    """The same, compiled."""

    name = "jax_pallas_cuda"
    on_gpu = True

    @staticmethod
    def skip_unless_hopper() -> None:
        import jax

        capability = str(getattr(jax.devices()[0], "compute_capability", "none"))
        if not capability.startswith("9."):
            pytest.skip(f"the Pallas kernels need compute capability 9, JAX's first device has {capability}")

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        self.skip_unless_hopper()
        with super().precision(dtype):
            yield


class JaxInTorch(TorchEager):
    """jax_impl's function on torch tensors, through interop.jax_in_torch."""

    name = "jax_in_torch"
    backend = "xla"

    @functools.cache  # noqa: B019 (there is one of each)
    def function(self) -> Any:
        from logitless import interop, jax_impl

        return interop.jax_in_torch(jax_impl.linear_cross_entropy)

    def run(self, *arguments: Any, dtype: str | None = None, **options: Any) -> Outcome:
        dtype = self.takes(dtype)
        with JaxXla().precision(dtype):
            return super().run(*arguments, dtype=dtype, **options)


class TorchInJax(JaxXla):
    """torch_impl's function on JAX arrays, through interop.torch_in_jax, eagerly."""

    name = "torch_in_jax"
    backend = "eager"

    @functools.cache  # noqa: B019
    def function(self) -> Any:
        from logitless import interop, torch_impl

        return interop.torch_in_jax(torch_impl.linear_cross_entropy)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _parameter(implementation: Any, framework: str, *marks: Any) -> Any:
    missing = not _installed(framework)
    mark = pytest.mark.skipif(missing, reason=f"{framework} is not installed")
    return pytest.param(implementation, id=implementation.name, marks=[mark, *marks])


INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and _installed("torch") and _installed("triton")
interpreted = pytest.mark.skipif(
    not INTERPRETS, reason="kernels are interpreted only where there is no GPU, and triton must be installed"
)


def uninterpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have nowhere to run. Triton comes first: it decides at its import, once, whether it interprets."""
    if _installed("torch") and _installed("triton"):
        importlib.import_module("logitless.torch_impl.kernels.fused")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("LOGITLESS_PALLAS_INTERPRET", "0")


# (device, backend) of PyTorch: two on a CPU, then two on a GPU.
TORCH_PLACES = (
    pytest.param("cpu", "eager", id="eager"),
    pytest.param("cpu", "triton", id="interpreted", marks=interpreted),
    pytest.param("cuda", "eager", id="eager_cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "triton", id="triton_cuda", marks=pytest.mark.gpu),
)
in_every_torch_place = pytest.mark.parametrize(("device", "backend"), TORCH_PLACES)
slow_where_interpreted = pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(*place.values, id=place.id, marks=[*place.marks, pytest.mark.slow])
        if place.id == "interpreted"
        else place
        for place in TORCH_PLACES
    ],
)


def in_jax(parameters: dict[str, Any]) -> bool:
    """For the markers late and every_value: JAX's implementations, whose compiler takes most of the time."""
    return parameters["impl"].name in ("jax_xla", "jax_pallas")


beside_torch = pytest.mark.skipif(
    not (_installed("torch") or cuda_device_count()), reason="slow, and run where torch is installed too"
)

ALL = [_parameter(TorchEager(), "torch"), _parameter(JaxXla(), "jax")]
# Implementations once more, with another dtype of their own.
MORE_DTYPES = []
if cuda_device_count():  # tests/test_gpu.py says so where there is none
    ALL.append(_parameter(TorchEagerCuda(), "torch", pytest.mark.gpu))
    ALL.append(_parameter(TorchTritonCuda(), "torch", pytest.mark.gpu))
    ALL.append(_parameter(JaxPallasCuda(), "jax", pytest.mark.gpu))
    MORE_DTYPES.append(_parameter(TorchTritonCudaBfloat16(), "torch", pytest.mark.gpu))
HAVE_BOTH = _installed("torch") and _installed("jax")

WITH_INTERPRETED = [*ALL, pytest.param(TorchTriton(), id="torch_triton", marks=interpreted)]

every_implementation = pytest.mark.parametrize("impl", ALL)
and_interpreted = pytest.mark.parametrize("impl", WITH_INTERPRETED)
# For tests whose subject is not the dtype: they take ``impl.dtype``.
in_its_own_dtype = pytest.mark.parametrize("impl", [*ALL, *MORE_DTYPES])


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """PyTorch fills what it allocates with NaN, as it does for deterministic algorithms."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def in_turn(firsts: Iterable[Any], dtypes: Sequence[str], always: Sequence[str] = ()) -> list[Any]:
    """Pairs (first, dtype) for parametrize.

    On a GPU: all pairs. Elsewhere: each first with the dtypes of ``always`` and one more, in turn. With JAX alone: each
    first with one dtype, a different one than beside torch. A CPU spends a second on every program that JAX compiles,
    and a dtype's faults rarely depend on the rest.
    """
    pairs, others = [], [dtype for dtype in dtypes if dtype not in always]
    for number, first in enumerate(firsts):
        chosen = [*always, others[number % len(others)]] if HAVE_BOTH else [dtypes[(number + 1) % len(dtypes)]]
        if cuda_device_count():
            chosen = list(dtypes)
        name = getattr(first, "name", None) or "-".join(map(str, first if isinstance(first, tuple) else [first]))
        pairs += [pytest.param(first, dtype, id=f"{name}-{dtype}") for dtype in chosen]
    return pairs


def options_of(case: Case) -> dict[str, Any]:
    """The keyword arguments of ``case``, for the reference and for every implementation."""
    fields = dataclasses.asdict(case.problem.options)
    return fields | {
        "token_weight": case.token_weight,
        "class_weight": case.class_weight,
        "normalizer": case.problem.normalizer,
    }


def plan_for(problem: Problem, **arguments: Any) -> Any:
    """A plan for the problem's sizes."""
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": problem.dtype}
    return make_plan(**sizes, device="cpu", **arguments)


def run_case(impl: Any, case: Case, **more: Any) -> Outcome:
    """``case`` on one implementation."""
    return impl.run(
        case.hidden, case.weight, case.target, case.bias, dtype=case.problem.dtype, upstream=case.upstream,
        **(options_of(case) | more),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def truth(problem: Problem) -> reference.LossResult:
    """The float64 reference on the problem's arrays."""
    case = problem.case()
    return reference.linear_cross_entropy(
        case.hidden, case.weight, case.target, case.bias, upstream=case.upstream, **options_of(case)
    )


def ideal_errors(problem: Problem, product: Callable[[Any, Any], Any] = np.matmul) -> dict[str, float]:
    """Error of the ideal full-logits path of the problem's dtype, per output."""
    return _ideal_errors(problem, product)


@functools.lru_cache(maxsize=256)
def _ideal_errors(problem: Problem, product: Callable[[Any, Any], Any]) -> dict[str, float]:
    case = problem.case()
    made, true = with_commonest(case, ideal_gradients(case, product)), with_commonest(case, truth_outputs(problem))
    return {name: error(made[name], true[name]) for name in true}


def with_commonest(case: Case, outputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs, and for a trained problem the rows of dW of its commonest targets."""
    if "trained" not in case.problem.tags or "dweight" not in outputs:
        return outputs
    return outputs | {COMMONEST: outputs["dweight"][case.commonest_targets()]}


def truth_outputs(problem: Problem) -> dict[str, Any]:
    true = truth(problem)
    return {
        "loss": true.loss, "dhidden": true.hidden_grad, "dweight": true.weight_grad, "dbias": true.bias_grad,
    }  # fmt: skip


def assert_within(problem: Problem, outcome: Outcome, product: Callable[[Any, Any], Any] = np.matmul) -> None:
    """The rule of logitless.tolerances for every output that the outcome has."""
    case, ideal = problem.case(), ideal_errors(problem, product)
    true = with_commonest(case, truth_outputs(problem))
    made = {"loss": outcome.loss} | {f"d{name}": grad for name, grad in outcome.grads.items() if grad is not None}
    for name, value in with_commonest(case, made).items():
        wrong, allowed = error(value, true[name]), allowance(ideal[name], problem.dtype)
        assert wrong <= allowed, f"{problem.name} {problem.dtype} {name}: error {wrong:.3g}, allowed {allowed:.3g}"


def assert_rounded_once(impl: Any, chunk: int, sum_bits: int = 24) -> None:
    """Where gradients cancel, a second rounding of dW makes its error 1.15 times that of the ideal path, and 1.26 times
    in the rows of the commonest targets."""
    problem = Problem("trained_x", (1024,), 16, 96, recipe="trained", tags=("trained",)).with_dtype("bfloat16")
    sizes = {"tokens": problem.tokens, "hidden": problem.hidden, "vocab": problem.vocab, "dtype": "bfloat16"}
    chosen = make_plan(**sizes, fused=True, padded=impl.padded, order="tokens", chunk=chunk)
    chosen = dataclasses.replace(chosen, sum_bits=sum_bits)
    assert chosen.one_pass
    assert chosen.chunks == math.ceil(problem.tokens / chunk)
    case, ideal = problem.case(), ideal_errors(problem)
    true = with_commonest(case, truth_outputs(problem))
    made = with_commonest(case, {"dweight": run_case(impl, case, plan=chosen).grads["weight"]})
    for name, value in made.items():
        assert error(value, true[name]) <= ROUNDED_ONCE * ideal[name], name


def problem_named(name: str) -> Problem:
    return BY_NAME[name]
