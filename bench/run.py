"""The one runner: ``python -m bench.run portable`` measures and writes bench/results/NAME.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import machine, portable, timing

RESULTS = Path(__file__).resolve().parent / "results"

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()


@app.callback()
def main() -> None:
    """Measure, and write a results file with the machine, the versions and the commit."""


@app.command("portable")
def run_portable(
    tokens: int = 2048,
    hidden: int = 512,
    vocab: int = 32768,
    dtype: Annotated[list[str] | None, typer.Option()] = None,
    rounds: int = 7,
    output: Path = RESULTS / "portable.json",
) -> None:
    """The portable backends against full logits on this CPU, time and scratch, both frameworks."""
    output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in dtype or ["float32", "bfloat16"]:
        sizes = portable.Sizes(tokens, hidden, vocab, name)
        for implementation, make in portable.VARIANTS.items():
            rows += _measure(implementation, sizes, make(sizes), rounds)
    output.write_text(json.dumps({"machine": machine.describe(), "rounds": rounds, "rows": rows}, indent=1) + "\n")
    console.print(_table(rows))
    console.print(f"written to {output}")


def _measure(
    implementation: str, sizes: portable.Sizes, variants: list[portable.Variant], rounds: int
) -> list[dict[str, Any]]:
    with Progress(console=console) as progress:
        task = progress.add_task(f"{implementation} {sizes.dtype}", total=rounds)
        times: dict[str, list[float]] = {}
        for done, times in timing.interleaved_ms({v.name: v.step for v in variants}, rounds):  # noqa: B007
            progress.update(task, completed=done)
    base = timing.median_ms(times["full logits"])
    return [
        {
            "implementation": implementation,
            **dataclasses.asdict(sizes),
            "variant": variant.name,
            "order": None if variant.plan is None else variant.plan.order,
            "chunks": None if variant.plan is None else variant.plan.chunks,
            "time_ms": round(timing.median_ms(times[variant.name]), 2),
            "times_ms": [round(value, 2) for value in times[variant.name]],
            "time_over_full_logits": round(timing.median_ms(times[variant.name]) / base, 4),
            "scratch_bytes": variant.scratch_bytes(),
            "promised_bytes": None if variant.plan is None else variant.plan.scratch_bytes,
        }
        for variant in variants
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("implementation", "dtype", "variant", "ms", "× full logits", "scratch MiB", "promised MiB")
    for row in rows:
        promised = row["promised_bytes"]
        table.add_row(
            row["implementation"],
            row["dtype"],
            row["variant"],
            f"{row['time_ms']:.0f}",
            f"{row['time_over_full_logits']:.2f}",
            f"{row['scratch_bytes'] / 2**20:.1f}",
            "" if promised is None else f"{promised / 2**20:.1f}",
        )
    return table


if __name__ == "__main__":
    app()
