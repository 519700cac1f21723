"""Plots and tables from the results files: ``python -m bench report`` writes docs/figures/*.png and *.md."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.checkout import ROOT
from bench.registry import RESULTS, Results, register
from bench.variants import REDUCE_OVERHEAD

FIGURES = ROOT / "docs" / "figures"
Rows = list[dict[str, Any]]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def sizes_of(row: dict[str, Any], names: Sequence[str] = ("tokens", "hidden", "vocab")) -> str:
    return " × ".join(str(row[name]) for name in names)


def mib(count: float) -> str:
    return f"{count / 2**20:.0f}"


def portable_table(rows: Rows) -> str:
    """The default and the lean plan, and the default with half of the tokens ignored, beside full logits."""
    shown = "full logits", "default", "default, half ignored", "lean"
    columns = "implementation", "dtype", "step", "time [ms]", "× full logits", "scratch [MiB]"
    return markdown(columns, (
        [row["implementation"], row["dtype"], row["variant"], f"{row['time_ms']:.0f}",
         f"{row['time_over_full_logits']:.2f}", mib(row["scratch_bytes"])]
        for row in rows if row["variant"] in shown
    ))  # fmt: skip


def gpu_table(rows: Rows) -> str:
    """Every variant that ran, shape by shape."""
    columns = "tokens × hidden × vocab", "implementation", "time [ms]", "× floor", "scratch [MiB]"
    return markdown(columns, (
        [sizes_of(row), row["variant"], f"{row['time_ms']:.2f}",
         f"{row['over_floor']:.2f}" if "over_floor" in row else "–", mib(row["scratch_bytes"])]
        for row in rows if "time_ms" in row
    ))  # fmt: skip


def error_table(rows: Rows) -> str:
    """Relative errors against float64."""
    names = "loss", "dhidden", "dweight"
    cells = ([row["variant"], *(f"{row[f'{name}_error']:.2e}" for name in names)] for row in rows)
    return markdown(("implementation", "loss", "dX", "dW"), cells)


def architectures_table(rows: Rows) -> str:
    """Of each chip and arithmetic: how many kernels were compiled, and the most that one of them takes."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["architecture"], row["precision"]), []).append(row)
    columns = "chip", "operands", "kernels", "fit", "most shared memory [KiB]", "most registers", "most spilled [bytes]"
    return markdown(columns, (
        [chip, {"half": "16 bits", "tf32": "float32, tf32", "ieee": "float32"}[precision], len(group),
         sum(row["ok"] for row in group),
         *(f"{max(row.get(key, 0) for row in group) / unit:.0f}"
           for key, unit in (("shared_bytes", 1024), ("registers", 1), ("spill_bytes", 1)))]
        for (chip, precision), group in groups.items()
    ))  # fmt: skip


def tpu_table(rows: Rows) -> str:
    """What XLA's scratch is beside the plan's promise."""
    columns = "chip", "tokens × hidden × vocab", "dtype", "order", "chunks", "scratch [MiB]", "promised [MiB]"
    return markdown(columns, (
        [row["chip"], sizes_of(row), row["dtype"], row["order"], row["chunks"], mib(row["scratch_bytes"]),
         mib(row["promised_bytes"])]
        for row in rows
    ))  # fmt: skip


def rl_table(rows: Rows) -> str:
    """Errors of log-probabilities, in nats."""
    columns = (
        "log-probs by", "mean error", "99 of 100 below", "largest", "of 511 tokens", "off by over 1 %", "KL, mean",
        "KL, largest",
    )  # fmt: skip
    return markdown(columns, (
        [row["variant"], *(f"{row[name]:.2g}" for name in ("mean_error", "p99_error", "max_error", "text_error")),
         f"{100 * row['off_by_1_percent']:.1f} %",
         *("–" if row[name] is None else f"{row[name]:.2g}" for name in ("kl_mean", "kl_max"))]
        for row in rows
    ))  # fmt: skip


def grpo_table(rows: Rows) -> str:
    """The trainer's log-probabilities beside the sampler's, in nats: means over the seeds, and the largest of all."""
    means = "mismatch_mean", "body_mean", "trainer_error_mean", "sampler_error_mean", "kl"
    columns = (
        "heads", "mismatch, mean", "of the body alone", "trainer's error", "sampler's error", "KL (k3)",
        "mismatch, largest", "outside the clip range", "reward at the end", "of all steps, by seed",
    )  # fmt: skip
    by_variant: dict[str, Rows] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row)

    def mean(own: Rows, name: str) -> float:
        return float(statistics.mean(row[name] for row in own))

    return markdown(columns, (
        [name, *(f"{mean(own, key):.2g}" for key in means), f"{max(row['mismatch_max'] for row in own):.2g}",
         f"{100 * mean(own, 'outside'):.3f} %", f"{mean(own, 'last_reward'):.3f}",
         ", ".join(f"{row['reward']:.3f}" for row in own)]
        for name, own in by_variant.items()
    ))  # fmt: skip


def bridges_table(rows: Rows) -> str:
    """The bridges beside the function that each wraps."""
    return markdown(("step", "time [ms]", "over its native step", "host busy [ms]"), (
        [row["variant"], f"{row['time_ms']:.2f}",
         f"{row['overhead_percent']:+.1f} % of {row['native']}" if "native" in row else "–", f"{row['host_ms']:.1f}"]
        for row in rows
    ))  # fmt: skip


def logits_table(rows: Rows) -> str:
    """The loss on given logits beside a bare copy of as many bytes."""
    return markdown(("step", "time [ms]", "× a bare copy", "GB/s", "scratch [MiB]"), (
        [row["variant"], f"{row['time_ms']:.2f}", f"{row['over_floor']:.2f}", f"{row['gb_per_s']:.0f}",
         mib(row["scratch_bytes"])]
        for row in rows if "time_ms" in row
    ))  # fmt: skip


def energy_table(rows: Rows) -> str:
    """Time and energy in steady state, and how far the rounds lie apart."""

    def spread(row: dict[str, Any], key: str) -> str:
        values = [one[key] for one in row["rounds"]]
        return f"{row[key]:.2f} ({min(values):.2f} to {max(values):.2f})"

    columns = (
        "tokens × hidden × vocab", "implementation", "time [ms]", "× floor", "power [W]", "energy [J]", "× floor"
    )  # fmt: skip
    return markdown(columns, (
        [sizes_of(row), row["variant"], spread(row, "time_ms"), f"{row['over_floor']:.3f}", f"{row['watts']:.0f}",
         spread(row, "joules"), f"{row['joules_over_floor']:.3f}"]
        for row in rows
    ))  # fmt: skip


def sharded_table(torch_rows: Rows, jax_rows: Rows) -> str:
    """Several devices beside one, both frameworks; a device's scratch."""
    cells: list[list[object]] = []

    def add(framework: str, row: dict[str, Any], split: str, devices: int, speed: float, scratch: float) -> None:
        times = f"{row['time_ms']:.1f}", f"{speed:.2f}", f"{scratch:.0f}"
        cells.append([framework, sizes_of(row), split, devices, *times])

    for row in torch_rows:
        split = row["variant"]
        # Data parallel ranks work on as many tokens each.
        speed = row["speedup"] * (row["ranks"] if split.endswith("data") else 1)
        add("torch", row, split, 1 if split in ("alone", "model") else row["ranks"], speed, row["scratch_mib"])
    for row in jax_rows:
        speed = (row["devices"] if row["kind"] == "data" else 1) / row["over_one"]
        add("jax", row, row["kind"], row["devices"], speed, row["temp_bytes"] / 2**20)
    columns = (
        "framework", "tokens × hidden × vocab", "split", "devices", "time [ms]", "× one device's speed", "scratch [MiB]"
    )  # fmt: skip
    return markdown(columns, cells)


def sharded_tokens_table(rows: Rows) -> str:
    """Log-probabilities with entropy, ours and of materialised logits, on one GPU and on several that share V."""
    columns = (
        "tokens × hidden × vocab", "variant", "GPUs", "forward [ms]", "scratch [MiB]", "with gradients [ms]",
        "scratch [MiB]", "largest error [nats]",
    )  # fmt: skip
    return markdown(columns, (
        [sizes_of(row), row["variant"], row["ranks"], f"{row['forward_ms']:.2f}", f"{row['forward_scratch_mib']:.0f}",
         f"{row['step_ms']:.2f}", f"{row['step_scratch_mib']:.0f}", f"{row['difference']:.1e}"]
        for row in rows
    ))  # fmt: skip


def small_table(rows: Rows) -> str:
    """Small steps, the host's time included. What a graph of torch.compile's holds in its own memory is not known."""

    def scratch(row: dict[str, Any]) -> str:
        known = row["scratch_bytes"] is not None and REDUCE_OVERHEAD not in row["variant"]
        return f"{row['scratch_bytes'] / 2**20:.0f}" if known else "–"

    columns = "tokens × hidden × vocab", "variant", "time [ms]", "over floor", "scratch [MiB]", "launches"
    return markdown(columns, (
        [sizes_of(row), row["variant"], f"{row['time_ms']:.3f}", f"{row['over_floor']:.2f}", scratch(row),
         row.get("launches", "–")]
        for row in rows
    ))  # fmt: skip


def small_cpu_table(rows: Rows) -> str:
    """Portable paths on a CPU at the size of a unit test."""
    columns = "tokens × hidden × vocab", "variant", "time [ms]", "over full logits", "scratch [MiB]"
    return markdown(columns, (
        [sizes_of(row), row["variant"], f"{row['time_ms']:.3f}", f"{row['over_full_logits']:.2f}",
         f"{row['scratch_bytes'] / 2**20:.2f}"]
        for row in rows
    ))  # fmt: skip


def largest_batches(rows: Rows) -> dict[str, int]:
    """Variant → the largest batch that fits, where it was searched for."""
    return {row["variant"]: row["largest_batch"] for row in rows if "largest_batch" in row}


def hf_table(rows: Rows) -> str:
    """A model's training step, every variant and batch; a failure in the place of the time."""
    largest = largest_batches(rows)

    def measured(row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return [row["error"].split(". ")[0].replace("|", "/"), "–", "–"]
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        return [f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:.0f}", peak]

    return markdown(("variant", "batch", "step [ms]", "tokens/s", "peak [GiB]", "largest batch"), (
        [row["variant"], row.get("batch", "–"), *measured(row), largest.get(row["variant"], "–")]
        for row in rows if "largest_batch" not in row
    ))  # fmt: skip


def phases_table(rows: Rows, checks: Rows, launches: Rows) -> str:
    """Forward and backward apart, and the bytes of each; then what was checked, and what was launched."""

    def times(row: dict[str, Any], *names: str) -> list[str]:
        return [f"{row[name]:.2f}" if name in row else "–" for name in names]

    phases = "forward_ms", "backward_ms", "both_ms"
    columns = (
        "implementation", "forward [ms]", "backward [ms]", "both [ms]", "forward's peak [MiB]", "held between [MiB]",
        "peak of both [MiB]", "beyond gradients [MiB]", "promised [MiB]",
    )  # fmt: skip
    sizes = ("forward_bytes", "held_bytes", "peak_bytes", "scratch_bytes", "promised_bytes")
    first = markdown(columns, (
        [row["variant"], *times(row, *phases), *(mib(row[name]) if name in row else "–" for name in sizes)]
        for row in rows if "both_ms" in row
    ))  # fmt: skip
    groups: dict[tuple[str, str], Rows] = {}
    for row in checks:
        groups.setdefault((sizes_of(row), row["dtype"]), []).append(row)
    names = "loss", "dhidden", "dweight"
    columns = (
        "tokens × hidden × vocab",
        "dtype",
        "calls",
        "right",
        *(f"{name} / allowed" for name in ("loss", "dX", "dW")),
    )
    second = markdown(columns, (
        [size, dtype, len(group), sum(row["passes"] for row in group),
         *(f"{max(row[f'{name}_error'] / row[f'{name}_allowed'] for row in group):.2f}" for name in names)]
        for (size, dtype), group in groups.items()
    ))  # fmt: skip
    columns = ("tokens × hidden × vocab", "first call [ms]", "forward [ms]", "backward [ms]", "both [ms]")
    third = markdown(columns, ([sizes_of(row), *times(row, "first_ms", *phases)] for row in launches))
    return "\n".join((first, second, third))


def log_probs_table(rows: Rows, jax_rows: Rows) -> str:
    """Forward and backward of log-probabilities and entropy; a failure in the place of the times. JAX's are one
    program, and its forward is timed alone."""

    def measured(row: dict[str, Any], *phases: str) -> list[str]:
        if "error" in row:
            return [row["error"].split(":")[0], *"–" * (3 + len(phases))]
        times = [f"{row[name]:.2f}" if name in row else "–" for name in phases]
        over, scratch = (
            f"{row.get('over_floor', 1.0):.3f}",
            mib(row["scratch_bytes"]) if "scratch_bytes" in row else "–",
        )
        errors = [f"{row[name]:.0e}" if name in row else "–" for name in ("log_prob_error", "entropy_error")]
        return [*times, over, scratch, *errors]

    def table(rows: Rows, **phases: str) -> str:
        columns = ("tokens × hidden × vocab", "implementation", *phases.values(), "over the floor", "scratch [MiB]",
                   "error of log p [nats]", "of the entropy")  # fmt: skip
        return markdown(columns, ([sizes_of(row), row["variant"], *measured(row, *phases)] for row in rows))

    both = {"both_ms": "both [ms]"}
    return "\n".join((
        table(rows, forward_ms="forward [ms]", backward_ms="backward [ms]", **both),
        table(jax_rows, forward_ms="forward alone [ms]", **both),
    ))  # fmt: skip


def accumulation_table(rows: Rows) -> str:
    """The error of dW by the number of chunks, and that of the rows of the commonest targets."""
    counts = list(dict.fromkeys(row["chunks"] for row in rows if row["chunks"]))
    by_variant: dict[str, dict[int | None, dict[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["chunks"]] = row

    def cell(row: dict[str, Any]) -> str:
        return f"{row['dweight_error']:.1e}, {row['commonest_error']:.1e}" if "dweight_error" in row else "–"

    return markdown(("dW by", *(f"{count} chunks" for count in counts)), (
        [name, *(cell(of.get(count, of.get(None, {}))) for count in counts)] for name, of in by_variant.items()
    ))  # fmt: skip


def long_table(rows: Rows, jax_rows: Rows) -> str:
    """Time, scratch, and errors over what is allowed, where offsets are largest."""
    columns = (
        "framework", "tokens × hidden × vocab", "plan", "chunks", "time [ms]", "TFLOP/s", "scratch [MiB]",
        "promised [MiB]", "loss / allowed", "last dX", "last rows of dW", "last targets' rows of dW",
    )  # fmt: skip
    names = "loss", "dhidden", "last_rows", "target_rows"
    return markdown(columns, (
        [row["framework"], sizes_of(row), row["variant"], row["chunks"], f"{row['time_ms']:.1f}",
         f"{row['tflops']:.0f}", mib(row["scratch_bytes"]), mib(row["promised_bytes"]),
         *(f"{row[f'{name}_error'] / row[f'{name}_allowed']:.2f}" for name in names)]
        for row in (*rows, *jax_rows)
    ))  # fmt: skip


def distillation_table(rows: Rows, jax_rows: Rows) -> str:
    """Time over the bare products, scratch, and the loss's error; a failure in the place of the time."""

    def measured(row: dict[str, Any]) -> list[str]:
        if "time_ms" not in row:
            return [row["error"].split(":")[0], "–", "–", "–"]
        error = f"{row['loss_error']:.0e}" if "loss_error" in row else "–"
        return [f"{row['time_ms']:.2f}", f"{row['over_floor']:.2f}", mib(row["scratch_bytes"]), error]

    columns = (
        "framework", "tokens × hidden × vocab", "teacher's hidden", "implementation", "time [ms]", "over the floor",
        "scratch [MiB]", "error of the loss",
    )  # fmt: skip
    return markdown(columns, (
        [framework, sizes_of(row), row["teacher_hidden"] or "–", row["variant"], *measured(row)]
        for framework, of in (("PyTorch", rows), ("JAX", jax_rows)) for row in of
    ))  # fmt: skip


def gist_table(rows: Rows) -> str:
    """The ways to write a head's loss; a failure in the place of the time."""

    def measured(row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return ["out of memory", "–", "–"]
        return [f"{row['time_ms']:.2f}", mib(row["scratch_bytes"]), f"{row['loss']:.6f}"]

    columns = "batch × length × hidden × vocab", "implementation", "time [ms]", "scratch [MiB]", "loss"
    names = "batch", "length", "hidden", "vocab"
    return markdown(columns, ([sizes_of(row, names), row["variant"], *measured(row)] for row in rows))


def programs_table(rows: Rows, pins: set[tuple[str, str]]) -> str:
    """What was tested with which version of which program; ``pins``: (package, version) of the tests' environment."""
    columns = "program", "tested with", "what", "in `make test`"

    def cells(row: dict[str, Any]) -> list[str]:
        pinned = [version for version in row["versions"] if (row["package"], version) in pins]
        installed = f"the package, {', '.join(pinned)}" if pinned else row["otherwise"]
        return [row["program"], ", ".join(row["versions"]) or row["sources"], row["what"], installed]

    return markdown(columns, map(cells, rows))


def tested_programs() -> tuple[Rows, set[tuple[str, str]]]:
    """The rows of tests/programs.toml, and the packages that the Makefile pins."""
    rows: Rows = tomllib.loads((ROOT / "tests" / "programs.toml").read_text(encoding="utf-8"))["row"]
    return rows, set(re.findall(r"([a-z][\w-]*)==([\d.]+\d)", (ROOT / "Makefile").read_text(encoding="utf-8")))


def read(file: str) -> dict[str, Any]:
    """A results file of this checkout, with no rows where there is none."""
    path = RESULTS / file
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return results


@register("tables and plots of the results files, into docs/figures/", file=None)
def run(options: argparse.Namespace, results: Results) -> None:
    from bench import plots

    on_gpu, energy, sharded = read("gpu_check.json"), read("energy.json"), read("sharded.json")["rows"]
    phases = read("phases.json")
    tokens = on_gpu.get("token_rows", [])
    tables: dict[str, tuple[Callable[..., str], Sequence[Rows]]] = {
        "gpu": (gpu_table, [on_gpu["rows"]]),
        "gpu_tokens": (gpu_table, [tokens and tokens + on_gpu.get("jax_token_rows", [])]),
        "gpu_errors": (error_table, [on_gpu.get("errors", [])]),
        "gpu_jax_errors": (error_table, [on_gpu.get("jax_errors", [])]),
        "gpu_jax": (gpu_table, [on_gpu.get("jax_rows", [])]),
        "bridges": (bridges_table, [read("bridges.json")["rows"]]),
        "energy": (lambda *kinds: "\n".join(map(energy_table, filter(None, kinds))),
                   [energy["rows"], energy.get("products", [])]),
        "logits": (logits_table, [read("logits.json")["rows"]]),
        "sharded": (sharded_table, [sharded, read("sharded_jax.json")["rows"]]),
        "sharded_tokens": (sharded_tokens_table, [read("sharded_tokens.json")["rows"]]),
        "small": (small_table, [read("small.json")["rows"]]),
        "small_cpu": (small_cpu_table, [read("small_cpu.json")["rows"]]),
        "hf": (hf_table, [read("hf.json")["rows"]]),
        "gist": (gist_table, [read("gist.json")["rows"]]),
        "portable": (portable_table, [read("portable.json")["rows"]]),
        "architectures": (architectures_table, [read("architectures.json")["rows"]]),
        "tpu": (tpu_table, [read("tpu.json")["rows"]]),
        "rl": (rl_table, [read("rl.json")["rows"]]),
        "grpo": (grpo_table, [read("grpo.json")["rows"]]),
        "phases": (phases_table, [phases.get(key, []) for key in ("rows", "checks", "launches")]),
        "log_probs": (log_probs_table, [read(f"log_probs{end}.json")["rows"] for end in ("", "_jax")]),
        "accumulation": (accumulation_table, [read("accumulation.json")["rows"]]),
        "distillation": (distillation_table, [read(f"distillation{end}.json")["rows"] for end in ("", "_jax")]),
        "long": (long_table, [read("long.json")["rows"], read("long_jax.json")["rows"]]),
    }  # fmt: skip
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, (table, rows) in tables.items():
        if rows[0]:
            (FIGURES / f"{name}.md").write_text(table(*rows))
    (FIGURES / "programs.md").write_text(programs_table(*tested_programs()))
    for name, (plot, file, key) in plots.PLOTS.items():
        if (found := read(file)).get(key):
            plot(found, FIGURES / f"{name}.png")
    print(f"written to {FIGURES}")
