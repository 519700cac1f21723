"""Plots and tables from the results files: ``python -m bench.report`` writes docs/figures/*.png and *.md."""

from __future__ import annotations

import json
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

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


def _plain_ticks(axis: Any, values: tuple[int, ...]) -> None:
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


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    results = json.loads((RESULTS / "portable.json").read_text())
    portable(results)
    (FIGURES / "portable.md").write_text(portable_table(results))
    print(f"written to {FIGURES}")


if __name__ == "__main__":
    main()
