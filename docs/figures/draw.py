"""The drawings of docs/design.md and docs/plan.md, and the table of tolerances.

``python docs/figures/draw.py`` writes them beside itself.

Every number comes from :mod:`logitless.planning` and :mod:`logitless.tolerances`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import NullLocator

from logitless.cli import format_bytes
from logitless.planning import ChunkPlan, plan
from logitless.scratch import TOKEN_TILE, VOCAB_TILE, Order, round_up
from logitless.spec import FLOAT_DTYPES
from logitless.tolerances import RATIO, TARGET_GRADIENT, TINY

SIZES: dict[str, Any] = {"tokens": 16384, "hidden": 4096, "vocab": 128256, "dtype": "bfloat16"}
BUDGETS: dict[Order, int] = {"tokens": 3 * 2**30, "vocab": 614 * 2**20}
COLOURS = {"tokens": "#00798c", "vocab": "#d1495b"}
LIVE, DONE, LATER = "#e9a23b", "#dfe7ea", "#ffffff"


def ladder(order: Order, fused: bool) -> list[ChunkPlan]:
    """Plans of 1, 2, 4, … chunks along the order's axis, down to one tile of tokens, or eight of the vocabulary."""
    length, tile = (SIZES["tokens"], TOKEN_TILE) if order == "tokens" else (SIZES["vocab"], 8 * VOCAB_TILE)
    sizes = [length]
    while sizes[-1] > tile:
        sizes.append(max(tile, round_up(sizes[-1] // 2, TOKEN_TILE)))
    return [plan(**SIZES, order=order, chunk=size, fused=fused) for size in sizes]


def draw_plans() -> Any:
    """Scratch against the number of chunks, and modelled time against scratch, of both orders."""
    figure, (memory, time) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    for order, colour in COLOURS.items():
        for fused, style in ((True, "o-"), (False, "o--")):
            rungs = ladder(order, fused)  # type: ignore[arg-type]
            scratch = [rung.scratch_bytes / 2**20 for rung in rungs]
            label = f"{order}, {'kernels' if fused else 'plain operations'}"
            options: dict[str, Any] = {"color": colour, "label": label, "ms": 4, "mfc": colour if fused else "white"}
            memory.plot([rung.chunks for rung in rungs], scratch, style, **options)
            time.plot(scratch, [rung.relative_cost("gpu") for rung in rungs], style, **options)
    full = rungs[0].full_logits_bytes / 2**20
    memory.axhline(full, color="grey", ls=":")
    memory.text(128, full * 1.05, "float32 logits and their gradient", color="grey", fontsize=8, ha="right")
    chosen = plan(**SIZES, fused=True)
    time.plot(chosen.scratch_bytes / 2**20, chosen.relative_cost("gpu"), "*", color=LIVE, ms=14, label="the default")
    memory.set(xscale="log", yscale="log", xlabel="chunks", ylabel="scratch [MiB]", title="Promised scratch")
    _plain_ticks(memory.xaxis, (1, 2, 4, 8, 16, 32, 64, 128))
    time.set(xscale="log", ylim=(0.9, 2.5), xlabel="scratch [MiB]", ylabel="time / time of 6·N·D·V flops")
    time.set_title("Modelled time on a GPU")
    for axis in (memory.yaxis, time.xaxis):
        _plain_ticks(axis, (256, 512, 1024, 2048, 4096, 8192, 16384))
    time.legend(fontsize=8)
    figure.suptitle(_sizes())
    return figure


def _plain_ticks(axis: Any, values: tuple[int, ...]) -> None:
    axis.set_ticks(values, [str(value) for value in values])
    axis.set_minor_locator(NullLocator())


def _sizes() -> str:
    return f"{SIZES['tokens']} tokens × {SIZES['hidden']} hidden × {SIZES['vocab']} vocabulary, {SIZES['dtype']}"


def draw_orders() -> Any:
    """How each order goes through the logits: what exists now, what is done, what is to come."""
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.0), layout="constrained")
    for panel, (order, budget) in zip(panels, BUDGETS.items(), strict=True):
        chosen = plan(**SIZES, order=order, memory_budget=budget, fused=True)
        by_tokens = order == "tokens"
        live = chosen.chunks // 2
        for index, (start, stop) in enumerate(chosen.token_slices if by_tokens else chosen.vocab_slices):
            colour = DONE if index < live else LIVE if index == live else LATER
            size = stop - start
            place, width, height = ((0, start), chosen.vocab, size) if by_tokens else ((start, 0), size, chosen.tokens)
            panel.add_patch(Rectangle(place, width, height, facecolor=colour, edgecolor="grey"))
        panel.set(xlim=(0, chosen.vocab), ylim=(chosen.tokens, 0), xticks=[], yticks=[])
        panel.set_xlabel(f"V = {chosen.vocab}")
        panel.set_ylabel(f"N = {chosen.tokens}")
        words = f"C = {chosen.token_chunk} tokens" if by_tokens else f"B = {chosen.vocab_chunk} entries"
        words = f"{chosen.chunks} chunks, {words}, {format_bytes(chosen.scratch_bytes)}"
        panel.set_title(f"order {order}, {format_bytes(budget)} allowed\n{words}", fontsize=10)
        rows, columns = (chosen.token_chunk, chosen.vocab) if by_tokens else (chosen.tokens, chosen.vocab_chunk)
        middle = (chosen.token_slices if by_tokens else chosen.vocab_slices)[live]
        place = (chosen.vocab / 2, sum(middle) / 2) if by_tokens else (sum(middle) / 2, chosen.tokens / 2)
        panel.text(
            *place,
            f"held now: {rows} × {columns}",
            ha="center",
            va="center",
            rotation=0 if by_tokens else 90,
            fontsize=9,
        )
    flops = [plan(**SIZES, order=order, memory_budget=budget, fused=True).flops for order, budget in BUDGETS.items()]
    per = SIZES["tokens"] * SIZES["hidden"] * SIZES["vocab"]
    counts = " and ".join(f"{count // per}·N·D·V" for count in flops)
    figure.suptitle(f"The logits of {_sizes()}: {counts} flops")
    return figure


def draw_chunk() -> Any:
    """The flow of one chunk of tokens in one pass: three products, and nothing else of size C × V."""
    chosen = plan(**SIZES, order="tokens", memory_budget=BUDGETS["tokens"], fused=True)
    chunk, hidden, vocab = chosen.token_chunk, chosen.hidden, chosen.vocab
    held = format_bytes(chunk * chosen.vocab * 2)
    figure, panel = plt.subplots(figsize=(10.5, 4.6), layout="constrained")
    panel.set(xlim=(0, 105), ylim=(0, 46), xticks=[], yticks=[])
    panel.axis("off")

    def box(x: float, y: float, width: float, height: float, words: str, colour: str = DONE) -> None:
        panel.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="grey"))
        panel.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=9)

    def arrow(start: tuple[float, float], stop: tuple[float, float], words: str = "", lift: float = 1.2) -> None:
        panel.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=12, color="#444444"))
        if words:
            x, y = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2 + lift
            panel.text(x, y, words, ha="center", va="bottom", fontsize=8)

    box(1, 30, 17, 9, f"x: C × D\n{chunk} × {hidden}")
    box(1, 6, 17, 9, f"w: V × D\n{vocab} × {hidden}")
    box(25, 31, 17, 7, "anchors\na = x · w[y]")
    box(50, 16, 25, 13, f"E = exp(x wᵀ − a): C × V\n{chunk} × {vocab}\n{held}, nothing else is C × V", LIVE)
    box(50, 35, 25, 8, "s = Σ E,  loss = log1p(s)\nu = g / (1 + s)")
    box(85, 30, 18, 9, "dX = u ⊙ (E w)\nthe rows of this chunk")
    box(85, 6, 18, 9, "dW += Eᵀ (u ⊙ x)\na sum of 24 bits, " + format_bytes(3 * vocab * hidden))
    arrow((18, 34.5), (25, 34.5))
    arrow((42, 33), (50, 27.5))
    arrow((18, 31), (50, 24))
    arrow((18, 12), (50, 20), "1st product", lift=2.5)
    arrow((62.5, 29), (62.5, 35), "")
    arrow((75, 25), (85, 32), "2nd product", lift=-4.5)
    arrow((75, 18), (85, 12), "3rd product", lift=2.0)
    arrow((75, 39), (85, 37), "u", lift=0.5)
    panel.text(
        52.5, 0.8, f"one of {chosen.chunks} chunks of {_sizes()}",
        ha="center", fontsize=9, color="#444444",
    )  # fmt: skip
    return figure


def tolerance_table() -> str:
    """The rule's constants by dtype, in Markdown."""
    lines = [
        "| dtype | ratio to the ideal path | tiny | target's gradient and a confident token's loss, relative |",
        "| --- | --- | --- | --- |",
    ]
    for dtype in reversed(FLOAT_DTYPES):
        lines.append(f"| {dtype} | {RATIO} | {_power(TINY[dtype])} | {_power(TARGET_GRADIENT[dtype])} |")
    return "\n".join(lines) + "\n"


def _power(value: float) -> str:
    """0.01 → 10⁻²."""
    exponent = round(math.log10(value))
    assert math.isclose(value, 10.0**exponent)
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


DRAWINGS = {"orders.svg": draw_orders, "chunk.svg": draw_chunk, "plans.svg": draw_plans}


def main(folder: Path = Path(__file__).parent) -> None:
    # The same file from run to run: no date, names of parts that do not change.
    with mpl.rc_context({"svg.hashsalt": "logitless", "font.size": 9}):
        for name, draw in DRAWINGS.items():
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None, "Creator": None}, facecolor="white")
            plt.close(figure)
    (folder / "tolerances.md").write_text(tolerance_table(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
