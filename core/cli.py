"""The command line: ``python -m logitless plan | doctor | parity | demo``.

A user's mistake ends with exit code 2 and one line on stderr. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import logitless
from logitless.planning import SLACK, ChunkPlan, Request, choose
from logitless.scratch import TOKEN_TILE, VOCAB_TILE, Kind, Order, round_up
from logitless.spec import FLOAT_DTYPES, REDUCTIONS, check_choice

if TYPE_CHECKING:
    from logitless.problems import Case, Problem

UNITS = {"": 1, "b": 1}
for power, letter in enumerate("kmgt", start=1):
    UNITS |= {f"{letter}ib": 1024**power, f"{letter}b": 1000**power}

app = typer.Typer(
    name="logitless",
    help="Linear cross-entropy that never holds the logits, in PyTorch and in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of ``python -m logitless`` and of the console script."""
    app(prog_name="logitless")


def parse_bytes(text: str) -> int:
    """``512MiB``, ``3GiB``, ``1.5GB``, ``800000`` → bytes. KiB to TiB are powers of 1024, kB to TB powers of 1000.

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].lower()) if found else None
    if not found or unit is None:
        raise ValueError(f"memory_budget: got {text!r}, allowed is a number of bytes, such as 512MiB, 3GiB or 800000")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def format_bytes(count: int) -> str:
    """1536 → ``1.5 KiB``: three digits, in the largest unit that leaves at least 1."""
    size, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def format_flops(count: int) -> str:
    """2500000000 → ``2.5 GFLOP``."""
    size, unit = _scaled(count, 1000, ("", *"kMGTPE"))
    return f"{size:.3g} {unit}FLOP"


def _scaled(count: int, step: int, units: Sequence[str]) -> tuple[float, str]:
    """``count`` in the largest unit that leaves at least 1."""
    power = sum(count >= step**larger for larger in range(1, len(units)))
    return count / step**power, units[power]


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"logitless {logitless.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------------
# plan


@app.command()
def plan(
    tokens: Annotated[int, typer.Option(help="N: tokens in a call, all leading axes together.")],
    hidden: Annotated[int, typer.Option(help="D: the hidden size.")],
    vocab: Annotated[int, typer.Option(help="V: the vocabulary size.")],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(FLOAT_DTYPES)}.")] = "bfloat16",
    memory_budget: Annotated[
        str | None, typer.Option(help="Scratch beyond inputs and gradients: 512MiB, 3GiB, or plain bytes.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="tokens, vocab or both; default: whichever costs less.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Chunk size along --order, taken as it is.")] = None,
    reduction: Annotated[
        str, typer.Option(help="mean, sum or none; with none the upstream gradient comes later, at 8 N D V flops.")
    ] = "mean",
    device: Annotated[str, typer.Option(help="gpu or cpu: whose speed and bandwidth the cost assumes.")] = "gpu",
    fused: Annotated[
        bool, typer.Option("--fused/--portable", help="For the kernels (triton, pallas) or for plain operations.")
    ] = False,
    prefer: Annotated[
        str, typer.Option(help="fast, balanced or lean: the least scratch within 0.5, 5 or 50 % of the fastest plan.")
    ] = "balanced",
) -> None:
    """Show the chunk plan for the given sizes, and what other chunk sizes and full logits would take."""
    try:
        check_choice("reduction", reduction, REDUCTIONS)
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        request = Request(
            tokens, hidden, vocab, dtype, "triton" if fused else "xla", budget, order, chunk,  # type: ignore[arg-type]
            one_pass=reduction != "none", hold=memory_budget is not None, device=device,  # type: ignore[arg-type]
            prefer=prefer,  # type: ignore[arg-type]
        )  # fmt: skip
        chosen = choose(request)
        rungs = _rungs(chosen, order)
        ladder = [choose(dataclasses.replace(request, memory_budget=None, order=o, chunk=size)) for o, size in rungs]
    except (ValueError, TypeError) as mistake:
        _fail(str(mistake))
    console = Console()
    _print_plan(console, chosen, budget, SLACK[request.prefer])
    console.print(_ladder_table(chosen, ladder, budget, device))


def _rungs(chosen: ChunkPlan, order: str | None) -> list[tuple[Order, int]]:
    """Chunk sizes to compare: the whole axis, its halves in whole tiles down to one tile, and the chosen size."""
    rungs: list[tuple[Order, int]] = []
    axes: tuple[tuple[Order, int, int, int], ...] = (
        ("tokens", chosen.tokens, TOKEN_TILE, chosen.token_chunk),
        ("vocab", chosen.vocab, VOCAB_TILE, chosen.vocab_chunk),
        ("both", chosen.tokens, TOKEN_TILE, chosen.token_chunk),
    )
    for axis, length, tile, chosen_size in axes:
        if axis not in ((order,) if order else ("tokens", "vocab", chosen.order)):
            continue
        sizes = {max(1, length)}
        while (size := min(sizes)) > tile:
            sizes.add(round_up(size // 2, tile) if size > 2 * tile else tile)
        if axis == chosen.order:
            sizes.add(chosen_size)
        rungs += [(axis, size) for size in sorted(sizes, reverse=True)]
    return rungs


def _print_plan(console: Console, chosen: ChunkPlan, budget: int | None, slack: float) -> None:
    size = f"{chosen.vocab_chunk} vocabulary entries"
    if chosen.order != "vocab":
        size = f"{chosen.token_chunk} tokens" + (f", then slices of {size}" if chosen.order == "both" else "")
    within = f"{100 * (slack - 1):.2g} %"
    rule = f"budget {format_bytes(budget)}" if budget else f"the least scratch within {within} of the fastest"
    passes = "one pass" if chosen.one_pass else "two passes"
    times = chosen.full_logits_bytes / max(1, chosen.scratch_bytes)
    lines = (
        f"[bold]{chosen.tokens} tokens × {chosen.hidden} hidden × {chosen.vocab} vocabulary, {chosen.dtype}[/bold]",
        f"plan: order {chosen.order}, {chosen.chunks} chunk(s) of at most {size}, {passes} ({rule})",
        f"scratch: at most {format_bytes(chosen.scratch_bytes)} ({chosen.scratch_bytes} bytes)",
        f"full logits and their gradient: {format_bytes(chosen.full_logits_bytes)}, {times:.3g} times as much",
        f"flops, forward and all gradients: {format_flops(chosen.flops)}",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _ladder_table(chosen: ChunkPlan, ladder: list[ChunkPlan], budget: int | None, device: str) -> Table:
    table = Table(caption=f"cost: modelled time on a {device}, relative to 6·N·D·V flops")
    table.add_column("order")
    for name in ("chunk", "chunks", "scratch", "flops", "cost"):
        table.add_column(name, justify="right")
    table.add_column("")
    for rung in ladder:
        is_chosen = rung == chosen
        over = budget is not None and rung.scratch_bytes > budget
        table.add_row(
            rung.order,
            str(rung.vocab_chunk if rung.order == "vocab" else rung.token_chunk),
            str(rung.chunks),
            format_bytes(rung.scratch_bytes),
            format_flops(rung.flops),
            f"{rung.relative_cost('cpu' if device == 'cpu' else 'gpu'):.3f}",
            "chosen" if is_chosen else "over budget" if over else "",
            style="bold green" if is_chosen else "dim" if over else None,
        )
    table.add_section()
    flops = 6 * chosen.tokens * chosen.hidden * chosen.vocab
    over = budget is not None and chosen.full_logits_bytes > budget
    note = "over budget" if over else ""
    table.add_row("full logits", "–", "–", format_bytes(chosen.full_logits_bytes), format_flops(flops), "–", note)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# doctor


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="A model of transformers, by name or folder: say what its LM head gets, and try no backend."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="With --model: tokens in a batch.")] = 8192,
    memory_budget: Annotated[
        str | None, typer.Option(help="With --model: scratch beyond inputs and gradients, as of `plan`.")
    ] = None,
) -> None:
    """Try every backend and say which run here, and why the others do not. Exit code 1 when one gives wrong numbers.

    With --model: which LM head a model has and what patch() does with it, from its configuration alone, and the plan
    and the memory of a batch. Exit code 1 when patch() refuses the model.
    """
    from logitless.doctor import examine

    if model is not None:
        _show_model(model, tokens, memory_budget)
        return
    report = examine()
    console = Console()
    machine = Table.grid(padding=(0, 2))
    machine.add_row("logitless", logitless.__version__)
    machine.add_row("Python", report.python)
    machine.add_row("system", report.system)
    for name, version in report.packages.items():
        machine.add_row(name, version)
    for name, found in report.devices.items():
        machine.add_row(name, escape(found))
    console.print(machine)
    table = Table()
    for column in ("framework", "backend", "status", "why"):
        table.add_column(column, overflow="fold")
    for backend in report.backends:
        style = {"runs": "green", "not here": "yellow"}.get(backend.status, "red")
        table.add_row(
            backend.framework, backend.backend, f"[{style}]{backend.status}[/{style}]", escape(backend.reason)
        )
    console.print(table)
    if not report.healthy:
        raise typer.Exit(1)


def _show_model(model: str, tokens: int, memory_budget: str | None) -> None:
    """What ``doctor --model`` prints."""
    from logitless.doctor import INSTALL, installed

    missing = [name for name in ("torch", "transformers") if not installed(name)]
    if missing:
        _fail(f"model: {', '.join(missing)} is not installed: {INSTALL['torch']} transformers")
    from logitless.torch_impl.huggingface.examine import examine_model

    try:
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        found = examine_model(model)
        kind: Kind = "eager" if found.dtype == "float64" else "triton"
        request = Request(tokens, max(1, found.hidden), max(1, found.vocab), found.dtype, kind, budget)
        chosen = choose(request)
    except (ValueError, TypeError) as mistake:
        _fail(str(mistake))
    console, table = Console(), Table.grid(padding=(0, 2))
    table.add_row("model", f"{found.model}, {found.dtype}")
    if found.head:
        weight = f"[{found.vocab}, {found.hidden}], {'tied to the embedding' if found.tied else 'not tied'}"
        table.add_row("head", escape(f"{found.head}, weight {weight}, {'with a' if found.bias else 'no'} bias"))
        table.add_row("logits", f"logit_scale {found.logit_scale:g}, softcap {found.softcap}")
    taken = "takes it; its first forward with labels checks what the model does to its logits"
    table.add_row("patch", escape(f"refuses it: {found.refusal}" if found.refusal else taken))
    console.print(table)
    if found.head:
        _print_plan(console, chosen, budget, SLACK[request.prefer])
        saved = chosen.full_logits_bytes - chosen.scratch_bytes
        console.print(f"saved: {format_bytes(max(0, saved))} of a batch, with the kernels", highlight=False)
    if found.refusal:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# demo

DEMO_PACKAGES = ("torch", "jax", "matplotlib", "optax", "tokenizers")


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="A text file to learn from; default: the Python standard library's own sources.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture of the curves.")] = Path("demo-output"),
) -> None:
    """Train one small model on real text in both frameworks, with and without full logits, and compare."""
    from logitless.doctor import installed

    missing = [name for name in DEMO_PACKAGES if not installed(name)]
    if missing:
        _fail(f"demo: not installed here: {', '.join(missing)}; pip install 'logitless[demo]' brings what it needs")
    from logitless.interop.demo.run import DisagreementError, run_demo

    try:
        run_demo(text, output, steps=steps)
    except ValueError as mistake:
        if str(mistake).partition(":")[0] not in ("text", "steps", "output"):
            raise  # a bug, not a user's mistake
        _fail(str(mistake))
    except DisagreementError as disagreement:
        typer.echo(f"error: {disagreement}", err=True)
        raise typer.Exit(1) from None


# ---------------------------------------------------------------------------------------------------------------------
# parity

PARITY_PROBLEMS = ("odd", "odd_most", "odd_none_most", "gemma", "confident_wrong")
PARITY_DTYPES = ("float32", "bfloat16")


@app.command()
def parity(
    problems: Annotated[
        list[str] | None,
        typer.Argument(help=f"Names of core/problems.py; default: {', '.join(PARITY_PROBLEMS)}.", show_default=False),
    ] = None,
    arrays: Annotated[
        Path | None, typer.Option(help="Your own .npz or .safetensors with hidden, weight, target and perhaps bias.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="What to compute in; may be repeated. Default: float32 and bfloat16, or that of --arrays."),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="Run only this one, which must then run; may be repeated. Default: all that run here."),
    ] = None,
    ignore_index: Annotated[int, typer.Option(help="Marks tokens of --arrays without a loss.")] = -100,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything there as JSON.")] = None,
) -> None:
    """Run every implementation on identical bytes and hold it against float64. Exit code 1 on disagreement."""
    from logitless.interop.parity import compare
    from logitless.interop.parity_report import notes, table

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX and torch share a GPU's memory
    console = Console()
    comparisons = []
    try:
        for case in _parity_cases(problems, arrays, dtype, ignore_index):
            comparisons.append(compare(case, implementation))
            console.print(table(comparisons[-1]))
        console.print(notes(comparisons), soft_wrap=True)
        if json_path is not None:
            _write_parity(json_path, [comparison.to_dict() for comparison in comparisons])
    except (ImportError, TypeError, ValueError) as mistake:
        _fail(str(mistake))
    wrong = [f"{c.problem} {c.dtype}" for c in comparisons if not c.agrees]
    if wrong:
        typer.echo(f"error: no agreement on {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def _parity_cases(
    names: list[str] | None, arrays: Path | None, dtypes: list[str] | None, ignore_index: int
) -> list[Case | Problem]:
    """The named problems in every dtype, then the user's own arrays."""
    from logitless.interop.own_arrays import load_case
    from logitless.problems import BY_NAME
    from logitless.spec import LossOptions

    unknown = [dtype for dtype in dtypes or () if dtype not in FLOAT_DTYPES]
    if unknown:
        raise ValueError(f"dtype: got {unknown[0]!r}, allowed are {', '.join(FLOAT_DTYPES)}")
    names = list(PARITY_PROBLEMS) if names is None and arrays is None else names or []
    for name in names:
        if name not in BY_NAME:
            raise ValueError(f"problems: got {name!r}, allowed are {', '.join(BY_NAME)}")
    cases: list[Case | Problem] = [BY_NAME[n].with_dtype(dtype) for n in names for dtype in dtypes or PARITY_DTYPES]
    if arrays is not None:
        options = LossOptions(ignore_index=ignore_index)
        cases += [load_case(arrays, dtype=dtype, options=options) for dtype in dtypes or (None,)]
    return cases


def _write_parity(path: Path, comparisons: list[dict[str, object]]) -> None:
    from logitless.doctor import PACKAGES, installed_versions

    written = {
        "logitless": logitless.__version__,
        "versions": installed_versions(PACKAGES),
        "agrees": all(comparison["agrees"] for comparison in comparisons),
        "comparisons": comparisons,
    }
    try:
        path.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"json: got {str(path)!r}, where nothing can be written ({error.strerror})") from error
