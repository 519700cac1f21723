"""The plots of bench/report.py and bench/gist.py, from results files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, NullLocator

from bench.report import largest_batches, sizes_of

COLOURS = {"torch_eager": "#d1495b", "jax_xla": "#00798c"}


def portable(results: dict[str, Any], path: Path) -> None:
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
    figure.suptitle(f"{sizes_of(rows[0])} float32, loss and gradients, {results['machine']['cores']} CPU cores")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_ticks(values, [str(value) for value in values])
    axis.set_minor_locator(NullLocator())


# What the GPU plots show of each shape, in this order; colours go by implementation.
GPU_COLOURS = {
    "triton": "#00798c", "eager": "#d1495b", "torch, full logits": "#8d6b94", "torch.compile, full logits": "#b9a44c",
    "Liger-Kernel": "#5b8c5a", "cut-cross-entropy": "#7f7f7f", "QuACK": "#e07a5f",
}  # fmt: skip

JAX_COLOURS = {
    "pallas": "#00798c", "xla": "#d1495b", "jax, full logits": "#8d6b94", "jax, full logits in float32": "#b9a44c",
    "jax.checkpoint in a scan": "#5b8c5a", "tokamax, chunked_xla": "#7f7f7f", "tokamax, xla": "#3d405b",
    "jax-cce": "#e07a5f",
}  # fmt: skip


KERNELS = ("triton", "pallas")
# Each of their modes is a point of one colour.
PEERS = ("Liger-Kernel", "cut-cross-entropy", "QuACK", "TRL", "verl")

LOG_PROB_COLOURS = {
    "triton": "#00798c", "torch, full logits": "#8d6b94", "torch.compile, full logits": "#b9a44c",
    "Liger-Kernel": "#5b8c5a", "TRL": "#e07a5f", "verl": "#7f7f7f",
}  # fmt: skip


def _family(variant: str) -> str:
    """Our kernels by any plan count as our kernels, and a peer's mode as the peer."""
    return next((name for name in (*KERNELS, *PEERS) if variant.startswith(name)), variant)


def _gpu_rows(rows: list[dict[str, Any]], shape: str) -> list[dict[str, Any]]:
    rows = [row for row in rows if row["shape"] == shape and "over_floor" in row]
    return [row for row in rows if "ignored" not in row["variant"] and "forward" not in row["variant"]]


def gpu(results: dict[str, Any], path: Path) -> None:
    """Time of a step over the floor's, against scratch, of PyTorch's implementations."""
    _over_floor(results["rows"], results["machine"]["gpu"], GPU_COLOURS, path)


def gpu_jax(results: dict[str, Any], path: Path) -> None:
    """The same of JAX's."""
    _over_floor(results["jax_rows"], results["jax_machine"]["gpu"], JAX_COLOURS, path)


def log_probs(results: dict[str, Any], path: Path) -> None:
    """The same of log-probabilities with the entropy."""
    by_sizes: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if "over_floor" in row and "GRPO" not in row["variant"]:
            by_sizes.setdefault(sizes_of(row), []).append(row)
    what = f"{results['machine']['gpu']}, bfloat16, log-probabilities with the entropy, forward and backward"
    _panels(list(by_sizes.values()), LOG_PROB_COLOURS, "time / four bare products", what, path, lowest=0.7)


def _over_floor(every: list[dict[str, Any]], name_of_gpu: str, colours: dict[str, str], path: Path) -> None:
    by_shape = [_gpu_rows(every, shape) for shape in ("liger", "gist", "gemma", "llama")]
    what = f"{name_of_gpu}, bfloat16, loss and both gradients"
    _panels([rows for rows in by_shape if rows], colours, "time / three bare products", what, path, lowest=0.9)


def _panels(
    by_shape: list[list[dict[str, Any]]], colours: dict[str, str], unit: str, what: str, path: Path, lowest: float
) -> None:
    """One panel a shape: down and to the left is better."""
    if not by_shape:
        return
    highest = 1.1 * max(row["over_floor"] for rows in by_shape for row in rows)
    top = highest if lowest < 0.9 else max(5.0, highest)
    figure, panels = plt.subplots(1, len(by_shape), figsize=(15, 4.2), layout="constrained", sharey=True, squeeze=False)
    for panel, rows in zip(panels[0], by_shape, strict=True):
        for name, colour in colours.items():
            own = sorted((row for row in rows if _family(row["variant"]) == name), key=lambda row: row["scratch_bytes"])
            if own:
                scratch = [max(row["scratch_bytes"] / 2**20, 1) for row in own]
                times = [row["over_floor"] for row in own]
                panel.plot(scratch, times, "o", color=colour, label=name)
                if name in KERNELS:  # one curve, from lean to fast, of the plans that nothing leaner outruns
                    best = [i for i, time in enumerate(times) if time == min(times[: i + 1])]
                    panel.plot([scratch[i] for i in best], [times[i] for i in best], "-", color=colour)
        panel.axhline(1.0, color="grey", ls=":")
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="scratch [MiB]",
            title=sizes_of(rows[0]),
            ylim=(lowest, top),
        )
        panel.xaxis.set_minor_formatter(NullFormatter())
        _plain_ticks(panel.yaxis, [tick for tick in (0.8, 1, 1.2, 1.5, 2, 3, 4, 5, 7) if lowest < tick <= top])
    panels[0][0].set_ylabel(unit)
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(what)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def gpu_sweeps(results: dict[str, Any], path: Path) -> None:
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
    figure.savefig(path, dpi=130)
    plt.close(figure)


HF_COLOURS = {"logitless": "#00798c", "Liger-Kernel": "#5b8c5a", "transformers": "#8d6b94"}


def hf(results: dict[str, Any], path: Path) -> None:
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
    figure.savefig(path, dpi=130)
    plt.close(figure)


def gist(result: dict[str, Any], path: Path) -> None:
    """Time and scratch of every variant that ran."""
    rows = [row for row in result["rows"] if "error" not in row]
    names, colours = (
        [row["variant"] for row in rows],
        ["#00798c" if "logitless" in r["variant"] else "#8d6b94" for r in rows],
    )
    figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 0.5 * len(rows) + 1.6), layout="constrained", sharey=True)
    for panel, values, label in (
        (time, [row["time_ms"] for row in rows], "time of a step [ms]"),
        (memory, [row["scratch_bytes"] / 2**20 for row in rows], "scratch [MiB]"),
    ):
        panel.bar_label(panel.barh(names, values, color=colours), fmt="%.1f", padding=3)
        panel.set(xlabel=label)
        panel.margins(x=0.2)
    time.invert_yaxis()
    sizes, where = result["rows"][0], result["machine"]["gpu"] or result["machine"]["cpu"]
    shape = sizes_of(sizes, ("batch", "length", "hidden", "vocab"))
    figure.suptitle(f"{shape} {sizes['dtype']}, {where}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# By the name of the file: the plot, the results file and the rows without which there is none.
def rl(results: dict[str, Any], path: Path) -> None:
    """The share of tokens whose log-probability is off by more than a size, for every way to make it."""
    figure, axis = plt.subplots(figsize=(10.0, 4.2), layout="constrained")
    for row in results["rows"]:
        sizes, line = row["quantiles"], "-" if row["variant"].startswith("logitless") else "--"
        shares = [1.0 - i / (len(sizes) - 1) for i in range(len(sizes))]
        axis.plot(sizes, shares, line, label=row["variant"])
    axis.set(xscale="log", xlim=(1e-8, 1.0), xlabel="error of a token's log-probability [nats]")
    axis.set(ylabel="share of tokens with a larger error", title="SmolLM2-135M's head on text, beside float64")
    axis.axvline(0.01, color="grey", ls=":")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


GRPO_COLOURS = "#d1495b", "#b9a44c", "#00798c"


def grpo(results: dict[str, Any], path: Path) -> None:
    """Mismatch and reward over the steps: a thin line for every seed, a thick one for their mean."""
    rows = results["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    for colour, name in zip(GRPO_COLOURS, dict.fromkeys(row["variant"] for row in rows), strict=False):
        own = [row["by_step"] for row in rows if row["variant"] == name]
        for panel, key in zip(panels, ("mismatch_mean", "reward"), strict=True):
            for steps in own:
                panel.plot(steps[key], color=colour, lw=0.5, alpha=0.5)
            mean = [statistics.mean(values) for values in zip(*(steps[key] for steps in own), strict=True)]
            panel.plot(mean, color=colour, label=name)
        body = [statistics.mean(values) for values in zip(*(steps["body_mean"] for steps in own), strict=True)]
        panels[0].plot(body, ":", color=colour, label=f"{name}: the body alone")
    panels[0].set(ylim=(0, None), ylabel="mean of |log p of the trainer − of the sampler| [nats]")
    panels[1].set(ylabel="reward")
    for panel in panels:
        panel.set(xlabel="step")
        panel.legend(fontsize=8)
    figure.suptitle(f"GRPO of a small model, vocabulary {rows[0]['vocab']}, every forward in bfloat16")
    figure.savefig(path, dpi=130)
    plt.close(figure)


PHASE_COLOURS = {"tokens": "#00798c", "vocab": "#d1495b"}


def phases(results: dict[str, Any], path: Path) -> None:
    """Forward and backward of every implementation, and our scratch against the number of chunks."""
    rows = [row for row in results["rows"] if "both_ms" in row]
    ladder = [row for row in rows if row["variant"].endswith("chunks")]
    bars = [row for row in rows if row not in ladder and "forward_ms" in row and "padding" not in row["variant"]]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(13, max(3.6, 0.4 * len(bars) + 1.8)), layout="constrained")
    names, forward = [row["variant"] for row in bars], [row["forward_ms"] for row in bars]
    time.barh(names, forward, color="#00798c", label="forward")
    backward = time.barh(names, [row["backward_ms"] for row in bars], left=forward, color="#7fbcc5", label="backward")
    time.bar_label(backward, [f"{row['both_ms']:.1f}" for row in bars], padding=3)
    for row in rows:
        if row["variant"] == "floor":
            time.axvline(row["both_ms"], color="grey", ls=":", label="three bare products")
        if row["variant"] == "torch, full logits":
            memory.axhline(row["scratch_bytes"] / 2**20, color="#8d6b94", label="torch, full logits")
    time.set(xlabel="time of forward and backward [ms]")
    time.margins(x=0.15)
    time.invert_yaxis()
    time.legend(fontsize=8)
    for order, colour in PHASE_COLOURS.items():
        own = [row for row in ladder if row["order"] == order]
        counts = [row["chunks"] for row in own]
        of = {"tokens": "the tokens", "vocab": "the vocabulary"}[order]
        memory.plot(counts, [row["scratch_bytes"] / 2**20 for row in own], "o-", color=colour, label=f"of {of}")
        memory.plot(
            counts, [row["promised_bytes"] / 2**20 for row in own], ":", color=colour, label=f"of {of}, promised"
        )
    if ladder:
        counts = sorted({row["chunks"] for row in ladder})
        matrix = ladder[0]["tokens"] * ladder[0]["vocab"] * 2 / 2**20
        memory.plot(counts, [matrix / count for count in counts], "--", color="grey", label="the exponentials alone")
        memory.set_xscale("log")
        _plain_ticks(memory.xaxis, counts)
    memory.set(yscale="log", xlabel="chunks", ylabel="scratch beyond gradients [MiB]")
    memory.legend(fontsize=8)
    figure.suptitle(f"{sizes_of(rows[0])} {rows[0]['dtype']}, {results['machine']['gpu'] or results['machine']['cpu']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def accumulation(results: dict[str, Any], path: Path) -> None:
    """The error of dW against the number of chunks, of all rows and of the commonest targets' rows."""
    rows = [row for row in results["rows"] if "dweight_error" in row]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained", sharey=True)
    titles = {"dweight_error": "all rows of dW", "commonest_error": "rows of the commonest targets"}
    for panel, (key, title) in zip(panels, titles.items(), strict=True):
        for name in dict.fromkeys(row["variant"] for row in rows):
            own = [row for row in rows if row["variant"] == name]
            if own[0]["chunks"] is None:
                panel.axhline(own[0][key], color="grey", ls=":", label=name)
            else:
                line = "o-" if name.startswith("logitless") else "s--"
                panel.plot([row["chunks"] for row in own], [row[key] for row in own], line, label=name)
        panel.set(xscale="log", yscale="log", xlabel="chunks that add up to dW", title=title)
        _plain_ticks(panel.xaxis, sorted({row["chunks"] for row in rows if row["chunks"]}))
    panels[0].set(ylabel="‖dW − truth‖ / ‖truth‖")
    panels[1].legend(fontsize=8)
    where = results["machine"]["gpu"] or results["machine"]["cpu"]
    figure.suptitle(f"{sizes_of(rows[0])} {rows[0]['dtype']}, {where}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


PLOTS = {
    "phases": (phases, "phases.json", "rows"),
    "log_probs": (log_probs, "log_probs.json", "rows"),
    "accumulation": (accumulation, "accumulation.json", "rows"),
    "rl": (rl, "rl.json", "rows"),
    "grpo": (grpo, "grpo.json", "rows"),
    "gpu": (gpu, "gpu_check.json", "rows"),
    "gpu_sweeps": (gpu_sweeps, "gpu_check.json", "sweeps"),
    "gpu_jax": (gpu_jax, "gpu_check.json", "jax_rows"),
    "hf": (hf, "hf.json", "rows"),
    "gist": (gist, "gist.json", "rows"),
    "portable": (portable, "portable.json", "rows"),
}
