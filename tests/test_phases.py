"""The benchmarks of phases, accumulation, distillation and long contexts: their truth, their meters, small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the truth is computed in PyTorch")

from implementations import interpreted  # noqa: E402

from bench import accumulation, gpu_torch, log_probs, long, phases, registry, report, truth  # noqa: E402
from bench.shapes import Shape  # noqa: E402
from logitless import torch_impl  # noqa: E402
from logitless.tolerances import TINY, error  # noqa: E402

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import timing

    monkeypatch.setattr(phases, "WARM_S", 1e-3)
    monkeypatch.setattr(timing, "WARM_S", 1e-3)
    monkeypatch.setattr(timing, "TIMED_S", 1e-3)


def made(name: str, output: Path, *options: str, file: str | None = None) -> dict[str, Any]:
    """The results of a command on the CPU."""
    assert registry.main([name, "--output", str(output), *options]) == 0
    results: dict[str, Any] = json.loads((output / f"{file or name}.json").read_text())
    assert results["benchmark"] == name
    return results


# ---------------------------------------------------------------------------------------------------------------------
# The truth


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 12, generator=generator).to(dtype) for size in (23, 70))
    y = torch.randint(0, 70, (23,), generator=generator)
    y[::5] = truth.IGNORED
    return x, w, y, 3 * torch.randn(23, generator=generator)


def by_autograd(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, w = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    loss = torch.nn.functional.cross_entropy(x @ w.t(), y, reduction="none", ignore_index=truth.IGNORED)
    return loss.detach(), *torch.autograd.grad(loss, (x, w), upstream.double())


@pytest.mark.parametrize("sampled", [False, True])
def test_the_truth_is_autograds(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of which the last is shorter. Of sampled rows the logits are float32 sums."""
    monkeypatch.setattr(truth, "HELD", 7 * 70)
    arrays = problem(torch.float32 if sampled else torch.bfloat16)
    rows, columns = (torch.tensor([0, 3, 4, 22]), torch.tensor([69, 5, 68])) if sampled else (None, None)
    found, ideal = truth.truth_and_ideal(*arrays, rows, columns)
    loss, dx, dw = by_autograd(*arrays)
    expected = {
        "loss": loss,
        "dhidden": dx if rows is None else dx[rows],
        "dweight": dw if rows is None else dw[columns],
    }
    assert set(found) == set(ideal) == set(expected)
    for name, value in expected.items():
        assert error(found[name], value) < TINY["float32" if sampled else "float64"], name
        if not sampled:
            assert 0 < error(ideal[name], value) < 1e-2, name


def test_what_is_wrong_does_not_pass() -> None:
    """A mean beside the truth of a sum, and a row of dW that was not written."""
    x, w, y, _ = problem(torch.bfloat16)
    count = int((y != truth.IGNORED).sum())
    found, ideal = truth.truth_and_ideal(x, w, y, torch.ones(len(y)))
    found["loss"] = ideal["loss"] = found["loss"].sum()
    outputs = {name: (value / count).to(torch.bfloat16) for name, value in found.items()} | {
        "loss": found["loss"] / count
    }
    assert truth.passes(truth.compared(outputs, found, ideal, count))
    assert not truth.passes(truth.compared(outputs, found, ideal))
    outputs["dweight"][int(y[1])] = 0
    fields = truth.compared(outputs, found, ideal, count)
    assert fields["dweight_error"] > fields["dweight_allowed"]
    assert not truth.passes(fields)


# ---------------------------------------------------------------------------------------------------------------------
# Phases


def test_a_phase_is_a_median_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of 1, 2, 3, ... seconds, and backwards of twice as long."""
    clock = {"now": 0.0, "steps": 0}

    def forward() -> None:
        clock["steps"] += 1
        clock["now"] += clock["steps"]

    def backward(_: object) -> None:
        clock["now"] += 2 * clock["steps"]

    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock["now"])
    step = phases.Step(gpu_torch.Arrays(Shape(2, 3, 4)), phases.Way(dict))
    monkeypatch.setattr(step, "forward", forward)
    monkeypatch.setattr(step, "backward", backward)
    assert step.times_ms(warm_s=0.5, repeats=3) == {"forward_ms": 3e3, "backward_ms": 6e3, "both_ms": 9e3}


def test_the_bytes_of_the_phases_are_what_was_allocated() -> None:
    """The forward has 5 MiB at its peak and holds 2 of them; the backward has 4 more, and the gradients."""
    arrays = gpu_torch.Arrays(Shape(64, 64, 64))

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.held = torch.zeros(2 << 20, dtype=torch.uint8)
            torch.zeros(3 << 20, dtype=torch.uint8)
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor) -> Any:  # type: ignore[override]
            torch.zeros(4 << 20, dtype=torch.uint8)
            return torch.zeros_like(arrays.x), torch.zeros_like(arrays.w)

    apply: Any = Loss.apply
    found = phases.Step(arrays, phases.Way(lambda x, w, y: apply(x, w))).bytes()
    mib, loss, gradients = 2**20, 4, arrays.x.nbytes + arrays.w.nbytes
    assert found == {
        "forward_bytes": 5 * mib,
        "held_bytes": 2 * mib + loss,
        "peak_bytes": 6 * mib + 2 * loss,  # with its upstream gradient
        "scratch_bytes": 6 * mib + 2 * loss - gradients,
    }


def test_phases_are_measured_and_what_they_give_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "CHUNKS", (1, 8))
    options = ["--backend", "eager", "--shapes", "64x32x1024", "--checks", "40x16x125", "--launches", "15x8x99"]
    results = made("phases", tmp_path, *options, "--no-peers")
    rows = {row["variant"]: row for row in results["rows"]}
    assert {"floor", "eager", "eager, half padding", "eager, per token", "eager, tokens in 8 chunks"} <= set(rows)
    for name, row in rows.items():
        assert row["both_ms"] > 0, row
        if name != "floor":
            assert 0 <= row["held_bytes"] <= row["forward_bytes"] <= row["peak_bytes"]
            assert row["scratch_bytes"] <= row["promised_bytes"], row
    for order in ("tokens", "vocab"):
        ladder = [rows[f"eager, {order} in {chunks} chunks"]["scratch_bytes"] for chunks in phases.CHUNKS]
        assert ladder == sorted(ladder, reverse=True)
        assert ladder[-1] < ladder[0] / 2
    assert len(results["checks"]) == 12
    assert all(row["passes"] for row in results["checks"])
    assert [row["finite"] for row in results["launches"]] == [True]
    table = report.phases_table(results["rows"], results["checks"], results["launches"])
    assert "| 40 × 16 × 125 | float16 | 6 | 6 |" in table


@pytest.mark.parametrize("wrong", ["counts padding", "leaves a gradient"])
def test_a_check_refuses_a_wrong_loss(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Any, w: Any, y: Any, *, ignore_index: int, **options: Any) -> Any:
        if wrong == "counts padding":
            return torch_impl.linear_cross_entropy(x, w, torch.where(y == ignore_index, 5, y), **options)
        padding = x[3].sum() * 0.01  # the fourth token is ignored
        return (
            torch_impl.linear_cross_entropy(x, w, y, ignore_index=ignore_index, **options) + padding - padding.detach()
        )

    monkeypatch.setattr(gpu_torch.Arrays, "loss", staticmethod(loss))
    found = list(phases.checks(Shape(40, 16, 125), "bfloat16", "eager"))
    assert not any(row["passes"] for row in found)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation


def test_errors_grow_with_chunks_that_are_added_in_bfloat16_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "CHUNKS", (1, 16, 256))
    results = made("accumulation", tmp_path, "--backend", "eager", "--shapes", "256x8x512", "--no-peers")
    errors: dict[str, dict[int, float]] = {}
    for row in results["rows"]:
        errors.setdefault(row["variant"], {})[row["chunks"]] = row["dweight_error"]
    rounded = errors.pop("torch, added in bfloat16")
    assert rounded[256] > 2 * rounded[16] > 2 * rounded[1]
    float32_sums = float(np.finfo(np.float32).eps) / 2 * 256**0.5  # of 256 tokens; how they are added differs by CPU
    for name in ("logitless", "logitless, accumulate_into float32", "torch, added in float32 inside the product"):
        of = errors[name]
        assert max(of.values()) < 1.1 * min(of.values()) + float32_sums, name
        assert max(of.values()) < 1.1 * errors["ideal"][None], name  # type: ignore[index]
    assert "| torch, added in bfloat16 | " in report.accumulation_table(results["rows"])


@interpreted
def test_ligers_chunks_are_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    liger = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy", reason="Liger-Kernel is not installed")
    arrays = gpu_torch.Arrays(Shape(32, 8, 64))
    seen: list[int] = []
    monkeypatch.setattr(liger.triton, "next_power_of_2", lambda size: seen.append(32 // size) or size)
    gradient = accumulation.ligers(arrays)
    assert gradient is not None
    found, _ = truth.truth_and_ideal(arrays.x, arrays.w, arrays.y, torch.ones(32))
    for chunks in (1, 2, 8):
        assert truth.relative(gradient(chunks), found["dweight"], 32) < 2e-2
    assert list(dict.fromkeys(filter(None, seen))) == [1, 2, 8]  # without what it asks for the vocabulary


# ---------------------------------------------------------------------------------------------------------------------
# Long contexts


@pytest.mark.parametrize(("framework", "backend"), [("torch", "eager"), ("jax", "xla")])
def test_long_steps_are_measured_and_their_ends_are_checked(framework: str, backend: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason="the steps are this framework's")
    options = ["--framework", framework, "--backend", backend, "--shapes", "1024x16x300", "--budget", "2"]
    file = "long_jax" if framework == "jax" else "long"
    rows = made("long", tmp_path, *options, file=file)["rows"]
    assert [(row["framework"], row["variant"]) for row in rows] == [(framework, "default"), (framework, "2 MiB")]
    for row in rows:
        assert row["passes"], row
        assert 0 < row["scratch_bytes"] <= row["promised_bytes"]
        assert row["tflops"] * row["time_ms"] * 1e9 == pytest.approx(6 * 1024 * 16 * 300)
    assert rows[1]["promised_bytes"] <= 2 << 20
    assert rows[1]["chunks"] > rows[0]["chunks"]
    assert f"| {framework} | 1024 × 16 × 300 | 2 MiB |" in report.long_table(rows, [])


@pytest.mark.parametrize(("name", "place"), [("dhidden", -1), ("last_rows", -1), ("target_rows", 0)])
def test_an_end_that_was_not_written_does_not_pass(name: str, place: int) -> None:
    arrays = gpu_torch.Arrays(Shape(512, 16, 300))
    arrays.y[-long.CHECKED] = 7
    loss = torch_impl.linear_cross_entropy(arrays.x, arrays.w, arrays.y)
    loss.backward()
    assert arrays.x.grad is not None
    assert arrays.w.grad is not None
    sample, outputs = long.Sample(arrays), [loss.detach(), arrays.x.grad, arrays.w.grad]
    assert sample.errors(*outputs)["passes"]
    number = place if name != "target_rows" else 7
    outputs[1 if name == "dhidden" else 2][number] = 0
    fields = sample.errors(*outputs)
    assert fields[f"{name}_error"] > fields[f"{name}_allowed"]
    assert not fields["passes"]


def test_a_vocabulary_of_a_million_also_runs_in_one_chunk() -> None:
    from types import SimpleNamespace

    shape = Shape(*map(int, long.SHAPES[-1].split("x")))
    arrays: Any = SimpleNamespace(shape=shape, kernels="triton", padded=False, lends=False)
    found = long.plans(arrays, "triton", long.BUDGETS["torch"])
    assert found["one chunk"].chunks == 1
    assert all(plan.scratch_bytes <= long.BUDGETS["torch"] for name, plan in found.items() if name.endswith("MiB"))
    for name in long.SHAPES:
        for framework, padded in (("torch", False), ("jax", True)):
            arrays.shape, arrays.padded = Shape(*map(int, name.split("x"))), padded
            assert len(long.plans(arrays, "triton", long.BUDGETS[framework])) >= 2


# ---------------------------------------------------------------------------------------------------------------------
# Distillation


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_distillation_beside_full_logits(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason="measures it")
    file = "distillation_jax" if framework == "jax" else None
    options = ("--framework", framework, "--problems", "40,16,24,300", "--rounds", "1", "--no-peers")
    results = made("distillation", tmp_path, *options, file=file)
    rows = {row["variant"]: row for row in results["rows"] if row["teacher_hidden"]}
    of_ids = {row["variant"]: row for row in results["rows"] if not row["teacher_hidden"]}
    assert {"floor", "logitless, forward KL", "logitless, Jensen-Shannon", "full logits"} <= set(rows)
    assert {"floor", "logitless, 64 ids and one class"} <= set(of_ids) or framework == "jax"
    assert all(row["time_ms"] > 0 and row["teacher_hidden"] in (0, 24) for row in results["rows"])
    table = report.distillation_table(*([], results["rows"])[:: 1 if framework == "jax" else -1])
    assert "| 40 × 16 × 300 | 24 | logitless, forward KL |" in table
    if framework == "torch":
        errors = {name: row["loss_error"] for name, row in rows.items() if "loss_error" in row}
        assert errors.pop("full logits") > 10 * max(errors.values())  # logits in bfloat16
        assert len(errors) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


def test_log_probs_are_measured_beside_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, and two peers: one is right, the other says log p of another token."""

    def off(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probs.full_logits(x, w, (y + 1) % len(w))

    ways = {"right": log_probs.full_logits, "off": off, "fails": lambda x, w, y: 1 / 0}
    monkeypatch.setattr(log_probs, "peers", lambda: {name: phases.Way(values) for name, values in ways.items()})
    results = made("log_probs", tmp_path, "--shapes", "16x8x125", "--backend", "eager")
    rows = {row["variant"]: row for row in results["rows"]}
    assert {"floor", "eager", "eager, fast", "eager, lean", "eager, GRPO loss"} <= rows.keys()
    for name in ("eager", "right"):
        assert rows[name]["log_prob_error"] < 0.01 > rows[name]["entropy_error"]
        assert rows[name]["both_ms"] > 0 < rows[name]["scratch_bytes"]
        assert rows[name]["over_floor"] == rows[name]["both_ms"] / rows["floor"]["both_ms"]
    assert rows["off"]["log_prob_error"] > 0.1
    assert rows["off"]["entropy_error"] < 0.01
    assert "both_ms" in rows["eager, GRPO loss"]
    assert "log_prob_error" not in rows["eager, GRPO loss"]
    assert rows["fails"]["error"].startswith("ZeroDivisionError")
    table = report.log_probs_table(results["rows"], [])
    assert table.count("\n") == len(results["rows"]) + 5
    assert "ZeroDivisionError" in table
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import plots

    plots.log_probs(results, tmp_path / "log_probs.png")
    assert (tmp_path / "log_probs.png").stat().st_size > 1000


def test_log_probs_of_jax_are_measured_beside_the_truth(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the rows are JAX's")
    arguments = "--framework", "jax", "--shapes", "16x8x125", "--backend", "xla"
    results = made("log_probs", tmp_path, *arguments, file="log_probs_jax")
    rows = {row["variant"]: row for row in results["rows"]}
    assert rows.keys() == {"floor", "xla", "xla, fast", "xla, lean", "JAX, full logits"}
    for name in rows.keys() - {"floor"}:
        assert rows[name]["log_prob_error"] < 0.01 > rows[name]["entropy_error"]
        assert rows[name]["both_ms"] > 0 < rows[name]["forward_ms"]
        assert rows[name]["over_floor"] == rows[name]["both_ms"] / rows["floor"]["both_ms"]
    assert report.log_probs_table([], results["rows"]).count("\n") == len(rows) + 5


# ---------------------------------------------------------------------------------------------------------------------
# The pages


@pytest.mark.parametrize("name", ["phases", "accumulation", "distillation", "log_probs", "long"])
def test_the_page_is_that_of_the_results(name: str) -> None:
    pytest.importorskip("matplotlib", reason="the report draws with it")
    page = RESULTS.parent.parent / "docs" / "figures" / f"{name}.md"
    if not (RESULTS / f"{name}.json").exists():
        assert not page.exists()
        pytest.skip(f"{name}.json is not there yet")
    results = report.read(f"{name}.json")
    parts = {
        "phases": [results.get(key, []) for key in ("rows", "checks", "launches")],
        "accumulation": [results["rows"]],
        "log_probs": [results["rows"], report.read("log_probs_jax.json")["rows"]],
        "distillation": [results["rows"], report.read("distillation_jax.json")["rows"]],
        "long": [results["rows"], report.read("long_jax.json")["rows"]],
    }
    assert page.read_text() == getattr(report, f"{name}_table")(*parts[name])


def test_plots_of_phases_and_of_accumulation(tmp_path: Path) -> None:
    """Also where a variant failed, and where there is none of the peers."""
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import plots

    sizes = {"tokens": 8, "hidden": 4, "vocab": 16, "dtype": "bfloat16"}
    times, found = (
        {"forward_ms": 1.0, "backward_ms": 2.0, "both_ms": 3.0},
        {"scratch_bytes": 100, "promised_bytes": 120},
    )
    rows = [
        {"variant": "floor", "both_ms": 2.0},
        {"variant": "triton", **times, **found},
        {"variant": "QuACK", "error": "MemoryError"},
        *(
            {"variant": f"triton, tokens in {n} chunks", "order": "tokens", "chunks": n, **times, **found}
            for n in (1, 2)
        ),
    ]
    machine = {"gpu": None, "cpu": "a CPU"}
    plots.phases({"machine": machine, "rows": [sizes | row for row in rows]}, tmp_path / "phases.png")
    rows = [
        {"variant": "ideal", "chunks": None, "dweight_error": 1e-3, "commonest_error": 1e-3},
        *({"variant": "logitless", "chunks": n, "dweight_error": 1e-3, "commonest_error": 1e-3} for n in (1, 4)),
        {"variant": "Liger-Kernel", "chunks": 1, "error": "TypeError"},
    ]
    plots.accumulation({"machine": machine, "rows": [sizes | row for row in rows]}, tmp_path / "accumulation.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("phases", "accumulation"))
    assert np.isfinite(len(report.accumulation_table([sizes | row for row in rows])))
