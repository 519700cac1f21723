"""What the problem means: the dimension letters, the options, and every check of an argument.

Dimension letters, used everywhere in this project:

    N  tokens (all leading axes of ``hidden`` flattened)
    D  hidden size
    V  vocabulary size
    C  tokens in a chunk
    B  vocabulary entries in a block

The loss of token i, with raw logits r = x wᵀ + b, z = scale · r, then with a softcap z = cap · tanh(z / cap), and
last of all z / temperature:

    ℓ_i = t_i · [ (1−ε) k_{y_i} (lse_i − z_{i,y_i}) + (ε/V) Σ_j k_j (lse_i − z_ij) + λ lse_i² ]
    mean = Σ_i ℓ_i / Σ_i t_i k_{y_i}

t token weight (0 for an ignored token), k class weight, ε label smoothing, λ z-loss factor.

Nothing here imports an array library: the frameworks describe their arrays by :class:`ArrayInfo`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args

A = TypeVar("A")
"""An array of any framework."""

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")
TARGET_DTYPES = ("int32", "int64")
# Dtypes of a count that comes as an array.
COUNT_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# A row whose largest logit exceeds its target's by more than this (in nats) is anchored at its maximum instead.
# exp(40), its inverse, and both times any upstream gradient are far from the limits of float32 and bfloat16.
RESCUE_NATS = 40.0
# Logits that wait for a backward, relative to the anchor, have 16 bits: HELD_STEPS a nat, around −HELD_BELOW. So they
# range from −40 to 24 nats: what is lower is 0 as a probability, and rows with higher ones are done again. The error of
# p that comes of it is a sixth of that of rounding p to bfloat16.
HELD_STEPS = 1024.0
HELD_BELOW = 8.0
# The lowest of 16 bits, and the logit that it stands for.
HELD_NOTHING = -(2**15)
LOWEST_HELD = HELD_NOTHING / HELD_STEPS - HELD_BELOW
# A row whose sum is above this is done again. It is a little less than the exponential of the highest logit, which
# rounding must not lift out of the range.
HELD_RESCUE_SUM = 0.99 * math.exp(-HELD_NOTHING / HELD_STEPS - HELD_BELOW)

# Exponentials are multiplied by this before they are squared: of exp(RESCUE_NATS), V times, float32 has no square sum.
SQUARED_SCALE = 2.0**-32

# Where the target's logit is −inf the anchor starts here: finite, and below any logit that counts.
LOWEST_ANCHOR = -1e30

# The anchor of a row that does not count: its exponentials are 0.
NO_ROW = 1e30

# z − anchor is cut off here before it is multiplied by exp(z − anchor), which is 0 there. 0 · −inf would be NaN.
LOWEST_GAP = -1e4

# Limits of logit_scale, softcap and temperature. float32 can hold quotients of two of them.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-15, 1e15

# A divisor α_i is kept at least this far from zero, relative to β_i (signed class weights, z-loss at lse < 0).
ALPHA_FLOOR = 2.0**-20


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype name of an array of any framework."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The options that change the loss, checked. See :mod:`logitless.spec` for the formula."""

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_ignore_index(self.ignore_index)
        check_number("label_smoothing", self.label_smoothing, low=0.0, high=1.0)
        check_number("z_loss", self.z_loss, low=0.0, high=LARGEST_FACTOR)
        check_factor("logit_scale", self.logit_scale)
        if self.softcap is not None:
            check_factor("softcap", self.softcap, also="None")

    def tempered(self, temperature: float) -> LossOptions:
        """The options of z / temperature: it divides what the softcap gives, as a sampler's does.

        cap · tanh(scale · r / cap) / T = (cap / T) · tanh((scale / T) · r / (cap / T))
        """
        check_factor("temperature", temperature)
        divisor = float(temperature)
        if divisor == 1.0:
            return self
        scale, cap = self.logit_scale / divisor, None if self.softcap is None else self.softcap / divisor
        if any(not SMALLEST_FACTOR <= value <= LARGEST_FACTOR for value in (scale, cap) if value is not None):
            raise ValueError(
                f"temperature: got {temperature!r} beside logit_scale={self.logit_scale!r} and "
                f"softcap={self.softcap!r}, allowed are quotients in [{SMALLEST_FACTOR:g}, {LARGEST_FACTOR:g}]"
            )
        return dataclasses.replace(self, logit_scale=scale, softcap=cap)

    @property
    def separable(self) -> bool:
        """Whether a token's gradient is one row factor times exponentials, so that one pass is enough.

        A softcap's slope multiplies the smoothing term as well, element by element: the two together are not separable.
        """
        return self.softcap is None or self.label_smoothing == 0.0


WeightLayout = Literal["vd", "dv"]
"""How a weight comes: [V, D], as torch.nn.Linear stores it, or [D, V], as a Flax kernel lies."""


def check_weight_layout(layout: object) -> None:
    """Raise ValueError unless the layout is one."""
    if layout not in get_args(WeightLayout):
        raise ValueError(f"weight_layout: got {layout!r}, allowed are 'vd' (a weight [V, D]), 'dv' (a weight [D, V])")


def check_turned_weight(weight: tuple[int, ...], hidden: tuple[int, ...]) -> None:
    """Raise ValueError unless the shape is that of a weight [D, V] for these hidden states."""
    if len(weight) != 2 or not hidden or weight[0] != hidden[-1]:
        size = hidden[-1] if hidden else "D"
        raise ValueError(f"weight: got shape {weight}, allowed beside weight_layout='dv' is ({size}, V)")


class TokenStats(NamedTuple, Generic[A]):
    """Token statistics, shaped like ``target``; an ignored token has 0, argmax −1, correct False.

    They have no gradient, but for lse, entropy and sum_p_squared of ``linear_log_probs``.
    """

    nll: A
    """lse − target_logit: the plain negative log-likelihood, without weights, smoothing or z-loss [nats]."""
    lse: A
    """log Σ_j exp(z_ij) [nats]."""
    target_logit: A
    """z_{i,y_i}, after logit_scale, softcap and temperature."""
    entropy: A
    """−Σ_j p_ij log p_ij [nats]."""
    argmax: A
    """First index of the largest logit, int32."""
    correct: A
    """argmax == target, bool."""
    max_logit: A
    min_logit: A
    sum_p_squared: A
    """Σ_j p_ij²: the probability that two samples agree. −log of it is the Rényi-2 entropy [nats]."""


class Statistic(NamedTuple):
    """One row of the table of statistics."""

    dtype: Literal["int32", "bool"] | None = None
    """None: the dtype of sums, float32 (float64 for float64)."""
    ignored: int = 0
    """The value of an ignored token."""
    differentiable: bool = False
    """Whether ``linear_log_probs`` gives it with a gradient."""


STATISTICS = {name: Statistic() for name in TokenStats._fields}
STATISTICS |= {"argmax": Statistic("int32", ignored=-1), "correct": Statistic("bool")}
STATISTICS |= {name: Statistic(differentiable=True) for name in ("lse", "entropy", "sum_p_squared")}

Statistics = bool | Literal["entropy"]
"""Which statistics of a token are wanted: none, all of them, or the entropy alone."""


class ClassSum(NamedTuple):
    """One row of the table of what statistics are made of: gathered over a token's classes but its target."""

    merge: Literal["sum", "max", "min", "first"]
    """How two shares of the classes come together: blocks', a kernel's tiles', devices'. "first": the lowest index of
    those with the largest ``highest``."""
    needed: Literal["lse", "smoothing", "entropy", "statistics"]
    """What asks for it."""
    power: int = 0
    """How many factors exp(z − anchor) its terms have."""
    gap: bool = False
    """Whether they have a factor z − anchor, too."""


# In the order of a kernel's record of a token.
CLASS_SUMS = {
    "s": ClassSum("sum", "lse", power=1),
    "gap_sum": ClassSum("sum", "entropy", power=1, gap=True),
    "highest": ClassSum("max", "lse"),
    "lowest": ClassSum("min", "statistics"),
    "argmax": ClassSum("first", "statistics"),
    "logit_sum": ClassSum("sum", "smoothing"),  # Σ_j k_j z_ij, with the target
    "squares": ClassSum("sum", "statistics", power=2),  # Σ (SQUARED_SCALE exp(z − anchor))²
}


def class_sums(wanted: Statistics) -> tuple[str, ...]:
    """What plain operations gather for lse and the statistics ``wanted``."""
    needs = ("lse", *(("entropy",) if wanted else ()), *(("statistics",) if wanted is True else ()))
    return tuple(name for name, row in CLASS_SUMS.items() if row.needed in needs)


LogProbResults = tuple[A, *tuple[Any, ...]]
"""(log_prob, entropy or None), or (log_prob, entropy, stats): a type for both, so that either can be unpacked."""


def differentiable_statistics(wanted: Statistics) -> tuple[str, ...]:
    """Those of ``wanted`` that have a gradient in ``linear_log_probs``, in the table's order."""
    if wanted == "entropy":
        return ("entropy",)
    return tuple(name for name, row in STATISTICS.items() if row.differentiable and wanted)


def log_prob_statistics(wanted: Statistics) -> tuple[str, ...]:
    """Those that ``linear_log_probs`` returns, in the order of its results: the differentiable ones come first."""
    first = differentiable_statistics(wanted)
    return first if wanted is not True else (*first, *(name for name in STATISTICS if name not in first))


def wanted_statistics(with_entropy: object, return_stats: object) -> Statistics:
    """What ``linear_log_probs`` is asked for. Raises TypeError unless both are True or False."""
    check_flags(with_entropy=with_entropy, return_stats=return_stats)
    if return_stats:
        return True
    return "entropy" if with_entropy else False


def log_prob_results(wanted: Statistics, log_prob: A, statistics: Iterable[A]) -> LogProbResults[A]:
    """What ``linear_log_probs`` returns, from the arrays of :func:`log_prob_statistics`."""
    found = dict(zip(log_prob_statistics(wanted), statistics, strict=True))
    if wanted is not True:
        return log_prob, found.get("entropy")
    return log_prob, found["entropy"], TokenStats(**found)


def check_factor(name: str, value: object, also: str = "") -> None:
    """Check logit_scale, softcap or a temperature: a number that float32 can multiply and divide by."""
    check_number(name, value, low=SMALLEST_FACTOR, high=LARGEST_FACTOR, also=also)


def check_number(
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    also: str = "",
) -> None:
    """Raise TypeError unless ``value`` is a number, ValueError unless it is finite and between ``low`` and ``high``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        or_also = f" or {also}" if also else ""
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, allowed is a Python number{or_also}")
    number = float(value)
    inside = low < number if open_low else low <= number
    if not (math.isfinite(number) and inside and number <= high):
        left = f"{'(' if open_low else '['}{low:g}" if math.isfinite(low) else "(-inf"
        right = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise ValueError(f"{name}: got {value!r}, allowed is a finite number in {left}, {right}")


def check_ignore_index(value: object) -> None:
    """Raise TypeError unless ``value`` is an integer, ValueError unless int32 holds it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"ignore_index: got {value!r}, allowed is an integer")
    if not -(2**31) <= int(value) < 2**31:
        raise ValueError(f"ignore_index: got {value}, allowed is what an int32 target can hold")


def check_shift(value: object, target: tuple[int, ...]) -> None:
    """Check ``shift`` beside a target of this shape: an integer from 0 to T - 1, T the target's last axis.

    Raises TypeError unless it is an integer, ValueError for its size or a target without axes.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"shift: got {value!r}, allowed is an integer")
    if int(value) == 0:
        return
    if not target:
        raise ValueError(f"shift: got {value} beside a target without axes, allowed is 0")
    if not 0 < int(value) < target[-1]:
        raise ValueError(f"shift: got {value} beside a target {target}, allowed is 0 or less than its last axis")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, allowed))}")


def check_dtype(name: str, info: ArrayInfo, allowed: tuple[str, ...]) -> None:
    """Raise TypeError unless the array's dtype is one of those that are allowed."""
    if info.dtype not in allowed:
        raise TypeError(f"{name}: got dtype {info.dtype}, allowed are {', '.join(allowed)}")


def check_count(name: str, value: object, least: int, why: str = "") -> None:
    """Raise TypeError or ValueError unless the value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, allowed is an integer")
    if value < least:
        raise ValueError(f"{name}: got {value}, allowed is at least {least}{why}")


def check_flags(**values: object) -> None:
    """Raise TypeError unless every value is True or False."""
    for name, value in values.items():
        if value is not True and value is not False:
            raise TypeError(f"{name}: got {type(value).__name__} {value!r}, allowed are True and False")


def check_arrays(
    hidden: ArrayInfo,
    weight: ArrayInfo,
    target: ArrayInfo,
    bias: ArrayInfo | None = None,
    token_weight: ArrayInfo | None = None,
    class_weight: ArrayInfo | None = None,
    temperature: ArrayInfo | None = None,
    *,
    mixed_dtypes: bool = False,
) -> None:
    """Check ranks, sizes and dtypes of a call's arrays against each other.

    hidden [..., D] and weight [V, D] floating, of one dtype unless ``mixed_dtypes`` (autocast); target [...] int32 or
    int64; bias [V] of weight's dtype; token_weight and temperature [...], and class_weight [V], floating. Raises
    TypeError for a dtype, ValueError for a rank or size.
    """
    for name, info in (("hidden", hidden), ("weight", weight)):
        check_dtype(name, info, FLOAT_DTYPES)
    if hidden.dtype != weight.dtype and not mixed_dtypes:
        raise TypeError(
            f"weight: got dtype {weight.dtype} beside hidden's {hidden.dtype}, allowed is the same dtype: "
            f"cast one of them (or use autocast where the framework has it)"
        )
    check_dtype("target", target, TARGET_DTYPES)
    if len(hidden.shape) < 1:
        raise ValueError(f"hidden: got shape {hidden.shape}, allowed is [..., D]")
    if len(weight.shape) != 2:
        raise ValueError(f"weight: got shape {weight.shape}, allowed is [V, D]")
    vocab, size = weight.shape
    if hidden.shape[-1] != size:
        raise ValueError(f"hidden: got last axis {hidden.shape[-1]}, allowed is weight's D = {size}")
    if vocab < 1 or size < 1:
        raise ValueError(f"weight: got shape {weight.shape}, allowed is [V, D] with V and D at least 1")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target: got shape {target.shape}, allowed is hidden's leading axes {hidden.shape[:-1]}")
    if bias is not None:
        if bias.shape != (vocab,):
            raise ValueError(f"bias: got shape {bias.shape}, allowed is [V] = ({vocab},)")
        if bias.dtype != weight.dtype and not (mixed_dtypes and bias.dtype in FLOAT_DTYPES):
            raise TypeError(f"bias: got dtype {bias.dtype}, allowed is weight's {weight.dtype}")
    _check_weights("token_weight", token_weight, target.shape, "target's shape")
    _check_weights("temperature", temperature, target.shape, "a number, or one per token, target's shape")
    _check_weights("class_weight", class_weight, (vocab,), "[V] =")


def check_logits(
    logits: ArrayInfo,
    target: ArrayInfo,
    token_weight: ArrayInfo | None = None,
    class_weight: ArrayInfo | None = None,
) -> None:
    """Check the arrays of a loss on given logits: logits [..., V] floating, the others as :func:`check_arrays`."""
    check_dtype("logits", logits, FLOAT_DTYPES)
    check_dtype("target", target, TARGET_DTYPES)
    if len(logits.shape) < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits: got shape {logits.shape}, allowed is [..., V] with V at least 1")
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target: got shape {target.shape}, allowed is logits' leading axes {logits.shape[:-1]}")
    _check_weights("token_weight", token_weight, target.shape, "target's shape")
    _check_weights("class_weight", class_weight, logits.shape[-1:], "[V] =")


def temperature_error(position: tuple[int, ...], value: float) -> ValueError:
    """The error for one token's temperature. It is looked for only where that costs no synchronisation."""
    where = ", ".join(map(str, position))
    return ValueError(
        f"temperature: got {value:g} at index ({where}), allowed is a number in [{SMALLEST_FACTOR:g}, "
        f"{LARGEST_FACTOR:g}] for every token that counts"
    )


def check_counted(target: ArrayInfo, token_weight: ArrayInfo | None, class_weight: ArrayInfo | None) -> None:
    """Check the arrays of mean's denominator: target [...], token_weight [...], class_weight [V]."""
    check_dtype("target", target, TARGET_DTYPES)
    _check_weights("token_weight", token_weight, target.shape, "target's shape")
    if class_weight is not None and len(class_weight.shape) != 1:
        raise ValueError(f"class_weight: got shape {class_weight.shape}, allowed is [V]")
    _check_weights("class_weight", class_weight, class_weight.shape if class_weight else (), "[V] =")


def _check_weights(name: str, info: ArrayInfo | None, shape: tuple[int, ...], words: str) -> None:
    if info is None:
        return
    check_dtype(name, info, FLOAT_DTYPES)
    if info.shape != shape:
        raise ValueError(f"{name}: got shape {info.shape}, allowed is {words} {shape}")


def check_normalizer(value: object, info: ArrayInfo | None, reduction: str) -> None:
    """Check ``normalizer``: None, a finite number other than 0, or an array (``info``) without axes; "mean" only."""
    if value is None:
        return
    if reduction != "mean":
        raise ValueError(f"normalizer: got a value beside reduction={reduction!r}, allowed is only reduction='mean'")
    if info is not None:
        if info.dtype not in FLOAT_DTYPES + COUNT_DTYPES:
            raise TypeError(f"normalizer: got dtype {info.dtype}, allowed are {', '.join(FLOAT_DTYPES)} and integers")
        if info.shape != ():
            raise ValueError(f"normalizer: got shape {info.shape}, allowed is a number or an array without axes")
        return
    check_number("normalizer", value, also="an array without axes")
    if float(value) == 0.0:  # type: ignore[arg-type]
        raise ValueError("normalizer: got 0, allowed is a finite number other than 0")


def check_backend(name: str | None, known: tuple[str, ...]) -> None:
    """Raise ValueError unless ``name`` is None or one of ``known``."""
    if name is not None and name not in known:
        raise ValueError(f"backend: got {name!r}, allowed are None, {', '.join(map(repr, known))}")


def unavailable_error(name: str, reason: str, usable: str) -> NotImplementedError:
    """The error for a backend that was asked for and cannot run here; ``usable`` can."""
    return NotImplementedError(f"backend: {name!r} cannot run here: {reason}; backend={usable!r} can")


def needs_hopper(capability: str) -> str:
    """The reason of an :func:`unavailable_error` on a CUDA GPU that the kernels were not built for."""
    return f"its kernels are built for NVIDIA GPUs of compute capability 9.x (Hopper), not {capability}"


def needs_cuda(device: str) -> str:
    """The reason of an :func:`unavailable_error` on another kind of device."""
    return f"its kernels need a CUDA device, not {device}"


def out_of_range_error(
    position: tuple[int, ...], target: int, vocab: int, ignore_index: int, name: str = "target"
) -> ValueError:
    """The error for a target outside the vocabulary. It is looked for only where that costs no synchronisation."""
    where = ", ".join(map(str, position))
    return ValueError(
        f"{name}: got id {target} at index ({where}), allowed are 0 to {vocab - 1} and ignore_index = {ignore_index}"
    )


def check_gather(
    input: ArrayInfo, index: ArrayInfo, pad_to_multiple: object, group_sizes: ArrayInfo | Sequence[object] | None
) -> int:
    """Check the arguments of padded_index_gather: input [R, ...] floating, index [M] int32 or int64, G group sizes.

    Returns the rows of the result. Sizes that are an array may not be known yet. Whatever they are, M and G multiples
    less one row each are enough, and the result has as many of them as a multiple allows.
    """
    check_dtype("input", input, FLOAT_DTYPES)
    check_dtype("index", index, TARGET_DTYPES)
    if len(input.shape) < 1:
        raise ValueError(f"input: got shape {input.shape}, allowed is [R, ...]")
    if len(index.shape) != 1:
        raise ValueError(f"index: got shape {index.shape}, allowed is [M]")
    if isinstance(pad_to_multiple, bool) or not isinstance(pad_to_multiple, numbers.Integral):
        raise TypeError(f"pad_to_multiple: got {pad_to_multiple!r}, allowed is an integer")
    if pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple: got {pad_to_multiple}, allowed is at least 1")
    multiple = cast("int", pad_to_multiple)
    count, groups = index.shape[0], 1
    if isinstance(group_sizes, ArrayInfo):
        check_dtype("group_sizes", group_sizes, TARGET_DTYPES)
        if len(group_sizes.shape) != 1 or not group_sizes.shape[0]:
            raise ValueError(f"group_sizes: got shape {group_sizes.shape}, allowed is [G] with G at least 1")
        groups = group_sizes.shape[0]
    elif group_sizes is not None:
        sizes = _group_sizes(group_sizes)
        check_group_sum(sizes, count)
        return sum(-(-size // multiple) * multiple for size in sizes)
    return (count + groups * (multiple - 1)) // multiple * multiple


def _group_sizes(sizes: Sequence[object]) -> list[int]:
    found = [int(size) for size in sizes if isinstance(size, numbers.Integral) and not isinstance(size, bool)]
    if len(found) != len(sizes) or not found:
        raise TypeError(f"group_sizes: got {sizes!r}, allowed are integers, at least one, or an array [G] of them")
    return found


def check_group_sum(sizes: Sequence[int], count: int) -> None:
    """Raise ValueError unless sizes of groups, whose values are known, are those of ``count`` indices."""
    if min(sizes) < 0:
        raise ValueError(f"group_sizes: got {min(sizes)}, allowed is at least 0")
    if sum(sizes) != count:
        raise ValueError(f"group_sizes: got a sum of {sum(sizes)}, allowed is index's M = {count}")


def index_error(position: int, index: int, rows: int) -> ValueError:
    """The error for an index outside the rows. It is looked for only where that costs no synchronisation."""
    return ValueError(f"index: got {index} at position {position}, allowed are 0 to {rows - 1}")
