"""Settings shared by all tests: one thread a worker; JAX on the CPU and Triton interpreted where there is no GPU; the
gpu and case markers."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator

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


def pytest_configure(config: pytest.Config) -> None:
    """One thread for torch in a worker: several workers share the cores."""
    if IN_XDIST_WORKER and importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def leave_out_of_collections() -> None:
    """Leave every object that there is now out of garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the imported modules out of garbage collections, which the tests of memory ask for again and again, and
    interpret quicker where the collected tests have torch imported."""
    leave_out_of_collections()
    if "torch" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from interpreter import replace_the_language_once_a_launch

        replace_the_language_once_a_launch()


def pytest_unconfigure() -> None:
    """Frozen objects would outlive the interpreter, and nanobind says so of each."""
    gc.unfreeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed that repeats the run, and whether slow tests are left out."""
    lines = [f"random problems: LOGITLESS_FUZZ_SEED={os.environ['LOGITLESS_FUZZ_SEED']}"]
    if config.option.markexpr == "not slow":
        lines.append('slow tests: left out; make test-all or -m "" runs them')
    return lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and refuse a case marker that names no number."""
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


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Leave what earlier tests have put into caches out of garbage collections."""
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
