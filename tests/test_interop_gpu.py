"""The exchange and the bridges on a GPU: the order of streams, and memory that lives until it was used.

Every race is provoked by a long kernel in front: what is checked would be read or overwritten tens of milliseconds too
early if nothing ordered the two frameworks' streams.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="interop needs both frameworks, and jax is not installed")
torch = pytest.importorskip("torch", reason="interop needs both frameworks, and torch is not installed")
jnp = jax.numpy

from logitless import torch_impl  # noqa: E402
from logitless.interop import compare, jax_in_torch, to_jax, to_torch, torch_in_jax  # noqa: E402
from logitless.problems import BY_NAME  # noqa: E402
from logitless.tolerances import ELEMENTS  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU here"),
]

COUNT = 1 << 24  # 64 MiB of float32: an allocation of its own in both frameworks
SLEEP_CYCLES = 200_000_000  # about 0.1 s


def busy_torch() -> None:
    """A kernel of about 0.1 s on torch's current stream."""
    torch.cuda._sleep(SLEEP_CYCLES)


def _after_work(x: Any, work: Any) -> Any:
    """x, read after a loop of products that takes tens of milliseconds."""
    done = jax.lax.fori_loop(0, 60, lambda _, p: p @ work * 1e-4, work)
    return jax.lax.optimization_barrier((x, done))[0] * (1 + 0 * done[0, 0])


@functools.cache
def work() -> Any:
    return jax.block_until_ready(jnp.ones((8192, 8192), jnp.bfloat16))


@functools.cache
def after_work() -> Any:
    function = jax.jit(_after_work)
    jax.block_until_ready(function(jnp.zeros(COUNT), work()))  # compiled before anything is timed by it
    return function


def overwrite_torch_memory() -> list[Any]:
    """Take what torch's allocator has just got back, and write to it on the current stream."""
    return [torch.full((COUNT,), -1.0, device="cuda") for _ in range(4)]


def overwrite_jax_memory() -> list[Any]:
    return [jnp.full(COUNT, -1.0 - n).block_until_ready() for n in range(4)]


class TestOrder:
    @pytest.mark.parametrize("side", [False, True])
    def test_jax_waits_for_torchs_stream(self, side: bool) -> None:
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        tensor = torch.zeros(COUNT, device="cuda")
        to_jax(tensor).block_until_ready()  # the first may take longer than the kernel in front
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            busy_torch()
            tensor.fill_(1.0)
            array = to_jax(tensor)
        assert not stream.query()  # the kernel in front is still running: the test means something
        assert float(jnp.sum(array)) == COUNT

    @pytest.mark.parametrize("side", [False, True])
    def test_torchs_stream_waits_for_jax(self, side: bool) -> None:
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        function, x, p = after_work(), jax.block_until_ready(jnp.ones(COUNT)), work()
        with torch.cuda.stream(stream):
            tensor = to_torch(function(x, p))
            assert tensor.sum().item() == COUNT

    def test_a_write_after_jax_in_torch_comes_too_late_to_be_read(self) -> None:
        """The race: JAX computes, the caller overwrites its tensor at once, JAX reads the new bytes."""
        function = jax_in_torch(lambda x, p: _after_work(x, p))
        x, p = torch.ones(COUNT, device="cuda"), to_torch(work())
        function(x, p)
        torch.cuda.synchronize()
        result = function(x, p)
        x.fill_(-1.0)
        assert result.sum().item() == COUNT

    def test_the_race_is_there_without_the_bridge(self) -> None:
        """Documented: after to_jax alone, nothing orders a later write. This is what the test above is worth."""
        function, x, p = after_work(), torch.ones(COUNT, device="cuda"), work()
        array = to_jax(x)
        torch.cuda.synchronize()
        result = function(array, p)
        x.fill_(-1.0)
        assert float(jnp.sum(result)) == -COUNT

    def test_gradients_are_ordered_too(self) -> None:
        function = jax_in_torch(lambda x, p: (_after_work(x, p) ** 2).sum())
        x, p = torch.ones(COUNT, device="cuda", requires_grad=True), to_torch(work())
        for _ in range(2):
            x.grad = None
            loss = function(x, p)
            loss.backward()
        with torch.no_grad():
            x.fill_(7.0)
        assert loss.item() == COUNT
        assert bool((x.grad == 2).all())

    def test_int64_is_checked_when_the_work_is_given(self) -> None:
        """The range is known only when the device gets there. The host neither waits for it nor forgets it."""
        function, p = jax_in_torch(lambda y, p: _after_work(y.astype(jnp.float32), p).sum()), to_torch(work())
        right = torch.ones(COUNT, device="cuda", dtype=torch.int64)
        wrong = right.clone()
        wrong[5] = 2**40
        assert function(right, p).item() == COUNT
        with pytest.raises(
            ValueError, match=r"^argument 0: tensor has int64 values that do not fit int32.*at index \(5,\)"
        ):
            function(wrong, p)
        assert function(right, p).item() == COUNT

    def test_torch_in_jax_behind_a_long_torch_kernel(self) -> None:
        def slow(x: Any) -> Any:
            busy_torch()
            return x * 2

        function = torch_in_jax(slow)
        value, gradient = jax.value_and_grad(lambda x: function(x).sum())(jnp.ones(COUNT))
        assert (float(value), float(jnp.sum(gradient))) == (2 * COUNT, 2 * COUNT)

    def test_the_host_does_not_wait(self) -> None:
        x, p = torch.ones(COUNT, device="cuda", requires_grad=True), to_torch(work())
        function = jax_in_torch(lambda x, p: _after_work(x, p).sum())
        function(x, p).backward()
        shares = []
        for _ in range(3):  # a host that shares its cores may be late now and then; one that waits always is
            torch.cuda.synchronize()
            start = time.perf_counter()
            function(x, p).backward()
            returned = time.perf_counter() - start
            torch.cuda.synchronize()
            shares.append(returned / (time.perf_counter() - start))
        assert min(shares) < 0.5


class TestLifetime:
    def test_jaxs_memory_lives_until_torch_has_read_it(self) -> None:
        tensor = to_torch(jax.block_until_ready(jnp.ones(COUNT)))
        torch.cuda.synchronize()
        busy_torch()
        result = tensor * 1
        del tensor
        gc.collect()
        overwrite_jax_memory()
        assert result.sum().item() == COUNT

    def test_torchs_memory_lives_until_jax_has_read_it(self) -> None:
        function, p = after_work(), work()
        tensor = torch.ones(COUNT, device="cuda")
        array = to_jax(tensor)
        torch.cuda.synchronize()
        result = function(array, p)
        del tensor, array
        gc.collect()
        overwrite_torch_memory()
        assert float(jnp.sum(result)) == COUNT

    def test_arguments_of_jax_in_torch_may_be_dropped_at_once(self) -> None:
        function = jax_in_torch(lambda x, p: _after_work(x, p))
        p = to_torch(work())
        function(torch.ones(COUNT, device="cuda"), p)
        result = function(torch.ones(COUNT, device="cuda"), p)
        overwrite_torch_memory()
        assert result.sum().item() == COUNT

    def test_arguments_of_torch_in_jax_may_be_dropped_at_once(self) -> None:
        def slow(x: Any) -> Any:
            busy_torch()
            return x * 1

        result = torch_in_jax(slow)(jax.block_until_ready(jnp.ones(COUNT)))
        gc.collect()
        overwrite_jax_memory()
        assert float(jnp.sum(result)) == COUNT

    def test_memory_is_given_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        time.sleep(0.5)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            array = to_jax(torch.ones(COUNT, device="cuda"))
            assert float(jnp.sum(array)) == COUNT
            del array
        tensors = [to_torch(jnp.ones(COUNT) * n) for n in range(3)]
        in_use = jax.local_devices()[0].memory_stats()["bytes_in_use"]
        del tensors
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            gc.collect()
            used = jax.local_devices()[0].memory_stats()["bytes_in_use"]
            if torch.cuda.memory_allocated() <= before and used <= in_use - 3 * 4 * COUNT:
                return
            time.sleep(0.05)
        pytest.fail(f"torch holds {torch.cuda.memory_allocated() - before} bytes more, JAX {used} of {in_use}")


class TestSharing:
    def test_bridges_share_memory_both_ways(self) -> None:
        seen = []

        def fn(x: Any) -> Any:
            result = x * 2
            seen.append((x.data_ptr(), result.data_ptr()))
            return result

        x = jnp.arange(64.0)
        result = torch_in_jax(fn)(x)
        assert seen == [(x.unsafe_buffer_pointer(), result.unsafe_buffer_pointer())]
        tensor = torch.ones(64, device="cuda")
        with torch.no_grad():
            same = to_torch(to_jax(tensor))
        assert same.data_ptr() == tensor.data_ptr()

    @pytest.mark.parametrize("name", ["odd_most", "odd_none_most", "confident_wrong"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_every_implementation_agrees(self, name: str, dtype: str) -> None:
        comparison = compare(BY_NAME[name].with_dtype(dtype))
        statuses = {row.implementation: (row.status, row.reason) for row in comparison.rows}
        assert comparison.agrees, statuses
        for ran in ("eager", "triton", "xla", "jax_in_torch", "torch_in_jax"):
            assert statuses[ran][0] == "agrees", statuses

    def test_inside_jit_through_the_host(self) -> None:
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((40, 32), (90, 32)))
        y = jnp.asarray(rng.integers(0, 90, 40), jnp.int32)
        devices = []

        def loss(x: Any, w: Any, y: Any) -> Any:
            devices.append(x.device.type)
            return torch_impl.linear_cross_entropy(x, w, y)

        both = jax.value_and_grad(torch_in_jax(loss), argnums=(0, 1))
        eager, jitted = both(x, w, y), jax.jit(both)(x, w, y)
        for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
            assert np.allclose(one, other, **ELEMENTS["compiled"])
        assert set(devices) == {"cuda"}

    def test_tensors_on_two_devices_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"several devices: got argument 0 on cuda:0, argument 1 on cpu"):
            jax_in_torch(lambda x, w: x + w)(torch.ones(2, device="cuda"), torch.ones(2))
        cpu = jax.device_put(jnp.ones(2), jax.devices("cpu")[0])
        with pytest.raises(ValueError, match=r"several devices: got argument 0 on .*, argument 1 on "):
            torch_in_jax(lambda x, w: x + w)(jnp.ones(2), cpu)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Stop Python's garbage collector: when it frees a program or an array of JAX's, that GPU becomes current."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
class TestCurrentDevice:
    """torch's current device stays, whichever GPU JAX has used meanwhile."""

    def test_of_the_exchange(self, current: int, used: int) -> None:
        tensor = torch.ones(64, device=f"cuda:{used}")
        with torch.cuda.device(current):
            array = to_jax({"x": tensor})
            assert torch.cuda.current_device() == current
            for copy in (None, True):
                assert to_torch(array, copy=copy)["x"].device == tensor.device
                assert torch.cuda.current_device() == current

    def test_of_jax_in_torch(self, current: int, used: int) -> None:
        function = jax_in_torch(lambda x: (x**2).sum())
        tensor = torch.ones(64, device=f"cuda:{used}", requires_grad=True)
        with torch.cuda.device(current):
            function(tensor.detach())
            assert torch.cuda.current_device() == current
            loss = function(tensor)
            assert torch.cuda.current_device() == current
            loss.backward()
            assert torch.cuda.current_device() == current
        assert bool((tensor.grad == 2).all())

    def test_in_the_function_of_torch_in_jax(self, current: int, used: int) -> None:
        seen = []

        def square(x: Any) -> Any:
            seen.append(torch.cuda.current_device())
            return x**2

        array = jax.block_until_ready(jax.device_put(jnp.ones(64), jax.devices()[used]))
        with torch.cuda.device(current):
            torch_in_jax(square)(array)
        assert seen == [current]
