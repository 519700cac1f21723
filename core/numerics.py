"""The mathematics of a token's row, and of losses on log-probabilities, written once for PyTorch and JAX.

``xp`` is the array namespace: ``torch`` or ``jax.numpy``. Nothing here imports either, looks at a value, or touches the
N × V matrix: vectors go in and come out. The float64 reference (:mod:`logitless.reference`) checks this module, so it
does not use it.

With p the probabilities of token i and y its target, the gradient of a loss in the logits is (docs/design.md)

    dz_j = g (α p_j − (ε/V) k_j − β δ_jy)        β = (1 − ε) k_y,    α = β + (ε/V) Σ_j k_j + 2 λ lse

g is the upstream gradient times the token's weight. The slope of a softcap multiplies all of it. The gradient of lse
itself is p_j, without a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from logitless.objectives import (
    LARGEST_LOG_RATIO,
    LARGEST_SUM,
    Aggregation,
    DPOOptions,
    DPOStats,
    KTOOptions,
    KTOStats,
    PolicyOptions,
    PolicyStats,
    Rest,
)
from logitless.spec import (
    ALPHA_FLOOR,
    CLASS_SUMS,
    LOWEST_GAP,
    NO_ROW,
    SQUARED_SCALE,
    STATISTICS,
    LossOptions,
    Reduction,
    Statistic,
    TokenStats,
)


class Array(Protocol):
    """What this module asks of a ``torch.Tensor`` or a ``jax.Array``. Operands are arrays or numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __add__(self, other: Self | float, /) -> Self: ...
    def __radd__(self, other: Self | float, /) -> Self: ...
    def __sub__(self, other: Self | float, /) -> Self: ...
    def __rsub__(self, other: Self | float, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __rmul__(self, other: Self | float, /) -> Self: ...
    def __truediv__(self, other: Self | float, /) -> Self: ...
    def __rtruediv__(self, other: Self | float, /) -> Self: ...
    def __eq__(self, other: Self | float, /) -> Self: ...  # type: ignore[override]
    def __lt__(self, other: Self | float, /) -> Self: ...
    def __gt__(self, other: Self | float, /) -> Self: ...
    def __or__(self, other: Self | float, /) -> Self: ...
    def __and__(self, other: Self | float, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __getitem__(self, key: slice | tuple[EllipsisType, None], /) -> Self: ...
    def sum(self) -> Self: ...


A = TypeVar("A", bound=Array)
A_co = TypeVar("A_co", bound=Array, covariant=True)


class Namespace(Protocol[A]):
    """The functions of ``torch`` and ``jax.numpy`` that this module calls: same name, same arguments."""

    def where(self, condition: A, yes: A | float, no: A | float, /) -> A: ...
    def abs(self, x: A, /) -> A: ...
    def exp(self, x: A, /) -> A: ...
    def expm1(self, x: A, /) -> A: ...
    def log(self, x: A, /) -> A: ...
    def log1p(self, x: A, /) -> A: ...
    def square(self, x: A, /) -> A: ...
    def copysign(self, size: A, sign: A, /) -> A: ...
    def maximum(self, a: A, b: A, /) -> A: ...
    def amax(self, x: A, /) -> A: ...
    def sum(self, x: A, axis: int, /) -> A: ...
    def clip(self, x: A, /, min: float | None = None, max: float | None = None) -> A: ...
    def nan_to_num(self, x: A, /, *, nan: float = 0.0, posinf: float | None = None) -> A: ...
    def ones_like(self, x: A, /) -> A: ...
    def zeros_like(self, x: A, /) -> A: ...


class Tokens(Protocol[A_co]):
    """What is known of a call's tokens before the first product. Each framework's ``Inputs`` is one."""

    @property
    def ids(self) -> A_co:
        """[N] the target, 0 where ignored or outside the vocabulary."""

    @property
    def valid(self) -> A_co:
        """[N] False where ignored."""

    @property
    def inside(self) -> A_co:
        """[N] False for an id outside the vocabulary."""

    @property
    def token_weight(self) -> A_co:
        """[N] t, 0 where ignored."""

    @property
    def temperature(self) -> A_co | None:
        """[N] what divides a token's logits last of all, 1 where ignored; None: 1, or a part of the options."""

    @property
    def vocab(self) -> int:
        """V, of all ranks or devices together."""

    def target_class_weight(self) -> A_co | float:
        """[N] k_y, or 1."""

    def class_weight_sum(self) -> A_co | float:
        """Σ_j k_j."""

    def largest_class_weight(self) -> A_co | float | None:
        """max |k_j|; None where the products hold numbers of any size."""


class TokenSums(NamedTuple, Generic[A]):
    """Per token, [N] each: what the forward knows. Statistics are None unless they were asked for.

    lse = anchor + log_total is kept in two parts: where logits are large, their sum would lose what the gradient needs.
    """

    target_logit: A
    anchor: A
    """The target's logit; a rescued row's maximum."""
    log_total: A
    """log Σ_j exp(z_ij − anchor_i)."""
    weighted_logits: A | None = None
    """Σ_j k_j z_ij, for label smoothing."""
    entropy: A | None = None
    argmax: A | None = None
    """int32."""
    max_logit: A | None = None
    min_logit: A | None = None
    others_squared: A | None = None
    """Σ_{j ≠ y} p_ij²."""
    total: A | None = None
    """[] the sum of the token losses times the normalizer, where a kernel has made it in the same pass."""

    @property
    def lse(self) -> A:
        return self.anchor + self.log_total

    @property
    def nll(self) -> A:
        return (self.anchor - self.target_logit) + self.log_total


class KnownRows(NamedTuple, Generic[A]):
    """dz_ij = factor_i · slope_ij · [p_ij (alpha_i + gamma_i log p_ij + delta_i p_ij) − sigma_i k_j], and ``target`` at
    j = y_i.

    log p_ij = (z_ij − anchor_i) − log_total_i. alpha None means 1 (it is in the factor); gamma, delta and sigma None
    mean 0. Beside gamma and delta there is an alpha.
    """

    anchor: A
    log_total: A
    factor: A
    target: A
    alpha: A | None = None
    gamma: A | None = None
    delta: A | None = None
    sigma: A | None = None

    def of(self, xp: Namespace[A], valid: A) -> KnownRows[A]:
        """The rows, 0 for tokens that do not count, whatever their logits are, even −inf in every class."""
        rest = {name: values for name, values in self._asdict().items() if name != "anchor" and values is not None}
        rest = {name: xp.where(valid, values, 0.0) for name, values in rest.items()}
        return KnownRows(anchor=xp.where(valid, self.anchor, NO_ROW), **rest)

    def at(self, rows: A) -> KnownRows[A]:
        """Some of the rows."""
        present = {name: values for name, values in self._asdict().items() if values is not None}
        return KnownRows(**{name: values[rows] for name, values in present.items()})

    def unit(self, xp: Namespace[A]) -> A:
        """What is taken out of the matrix before it is rounded."""
        return largest_factor(xp, xp.maximum(xp.abs(self.factor), xp.abs(self.factor * self.target)))


# ---------------------------------------------------------------------------------------------------------------------
# From a row's sums to losses and statistics


def finish_sums(xp: Namespace[A], target_logit: A, anchor: A, s: A, gap_sum: A | None) -> tuple[A, A | None]:
    """(log Σ_j exp(z_j − anchor), entropy or None) from sums over j ≠ y.

    s = Σ exp(z_j − anchor), gap_sum = Σ exp(z_j − anchor) (z_j − anchor). log1p(s) keeps full relative accuracy for a
    confident token; a rescued row is far from being one.
    """
    gap, e_target = anchor - target_logit, xp.exp(target_logit - anchor)
    total = s + e_target
    log_total = xp.where(_is_zero(gap), xp.log1p(s), xp.log(total))
    if gap_sum is None:
        return log_total, None
    return log_total, log_total - (gap_sum + e_target * xp.clip(-gap, min=LOWEST_GAP)) / total


def moved_sums(xp: Namespace[A], sums: Mapping[str, A], step: A) -> dict[str, A]:
    """Those of ``sums`` that are relative to an anchor, by their names in CLASS_SUMS, after it has moved by −step."""
    factor, moved = xp.exp(step), {}
    for name, value in sums.items():
        row = CLASS_SUMS[name]
        if row.gap:
            value = value + sums["s"] * step
        for _ in range(row.power):
            value = value * factor
        if row.power:
            moved[name] = value
    return moved


def squared_shares(xp: Namespace[A], target_logit: A, anchor: A, s: A, squares: A) -> A:
    """Σ_{j ≠ y} p_j², from s = Σ exp(z_j − anchor) and squares = Σ (SQUARED_SCALE exp(z_j − anchor))² over j ≠ y.

    Without the target's own share nothing cancels in the gradient of a confident token.
    """
    total = SQUARED_SCALE * (s + xp.exp(target_logit - anchor))
    return squares / total / total


def sum_p_squared(xp: Namespace[A], sums: TokenSums[A]) -> A:
    """Σ_j p_j²."""
    assert sums.others_squared is not None
    return sums.others_squared + xp.exp(-2.0 * sums.nll)


def losses(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, sums: TokenSums[A]) -> A:
    """ℓ_i of every token, [N]; exactly 0 where ignored."""
    loss = _times((1.0 - options.label_smoothing) * tokens.target_class_weight(), sums.nll)
    if options.label_smoothing:
        assert sums.weighted_logits is not None
        gap = tokens.class_weight_sum() * sums.lse - sums.weighted_logits
        loss = loss + options.label_smoothing / tokens.vocab * gap
    if options.z_loss:
        loss = loss + options.z_loss * xp.square(sums.lse)
    return xp.where(tokens.valid, loss * tokens.token_weight, 0.0)


def counts(xp: Namespace[A], tokens: Tokens[A]) -> A:
    """t k_y of every token, [N], whose sum is mean's denominator.

    An ignored token stands for id 0, whose weight may be no number.
    """
    k = tokens.target_class_weight()
    return tokens.token_weight if isinstance(k, float) else xp.where(tokens.valid, tokens.token_weight * k, 0.0)


def token_stats(xp: Namespace[A], tokens: Tokens[A], sums: TokenSums[A]) -> TokenStats[A]:
    """Public statistics, [N] each, with the values of an ignored token filled in."""
    assert sums.argmax is not None
    values = {
        "nll": sums.nll,
        "lse": sums.lse,
        "target_logit": sums.target_logit,
        "entropy": sums.entropy,
        "argmax": sums.argmax,
        "correct": (sums.argmax == tokens.ids) & tokens.inside,
        "max_logit": sums.max_logit,
        "min_logit": sums.min_logit,
        "sum_p_squared": sum_p_squared(xp, sums),
    }
    zero = xp.zeros_like(sums.log_total)  # one fill for all statistics of this dtype

    def shown(name: str, row: Statistic) -> A:
        value = values[name]
        assert value is not None
        if row.dtype == "bool":
            return value & tokens.valid
        return xp.where(tokens.valid, value, row.ignored if row.dtype else zero)

    return TokenStats(**{name: shown(name, row) for name, row in STATISTICS.items()})


# ---------------------------------------------------------------------------------------------------------------------
# The rows of the gradient


def row_upstream(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, upstream: A) -> A:
    """g_i: upstream (per token or one for all) times token weight and logit_scale, divided by the token's temperature;
    exactly 0 for an ignored token."""
    return xp.where(tokens.valid, _cooled(tokens, _times(options.logit_scale, upstream * tokens.token_weight)), 0.0)


def lse_upstream(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, upstream: A) -> A:
    """The same of lse, which no token weight multiplies."""
    return xp.where(tokens.valid, _cooled(tokens, upstream * options.logit_scale), 0.0)


def _times(factor: A | float, values: A) -> A:
    """The product, for which nothing is done where the factor is the number 1: PyTorch would launch an operation."""
    return values if isinstance(factor, float) and factor == 1.0 else factor * values


def _cooled(tokens: Tokens[A], values: A) -> A:
    return values if tokens.temperature is None else values / tokens.temperature


def smooth_share(tokens: Tokens[A], options: LossOptions) -> A | float:
    """(ε/V) Σ_j k_j; without smoothing 0, whatever the weights of classes that no token has."""
    if not options.label_smoothing:
        return 0.0
    return options.label_smoothing / tokens.vocab * tokens.class_weight_sum()


def alpha_beta(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, lse: A, k: A | float) -> tuple[A, A]:
    """α_i and β_i of some tokens, from their lse and the class weights k of their targets.

    |α| is kept away from 0, because the target's element is divided by it. Where α = β for any values, they are one
    array.
    """
    beta = _times((1.0 - options.label_smoothing) * k, xp.ones_like(lse))
    if not options.label_smoothing and not options.z_loss:
        return beta, beta
    alpha = beta + smooth_share(tokens, options) + 2.0 * options.z_loss * lse
    floor = ALPHA_FLOOR * xp.abs(beta)
    return xp.where(xp.abs(alpha) < floor, xp.copysign(floor, alpha), alpha), beta


def target_over_alpha(xp: Namespace[A], alpha: A, beta: A, e_target: A, s: A) -> A:
    """T_i = ((α − β) e_y − β s) / α, without the cancellation of p − 1.

    Where α = β = 0 any finite number will do: the row's factor, which has α, is 0.
    """
    if alpha is beta:
        return -s
    divisor = xp.where(_is_zero(alpha), 1.0, alpha)
    return ((alpha - beta) * e_target - beta * s) / divisor


def sloped(xp: Namespace[A], target: A, target_logit: A, options: LossOptions, temperature: A | None) -> A:
    """The target's element times the softcap's slope there, 1 − (z / cap)², z before the tokens' own temperatures."""
    if options.softcap is None:
        return target
    z = target_logit if temperature is None else target_logit * temperature
    return target * (1.0 - xp.square(z / options.softcap))


def largest_factor(xp: Namespace[A], values: A) -> A:
    """max |value| of the finite values; 1 if all are 0 or there is none.

    Rounded values are divided by it, and multiplied again in float32. One token's inf or NaN must not reach other rows.
    """
    sizes = xp.nan_to_num(xp.abs(values), nan=0.0, posinf=0.0)
    largest = xp.amax(sizes) if values.shape[0] else sizes.sum()
    return xp.where(largest > 0, largest, 1.0)


def loss_unit(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, g: A) -> A:
    """The largest factor of a loss's rows, as far as it is known before lse: g times the class weights."""
    k, share = tokens.target_class_weight(), smooth_share(tokens, options)
    if isinstance(k, float):
        return largest_factor(xp, g)
    size = (1.0 - options.label_smoothing) * xp.abs(k) + (abs(share) if isinstance(share, float) else xp.abs(share))
    return largest_factor(xp, g * xp.where(size > 0, size, 1.0))


def known_loss_rows(
    xp: Namespace[A], tokens: Tokens[A], options: LossOptions, sums: TokenSums[A], g: A
) -> KnownRows[A]:
    """The rows of the loss's gradient when lse is known: exponentials anchored at lse are probabilities.

    A softcap and label smoothing together make a matrix of two terms. Each of its rows is scaled by its largest
    coefficient, so that the matrix holds numbers near probabilities, unless ``largest_class_weight`` is None.
    """
    k = tokens.target_class_weight()
    alpha, beta = alpha_beta(xp, tokens, options, sums.lse, k)
    p, q = xp.exp(-sums.nll), -xp.expm1(-sums.nll)
    if options.separable:
        target = sloped(xp, target_over_alpha(xp, alpha, beta, p, q), sums.target_logit, options, tokens.temperature)
        return KnownRows(sums.anchor, sums.log_total, factor=g * alpha, target=target)
    smooth = options.label_smoothing / tokens.vocab
    target = sloped(xp, (alpha - beta) * p - beta * q - smooth * k, sums.target_logit, options, tokens.temperature)
    scale, largest = xp.ones_like(alpha), tokens.largest_class_weight()
    if largest is not None:
        scale = xp.abs(alpha) + xp.abs(beta) + smooth * largest
        scale = xp.where(_is_zero(scale), 1.0, scale)
    return KnownRows(
        sums.anchor, sums.log_total, factor=g * scale, target=target / scale, alpha=alpha / scale, sigma=smooth / scale
    )


def known_loss_and_lse_rows(
    xp: Namespace[A], tokens: Tokens[A], options: LossOptions, sums: TokenSums[A], g: A, g_lse: A
) -> KnownRows[A]:
    """The rows of g ℓ + g_lse lse: dz_j = (g α + g_lse) p_j − g ((ε/V) k_j + β δ_jy).

    As :func:`known_loss_rows`, but g α + g_lse may cancel, so nothing is divided by it: each row is scaled by its
    largest coefficient, so that the matrix holds numbers near probabilities.
    """
    k = tokens.target_class_weight()
    alpha, beta = alpha_beta(xp, tokens, options, sums.lse, k)
    p, q = xp.exp(-sums.nll), -xp.expm1(-sums.nll)
    target = (g * (alpha - beta) + g_lse) * p - g * (beta * q)
    alpha = g * alpha + g_lse
    smooth = 0.0 if options.separable else options.label_smoothing / tokens.vocab
    sigma = g * smooth if smooth else None
    if sigma is not None:
        target = target - sigma * k
    scale = xp.maximum(xp.abs(alpha), xp.abs(target))
    if sigma is not None:
        largest = tokens.largest_class_weight()
        scale = xp.maximum(scale, xp.abs(sigma if largest is None else sigma * largest))
    safe = xp.where(_is_zero(scale), 1.0, scale)
    target = sloped(xp, target / safe, sums.target_logit, options, tokens.temperature)
    sigma = None if sigma is None else sigma / safe
    return KnownRows(sums.anchor, sums.log_total, factor=scale, target=target, alpha=alpha / safe, sigma=sigma)


def known_log_prob_rows(
    xp: Namespace[A], tokens: Tokens[A], options: LossOptions, sums: TokenSums[A], g_log_prob: A, g: Mapping[str, A]
) -> KnownRows[A]:
    """The rows of g₁ log p_y + g₂ H + g₃ lse + g₄ S, with ``g`` by the statistics' names and S = Σ_j p_j²:

    dz_j = g₁ (δ_jy − p_j) − g₂ p_j (log p_j + H) + g₃ p_j + 2 g₄ p_j (p_j − S)
    """
    nll = xp.clip(sums.nll, max=-LOWEST_GAP)  # p log p is 0 where p is 0
    p, q = xp.exp(-nll), -xp.expm1(-nll)
    if not g:
        target = sloped(xp, -q, sums.target_logit, options, tokens.temperature)
        return KnownRows(sums.anchor, sums.log_total, factor=-g_log_prob, target=target)
    # Scaled by the row's largest coefficient, so that the matrix holds numbers near probabilities.
    scale = xp.abs(g_log_prob)
    for values in g.values():
        scale = scale + xp.abs(values)
    safe = xp.where(_is_zero(scale), 1.0, scale)
    g1, g = g_log_prob / safe, {name: values / safe for name, values in g.items()}
    target, alpha, gamma, delta = g1 * q, -g1, None, None
    if "entropy" in g:
        assert sums.entropy is not None
        target = target - g["entropy"] * p * (sums.entropy - nll)
        alpha, gamma = alpha - g["entropy"] * sums.entropy, -g["entropy"]
    if "lse" in g:
        target, alpha = target + g["lse"] * p, alpha + g["lse"]
    if "sum_p_squared" in g:
        assert sums.others_squared is not None
        delta = 2.0 * g["sum_p_squared"]
        # p − S = p (1 − p) − Σ_{j ≠ y} p_j², where p − S would cancel.
        target = target + delta * p * (p * q - sums.others_squared)
        alpha = alpha - delta * sum_p_squared(xp, sums)
    target = sloped(xp, target, sums.target_logit, options, tokens.temperature)
    return KnownRows(sums.anchor, sums.log_total, scale, target, alpha, gamma, delta)


def _is_zero(x: A) -> A:
    return x.__eq__(0)  # mypy would call x == 0 a comparison that is always false


class LogitRows(NamedTuple, Generic[A]):
    """Of given logits: ∂ loss / ∂r_ij = slope_ij (factor_i p_ij − smooth_i k_j), with ``target`` at j = y_i; [N] each.

    log p_ij = (z_ij − anchor_i) − log_total_i.
    """

    anchor: A
    log_total: A
    factor: A
    target: A
    smooth: A | None


def logit_rows(xp: Namespace[A], tokens: Tokens[A], options: LossOptions, sums: TokenSums[A], g: A) -> LogitRows[A]:
    """The rows of the gradient in given logits.

    The target's element has 1 − p = −expm1(−nll), the other exponentials' share: p − 1 would cancel as p → 1.
    """
    k, smooth = tokens.target_class_weight(), options.label_smoothing / tokens.vocab
    beta = (1.0 - options.label_smoothing) * k
    rest = smooth_share(tokens, options) + 2.0 * options.z_loss * sums.lse
    p, q = xp.exp(-sums.nll), -xp.expm1(-sums.nll)
    target = sloped(xp, g * (rest * p - beta * q - smooth * k), sums.target_logit, options, tokens.temperature)
    factor = g * (beta + rest)
    return LogitRows(sums.anchor, sums.log_total, factor, target, smooth=g * smooth if smooth else None)


# ---------------------------------------------------------------------------------------------------------------------
# Losses on log-probabilities


def dpo(
    xp: Namespace[A], options: DPOOptions, log_prob: A, reference: A | None, counted: A, log_sigmoid: Callable[[A], A]
) -> tuple[A, DPOStats[A]]:
    """The loss of ``dpo_loss``, [] or [B], and its statistics, which still have a gradient.

    log_prob [2 B, T], 0 where a token does not count; reference None, [2 B, T] or its sums [2 B]; counted [2 B, T].
    """
    sums = xp.sum(log_prob, 1)
    scores = sums if reference is None else sums - _sequence_sums(xp, reference, counted)
    number = xp.sum(xp.where(counted, xp.ones_like(log_prob), 0.0), 1)
    if options.averaged:
        scores = scores / xp.clip(number, min=1)
    rewards = options.beta * scores
    pairs = sums.shape[0] // 2
    stats = DPOStats(sums[:pairs], sums[pairs:], rewards[:pairs], rewards[pairs:])
    losses = _pair_losses(xp, options, scores, stats, log_sigmoid)
    if options.nll_weight:
        # Of the mean over pairs the mean over all tokens of chosen sequences.
        losses = losses - options.nll_weight * pairs / xp.clip(number[:pairs].sum(), min=1) * sums[:pairs]
    return _reduced(losses, options.reduction), stats


def _pair_losses(
    xp: Namespace[A], options: DPOOptions, scores: A, stats: DPOStats[A], log_sigmoid: Callable[[A], A]
) -> A:
    """Of every pair, [B], without its share of the nll; scores [2 B]."""
    pairs = scores.shape[0] // 2
    if options.loss_type == "ipo":
        return xp.square(scores[:pairs] - scores[pairs:] - 0.5 / options.beta)
    if options.loss_type == "orpo":
        odds = _log_odds(xp, scores)
        return -options.beta * log_sigmoid(odds[:pairs] - odds[pairs:])
    margin, noise = stats.chosen_reward - stats.rejected_reward, options.label_smoothing
    if options.margin:
        margin = margin - options.margin
    return -(1 - noise) * log_sigmoid(margin) - noise * log_sigmoid(-margin)


def _log_odds(xp: Namespace[A], log_p: A) -> A:
    """log p / (1 − p), at most LARGEST_LOG_RATIO, with no gradient beyond.

    Near 1 it is made of expm1, elsewhere of log1p. Either sees only its own numbers: where() multiplies the gradient of
    the side that is not taken by 0, and that gradient must not be infinite.
    """
    log_p = xp.clip(log_p, max=-math.exp(-LARGEST_LOG_RATIO))
    near = log_p > -math.log(2.0)
    confident, other = xp.where(near, log_p, -1.0), xp.where(near, -1.0, log_p)
    return log_p - xp.where(near, xp.log(-xp.expm1(confident)), xp.log1p(-xp.exp(other)))


class KTOSequences(NamedTuple, Generic[A]):
    """What ``kto_loss`` knows of its sequences."""

    counted: A
    """[B, T] whether a token counts, bool."""
    desirable: A
    """[B] bool."""
    reference: A
    """[B, T], or its sums [B]."""
    kl: A
    """[] or [B]."""


def kto(
    xp: Namespace[A], options: KTOOptions, sequences: KTOSequences[A], log_prob: A, log_sigmoid: Callable[[A], A]
) -> tuple[A, KTOStats[A]]:
    """The loss of ``kto_loss``, [] or [B], and its statistics, which still have a gradient."""
    sums = xp.sum(log_prob, 1)
    score = sums - _sequence_sums(xp, sequences.reference, sequences.counted)
    gain = options.beta * (score - xp.clip(sequences.kl, min=0.0))
    # 1 − σ(x) = σ(−x), which keeps its digits where σ(x) is near 1.
    lost = xp.exp(log_sigmoid(xp.where(sequences.desirable, -gain, gain)))
    losses = xp.where(sequences.desirable, options.desirable_weight * lost, options.undesirable_weight * lost)
    return _reduced(losses, options.reduction), KTOStats(sums, options.beta * score)


def _sequence_sums(xp: Namespace[A], values: A, counted: A) -> A:
    """[B] from values per token [B, T], which may be anything where a token does not count; or from these sums."""
    return xp.sum(xp.where(counted, values, 0.0), 1) if len(values.shape) == 2 else values


def _reduced(losses: A, reduction: Reduction) -> A:
    total = losses if reduction == "none" else losses.sum()
    return total / max(1, losses.shape[0]) if reduction == "mean" else total


class PolicyTokens(NamedTuple, Generic[A]):
    """What ``clipped_policy_loss`` knows of its tokens, [..., T] each, but for an advantage of one per sequence."""

    counted: A
    """Whether a token counts, bool."""
    advantage: A
    old: A | None
    """log p of the policy that the ratio is about; None: of this policy."""
    reference: A | None
    sampler: A | None = None
    """log p of the program that sampled; None: of the old policy."""


def policy_losses(
    xp: Namespace[A],
    options: PolicyOptions,
    tokens: PolicyTokens[A],
    log_prob: A,
    entropy: A | None,
    constant: Callable[[A], A],
) -> tuple[A, PolicyStats[A]]:
    """The token losses of ``clipped_policy_loss``, [..., T], 0 where a token does not count; and its statistics.

    ``constant`` returns its argument without gradient.
    """

    def known(values: A) -> A:
        return xp.where(tokens.counted, values if values.shape == log_prob.shape else values[..., None], 0.0)

    advantage = known(tokens.advantage)
    old = constant(log_prob) if tokens.old is None else known(tokens.old)
    ratio, kl_ratio = _ratios(xp, options, tokens.counted, log_prob, log_prob - old, constant)
    losses, clipped = _policy_terms(xp, options, ratio, advantage, log_prob, constant)
    weight = kl = None
    if tokens.sampler is not None:
        weight = _sampler_weight(xp, options, constant(old - known(tokens.sampler)))
        losses = losses * weight
    if options.entropy_coef:
        assert entropy is not None
        losses = losses - options.entropy_coef * entropy
    if tokens.reference is not None:
        kl = _kl_estimate(xp, options, known(tokens.reference) - log_prob)
        losses = losses + options.kl_coef * (kl * kl_ratio if options.kl_times_ratio else kl)

    def shown(values: A) -> A:
        return xp.where(tokens.counted, constant(values), 0.0)

    optional = (None if values is None else shown(values) for values in (entropy, kl, weight))
    stats = PolicyStats(shown(log_prob), shown(ratio), clipped, *optional)
    return xp.where(tokens.counted, losses, 0.0), stats


def _ratios(
    xp: Namespace[A], options: PolicyOptions, counted: A, log_prob: A, difference: A, constant: Callable[[A], A]
) -> tuple[A, A]:
    """ρ of the policy's term, [..., T], and ρ of the KL term, [..., T] or [..., 1].

    difference = log p − log p_old, 0 where a token does not count. The sequence's ratio is one number for all of its
    tokens. In the policy's term it has the gradient of each token's own log p (GSPO-token, which is GSPO where the
    advantage is one for all of them).
    """
    if options.ratio == "token":
        ratio = xp.exp(_log_ratio(xp, difference))
        return ratio, ratio
    number = xp.sum(xp.where(counted, xp.ones_like(difference), 0.0), -1)
    mean = (xp.sum(difference, -1) / xp.clip(number, min=1))[..., None]
    own = xp.where(counted, constant(mean) + (log_prob - constant(log_prob)), 0.0)
    return xp.exp(_log_ratio(xp, own)), xp.exp(_log_ratio(xp, mean))


def _policy_terms(
    xp: Namespace[A], options: PolicyOptions, ratio: A, advantage: A, log_prob: A, constant: Callable[[A], A]
) -> tuple[A, A]:
    """The policy's part of the token losses, and where a bound of the ratio was taken."""
    bounded = xp.clip(constant(ratio), min=1 - options.clip_low, max=1 + options.clip_high)
    held = bounded * advantage
    if options.objective == "cispo":
        return -(held * log_prob), (bounded < ratio) | (bounded > ratio)
    clipped = held < ratio * advantage
    gains = xp.where(clipped, held, ratio * advantage)
    if options.dual_clip is not None:
        floor = options.dual_clip * advantage
        below = (advantage < 0) & (gains < floor)
        gains, clipped = xp.where(below, floor, gains), clipped | below
    return -gains, clipped


def _sampler_weight(xp: Namespace[A], options: PolicyOptions, difference: A) -> A:
    """w, [..., T] or [..., 1], from log p_old − log p_sampler, 0 where a token does not count."""
    if options.sampler_correction.startswith("sequence"):
        difference = xp.sum(difference, -1)[..., None]
    weight = xp.exp(_log_ratio(xp, difference))
    if options.sampler_correction.endswith("truncate"):
        return xp.clip(weight, max=options.sampler_limit)
    return xp.where(weight > options.sampler_limit, 0.0, weight)


def _kl_estimate(xp: Namespace[A], options: PolicyOptions, d: A) -> A:
    """Of KL(π ‖ π_ref), from d = log p_ref − log p."""
    if options.kl_estimator == "k1":
        return -d
    if options.kl_estimator == "k2":
        return 0.5 * xp.square(d)
    d = _log_ratio(xp, d)
    return xp.expm1(d) - d


def _log_ratio(xp: Namespace[A], difference: A) -> A:
    """A difference of log-probabilities, cut off where its exponential would be of no use."""
    return xp.clip(difference, min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)


def aggregate(xp: Namespace[A], losses: A, counted: A, aggregation: Aggregation, normalizer: A | float | None) -> A:
    """The loss from token losses [..., T] that are 0 where a token does not count; counted is 1 or 0 in their dtype."""
    if aggregation == "sequence_mean":
        count = xp.sum(counted, -1)
        losses = xp.sum(losses, -1) / xp.clip(count, min=1)
        counted = xp.where(count > 0, xp.ones_like(count), 0.0)
    return losses.sum() / (xp.clip(counted.sum(), min=1) if normalizer is None else normalizer)


# ---------------------------------------------------------------------------------------------------------------------
# A teacher of which a few probabilities per token are known


def is_distribution(xp: Namespace[A], probs: A, known: A, rest: Rest) -> A:
    """[N]: whether a token's probabilities [N, K] are at least 0, with a sum of at most 1 but for rounding."""
    p = xp.where(known, probs, 0.0)
    total = xp.sum(p, -1)
    wrong = xp.sum(xp.where((p > 0) | _is_zero(p), 0.0, xp.ones_like(p)), -1)  # NaN is wrong, too
    right = _is_zero(wrong) & (total < LARGEST_SUM)
    return right & (total > 0) if rest == "drop" else right


def sparse_teacher(xp: Namespace[A], probs: A, known: A, rest: Rest, vocab: int) -> tuple[A, A]:
    """The logarithms of a token's probabilities [N, K], −inf where not known, and of what the rest has, [N].

    Of "class" that is the rest's mass, of "spread" the probability of each other id. Probabilities whose sum rounding
    took above 1 are divided by it, as all are where the rest is dropped.
    """
    p = xp.where(known, probs, 0.0)
    total = xp.sum(p, -1)
    divisor = xp.where(total > 0, total, 1.0) if rest == "drop" else xp.clip(total, min=1.0)
    mass = 0.0 * total if rest == "drop" else xp.clip(1.0 - total, min=0.0)
    others = vocab - xp.sum(xp.where(known, xp.ones_like(p), 0.0), -1)
    mass = xp.where(others > 0, mass / xp.clip(others, min=1.0) if rest == "spread" else mass, 0.0)
    return xp.log(p / divisor[..., None]), xp.log(mass)
