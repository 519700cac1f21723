"""Which backends run on this machine. Each one is tried on a small problem; one that does not run says why.

A framework is imported only when it is tried. If it is missing or broken, the report says so.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Literal

from logitless.problems import BY_NAME, Case, Problem
from logitless.rounding import Floats

Status = Literal["runs", "wrong", "not here", "fails"]

BACKENDS = (("torch", "eager"), ("torch", "triton"), ("jax", "xla"), ("jax", "pallas"))
PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy")
INSTALL = {"torch": "pip install 'logitless[torch]'", "jax": "pip install 'logitless[jax]'"}
PROBE = "odd"
SPEED_SIZES = 4096, 2048, 32768  # tokens, hidden size, vocabulary


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """One backend's result. ``reason``: what was checked; or why it does not run, and what would make it run."""

    framework: str
    backend: str
    status: Status
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything ``python -m logitless doctor`` prints."""

    python: str
    system: str
    packages: dict[str, str]
    """Package → version, or the words "not installed"."""
    devices: dict[str, str]
    backends: tuple[BackendReport, ...]

    @property
    def healthy(self) -> bool:
        """False when a backend that should run here fails or gives wrong numbers."""
        return all(backend.status in ("runs", "not here") for backend in self.backends)


@functools.cache
def cuda_device_count() -> int:
    """How many CUDA devices the NVIDIA driver reports, 0 without a driver. Needs no framework."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def examine() -> Report:
    """Try every backend and collect versions and devices. Never raises for a framework that is missing or broken."""
    # JAX would otherwise take most of a GPU's memory, and torch could not run beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return Report(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs",
        packages=installed_versions(PACKAGES),
        devices={
            "NVIDIA driver: devices": f"{cuda_device_count()} CUDA device(s)",
            "torch: devices": _described(_torch_devices, "torch"),
            "torch: kernels": _described(_torch_kernels, "torch"),
            "jax: devices": _described(_jax_devices, "jax"),
        },
        backends=tuple(try_backend(framework, backend) for framework, backend in BACKENDS),
    )


def probes(backend: str) -> tuple[Problem, ...]:
    """The small problem that a backend is tried on, in each dtype whose kernels are others."""
    dtypes = {"pallas": ("bfloat16",), "triton": ("bfloat16", "float32")}.get(backend, ("float32",))
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        dtypes = ("float32",)  # Triton's interpreter cuts float32 off where it should round it to bfloat16
    return tuple(BY_NAME[PROBE].with_dtype(dtype) for dtype in dtypes)


def try_backend(framework: str, backend: str) -> BackendReport:
    """Compute the loss and gradients of a small problem on one backend, and compare them with float64."""
    report = functools.partial(BackendReport, framework, backend)
    if not installed(framework):
        return report("not here", f"{framework} is not installed: {INSTALL[framework]}, then ask again")
    try:
        cases = [problem.case() for problem in probes(backend)]
        found = [_RUNNERS[framework](case, backend) for case in cases]
    except NotImplementedError as refusal:
        return report("not here", str(refusal))
    except Exception as failure:  # a broken installation may raise anything; the report says what
        return report("fails", f"{type(failure).__name__}: {failure}")
    device = found[0][1]
    for case, (results, _) in zip(cases, found, strict=True):
        if wrong := _differences(case, results):
            return report("wrong", f"on {device} in {case.problem.dtype}, against the float64 reference: {wrong}")
    return report("runs", f"on {device}; loss and gradients agree with the float64 reference")


def _run_torch(case: Case, backend: str) -> tuple[dict[str, Floats], str]:
    import torch

    implementation = importlib.import_module("logitless.torch_impl")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case.problem.dtype)
    hidden, weight = (torch.tensor(a).to(device, dtype).requires_grad_() for a in (case.hidden, case.weight))
    target = torch.tensor(case.target, device=device)
    loss = implementation.linear_cross_entropy(hidden, weight, target, backend=backend)
    loss.backward()
    arrays = {"loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}
    return {name: array.float().cpu().numpy() for name, array in arrays.items()}, device


def _run_jax(case: Case, backend: str) -> tuple[dict[str, Floats], str]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    implementation = importlib.import_module("logitless.jax_impl")
    target = jnp.asarray(case.target, jnp.int32)

    def loss_of(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        loss: jax.Array = implementation.linear_cross_entropy(hidden, weight, target, backend=backend)
        return loss

    arguments = [jnp.asarray(array).astype(case.problem.dtype) for array in (case.hidden, case.weight)]
    loss_of(*arguments)  # outside jit a backend that cannot run says so; inside, the device is not known
    loss, (dhidden, dweight) = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))(*arguments)
    results = {"loss": loss, "dhidden": dhidden, "dweight": dweight}
    return {name: np.asarray(array) for name, array in results.items()}, jax.default_backend()


_RUNNERS: dict[str, Callable[[Case, str], tuple[dict[str, Floats], str]]] = {"torch": _run_torch, "jax": _run_jax}


def _differences(case: Case, results: dict[str, Floats]) -> str:
    """Which results are worse than the tolerances allow, in words; empty if none is."""
    from logitless import reference
    from logitless.ideal import ideal_gradients
    from logitless.tolerances import allowance, error

    exact = reference.linear_cross_entropy(case.hidden, case.weight, case.target)
    truth = {"loss": exact.loss, "dhidden": exact.hidden_grad, "dweight": exact.weight_grad}
    ideal = ideal_gradients(case)
    parts = []
    for name, value in results.items():
        found = error(value, truth[name])
        allowed = allowance(error(ideal[name], truth[name]), case.problem.dtype)
        if not found <= allowed:  # also when it is NaN
            parts.append(f"{name} is off by {found:.1e}, allowed is {allowed:.1e}")
    return "; ".join(parts)


def installed(package: str) -> bool:
    """Whether ``package`` can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses the name, or the module there has no spec
        return False


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package → version, or the words "not installed"."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _described(devices: Callable[[], str], framework: str) -> str:
    if not installed(framework):
        return "not installed"
    try:
        return devices()
    except Exception as failure:  # as in try_backend
        return f"{type(failure).__name__}: {failure}"


def _torch_devices() -> str:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([f"cpu ({torch.get_num_threads()} threads)", *names])


def _torch_kernels() -> str:
    """Of every GPU that the kernels are built for: its chip, the record of its tiles, and how fast a step is."""
    import torch

    from logitless.torch_impl.kernels import architecture

    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        reason = architecture.unavailable(device, torch.bfloat16)
        if reason is None:
            chip, record = architecture.chip_of(index), architecture.architecture_of(torch.bfloat16, index, True)
            known = "" if architecture.was_run(chip) else "; never run on such a chip by us, so first calls are checked"
            reason = f"chip {chip}, tiles {record.name!r}{known}; {_torch_speed(index)}"
        found.append(f"{index}: {reason}")
    return "; ".join(found) or "no GPU"


def _torch_speed(index: int) -> str:
    """Loss and gradients beside three bare products, medians."""
    import torch

    from logitless.torch_impl import linear_cross_entropy

    tokens, size, vocab = SPEED_SIZES
    with torch.cuda.device(index):
        x, w = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for rows in (tokens, vocab))
        y = torch.randint(vocab, (tokens,), device="cuda")
        g = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_(), w.requires_grad_()

        def ours() -> object:
            return torch.autograd.grad(linear_cross_entropy(x, w, y), [x, w])

        def products() -> object:
            with torch.no_grad():
                return x @ w.T, g @ w, g.T @ x

        ms, bare = (_median_ms(step) for step in (ours, products))
    return f"a step of {tokens} × {size} × {vocab} in bfloat16 takes {ms:.2f} ms, {ms / bare:.2f} × three bare products"


def _median_ms(step: Callable[[], object]) -> float:
    import torch

    times: list[float] = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[5]


def _jax_devices() -> str:
    import jax

    return ", ".join(f"{device.platform}: {device.device_kind}" for device in jax.devices())
