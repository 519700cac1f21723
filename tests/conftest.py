"""Settings shared by all tests: one thread a worker; JAX on the CPU and Triton interpreted where there is no GPU; the
gpu and case markers."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitless.doctor import cuda_device_count

# Before any framework is imported. With a GPU, JAX must leave torch its share of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if cuda_device_count():
    # The tolerances are those of IEEE float32; JAX's own default on a GPU is TF32, torch's is not.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    # The optimiser takes most of the time of tests that compile hundreds of small programs; buffers are assigned
    # before it runs. The older emitters take half of the rest; jax 0.11 has none.
    # Four devices for tests/test_sharded_jax.py; the others see the first one.
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    flags += ["--xla_force_host_platform_device_count=4"]
    if importlib.util.find_spec("jax") is not None and importlib.metadata.version("jax").startswith("0.10."):
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    else:
        # XLA's pool has a thread a core or a device. Interpreted kernels wait for each other in it, two devices with
        # three warpgroups each in eight threads at most; with four they could wait for ever for a fifth.
        os.environ.setdefault("NPROC", "16")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# Of tests/test_fuzz.py: another one in every run; workers have the one of the process that started them.
os.environ.setdefault("LOGITLESS_FUZZ_SEED", str(int.from_bytes(os.urandom(4), "big")))

IN_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_XDIST_WORKER:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


MARKERS = (
    "late(where): slow with the parameters, by name, of which the condition is true",
    "every_value(where, each): of the grid of parameters, as many are not slow as it takes to have every value once; "
    "where: a condition, as above, on those that this is about (all); each: parameters, for each value of which anew",
)


def pytest_configure(config: pytest.Config) -> None:
    """One thread for torch in a worker: several workers share the cores."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if IN_XDIST_WORKER and importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def leave_out_of_collections() -> None:
    """Leave every object that there is now out of garbage collections."""
    gc.collect()
    gc.freeze()


# Each program that XLA compiles for a CPU maps memory in several pieces. Linux allows a process 65,530 of them; then
# LLVM ends it. A module of tests adds a few thousand.
MANY_MAPPINGS = 20_000


def drop_programs() -> None:
    """Let go what JAX has compiled, if that has mapped memory in many pieces."""
    mappings = Path("/proc/self/maps")
    if "jax" in sys.modules and mappings.exists() and mappings.read_text().count("\n") > MANY_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.unfreeze()


def lower_in_one_context() -> None:
    """JAX makes a context of MLIR for each program that it lowers. One for all does the same: making one takes 3 ms, a
    fifth of what a small program's test takes."""
    from jax._src.interpreters import mlir

    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the imported modules out of garbage collections, which the tests of memory ask for again and again, and
    make quicker what the collected tests have imported of the frameworks."""
    leave_out_of_collections()
    # What frameworks make in passing is a hundred times Python's threshold, and a collection finds little in it.
    gc.set_threshold(100_000, 50, 100)
    # Frozen objects would outlive the interpreter, and nanobind says so of each. Not before pytest's own collections.
    atexit.register(gc.unfreeze)
    if "jax" in sys.modules:
        lower_in_one_context()
    if "torch" in sys.modules:
        from interpreter import make_quicker

        make_quicker()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed that repeats the run, and whether slow tests are left out."""
    lines = [f"random problems: LOGITLESS_FUZZ_SEED={os.environ['LOGITLESS_FUZZ_SEED']}"]
    if config.option.markexpr == "not slow":
        lines.append('slow tests: left out; make test-all or -m "" runs them')
    return lines


def is_skipped(item: pytest.Item) -> bool:
    """Whether a marker skips it here."""
    return any(not mark.args or mark.args[0] for mark in item.iter_markers("skipif"))


def named_value(name: str, value: Any) -> tuple[str, Any]:
    """What is equal for the same value of the same parameter. A dictionary or an array is itself alone."""
    try:
        hash(value)
    except TypeError:
        value = id(value)
    return name, value


def few_with_every_value(items: list[Any]) -> list[Any]:
    """Some of the members of a grid of parameters, so that each value of each parameter is in one of them."""
    values = [{named_value(*one) for one in item.callspec.params.items()} for item in items]
    missing, chosen = set().union(*values), []
    while missing:
        most = max(range(len(items)), key=lambda number: len(values[number] & missing))
        missing -= values[most]
        chosen.append(items[most])
    return chosen


def mark_slow(items: list[Any]) -> None:
    """Mark what late and every_value leave to the slow tests. On a GPU every_value leaves nothing to them."""
    grids: dict[Any, list[Any]] = {}
    for item in items:
        for mark in item.iter_markers("late"):
            if mark.kwargs["where"](item.callspec.params):
                item.add_marker(pytest.mark.slow)
        there = item.get_closest_marker("gpu") is None and item.get_closest_marker("slow") is None
        for mark in item.iter_markers("every_value") if there and not is_skipped(item) else ():
            params, where, each = item.callspec.params, mark.kwargs.get("where"), mark.kwargs.get("each", ())
            if where is None or where(params):
                each = (each,) if isinstance(each, str) else each
                grid = item.nodeid.split("[")[0], *(named_value(name, params[name]) for name in each)
                grids.setdefault(grid, []).append(item)
    for grid in grids.values() if not cuda_device_count() else ():
        chosen = few_with_every_value(grid)
        for item in grid:
            if item not in chosen:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, skip what needs a GPU where there is none, and refuse a case marker that names no number."""
    mark_slow(items)
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and the NVIDIA driver reports none here")
    for item in items:
        for mark in item.iter_markers("case"):
            if not mark.args or mark.kwargs or not all(type(number) is int for number in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: case takes numbers of docs/cases.md, got {mark}")
        if item.get_closest_marker("gpu") is not None and not cuda_device_count():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _first_gpu_is_current(request: pytest.FixtureRequest) -> None:
    """Make the first GPU current in every test. JAX leaves the GPU that it used last current, for torch too."""
    if request.node.get_closest_marker("gpu") is not None and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(0)


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Leave what earlier modules have put into caches out of garbage collections. Frameworks keep millions of objects,
    and a collection that looks at all of them takes a second or more."""
    drop_programs()
    leave_out_of_collections()


@pytest.fixture(scope="module")
def checked_accesses() -> Iterator[None]:
    """Check what interpreted Triton kernels read and write (tests/accesses.py)."""
    from implementations import INTERPRETS

    if not INTERPRETS:
        yield
        return
    from accesses import checked

    with checked():
        yield


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill with NaN what torch.empty gives. Otherwise who reads memory that nobody has written may find the right
    numbers there, those of the call before."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group, which torch's global_normalizer sums over."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
