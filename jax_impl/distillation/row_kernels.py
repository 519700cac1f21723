"""The Pallas Mosaic GPU kernels of a distillation; jax_impl/distillation/fused.py launches them. Mirror of
torch_impl/distillation/row_kernels.py.

One program of row_losses, a warpgroup of 128 threads, owns one token: a row of V raw logits of the student and one of
the teacher, in float32. It goes over them piece by piece (pieces.py), once for the logsumexps and once or twice for the
divergence and its gradient. Every thread keeps sums of its own. They are added at the end of the row, in a fixed order.
tile_gradient makes the gradient of a tile of such rows from what was kept of them. others_sums and others_gradient are
for a teacher of a few ids and one class for all others. The formulas are those of parts.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless import spec
from logitless.jax_impl.kernels.arithmetic import (
    Factor,
    capped,
    exp,
    expm1_below,
    log1p_below,
    log1p_of_share,
    log_of_sum,
    sloped,
)
from logitless.jax_impl.kernels.launch import Arguments, References, launch
from logitless.jax_impl.kernels.pieces import Piece, Row, over

# Pieces of both sides that are asked for before the first one is worked on.
PIECES = 4

Known = dict[str, Array]
"""Numbers of a token by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student:
    """What is the same for every token."""

    student: Row
    hard: bool
    """Whether nll_coef times the hard loss is added, of the logits times the temperature."""
    nll_coef: float = 0.0
    temperature: float = 1.0
    """Of all tokens. Where each has its own, that is taken."""

    @property
    def normalizers(self) -> tuple[str, ...]:
        """The beginnings of the names of what logsumexps are taken of."""
        return "", *("others_",) * self.hard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Others(Student):
    """Of a teacher of a few ids. The student's rows are −∞ there, so what is left of them are the others."""

    @property
    def kept(self) -> tuple[str, ...]:
        """What the gradient needs of a token."""
        return "anchor", "log_total", "slope", *("others_anchor", "others_log_total", "gone") * self.hard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides(Student):
    """Of a teacher of the whole vocabulary."""

    teacher: Row
    normalize: bool
    """Whether the teacher's rows are raw logits, not log-probabilities."""
    beta: float

    @property
    def normalizers(self) -> tuple[str, ...]:
        return *super().normalizers, *("teacher_",) * self.normalize

    @property
    def kept(self) -> tuple[str, ...]:
        """What the gradient needs of a token."""
        teacher = ("teacher_anchor", "teacher_log_total") * self.normalize
        mean = ("mean",) * (self.beta != 0)
        return "anchor", "log_total", *teacher, *mean, *("others_anchor", "others_log_total", "gone") * self.hard


# ---------------------------------------------------------------------------------------------------------------------
# The mathematics of an entry


def _weighted(p: Array, log_ratio: Array) -> Array:
    """p · log_ratio, 0 where p is 0 (there log_ratio may be infinite or NaN)."""
    return jnp.where(p == 0.0, 0.0, p * log_ratio)


def _mixture_ratios(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """log (p / m) and log (q / m), of full relative precision where p and q are close."""
    gap = log_q - log_p
    smaller = jnp.where(gap > 0.0, beta, 1.0 - beta)  # its share in m
    log_m = log1p_below(smaller * expm1_below(-jnp.abs(gap)))  # log (m / max(p, q))
    return -jnp.maximum(gap, 0.0) - log_m, jnp.minimum(gap, 0.0) - log_m


def _divergence_terms(log_p: Array, log_q: Array, beta: float) -> dict[str, Array]:
    """Each entry's share of the divergence, and of the mean Σ_j q (log q − log m), which the forward KL has not."""
    p, q = exp(log_p), exp(log_q)
    if beta == 0:
        return {"divergence": (_weighted(p, log_p - log_q) - p) + q}
    if beta == 1:
        own = _weighted(q, log_q - log_p)
        return {"divergence": (own - q) + p, "mean": own}
    from_p, from_q = _mixture_ratios(log_p, log_q, beta)
    own = _weighted(q, from_q)
    return {"divergence": beta * _weighted(p, from_p) + (1.0 - beta) * own, "mean": own}


def _divergence_slope(log_p: Array, log_q: Array, known: Known, beta: float) -> Array:
    """The divergence's gradient in the student's logits."""
    if beta == 0:
        return exp(log_q) - exp(log_p)
    if beta == 1:
        return _weighted(exp(log_q), (log_q - log_p) - known["mean"])
    _, gap = _mixture_ratios(log_p, log_q, beta)
    return (1.0 - beta) * _weighted(exp(log_q), gap - known["mean"])


# ---------------------------------------------------------------------------------------------------------------------
# One token


def _put(r: References, number: Array, piece: Piece, row: Row, value: Array) -> None:
    """A piece of the gradient."""
    out, first = r["gradient"], r["first"][0] if "first" in r else 0
    out[first + number, pl.ds(piece.start, row.lanes)] = value.astype(out.dtype)


def _put_zeros(r: References, number: Array, row: Row) -> None:
    def zeros(pieces: Sequence[Piece], _: None) -> None:
        for piece in pieces:
            _put(r, number, piece, row, row.filled(0.0))

    over(row, zeros, None, PIECES)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """A piece of a row whose logsumexps are known."""

    piece: Piece
    z: Array
    log_q: Array
    log_p: Array


@dataclasses.dataclass(frozen=True)
class _Token:
    """The token of this program, which counts."""

    sides: Student
    r: References
    number: Array
    target: Array | None
    """Counted from the first column of its rows; None without a hard loss."""
    temperature: Factor

    def logits(self, pieces: Sequence[Piece]) -> list[Array]:
        """The student's f(r + b) of these pieces, all asked for before the first is used; −∞ at a teacher's ids."""
        row = self.sides.student
        raw = self._loaded("student", row, pieces)
        logits = self._logits("student", row, raw, pieces)
        if row.cap is None or not isinstance(self.sides, Others):
            return logits
        return [jnp.where(r == -math.inf, r, z) for r, z in zip(raw, logits, strict=True)]

    def normalized(self, pieces: Sequence[Piece]) -> dict[str, list[Array]]:
        """The logits of every side whose logsumexp is wanted, by the beginning of its name."""
        return {"": self.logits(pieces)}

    def whole(self, dz: Array, z: Array, piece: Piece, known: Known) -> Array:
        """The gradient of the student's r + b, but for logit_scale: of both losses, through the softcap. ``dz``: that
        of the divergence in the logits z."""
        row = self.sides.student
        if self.target is not None:
            others = exp((z * self.temperature - known["others_anchor"]) - known["others_log_total"])
            own = row.columns() == self.target - piece.start
            dz = dz + known["gone"] * jnp.where(own, -1.0, others)
        return sloped(dz, z, self.scale_and_cap(row)[1])

    def scale_and_cap(self, row: Row) -> tuple[Factor, Factor | None]:
        """Divided by the token's own temperature: f(r) / T is f with these two."""
        if "temperature" not in self.r:
            return row.scale, row.cap
        return row.scale / self.temperature, None if row.cap is None else row.cap / self.temperature

    def put(self, piece: Piece, gradient: Array) -> None:
        _put(self.r, self.number, piece, self.sides.student, gradient)

    def _loaded(self, side: str, row: Row, pieces: Sequence[Piece]) -> list[Array]:
        return [piece.of(self.r[side].at[self.number], row) for piece in pieces]

    def _logits(self, side: str, row: Row, values: Sequence[Array], pieces: Sequence[Piece]) -> list[Array]:
        """f(r + b)"""
        if f"{side}_bias" in self.r:
            biases = [piece.of(self.r[f"{side}_bias"], row) for piece in pieces]
            values = [r + b for r, b in zip(values, biases, strict=True)]
        return [capped(r, *self.scale_and_cap(row)) for r in values]


@dataclasses.dataclass(frozen=True)
class _Pair(_Token):
    """The same, beside a teacher of the whole vocabulary."""

    sides: Sides

    def teacher_logits(self, pieces: Sequence[Piece]) -> list[Array]:
        """Or its log-probabilities."""
        row = self.sides.teacher
        raw = self._loaded("teacher", row, pieces)
        return self._logits("teacher", row, raw, pieces) if self.sides.normalize else raw

    def normalized(self, pieces: Sequence[Piece]) -> dict[str, list[Array]]:
        found = super().normalized(pieces)
        return found | {"teacher_": self.teacher_logits(pieces)} if self.sides.normalize else found

    def entries(self, pieces: Sequence[Piece], known: Known) -> list[_Entries]:
        """Both sides of these pieces."""
        both = self.logits(pieces), self.teacher_logits(pieces)

        def entries(piece: Piece, z: Array, t: Array) -> _Entries:
            log_q = (z - known["anchor"]) - known["log_total"]
            if self.sides.normalize:
                t = (t - known["teacher_anchor"]) - known["teacher_log_total"]
            return _Entries(piece, z, log_q, t)

        return [entries(piece, z, t) for piece, z, t in zip(pieces, *both, strict=True)]

    def put_slope(self, of: _Entries, known: Known, factor: Factor = 1.0) -> None:
        """Store the gradient times ``factor``."""
        dz = _divergence_slope(of.log_p, of.log_q, known, self.sides.beta)
        self.put(of.piece, self.whole(dz, of.z, of.piece, known) * factor)


AnyToken = TypeVar("AnyToken", bound=_Token)


def _token(kind: type[AnyToken], sides: Student, r: References, number: Array) -> AnyToken:
    target = r["target"][number] if sides.hard else None
    return kind(sides, r, number, target, r["temperature"][number] if "temperature" in r else sides.temperature)


def _put_gradient(token: _Pair, known: Known, factor: Factor = 1.0) -> None:
    def write(pieces: Sequence[Piece], _: None) -> None:
        for each in token.entries(pieces, known):
            token.put_slope(each, known, factor)

    over(token.sides.student, write, None, PIECES)


# ---------------------------------------------------------------------------------------------------------------------
# The losses

Lanes = tuple[Array, Array]
"""Every lane's largest logit, and its Σ exp(z − largest)."""


def _more(lanes: Lanes, logits: Sequence[Array]) -> Lanes:
    """With a logit of each piece more, and one rescaling for all of them."""
    highest, total = lanes
    top = highest
    for z in logits:
        top = jnp.maximum(top, z)
    total = total * exp(highest - top)
    for z in logits:
        total = total + exp(z - top)
    return top, total


def _joined(lanes: Lanes) -> tuple[Array, Array]:
    """The lanes' as those of the row: the largest logit, and log Σ exp(z − largest)."""
    highest, total = lanes
    top = jnp.max(highest)
    return top, log_of_sum(jnp.sum(total * exp(highest - top)))


def _normalizers(token: _Token) -> Known:
    """One read of the rows: the logsumexp of each in two parts, and for a hard loss that of all but the target."""
    row = token.sides.student
    columns, begin = row.columns(), (row.filled(spec.LOWEST_ANCHOR), row.filled(0.0))

    def add(pieces: Sequence[Piece], lanes: dict[str, Lanes]) -> dict[str, Lanes]:
        found = token.normalized(pieces)
        if token.target is not None:
            own = [columns == token.target - piece.start for piece in pieces]
            scaled = [z * token.temperature for z in found[""]]
            found["others_"] = [jnp.where(is_own, -math.inf, z) for is_own, z in zip(own, scaled, strict=True)]

        def counted(logits: Sequence[Array]) -> list[Array]:
            return [piece.counted(columns, row, z, -math.inf) for piece, z in zip(pieces, logits, strict=True)]

        return {name: _more(lanes[name], counted(logits)) for name, logits in found.items()}

    known: Known = {}
    for name, lanes in over(row, add, dict.fromkeys(token.sides.normalizers, begin), PIECES).items():
        known[f"{name}anchor"], known[f"{name}log_total"] = _joined(lanes)
    return known


def _hard_loss(token: _Pair, known: Known) -> Known:
    """Its loss, and what its gradient needs."""
    r, row, sides = token.r, token.sides.student, token.sides
    raw = r["student"][token.number, token.target]
    raw = raw + r["student_bias"][token.target] if "student_bias" in r else raw
    own = token.temperature * capped(raw, *token.scale_and_cap(row))
    odds = (known["others_anchor"] - own) + known["others_log_total"]  # log ((1 − q) / q)
    loss = sides.nll_coef * (jnp.maximum(odds, 0.0) + log1p_of_share(exp(-jnp.abs(odds))))
    gone = sides.nll_coef * token.temperature / (1.0 + exp(-odds))  # 1 − q: no difference
    others = jnp.where(known["others_log_total"] == -math.inf, 0.0, known["others_log_total"])
    return {"loss": loss, "gone": gone, "others_log_total": others}


def _divergence(token: _Pair, known: Known, store: bool) -> Known:
    """The divergence, and what else its sums are; and if ``store``, the gradient, which needs none of them."""
    row, beta = token.sides.student, token.sides.beta
    columns = row.columns()

    def add(pieces: Sequence[Piece], lanes: dict[str, Array]) -> dict[str, Array]:
        for each in token.entries(pieces, known):
            terms = _divergence_terms(each.log_p, each.log_q, beta)
            lanes = {name: lanes[name] + each.piece.counted(columns, row, more) for name, more in terms.items()}
            if store:
                token.put_slope(each, known)
        return lanes

    begin = dict.fromkeys(("divergence", *("mean",) * (beta != 0)), row.filled(0.0))
    return {name: jnp.sum(lanes) for name, lanes in over(row, add, begin, PIECES).items()}


def row_losses(sides: Sides, arguments: Arguments, *, keep: bool) -> dict[str, Array]:
    """Of every token the loss, [C]; if ``keep``, what :func:`tile_gradient` needs, [C] each, by name; and where a
    matrix is given for it, the gradient of the student's r + b but for logit_scale.

    For a token that does not count, of which nothing is read, loss and gradient are zeros, and what is kept means
    nothing.

    Arguments: student and teacher [C, width] float32; valid [C] int32; student_bias and teacher_bias [width] float32,
    or none; target [C] int32 for a hard loss; temperature [C] float32 where each token has its own; gradient
    [≥ first + C, width], a reference, whose rows from ``first``, [1] int32, are written; or none.
    """
    tokens, store = arguments["student"].shape[0], "gradient" in arguments
    outputs = dict.fromkeys(("loss", *sides.kept * keep), jax.ShapeDtypeStruct((tokens,), jnp.float32))
    at_once = sides.beta == 0  # the forward KL's gradient needs no sum over the row

    def body(r: References) -> None:
        number = lax.axis_index("program")
        valid = r["valid"][number]

        @pl.when(valid != 0)
        def _() -> None:
            token = _token(_Pair, sides, r, number)
            known = _normalizers(token)
            if sides.hard:
                known |= _hard_loss(token, known)
            known |= _divergence(token, known, store=store and at_once)
            r["loss"][number] = known["divergence"] + known["loss"] if sides.hard else known["divergence"]
            if store and not at_once:
                _put_gradient(token, known)
            for name in sides.kept * keep:
                r[name][number] = known[name]

        @pl.when(valid == 0)
        def _() -> None:
            r["loss"][number] = jnp.float32(0.0)
            if store:
                _put_zeros(r, number, sides.student)

    return launch(body, arguments, outputs, name="distillation_rows", options=(sides, keep), grid=tokens)


# ---------------------------------------------------------------------------------------------------------------------
# The gradient of a tile


def tile_gradient(sides: Sides, arguments: Arguments, dtype: DTypeLike) -> Array:
    """A tile of the gradient of :func:`row_losses` times the token's factor, [C, width], from what that has kept.

    Arguments: those of :func:`row_losses`, of the tile's columns, of which the first one is ``target`` 0; factor and
    what is kept, [C] float32 each.
    """

    def body(r: References) -> None:
        number = lax.axis_index("program")
        valid = r["valid"][number]

        @pl.when(valid != 0)
        def _() -> None:
            token = _token(_Pair, sides, r, number)
            _put_gradient(token, {name: r[name][number] for name in sides.kept}, r["factor"][number])

        pl.when(valid == 0)(lambda: _put_zeros(r, number, sides.student))

    tokens, width = arguments["student"].shape
    outputs = {"gradient": jax.ShapeDtypeStruct((tokens, width), dtype)}
    return launch(body, arguments, outputs, name="distillation_tile", options=sides, grid=tokens)["gradient"]


# ---------------------------------------------------------------------------------------------------------------------
# A few ids and the others


def others_sums(of: Others, arguments: Arguments) -> dict[str, Array]:
    """Of every token the logsumexp of the others in two parts, anchor and log_total (−∞ where there are none), [C]
    each; for a hard loss that of the others but the target too, others_anchor and others_log_total.

    For a token that does not count, of which nothing is read, they mean nothing.

    Arguments: those of :func:`row_losses` without the teacher's, of rows of student that are −∞ at the ids.
    """
    tokens = arguments["student"].shape[0]
    names = [f"{name}{part}" for name in of.normalizers for part in ("anchor", "log_total")]

    def body(r: References) -> None:
        number = lax.axis_index("program")

        @pl.when(r["valid"][number] != 0)
        def _() -> None:
            known = _normalizers(_token(_Token, of, r, number))
            for name in names:
                r[name][number] = known[name]

    outputs = dict.fromkeys(names, jax.ShapeDtypeStruct((tokens,), jnp.float32))
    return launch(body, arguments, outputs, name="distillation_others", options=of, grid=tokens)


def others_gradient(of: Others, arguments: Arguments, dtype: DTypeLike | None) -> dict[str, Array]:
    """The gradient of the student's r + b but for logit_scale, as if no entry were an id, and times the token's factor
    where there is one: to ``gradient`` as of :func:`row_losses`, or, of this dtype, by that name, [C, width].

    Arguments: those of :func:`others_sums`, of whole rows or of a tile whose first column is ``target`` 0; what is
    kept, [C] float32 each, of which ``slope`` is the divergence's gradient in the logit of the others' class; factor
    [C] float32, or none.
    """
    row, (tokens, width) = of.student, arguments["student"].shape

    def body(r: References) -> None:
        number = lax.axis_index("program")
        valid = r["valid"][number]

        @pl.when(valid != 0)
        def _() -> None:
            token = _token(_Token, of, r, number)
            known = {name: r[name][number] for name in of.kept}
            factor = r["factor"][number] if "factor" in r else 1.0

            def write(pieces: Sequence[Piece], _: None) -> None:
                for piece, z in zip(pieces, token.logits(pieces), strict=True):
                    dz = known["slope"] * exp((z - known["anchor"]) - known["log_total"])
                    token.put(piece, token.whole(dz, z, piece, known) * factor)

            over(row, write, None, PIECES)

        pl.when(valid == 0)(lambda: _put_zeros(r, number, row))

    outputs = {} if dtype is None else {"gradient": jax.ShapeDtypeStruct((tokens, width), dtype)}
    return launch(body, arguments, outputs, name="distillation_others_gradient", options=of, grid=tokens)
