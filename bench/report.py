"""Plots and tables from the results files: ``python -m bench.report`` writes docs/figures/*.png and *.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, NullLocator

from bench.run import RESULTS

FIGURES = RESULTS.parent.parent / "docs" / "figures"
COLOURS = {"torch_eager": "#d1495b", "jax_xla": "#00798c"}


def portable(results: dict[str, Any]) -> None:
    """Scratch against the number of chunks, and time against scratch, beside full logits."""
    rows = [row for row in results["rows"] if row["dtype"] == "float32"]
    figure, (memory, time) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    for name, colour in COLOURS.items():
        own = [row for row in rows if row["implementation"] == name]
        full = next(row for row in own if row["variant"] == "full logits")
        ladder = [row for row in own if row["variant"].endswith("chunks")]
        counts = [row["chunks"] for row in ladder]
        memory.plot(
            counts, [row["scratch_bytes"] / 2**20 for row in ladder], "o-", color=colour, label=f"{name}, measured"
        )
        memory.axhline(full["scratch_bytes"] / 2**20, color=colour, ls=":", label=f"{name}, full logits")
        others = [*ladder, next(row for row in own if row["variant"] == "lean")]
        time.plot(
            [row["scratch_bytes"] / 2**20 for row in others[:-1]],
            [row["time_over_full_logits"] for row in others[:-1]], "o-", color=colour, label=name,
        )  # fmt: skip
        time.plot(others[-1]["scratch_bytes"] / 2**20, others[-1]["time_over_full_logits"], "D", color=colour,
                  label=f"{name}, lean order")  # fmt: skip
    promised = [row for row in rows if row["implementation"] == "torch_eager" and row["variant"].endswith("chunks")]
    memory.plot([row["chunks"] for row in promised], [row["promised_bytes"] / 2**20 for row in promised], "k--",
                label="the plan's promise")  # fmt: skip
    memory.set(xscale="log", yscale="log", xlabel="token chunks", ylabel="scratch [MiB]", title="Scratch of one step")
    memory.set_xticks(counts, [str(count) for count in counts])
    _plain_ticks(memory.yaxis, (16, 32, 64, 128, 256, 512))
    memory.legend(fontsize=8)
    time.axhline(1.0, color="grey", ls=":")
    time.set(
        xscale="log", xlabel="scratch [MiB]", ylabel="time / full-logits time", title="Time of one step", ylim=(0, None)
    )
    _plain_ticks(time.xaxis, (16, 32, 64, 128, 256))
    time.legend(fontsize=8)
    sizes = " × ".join(str(rows[0][name]) for name in ("tokens", "hidden", "vocab"))
    figure.suptitle(f"{sizes} float32, loss and gradients, {results['machine']['cores']} CPU cores")
    figure.savefig(FIGURES / "portable.png", dpi=130)
    plt.close(figure)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_ticks(values, [str(value) for value in values])
    axis.set_minor_locator(NullLocator())


def portable_table(results: dict[str, Any]) -> str:
    """A Markdown table of the default and the lean plan beside full logits."""
    lines = [
        "| implementation | dtype | step | time [ms] | × full logits | scratch [MiB] |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        if row["variant"] in ("full logits", "default", "lean"):
            lines.append(
                f"| {row['implementation']} | {row['dtype']} | {row['variant']} | {row['time_ms']:.0f} | "
                f"{row['time_over_full_logits']:.2f} | {row['scratch_bytes'] / 2**20:.0f} |"
            )
    return "\n".join(lines) + "\n"


# What the GPU figures and tables show of each shape, in this order; colours go by implementation.
GPU_COLOURS = {
    "triton": "#00798c", "eager": "#d1495b", "torch, full logits": "#8d6b94", "torch.compile, full logits": "#b9a44c",
    "Liger-Kernel": "#5b8c5a", "cut-cross-entropy": "#7f7f7f", "QuACK": "#e07a5f",
}  # fmt: skip

JAX_COLOURS = {
    "pallas": "#00798c", "xla": "#d1495b", "jax, full logits": "#8d6b94", "jax, full logits in float32": "#b9a44c",
    "jax.checkpoint in a scan": "#5b8c5a", "tokamax, chunked_xla": "#7f7f7f", "tokamax, xla": "#3d405b",
    "jax-cce": "#e07a5f",
}  # fmt: skip


def _family(variant: str) -> str:
    """Our kernels under a memory budget count as our kernels."""
    return next((kernels for kernels in ("triton", "pallas") if variant.startswith(kernels)), variant)


def _gpu_rows(rows: list[dict[str, Any]], shape: str) -> list[dict[str, Any]]:
    rows = [row for row in rows if row["shape"] == shape and "over_floor" in row]
    return [row for row in rows if "ignored" not in row["variant"] and "forward" not in row["variant"]]


def gpu(results: dict[str, Any]) -> None:
    """Time of a step over the floor's, against scratch, of PyTorch's implementations."""
    _over_floor(results["rows"], results["machine"]["gpu"], GPU_COLOURS, "gpu.png")


def gpu_jax(results: dict[str, Any]) -> None:
    """The same of JAX's."""
    _over_floor(results["jax_rows"], results["jax_machine"]["gpu"], JAX_COLOURS, "gpu_jax.png")


def _over_floor(every: list[dict[str, Any]], name_of_gpu: str, colours: dict[str, str], file: str) -> None:
    """One panel a shape: down and to the left is better."""
    by_shape = {shape: _gpu_rows(every, shape) for shape in ("liger", "gist", "gemma", "llama")}
    by_shape = {shape: rows for shape, rows in by_shape.items() if rows}
    if not by_shape:
        return
    highest = max(row["over_floor"] for rows in by_shape.values() for row in rows)
    figure, panels = plt.subplots(1, len(by_shape), figsize=(15, 4.2), layout="constrained", sharey=True, squeeze=False)
    for panel, rows in zip(panels[0], by_shape.values(), strict=True):
        for name, colour in colours.items():
            own = [row for row in rows if _family(row["variant"]) == name]
            if own:
                scratch = [max(row["scratch_bytes"] / 2**20, 1) for row in own]
                panel.plot(scratch, [row["over_floor"] for row in own], "o", color=colour, label=name)
        panel.axhline(1.0, color="grey", ls=":")
        sizes = " × ".join(str(rows[0][key]) for key in ("tokens", "hidden", "vocab"))
        panel.set(xscale="log", yscale="log", xlabel="scratch [MiB]", title=sizes, ylim=(0.9, max(5.0, 1.1 * highest)))
        panel.xaxis.set_minor_formatter(NullFormatter())
        _plain_ticks(panel.yaxis, [tick for tick in (1, 1.2, 1.5, 2, 3, 4, 5, 7) if tick <= max(5.0, highest)])
    panels[0][0].set_ylabel("time / three bare products")
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(f"{name_of_gpu}, bfloat16, loss and both gradients")
    figure.savefig(FIGURES / file, dpi=130)
    plt.close(figure)


def gpu_sweeps(results: dict[str, Any]) -> None:
    """Time per token against N, time against V, and time against the memory that is allowed."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for panel, kind in zip(panels, ("tokens", "vocab", "memory"), strict=True):
        rows = [row for row in results["sweeps"] if row["shape"] == kind and "time_ms" in row]
        for name, colour in {"floor": "grey", **GPU_COLOURS}.items():
            own = [row for row in rows if (_family(row["variant"]) if kind == "memory" else row["variant"]) == name]
            if kind == "memory":
                own.sort(key=lambda row: int(row["scratch_bytes"]))
                points = [(max(row["scratch_bytes"] / 2**20, 1), row["time_ms"]) for row in own if name != "floor"]
            else:
                points = [(row[kind], 1e3 * row["time_ms"] / row[kind]) for row in own]
            if points:
                line = ":" if name == "floor" else "-"
                panel.plot(*zip(*points, strict=True), color=colour, label=name, marker="o", ls=line)
        panel.set(xscale="log", xlabel={"memory": "scratch [MiB]"}.get(kind, kind))
        fixed = {"tokens": ("hidden", "vocab"), "vocab": ("tokens", "hidden"), "memory": ("tokens", "hidden", "vocab")}
        panel.set_title(", ".join(f"{rows[0][key]} {key}" for key in fixed[kind]))
        if kind == "memory":
            panel.axhline(next(r["time_ms"] for r in rows if r["variant"] == "floor"), color="grey", ls=":")
    panels[0].set(ylabel="time per token [µs]", yscale="log")
    panels[1].set(ylabel="time per vocabulary entry [µs]", yscale="log")
    panels[2].set(ylabel="time [ms]")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"{results['machine']['gpu']}, bfloat16, loss and both gradients; dotted: three bare products")
    figure.savefig(FIGURES / "gpu_sweeps.png", dpi=130)
    plt.close(figure)


def gpu_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of every variant that ran, shape by shape."""
    lines = [
        "| tokens × hidden × vocab | implementation | time [ms] | × floor | scratch [MiB] |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "time_ms" not in row:
            continue
        sizes = " × ".join(str(row[key]) for key in ("tokens", "hidden", "vocab"))
        ratio = f"{row['over_floor']:.2f}" if "over_floor" in row else "–"
        lines.append(
            f"| {sizes} | {row['variant']} | {row['time_ms']:.2f} | {ratio} | {row['scratch_bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines) + "\n"


def error_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of relative errors against float64."""
    lines = ["| implementation | loss | dX | dW |", "| --- | --- | --- | --- |"]
    for row in rows:
        errors = (f"{row[f'{name}_error']:.2e}" for name in ("loss", "dhidden", "dweight"))
        lines.append(f"| {row['variant']} | {' | '.join(errors)} |")
    return "\n".join(lines) + "\n"


def bridges_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the bridges beside the function that each wraps."""
    lines = ["| step | time [ms] | over its native step | host busy [ms] |", "| --- | --- | --- | --- |"]
    for row in rows:
        over = f"{row['overhead_percent']:+.1f} % of {row['native']}" if "native" in row else "–"
        lines.append(f"| {row['variant']} | {row['time_ms']:.2f} | {over} | {row['host_ms']:.1f} |")
    return "\n".join(lines) + "\n"


def logits_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the loss on given logits beside a bare copy of as many bytes."""
    lines = ["| step | time [ms] | × a bare copy | GB/s | scratch [MiB] |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        if "time_ms" in row:
            values = f"{row['time_ms']:.2f} | {row['over_floor']:.2f} | {row['gb_per_s']:.0f}"
            lines.append(f"| {row['variant']} | {values} | {row['scratch_bytes'] / 2**20:.0f} |")
    return "\n".join(lines) + "\n"


def energy_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of time and energy in steady state, and how far the rounds lie apart."""
    lines = [
        "| tokens × hidden × vocab | implementation | time [ms] | × floor | power [W] | energy [J] | × floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = f"{row['tokens']} × {row['hidden']} × {row['vocab']}"
        times, joules = ([one[key] for one in row["rounds"]] for key in ("time_ms", "joules"))
        time = f"{row['time_ms']:.2f} ({min(times):.2f} to {max(times):.2f}) | {row['over_floor']:.3f}"
        energy = f"{row['joules']:.2f} ({min(joules):.2f} to {max(joules):.2f}) | {row['joules_over_floor']:.3f}"
        lines.append(f"| {sizes} | {row['variant']} | {time} | {row['watts']:.0f} | {energy} |")
    return "\n".join(lines) + "\n"


def sharded_table(torch_rows: list[dict[str, Any]], jax_rows: list[dict[str, Any]]) -> str:
    """A Markdown table of several devices beside one, both frameworks; a device's scratch."""
    lines = [
        "| framework | tokens × hidden × vocab | split | devices | time [ms] | × one device's speed | scratch [MiB] |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]

    def line(framework: str, row: dict[str, Any], split: str, devices: int, speed: float, scratch: float) -> None:
        sizes = f"{row['tokens']} × {row['hidden']} × {row['vocab']}"
        values = f"{devices} | {row['time_ms']:.1f} | {speed:.2f} | {scratch:.0f}"
        lines.append(f"| {framework} | {sizes} | {split} | {values} |")

    for row in torch_rows:
        split = row["variant"]
        # Data parallel ranks work on as many tokens each.
        speed = row["speedup"] * (row["ranks"] if split.endswith("data") else 1)
        line("torch", row, split, 1 if split in ("alone", "model") else row["ranks"], speed, row["scratch_mib"])
    for row in jax_rows:
        speed = (row["devices"] if row["kind"] == "data" else 1) / row["over_one"]
        line("jax", row, row["kind"], row["devices"], speed, row["temp_bytes"] / 2**20)
    return "\n".join(lines) + "\n"


HF_COLOURS = {"logitless": "#00798c", "Liger-Kernel": "#5b8c5a", "transformers": "#8d6b94"}


def largest_batches(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Variant → the largest batch that fits, where it was searched for."""
    return {row["variant"]: row["largest_batch"] for row in rows if "largest_batch" in row}


def hf_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of a model's training step, every variant and batch; a failure in the place of the time."""
    lines = [
        "| variant | batch | step [ms] | tokens/s | peak [GiB] | largest batch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    largest = largest_batches(rows)
    for row in rows:
        if "largest_batch" in row:
            continue
        if "error" in row:
            measured = f"{row['error'].split('. ')[0].replace('|', '/')} | – | –"
        else:
            peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
            measured = f"{row['step_ms']:.1f} | {row['tokens_per_s']:.0f} | {peak}"
        most = largest.get(row["variant"], "–")
        lines.append(f"| {row['variant']} | {row.get('batch', '–')} | {measured} | {most} |")
    return "\n".join(lines) + "\n"


def hf(results: dict[str, Any]) -> None:
    """Tokens per second and peak memory of every variant, a bar for every batch, with the largest batch that fits."""
    rows, largest = [row for row in results["rows"] if "step_ms" in row], largest_batches(results["rows"])
    names = list(dict.fromkeys(row["variant"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    height = 0.8 / len(batches)
    figure, panels = plt.subplots(1, 2, figsize=(12, 0.6 * len(names) + 1.6), layout="constrained", sharey=True)
    for panel, key, unit in ((panels[0], "tokens_per_s", 1), (panels[1], "peak_bytes", 2**30)):
        for row in rows:
            order = batches.index(row["batch"])
            place = names.index(row["variant"]) + (order - (len(batches) - 1) / 2) * height
            colour = next(colour for name, colour in HF_COLOURS.items() if name in row["variant"])
            value = (row[key] or 0) / unit
            bars = panel.barh(place, value, 0.95 * height, color=colour, alpha=0.5 + 0.5 * (order + 1) / len(batches))
            panel.bar_label(bars, [f"{value:,.0f}, batch {row['batch']}"], padding=3, fontsize=8)
        panel.margins(x=0.32)
    panels[0].set(xlabel="tokens per second", yticks=range(len(names)))
    panels[0].set_yticklabels([f"{name}\nlargest batch {largest[name]}" if name in largest else name for name in names])
    panels[0].invert_yaxis()
    panels[1].set(xlabel="peak memory [GiB]")
    row, where = rows[0], results["machine"]["gpu"] or results["machine"]["cpu"]
    shape = f"{row['layers']} layers of {row['hidden']}, vocabulary {row['vocab']}, sequences of {row['sequence']}"
    figure.suptitle(f"A Llama of {shape}, {row['dtype']}, {where}")
    figure.savefig(FIGURES / "hf.png", dpi=130)
    plt.close(figure)


def gist_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the ways to write a head's loss; a failure in the place of the time."""
    lines = [
        "| batch × length × hidden × vocab | implementation | time [ms] | scratch [MiB] | loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = " × ".join(str(row[key]) for key in ("batch", "length", "hidden", "vocab"))
        if "error" in row:
            measured = "out of memory | – | –"
        else:
            measured = f"{row['time_ms']:.2f} | {row['scratch_bytes'] / 2**20:.0f} | {row['loss']:.6f}"
        lines.append(f"| {sizes} | {row['variant']} | {measured} |")
    return "\n".join(lines) + "\n"


def models_and_heads() -> None:
    """The tables and plots of bench/hf.py and bench/gist.py, where they were measured."""
    if (path := RESULTS / "hf.json").exists():
        on_model = json.loads(path.read_text())
        hf(on_model)
        (FIGURES / "hf.md").write_text(hf_table(on_model["rows"]))
    if (path := RESULTS / "gist.json").exists():
        from bench import gist  # needs torch

        of_a_head = json.loads(path.read_text())
        gist.plot(of_a_head, FIGURES / "gist.png")
        (FIGURES / "gist.md").write_text(gist_table(of_a_head["rows"]))


def on_several(file: str, key: str = "rows") -> list[dict[str, Any]]:
    """The rows of a results file, or what else it has under ``key``; none where there is no such file."""
    path = RESULTS / file
    rows: list[dict[str, Any]] = json.loads(path.read_text())[key] if path.exists() else []
    return rows


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    on_gpu = json.loads((RESULTS / "gpu_check.json").read_text())
    if on_gpu.get("rows"):
        gpu(on_gpu)
        (FIGURES / "gpu.md").write_text(gpu_table(on_gpu["rows"]))
    if on_gpu.get("sweeps"):
        gpu_sweeps(on_gpu)
    if on_gpu.get("token_rows"):
        (FIGURES / "gpu_tokens.md").write_text(gpu_table(on_gpu["token_rows"] + on_gpu.get("jax_token_rows", [])))
    for key, file in (("errors", "gpu_errors.md"), ("jax_errors", "gpu_jax_errors.md")):
        if on_gpu.get(key):
            (FIGURES / file).write_text(error_table(on_gpu[key]))
    if on_gpu.get("jax_rows"):
        gpu_jax(on_gpu)
        (FIGURES / "gpu_jax.md").write_text(gpu_table(on_gpu["jax_rows"]))
    if rows := on_several("bridges.json"):
        (FIGURES / "bridges.md").write_text(bridges_table(rows))
    if energy := list(filter(None, (on_several("energy.json", key) for key in ("rows", "products")))):
        (FIGURES / "energy.md").write_text("\n".join(map(energy_table, energy)))
    if rows := on_several("logits.json"):
        (FIGURES / "logits.md").write_text(logits_table(rows))
    if rows := on_several("sharded.json"):
        (FIGURES / "sharded.md").write_text(sharded_table(rows, on_several("sharded_jax.json")))
    models_and_heads()
    results = json.loads((RESULTS / "portable.json").read_text())
    portable(results)
    (FIGURES / "portable.md").write_text(portable_table(results))
    print(f"written to {FIGURES}")


if __name__ == "__main__":
    main()
