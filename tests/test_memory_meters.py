"""The two meters that judge the plan's scratch promise, held against programs whose peak is known by counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

KIB = 1024


def _torch() -> Any:
    return pytest.importorskip("torch", reason="the PyTorch meter needs torch")


def _jax() -> Any:
    return pytest.importorskip("jax", reason="the JAX meter needs jax")


class TestTorchMeter:
    """peak_scratch_bytes counts to the byte on the CPU, so every expectation is an equality."""

    def peak(self, function: Callable[[], object]) -> int:
        _torch()
        from logitless.torch_impl.memory import peak_scratch_bytes

        return peak_scratch_bytes(function)

    def test_nothing_allocated_is_zero(self) -> None:
        assert self.peak(lambda: None) == 0

    def test_one_result(self) -> None:
        torch = _torch()
        assert self.peak(lambda: torch.ones(300, KIB, dtype=torch.uint8)) == 300 * KIB

    def test_two_live_buffers_add(self) -> None:
        torch = _torch()

        def program() -> Any:
            first = torch.ones(300, KIB, dtype=torch.uint8)
            second = torch.ones(500, KIB, dtype=torch.uint8)
            return first, second

        assert self.peak(program) == 800 * KIB

    def test_a_freed_buffer_counts_only_while_it_lives(self) -> None:
        torch = _torch()

        def program() -> Any:
            first = torch.ones(300, KIB, dtype=torch.uint8)
            del first
            second = torch.ones(500, KIB, dtype=torch.uint8)
            del second
            return torch.ones(100, KIB, dtype=torch.uint8)

        assert self.peak(program) == 500 * KIB

    def test_many_buffers_one_after_the_other_are_one(self) -> None:
        torch = _torch()

        def program() -> None:
            for _ in range(50):
                torch.ones(64, KIB, dtype=torch.uint8)

        assert self.peak(program) == 64 * KIB

    def test_a_view_is_free_and_its_copy_is_not(self) -> None:
        torch = _torch()
        before = torch.ones(256, KIB)
        assert self.peak(lambda: before[:, :100].t().unsqueeze(0)) == 0
        assert self.peak(lambda: before[:, :100].contiguous()) == 4 * 256 * 100

    def test_an_in_place_operation_is_free(self) -> None:
        torch = _torch()
        before = torch.ones(256, KIB)
        assert self.peak(lambda: before.exp_()) == 0

    def test_a_temporary_inside_an_expression(self) -> None:
        torch = _torch()
        before = torch.ones(64, KIB)
        # before + 1, then its square beside it; the sum's 4 bytes come when `before + 1` is already gone.
        assert self.peak(lambda: ((before + 1) ** 2).sum()) == 2 * 4 * 64 * KIB

    def test_a_temporary_inside_an_operator(self) -> None:
        """cross_entropy allocates a log-softmax of the logits' size that no Python code names."""
        torch = _torch()
        logits, target = torch.zeros(64, KIB), torch.zeros(64, dtype=torch.int64)
        peak = self.peak(lambda: torch.nn.functional.cross_entropy(logits, target))
        assert 4 * 64 * KIB <= peak <= 4 * 64 * KIB + KIB

    def test_the_backward_pass_is_metered(self) -> None:
        """Backward of exp: the saved result is live, and the gradient comes beside it."""
        torch = _torch()
        leaf = torch.zeros(64, KIB, requires_grad=True)

        def program() -> Any:
            return torch.autograd.grad(leaf.exp().sum(), leaf)

        peak = self.peak(program)
        # The upstream gradient of sum is an expanded scalar, so two full buffers are live, not three.
        assert 2 * 4 * 64 * KIB <= peak <= 2 * 4 * 64 * KIB + KIB

    def test_freeing_older_memory_hides_nothing(self) -> None:
        """Neither blocks from before the call nor blocks that an earlier metered call left are subtracted."""
        torch = _torch()
        held = [torch.ones(700, KIB, dtype=torch.uint8)]
        assert self.peak(lambda: held.append(torch.ones(600, KIB, dtype=torch.uint8))) == 600 * KIB

        def program() -> Any:
            held.clear()
            return torch.ones(900, KIB, dtype=torch.uint8)

        assert self.peak(program) == 900 * KIB

    def test_the_function_runs_once_and_its_error_comes_through(self) -> None:
        _torch()
        calls: list[int] = []

        def program() -> None:
            calls.append(1)
            raise KeyError("from the program")

        with pytest.raises(KeyError, match="from the program"):
            self.peak(program)
        assert len(calls) == 1
        assert self.peak(lambda: None) == 0

    def test_a_silent_profiler_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If a release dropped the events, every scratch test would pass. So the meter must refuse."""
        _torch()
        from logitless.torch_impl import memory

        monkeypatch.setattr(memory, "_ALLOCATION_TAG", "Renamed")
        with pytest.raises(RuntimeError, match="did not report a known allocation"):
            memory.peak_scratch_bytes(lambda: None)


class TestJaxMeter:
    """temp_bytes on products that XLA cannot fuse: what is neither argument nor result must be stored."""

    def temp(self, function: Callable[..., object], *arguments: Any) -> int:
        _jax()
        from logitless.jax_impl.memory import temp_bytes

        return temp_bytes(function, *arguments)

    def shapes(self, *shapes: tuple[int, ...]) -> list[Any]:
        jax = _jax()
        return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def test_one_product_needs_none(self) -> None:
        assert self.temp(lambda x, w: x @ w, *self.shapes((256, 512), (512, 512))) == 0

    def test_a_fused_expression_needs_none(self) -> None:
        assert self.temp(lambda x: (x + 1) * x - 3, *self.shapes((256, 512))) == 0

    def test_one_intermediate(self) -> None:
        assert self.temp(lambda x, w: (x @ w) @ w, *self.shapes((256, 512), (512, 512))) == 4 * 256 * 512

    def test_two_live_intermediates_add(self) -> None:
        """(x a)(b x): both factors of the last product are live, 256 × 1024 and 1024 × 512 values."""
        shapes = self.shapes((256, 512), (512, 1024), (1024, 256))
        assert self.temp(lambda x, a, b: (x @ a) @ (b @ x), *shapes) == 4 * (256 * 1024 + 1024 * 512)

    def test_a_dead_intermediate_gives_its_space_back(self) -> None:
        """Nine products in a row: the result's buffer and one more take turns, or two more, whatever the length."""

        def chain(x: Any, w: Any) -> Any:
            for _ in range(9):
                x = x @ w
            return x

        one_buffer = 4 * 256 * 512
        temp = self.temp(chain, *self.shapes((256, 512), (512, 512)))
        assert one_buffer <= temp <= 2 * one_buffer

    def test_a_product_hidden_in_a_library_fusion_is_counted(self) -> None:
        """XLA gives max(x w) to a library as one fusion and reports no temporary at all."""
        jax = _jax()
        product_bytes = 4 * 256 * 4096
        shapes = self.shapes((256, 512), (512, 4096))
        temp = self.temp(lambda x, w: jax.numpy.max(x @ w), *shapes)
        assert product_bytes <= temp <= 1.1 * product_bytes

    def test_a_chain_hidden_in_a_library_fusion_is_counted(self) -> None:
        jax = _jax()
        wide_bytes = 4 * 256 * 4096
        shapes = self.shapes((256, 128), (128, 4096), (4096, 128))
        temp = self.temp(lambda x, a, b: jax.numpy.max((x @ a) @ b), *shapes)
        assert wide_bytes <= temp <= 1.1 * wide_bytes

    def test_a_loop_needs_one_slice_at_a_time(self) -> None:
        """A product whose result is used twice: whole, it is stored whole; in 8 slices by scan, an eighth of it."""
        jax = _jax()

        def slice_value(x: Any, w: Any) -> Any:
            logits = x @ w
            return jax.numpy.sum(jax.nn.logsumexp(logits, axis=1) * logits[:, 0])

        def sliced(x: Any, w: Any) -> Any:
            rows = x.reshape(8, -1, x.shape[1])
            return jax.lax.scan(lambda total, row: (total + slice_value(row, w), None), 0.0, rows)[0]

        shapes = self.shapes((1024, 128), (128, 2048))
        whole, in_slices = self.temp(slice_value, *shapes), self.temp(sliced, *shapes)
        logits_bytes = 4 * 1024 * 2048
        assert logits_bytes <= whole <= 1.1 * logits_bytes
        assert logits_bytes / 8 <= in_slices <= 1.4 * logits_bytes / 8

    def test_concrete_arrays_and_a_jitted_function_give_the_same(self) -> None:
        jax = _jax()

        def program(x: Any, w: Any) -> Any:
            return (x @ w) @ w

        arrays = jax.numpy.ones((64, 128)), jax.numpy.ones((128, 128))
        assert self.temp(program, *arrays) == self.temp(jax.jit(program), *arrays) == 4 * 64 * 128

    def test_a_jitted_function_keeps_its_static_arguments(self) -> None:
        jax = _jax()

        def program(x: Any, w: Any, products: int) -> Any:
            for _ in range(products):
                x = x @ w
            return x

        shapes = self.shapes((64, 128), (128, 128))
        from logitless.jax_impl.memory import temp_bytes

        jitted = jax.jit(program, static_argnums=2)
        assert temp_bytes(jitted, *shapes, 1) == 0
        assert temp_bytes(jitted, *shapes, 2) == 4 * 64 * 128

    def test_no_memory_analysis_is_an_error(self) -> None:
        _jax()

        class Silent:
            def lower(self, *_: object) -> Silent:
                return self

            def compile(self) -> Silent:
                return self

            def memory_analysis(self) -> None:
                return None

            def __call__(self) -> None:
                return None

        with pytest.raises(NotImplementedError, match="no memory analysis"):
            self.temp(Silent())
