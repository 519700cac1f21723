"""The parity check: every implementation on identical bytes, against float64, by the one tolerance table.

With T the float64 reference and B the ideal full-logits path of the dtype, an implementation K agrees when

    error(K, T) ≤ RATIO · error(B, T) + TINY[dtype]         for loss, dhidden, dweight and dbias

(:mod:`logitless.tolerances`). The reference itself is compared, by the same rule (in float64 by float32's), with a
second float64 computation that shares nothing with it: full logits, a row maximum, explicit gradients of the logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from logitless.doctor import INSTALL, installed
from logitless.ideal import ideal_gradients
from logitless.interop.runners import NEEDS, RUNNERS, Outputs, Runner, reference
from logitless.problems import BY_NAME, Case, Problem
from logitless.tolerances import OUTPUTS, allowance, error

Status = Literal["agrees", "disagrees", "fails", "skipped"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """One output of one implementation."""

    error: float
    """‖value − T‖ / ‖T‖."""
    ideal_error: float
    """The same of the ideal path."""
    allowed: float

    @property
    def passes(self) -> bool:
        """False also for NaN."""
        return self.error <= self.allowed

    @property
    def in_ideal_errors(self) -> float | None:
        """The error in units of the ideal path's; None where that path makes none."""
        return self.error / self.ideal_error if self.ideal_error > 0 else None


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation's result. ``reason``: why it did not run, or how it failed; else empty."""

    implementation: str
    status: Status
    measures: dict[str, Measure]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that :func:`compare` found out about one problem."""

    problem: str
    dtype: str
    sizes: dict[str, int]
    rows: tuple[Row, ...]
    required: tuple[str, ...]
    """Implementations that were asked for by name."""

    @property
    def agrees(self) -> bool:
        """No row disagrees or fails, no required one was skipped, and not only the reference has run."""
        ran = [row for row in self.rows if row.status == "agrees"]
        skipped = {row.implementation for row in self.rows if row.status == "skipped"}
        bad = any(row.status in ("disagrees", "fails") for row in self.rows) or bool(skipped & set(self.required))
        return not bad and any(row.implementation != "reference" for row in ran)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON. Infinities and NaN become None."""
        rows = []
        for row in self.rows:
            measures = {
                name: {
                    "error": _finite(m.error),
                    "ideal_error": _finite(m.ideal_error),
                    "error_over_ideal": _finite(m.in_ideal_errors),
                    "allowed": _finite(m.allowed),
                    "passes": m.passes,
                }
                for name, m in row.measures.items()
            }
            rows.append({"implementation": row.implementation, "status": row.status, "reason": row.reason, **measures})
        return {
            "problem": self.problem, "dtype": self.dtype, "sizes": self.sizes, "required": list(self.required),
            "agrees": self.agrees, "rows": rows,
        }  # fmt: skip


def compare(
    problem: str | Problem | Case, implementations: Sequence[str] | Mapping[str, Runner] | None = None
) -> Comparison:
    """Run implementations on the same bytes and compare each with float64.

    Args:
        problem: a name of ``logitless.problems.PROBLEMS``, a Problem, or a Case (your own arrays:
            :func:`logitless.interop.load_case`).
        implementations: names of "reference", "eager", "triton" (PyTorch), "xla", "pallas" (JAX), "jax_in_torch",
            "torch_in_jax" (each framework's best backend through a bridge); None: all, those that cannot run here
            skipped with the reason; what is named must run. Or a mapping from names to functions of a Case that return
            {"loss", "dhidden", "dweight", "dbias"} as float64 NumPy arrays: your own implementation.

    Returns:
        A Comparison, whose ``agrees`` is the verdict. An implementation that raises is a row with status "fails".

    Raises:
        ValueError: an unknown problem or implementation.
        TypeError: a problem of another type.
    """
    case = _case(problem)
    runners, required = _runners(implementations)
    true = reference(case)
    ideal = ideal_gradients(case)
    rows = []
    for name, runner in runners.items():
        truth = _second_route(case, true) if name == "reference" else true
        rows.append(_row(name, runner, case, truth, ideal))
    about = case.problem
    sizes = {"tokens": about.tokens, "hidden": about.hidden, "vocab": about.vocab}
    return Comparison(about.name, about.dtype, sizes, tuple(rows), required)


def _case(problem: str | Problem | Case) -> Case:
    if isinstance(problem, Case):
        return problem
    if isinstance(problem, Problem):
        return problem.case()
    if not isinstance(problem, str):
        raise TypeError(f"problem: got {type(problem).__name__}, allowed is a name, a Problem or a Case")
    if problem not in BY_NAME:
        raise ValueError(f"problem: got {problem!r}, allowed are {', '.join(BY_NAME)}")
    return BY_NAME[problem].case()


def _runners(wanted: Sequence[str] | Mapping[str, Runner] | None) -> tuple[dict[str, Runner], tuple[str, ...]]:
    """The functions to run, and the names that must not be skipped."""
    if wanted is None:
        return dict(RUNNERS), ()
    if isinstance(wanted, Mapping):
        return dict(wanted), tuple(wanted)
    if not isinstance(wanted, Sequence):
        raise TypeError(f"implementations: got {type(wanted).__name__}, allowed are names, or functions by name")
    unknown = [name for name in wanted if name not in RUNNERS]
    if isinstance(wanted, str) or unknown or not wanted:
        got = wanted if isinstance(wanted, str) or not unknown else unknown[0]
        raise ValueError(f"implementations: got {got!r}, allowed are several of {', '.join(RUNNERS)}")
    return {name: RUNNERS[name] for name in wanted}, tuple(wanted)


def _second_route(case: Case, true: Outputs) -> Outputs:
    """loss and gradients in float64 by full logits."""
    double = dataclasses.replace(case, problem=case.problem.with_dtype("float64"))
    outputs = ideal_gradients(double)
    return {name: outputs[name] for name in true}


def _row(name: str, runner: Runner, case: Case, truth: Outputs, ideal: Outputs) -> Row:
    missing = [package for package in NEEDS.get(name, ()) if not installed(package)]
    if missing:
        return Row(
            name, "skipped", {}, "; ".join(f"{package} is not installed: {INSTALL[package]}" for package in missing)
        )
    # The second float64 computation loses what full logits lose (log 2 at logits of 2²⁴). float64's own allowance would
    # be too small for it.
    dtype = "float32" if (name, case.problem.dtype) == ("reference", "float64") else case.problem.dtype
    ideal_errors = {output: error(ideal[output], truth[output]) for output in truth}
    try:
        outputs = runner(case)
        measures = {
            output: Measure(
                error(outputs[output], truth[output]), ideal_errors[output],
                allowance(ideal_errors[output], dtype),
            )
            for output in OUTPUTS
            if output in truth
        }  # fmt: skip
    except NotImplementedError as refusal:
        return Row(name, "skipped", {}, str(refusal))
    except Exception as failure:  # whatever an implementation does wrong belongs in its row
        return Row(name, "fails", {}, f"{type(failure).__name__}: {failure}")
    agrees = all(measure.passes for measure in measures.values())
    return Row(name, "agrees" if agrees else "disagrees", measures)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
