"""The demo: one small transformer trained three times on real text, in both frameworks, and the comparison.

1. JAX: jax.value_and_grad and optax, with this library's loss;
2. PyTorch: autograd and torch.optim, with this library's loss;
3. PyTorch with its own loss on full logits.

All three start from the same bytes of memory (shared by DLPack, not copied) and see the same batches in the same order,
so their loss curves may differ by float32 rounding only. Everything runs on the CPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import jax
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from logitless.interop.demo import jax_model, torch_model
from logitless.interop.demo.settings import Batches, DemoSettings, OnStep, TrainingRun, initial_parameters
from logitless.interop.demo.text import encode, make_batches, read_text, train_tokenizer
from logitless.interop.dlpack import to_jax

JAX_LOGITLESS = "JAX, logitless"
TORCH_LOGITLESS = "PyTorch, logitless"
TORCH_FULL = "PyTorch, full logits"
RUN_NAMES = (JAX_LOGITLESS, TORCH_LOGITLESS, TORCH_FULL)

RELATIVE_TOLERANCE = 1e-3

_PROGRAM = "logitless demo"  # marks the files as this program's own
_MIB = 2**20


class DisagreementError(RuntimeError):
    """The three runs do not give the same losses: one of the implementations is wrong."""


@dataclass(frozen=True)
class DemoRun:
    """One of the three runs."""

    name: str
    training: TrainingRun
    scratch_bytes: int
    """Measured peak of the loss and its gradients beyond inputs and gradients, at the demo's sizes."""
    full_logits_scratch_bytes: int
    """The same for the full-logits loss of the same framework."""


@dataclass(frozen=True)
class DemoResult:
    """All that the demo has found out; the same numbers are in its JSON file."""

    settings: DemoSettings
    source: str
    text_tokens: int
    vocabulary: int
    parameter_count: int
    initial_sha256: str
    runs: tuple[DemoRun, ...]
    picture: Path
    numbers: Path

    @property
    def losses(self) -> NDArray[np.float64]:
        """[3, steps]: the runs in the order of RUN_NAMES."""
        return np.array([run.training.losses for run in self.runs])

    @property
    def relative_differences(self) -> NDArray[np.float64]:
        """[steps]: (largest − smallest) / smallest loss of the three runs."""
        losses = self.losses
        differences: NDArray[np.float64] = np.ptp(losses, axis=0) / losses.min(axis=0)
        return differences

    @property
    def largest_relative_difference(self) -> float:
        """Over all steps; NaN if any loss is."""
        return float(self.relative_differences.max())


def run_demo(
    text: Path | None = None,
    output: Path = Path("demo-output"),
    *,
    steps: int | None = None,
    settings: DemoSettings | None = None,
    console: Console | None = None,
) -> DemoResult:
    """Train three times, compare, print a table, and write curves.png and results.json into `output`.

    Nothing is written outside `output`, apart from matplotlib's own font cache on its first use.

    Arguments:
        text: a UTF-8 file to learn from; None: the Python standard library's own sources.
        output: folder for the two files; made if it does not exist. Files there that the demo has not written are never
            overwritten.
        steps: training steps of each run; None: as in the settings.
        settings: sizes and hyperparameters; None: the default ones.
        console: where progress and table go; None: the terminal.

    Raises:
        ValueError: beginning with "text:", "output:", or the name of a setting: what came and what is allowed.
        DisagreementError: the losses differ by more than RELATIVE_TOLERANCE; table and files are made all the same.
    """
    settings = settings or DemoSettings()
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    console = console or Console()
    _check_output(output)
    found = read_text(text, settings.text_bytes)
    with console.status(f"training a tokenizer on {escape(found.source)}"):
        tokenizer = train_tokenizer(found.text, settings.vocabulary)
        tokens = encode(tokenizer, found.text)
    vocabulary = tokenizer.get_vocab_size()
    batches = make_batches(tokens, settings)
    _make_output(output)

    arrays = initial_parameters(settings, vocabulary)
    initial = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
    digest = _digest(initial)
    parameter_count = sum(tensor.numel() for tensor in initial.values())
    console.print(
        f"text: {escape(found.source)}: {len(found.text) / 1e6:.1f} million characters, {len(tokens):,} tokens\n"
        f"model: {_described(settings, vocabulary, parameter_count)}"
    )
    runs = _runs(initial, digest, batches, settings, console)
    files = output / "curves.png", output / "results.json"
    result = DemoResult(settings, found.source, len(tokens), vocabulary, parameter_count, digest, runs, *files)
    _report(result, console)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The three runs


def _described(settings: DemoSettings, vocabulary: int, parameter_count: int) -> str:
    return (
        f"{settings.layers} layers of width {settings.width}, vocabulary {vocabulary}, "
        f"{parameter_count / 1e6:.1f} million parameters; {settings.steps} steps of {settings.batch} × "
        f"{settings.sequence} tokens, three times"
    )


def _runs(
    initial: dict[str, torch.Tensor], digest: str, batches: Batches, settings: DemoSettings, console: Console
) -> tuple[DemoRun, ...]:
    """The three runs, and the scratch memory of their losses. ``digest``: of the initial parameters."""
    trainings = _train_all(initial, batches, settings, console)
    if _digest(initial) != digest:
        raise RuntimeError("a training run has written to the initial parameters, which all runs share")
    with console.status("measuring the scratch memory of the losses"):
        scratch = _measure_scratch(initial, batches, settings)
    return tuple(DemoRun(name, trainings[name], *scratch[name]) for name in RUN_NAMES)


def _train_all(
    initial: dict[str, torch.Tensor], batches: Batches, settings: DemoSettings, console: Console
) -> dict[str, TrainingRun]:
    """The three runs one after the other, with a progress bar each."""
    # copy=False: an error rather than a copy, so that the initial bytes are the same ones and not just equal.
    shared = {name: to_jax(tensor, copy=False) for name, tensor in initial.items()}

    def train_jax(on_step: OnStep) -> TrainingRun:
        with jax.default_device(jax.devices("cpu")[0]):
            return jax_model.train(shared, batches, settings, jax_model.logitless_loss, on_step)

    def train_torch(loss_function: torch_model.LossFunction) -> Callable[[OnStep], TrainingRun]:
        return lambda on_step: torch_model.train(initial, batches, settings, loss_function, on_step)

    trainers = {
        JAX_LOGITLESS: train_jax,
        TORCH_LOGITLESS: train_torch(torch_model.logitless_loss),
        TORCH_FULL: train_torch(torch_model.full_logits_loss),
    }
    description, loss = TextColumn("{task.description}"), TextColumn("loss {task.fields[loss]}")
    columns = (description, BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())
    trainings: dict[str, TrainingRun] = {}
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(f"{name:{max(map(len, RUN_NAMES))}}", total=settings.steps, loss="–", start=False)
            for name in RUN_NAMES
        }
        for name, task in tasks.items():
            progress.start_task(task)

            def on_step(step: int, value: float, task: TaskID = task) -> None:
                progress.update(task, completed=step + 1, loss=f"{value:.4f}")

            trainings[name] = trainers[name](on_step)
    return trainings


def _measure_scratch(
    initial: dict[str, torch.Tensor], batches: Batches, settings: DemoSettings
) -> dict[str, tuple[int, int]]:
    """For each run: the scratch of its loss, and of its framework's full-logits loss, on the first batch."""
    tokens = torch.from_numpy(batches[0])
    hidden = torch_model.hidden_states(initial, tokens[:, :-1].long(), settings).flatten(0, 1)
    target = tokens[:, 1:].flatten()
    head = initial["head"]
    arrays = [to_jax(tensor) for tensor in (hidden, head, target)]
    with _quiet_profiler():
        torch_ours, torch_full = (
            torch_model.loss_scratch_bytes(function, hidden, head, target.long())
            for function in (torch_model.logitless_loss, torch_model.full_logits_loss)
        )
    with jax.default_device(jax.devices("cpu")[0]):
        jax_ours, jax_full = (
            jax_model.loss_scratch_bytes(function, *arrays)
            for function in (jax_model.logitless_loss, jax_model.full_logits_loss)
        )
    return {
        JAX_LOGITLESS: (jax_ours, jax_full),
        TORCH_LOGITLESS: (torch_ours, torch_full),
        TORCH_FULL: (torch_full, torch_full),
    }


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """PyTorch's profiler writes a line for every start and stop to the terminal, above this level of logging."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "6"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _digest(parameters: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all parameters' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(parameters[name].numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The output folder


def _check_output(output: Path) -> None:
    """Refuse a folder that cannot be one, or that holds somebody else's files under the demo's names."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: got {str(output)!r}, which is a file, allowed is a folder")
    for name, is_own in (("curves.png", _is_own_picture), ("results.json", _is_own_numbers)):
        path = output / name
        if path.exists() and not is_own(path):
            raise ValueError(
                f"output: got {str(output)!r}, whose {name} the demo has not written and would overwrite, "
                f"allowed is a folder without {name}, or with that of an earlier demo"
            )


def _is_own_picture(path: Path) -> bool:
    return path.is_file() and f"Software\0{_PROGRAM}".encode() in path.read_bytes()


def _is_own_numbers(path: Path) -> bool:
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(numbers, dict) and numbers.get("program") == _PROGRAM


def _make_output(output: Path) -> None:
    """Make the folder and try to write there, before the minutes of training and not after."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"output: got {str(output)!r}, where nothing can be written ({reason}), allowed is a writable folder"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# The report


def _report(result: DemoResult, console: Console) -> None:
    """Table, picture and numbers; then the verdict."""
    console.print(_table(result))
    _draw(result).savefig(result.picture, metadata={"Software": _PROGRAM})
    result.numbers.write_text(json.dumps(_numbers(result), indent=1) + "\n", encoding="utf-8")
    console.print(f"curves: {escape(str(result.picture))}\nnumbers: {escape(str(result.numbers))}", soft_wrap=True)
    largest = result.largest_relative_difference
    if not largest <= RELATIVE_TOLERANCE:  # NaN is a disagreement too
        step = int(np.argmax(~(result.relative_differences <= RELATIVE_TOLERANCE)))
        raise DisagreementError(
            f"the runs' losses differ by {largest:.1e} (relative), allowed is {RELATIVE_TOLERANCE:.0e}; the first such "
            f"step is {step + 1}: {', '.join(f'{name} {losses[step]:.6f}' for name, losses in _by_name(result))}"
        )


def _by_name(result: DemoResult) -> Iterator[tuple[str, NDArray[np.float64]]]:
    return zip(RUN_NAMES, result.losses, strict=True)


def _table(result: DemoResult) -> Table:
    """Loss at some steps, and what the runs took."""
    table = Table(
        title="The same model, bytes and batches, three times",
        caption=f"Largest relative difference over all {result.settings.steps} steps: "
        f"{result.largest_relative_difference:.1e} (allowed: {RELATIVE_TOLERANCE:.0e}).\n"
        "Scratch: measured peak of the loss with its gradients, beyond inputs and gradients.",
    )
    table.add_column("", no_wrap=True)
    for name in RUN_NAMES:
        table.add_column(name.replace(", ", "\n"), justify="right", no_wrap=True)
    table.add_column("largest\ndifference", justify="right", no_wrap=True)
    losses, runs = result.losses, result.runs
    for step in np.unique(np.linspace(0, result.settings.steps - 1, 7).round().astype(int)):
        at_step = losses[:, step]
        table.add_row(f"loss at step {step + 1}", *(f"{loss:.6f}" for loss in at_step), f"{np.ptp(at_step):.1e}")
    table.add_row("all steps", "", "", "", f"{np.ptp(losses, axis=0).max():.1e}", end_section=True)
    table.add_row("median time per step", *(f"{run.training.median_step_s:.3f} s" for run in runs), end_section=True)
    table.add_row("scratch of the loss", *(_mib(run.scratch_bytes) for run in runs))
    table.add_row("with full logits", *(_mib(run.full_logits_scratch_bytes) for run in runs))
    table.add_row("ratio", *(_ratio(run) for run in runs))
    return table


def _ratio(run: DemoRun) -> str:
    return f"{run.full_logits_scratch_bytes / max(1, run.scratch_bytes):.1f} ×"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"


def _numbers(result: DemoResult) -> dict[str, object]:
    """Everything, for the JSON file."""
    packages = ("logitless", "torch", "jax", "optax", "tokenizers", "numpy")
    return {
        "program": _PROGRAM,
        "versions": {"python": python_version()} | {name: version(name) for name in packages},
        "settings": dataclasses.asdict(result.settings),
        "source": result.source,
        "text_tokens": result.text_tokens,
        "vocabulary": result.vocabulary,
        "parameter_count": result.parameter_count,
        "initial_sha256": result.initial_sha256,
        "relative_tolerance": RELATIVE_TOLERANCE,
        "largest_relative_difference": result.largest_relative_difference,
        "runs": [
            {
                "name": run.name,
                "median_step_s": run.training.median_step_s,
                "scratch_bytes": run.scratch_bytes,
                "full_logits_scratch_bytes": run.full_logits_scratch_bytes,
                "losses": run.training.losses,
                "step_times_s": run.training.step_times_s,
            }
            for run in result.runs
        ],
    }


# ---------------------------------------------------------------------------------------------------------------------
# The picture

# Colour and width. Blue, orange and grey are told apart with any kind of colour vision. The curves lie on top of one
# another, so the widest are drawn first.
_CURVES = {TORCH_FULL: ("#b8b8b8", 6.0), TORCH_LOGITLESS: ("#e69f00", 3.0), JAX_LOGITLESS: ("#0072b2", 1.2)}
_FLOAT32_SPACING = 2.0**-23


def _draw(result: DemoResult) -> Figure:
    """Loss curves, their differences below on a log axis, and the scratch memory beside them."""
    figure = Figure(figsize=(12, 7), dpi=130, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3.2, 1), height_ratios=(1.5, 1))
    curves = figure.add_subplot(grid[0, 0])
    differences = figure.add_subplot(grid[1, 0], sharex=curves)
    scratch = figure.add_subplot(grid[:, 1])
    _draw_curves(curves, result)
    _draw_differences(differences, result)
    _draw_scratch(scratch, result)
    figure.suptitle(
        "One model, the same initial bytes and batches, three times: "
        f"V = {result.vocabulary}, D = {result.settings.width}, "
        f"{result.settings.batch * result.settings.sequence} tokens a step, float32"
    )
    for axes in (curves, differences, scratch):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_curves(axes: Axes, result: DemoResult) -> None:
    by_name = dict(_by_name(result))
    steps = np.arange(1, result.settings.steps + 1)
    for name, (color, width) in _CURVES.items():
        axes.plot(
            steps, by_name[name], color=color, linewidth=width, linestyle="-", solid_capstyle="round",
            marker=_marker(result), label=name,
        )  # fmt: skip
    uniform = float(np.log(result.vocabulary))
    _draw_level(axes, uniform, f"log V\n{uniform:.2f}")
    axes.set_ylabel("loss (nats per token)")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, result: DemoResult) -> None:
    """Relative differences of each pair; equal losses are drawn at the lower edge, where a log axis has no zero."""
    by_name = dict(_by_name(result))
    steps = np.arange(1, result.settings.steps + 1)
    floor = _FLOAT32_SPACING / 4
    pairs = (
        (TORCH_LOGITLESS, TORCH_FULL, "#e69f00"),
        (JAX_LOGITLESS, TORCH_FULL, "#0072b2"),
        (JAX_LOGITLESS, TORCH_LOGITLESS, "#009e73"),
    )
    for one, other, color in pairs:
        relative = np.maximum(np.abs(by_name[one] - by_name[other]) / by_name[other], floor)
        label = f"{one} against {other}"
        axes.plot(steps, relative, color=color, linewidth=1.2, label=label, marker=_marker(result), clip_on=False)
    _draw_level(axes, RELATIVE_TOLERANCE, "allowed")
    _draw_level(axes, _FLOAT32_SPACING, "float32\nspacing")
    axes.set_yscale("log")
    largest = result.largest_relative_difference
    axes.set_ylim(floor, 4 * (max(RELATIVE_TOLERANCE, largest) if np.isfinite(largest) else 1.0))
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference (0: lower edge)")
    axes.legend(frameon=False, fontsize="small")


def _draw_scratch(axes: Axes, result: DemoResult) -> None:
    runs = {run.name: run for run in result.runs}
    labels, sizes, colors, notes = [], [], [], []
    for framework, name in (("JAX", JAX_LOGITLESS), ("PyTorch", TORCH_LOGITLESS)):
        run = runs[name]
        labels += [f"{framework},\nfull logits", f"{framework},\nlogitless"]
        sizes += [run.full_logits_scratch_bytes / _MIB, run.scratch_bytes / _MIB]
        colors += [_CURVES[TORCH_FULL][0], _CURVES[name][0]]
        notes += [_mib(run.full_logits_scratch_bytes), f"{_mib(run.scratch_bytes)}\n{_ratio(run)} less"]
    drawn = axes.bar(labels, sizes, color=colors)
    axes.bar_label(drawn, labels=notes, padding=2, fontsize="small")
    axes.set_ylabel("peak scratch of the loss with its gradients (MiB)")
    axes.tick_params(axis="x", labelsize="small")


def _draw_level(axes: Axes, level: float, label: str) -> None:
    """A dotted line across, named at its right end, outside."""
    axes.axhline(level, color="black", linewidth=0.8, linestyle=":")
    place = ("axes fraction", "data")
    axes.annotate(label, (1, level), (4, 0), place, "offset points", va="center", fontsize="small")


def _marker(result: DemoResult) -> str:
    """A line through one point is invisible."""
    return "." if result.settings.steps == 1 else ""
