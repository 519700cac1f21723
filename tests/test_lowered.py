"""Kernels of Pallas that are lowered once, kept and compiled side by side (jax_impl/kernels/lowered.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="these tests are about JAX")
pytest.importorskip("absl", reason="absl-py is not installed, which JAX's Pallas modules for GPUs import")

import jax.numpy as jnp  # noqa: E402
from distilling import ORDERS, take_order  # noqa: E402
from test_pallas import CONFIGURATIONS, INTERPRET, lowered, lowered_configuration  # noqa: E402
from test_pallas_memory import TARGETS, sharding_of  # noqa: E402

from logitless.jax_impl import (  # noqa: E402
    cross_entropy,
    dense_distillation_loss,
    distillation_loss,
    linear_cross_entropy,
)
from logitless.jax_impl.kernels import lowered as kernels  # noqa: E402
from logitless.jax_impl.kernels import row_kernels  # noqa: E402

Signature = kernels.Signature


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels, none of which is known yet."""
    monkeypatch.setenv(INTERPRET, "0")
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()
    monkeypatch.setattr(kernels, "kernels", weakref.WeakValueDictionary())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are traced and of those that are lowered, in this order each."""
    names = []
    trace, write = kernels.traced, kernels._write  # every lowered kernel is written, if there is a folder
    monkeypatch.setattr(kernels, "traced", lambda s, run: (names.append(f"traced {s.name}"), trace(s, run))[1])
    monkeypatch.setattr(kernels, "_write", lambda s, e: (names.append(f"lowered {s.name}"), write(s, e))[1])
    return names


def traced_step(tokens: int = 256) -> Any:
    """Another program at every call, with the same kernels for as many tokens."""
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((tokens, 128), jnp.bfloat16), shape((512, 128), jnp.bfloat16), shape((tokens,), jnp.int32)

    def loss(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, backend="pallas")

    return jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, w, y)


def step(tokens: int = 256) -> str:
    text: str = traced_step(tokens).lower(lowering_platforms=("cuda",)).as_text()
    return text


def test_another_program_takes_the_kernels_that_there_are(made: list[str]) -> None:
    before = traced_step()  # kernels live as long as a program that calls them
    first = before.lower(lowering_platforms=("cuda",)).as_text()
    assert "lowered logits_anchored" in made
    made.clear()
    jax.clear_caches()  # which would give the program before
    assert step().count("mosaic_gpu_v2") == first.count("mosaic_gpu_v2") > 0
    assert [name for name in made if name.startswith("lowered")] == []
    assert "traced logits_anchored" not in made  # traced are those alone that no program calls
    step(512)
    assert "lowered logits_anchored" in made


def test_kernels_that_no_program_calls_are_gone(made: list[str]) -> None:
    step()
    jax.clear_caches()
    gc.collect()
    assert len(kernels.kernels) == 0


def test_kernels_of_a_forward_alone_are_not_lowered_for_a_step(made: list[str]) -> None:
    """JAX traces the function that is differentiated, too."""
    step()
    assert "traced logits_sums" in made
    assert "lowered logits_sums" not in made


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on JAX's first device, a GPU, the kernel runs")
@pytest.mark.parametrize("disabled", [False, True])
def test_a_kernel_outside_of_jit_is_compiled_too(disabled: bool) -> None:
    arguments = {"rows": jnp.ones(1, jnp.int32), "e": jnp.ones((64, 256), jnp.bfloat16)}
    with jax.disable_jit(disabled), pytest.raises(NotImplementedError, match="its kernels need a CUDA device, not cpu"):
        row_kernels.column_sums(arguments)


def given_logits(**options: Any) -> str:
    shape = jax.ShapeDtypeStruct

    def loss(z: Any, y: Any) -> Any:
        found = cross_entropy(z, y, backend="pallas", **options)
        return (found[0] if isinstance(found, tuple) else found).sum()

    return lowered(jax.value_and_grad(loss), shape((64, 512), jnp.bfloat16), shape((64,), jnp.int32))


def distilled(beta: float = 0.0, **options: Any) -> None:
    """A teacher's head, and probabilities."""
    shape = jax.ShapeDtypeStruct
    x, w, y, p = (shape(size, jnp.bfloat16) for size in ((64, 128), (512, 128), (64,), (64, 512)))
    hard = "nll_coef" in options

    def head(x: Any, w: Any, y: Any, _: Any) -> Any:
        return distillation_loss(x, w, x, w, target=y if hard else None, beta=beta, backend="pallas", **options)

    def dense(x: Any, w: Any, y: Any, p: Any) -> Any:
        return dense_distillation_loss(x, w, p, target=y if hard else None, beta=beta, backend="pallas", **options)

    for loss in (head, dense):
        jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, w, shape(y.shape, jnp.int32), p)


def square(layout: str) -> None:
    """A weight whose shape does not say which way it lies."""
    shape = jax.ShapeDtypeStruct
    x, w, y = shape((200, 192), jnp.bfloat16), shape((192, 192), jnp.bfloat16), shape((200,), jnp.int32)

    def loss(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, weight_layout=layout, backend="pallas")

    jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, w, y)


# At the sizes of others, what changes nothing but options.
MORE: dict[str, dict[str, Any]] = {
    "scale": {"logit_scale": 1.5},
    "cap": {"softcap": 30.0},
    "another_cap": {"softcap": 20.0},
    "smooth": {"label_smoothing": 0.1},
    "chunks": {"plan": {"order": "tokens", "chunk": 136}},
    "slices": {"plan": {"order": "vocab", "chunk": 512}},
    "statistics": {"bias": True, "return_stats": True, "softcap": 30.0},
}


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["losses", "all"])
def test_a_signature_says_all_that_a_kernel_depends_on(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch is traced anew. Where two agree in their signatures, they must agree in their programs."""
    found: dict[Signature, set[str]] = {}
    trace = kernels.traced

    def note(signature: Signature, run: kernels.Run) -> Any:
        program = trace(signature, run)
        found.setdefault(signature, set()).add(str(program))
        return program

    class Nothing(dict[Any, Any]):
        def get(self, *_: Any) -> None:
            return None

    monkeypatch.setattr(kernels, "traced", note)
    monkeypatch.setattr(kernels, "kernels", Nothing())
    for name in ("plain", "bias_statistics", "two_pass_smooth", "none_held", "wide_one_chunk"):
        lowered_without_kernels(monkeypatch, name)
    if more:
        trace_more(monkeypatch)
    assert len(found) > (75 if more else 20)
    assert [signature for signature, programs in found.items() if len(programs) > 1] == []
    # Nor do their descriptions, by which they are kept in a folder, agree where they do not.
    assert len({repr(signature) for signature in found}) == len(found)


def trace_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """More options, orders and sizes, given logits and distillations."""
    for name, options in MORE.items():
        monkeypatch.setitem(CONFIGURATIONS, name, options)
        lowered_without_kernels(monkeypatch, name)
    for options in ({}, {"softcap": 30.0}, {"logit_scale": 2.0}, {"return_stats": True}, {"label_smoothing": 0.1}):
        given_logits(**options)
    for layout in ("vd", "dv"):
        square(layout)
    for order in ORDERS:
        take_order(monkeypatch, order)
        for options in ({"nll_coef": 0.5}, {"nll_coef": 0.5, "temperature": 2.0}, {"beta": 0.3}, {"softcap": 30.0}):
            distilled(**options)


def lowered_without_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Traces a configuration. Lowering takes ten times as long."""
    with monkeypatch.context() as patch:
        patch.setattr("test_pallas.lowered", lambda function, *arguments: jax.jit(function).trace(*arguments))
        lowered_configuration(name)


# ---------------------------------------------------------------------------------------------------------------------
# In the folder of JAX's compilation cache


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    pytest.importorskip("flatbuffers", reason="flatbuffers, with which JAX writes lowered functions, is not installed")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "logitless"
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_next_process_finds_lowered_kernels(folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = step()
    count = sum(name.startswith("lowered") for name in made)
    assert len(list(folder.iterdir())) == count > 0
    made.clear()
    forget(monkeypatch)
    assert step().count("mosaic_gpu_v2") == first.count("mosaic_gpu_v2")
    assert {name for name in made if name.startswith("lowered")} == set()
    assert "traced logits_anchored" not in made  # traced are those alone that no program called


def test_half_a_file_is_lowered_again(folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    path = sorted(folder.iterdir())[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    made.clear()
    forget(monkeypatch)
    step()
    assert sum(name.startswith("lowered") for name in made) == 1
    assert len(path.read_bytes()) == len(whole)


def test_other_code_finds_nothing(folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    before = len(list(folder.iterdir()))
    forget(monkeypatch)
    monkeypatch.setattr(kernels, "_code", lambda: "another version")
    step()
    assert len(list(folder.iterdir())) == 2 * before


def test_a_folder_that_cannot_be_written_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file where the folder would be")
    with pytest.warns(RuntimeWarning, match="cannot be kept in JAX's compilation cache"):
        step()


@pytest.mark.parametrize("place", [None, "gs://a bucket/cache"])
def test_nothing_is_written_without_a_folder(
    place: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", place)
    assert kernels.folder() is None
    step()
    assert list(tmp_path.rglob("*")) == []


# ---------------------------------------------------------------------------------------------------------------------
# Side by side


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_compiled_before_the_whole(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = sharding_of(target) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    begun: list[Future[Any]] = []
    compilers = kernels._compilers()

    class Recorder:
        def submit(self, work: Any) -> None:
            begun.append(compilers.submit(work))

    monkeypatch.setattr(kernels, "_compilers", Recorder)
    monkeypatch.setattr(kernels, "device", lambda: next(iter(sharding.device_set)))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(x: Any, w: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, backend="pallas")

    arrays = array(256, 128), array(512, 128), array(256, dtype=jnp.int32)
    whole = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays)
    assert len(begun) == whole.as_text().count("custom_call @mosaic_gpu_v2") > 0
    for kernel in begun:
        assert "mosaic_gpu_v2" in kernel.result(timeout=60).as_text()
    assert whole.compile().memory_analysis() is not None
