"""Random problems: each is a pure function of its seed and its number, and nothing but names and numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

# How often a backend is drawn. On one core a problem takes eager 5 ms, xla 350 ms (it compiles) and the interpreter of
# Triton's kernels 450 ms.
SHARES: dict[str, dict[str, float]] = {
    "cpu": {"eager": 0.70, "triton": 0.12, "xla": 0.18},
    "cuda": {"eager": 0.15, "triton": 0.45, "xla": 0.10, "pallas": 0.30},
}
TORCH = ("eager", "triton")

DTYPES = {
    "eager": {"float64": 0.2, "float32": 0.3, "bfloat16": 0.3, "float16": 0.2},
    "triton": {"float32": 0.35, "bfloat16": 0.35, "float16": 0.3},
    "xla": {"float64": 0.2, "float32": 0.3, "bfloat16": 0.3, "float16": 0.2},
    "pallas": {"bfloat16": 0.6, "float16": 0.4},
}
FUNCTIONS = {
    "linear_cross_entropy": 0.43, "linear_log_probs": 0.11, "cross_entropy": 0.11, "clipped_policy_loss": 0.08,
    "dpo_loss": 0.06, "kto_loss": 0.02, "distillation_loss": 0.05, "padded_index_gather": 0.04,
    "linear_token_log_probs": 0.06, "linear_top_k": 0.04, "sparse_distillation_loss": 0.04,
    "dense_distillation_loss": 0.02,
}  # fmt: skip
# Kernels are compiled once for a size of D and V and their options: on a GPU sizes come from these.
BUCKETS = (
    ((130,), 64, 300), ((4, 47), 96, 1000), ((512,), 128, 4096), ((3, 1), 64, 257), ((1,), 32, 128),
    ((2, 700), 64, 512),
)  # fmt: skip

LAYOUTS = ("contiguous", "offset", "step", "step_rows", "transposed", "expanded", "broadcast")
NUMPY_LAYOUTS = (*LAYOUTS, "negative")
TRAINED = "trained"
OF_IDS = ("linear_token_log_probs", "linear_top_k")
PER_TOKEN = ("linear_log_probs", *OF_IDS)
FROM_TARGETS = ("sparse_distillation_loss", "dense_distillation_loss")
DISTILLATIONS = ("distillation_loss", *FROM_TARGETS)
OF_TEACHERS = ("ids", "probs", "teacher")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, its arguments' data, and how it is made: names and numbers, in dicts and tuples."""

    seed: int
    index: int
    device: str
    backend: str
    function: str
    dtype: str
    shape: tuple[int, ...]
    """Of target; of padded_index_gather: (rows, indices)."""
    hidden: int
    vocab: int
    data: str
    blemish: str
    """One token with something that is no number, in its hidden state (ignored or not) or its upstream gradient; or
    with an id outside of the vocabulary."""
    options: dict[str, Any]
    arrays: dict[str, str]
    """Which optional arrays there are, and of what kind."""
    ignored: float
    upstream: str
    layouts: dict[str, str]
    needs: tuple[str, ...]
    plan: str
    plan_at: float
    """Where between its smallest and its largest value what the plan asks for lies."""
    transform: str
    extras: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def torch(self) -> bool:
        return self.backend in TORCH

    @property
    def fused(self) -> bool:
        return self.backend in ("triton", "pallas")

    @property
    def turned(self) -> bool:
        """Whether the caller's weight is [D, V]."""
        return self.options.get("weight_layout") == "dv"

    @property
    def padded_places(self) -> np.ndarray:
        """Of padded_index_gather: the index that each padded row takes, −1 for none."""
        multiple, count = self.options["pad_to_multiple"], self.shape[1]
        rows, first = [np.zeros(0, np.int64)], 0
        for size in self.options.get("group_sizes", (count,)):
            rows += [np.arange(first, first + size), np.full(-size % multiple, -1)]
            first += size
        return np.concatenate(rows)

    @property
    def count(self) -> int:
        """How many ids a token has, where a function is about several."""
        return self.options["k"] if self.function == "linear_top_k" else int(self.arrays["ids"].split()[1])

    @property
    def runs(self) -> int:
        """How often the call is made; the last one is judged. PyTorch's kernels repeat a step that they have seen."""
        if self.backend != "triton":
            return 1
        return (1, 2, 3, 5, 6)[self.index % 5] if self.device == "cuda" else (1, 4)[self.index % 2]

    def rng(self) -> np.random.Generator:
        """For the data; drawing the problem has another."""
        return np.random.default_rng([self.seed, self.index, 1])

    def choices(self) -> dict[str, str]:
        """What is counted: option → value, in words."""
        counted = {name: str(getattr(self, name)) for name in COUNTED}
        counted["needs"] = "+".join(self.needs) or "none"
        counted |= {f"layout of {name}": value for name, value in self.layouts.items()}
        counted |= {name: _in_words(value) for name, value in self.options.items()}
        counted |= {name: kind for name, kind in self.arrays.items()}
        return counted | {extra: "yes" for extra in self.extras}


# The differentiable results by function, where they are no loss.
RESULTS = {
    "linear_log_probs": ("log_prob", "entropy", "lse", "sum_p_squared"),
    "linear_token_log_probs": ("log_prob",),
    "linear_top_k": ("log_prob",),
    "padded_index_gather": ("output",),
}


class Found(NamedTuple):
    """What comes beside the log-probabilities of the largest logits."""

    ids: Any


COUNTED = ("backend", "function", "dtype", "data", "blemish", "upstream", "plan", "transform", "runs")


def _in_words(value: Any) -> str:
    return "given" if isinstance(value, float | tuple) else str(value)


class Dice:
    """Draws from a generator, in a few words."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, values: Any) -> Any:
        """One of ``values``; of a dict, a key as often as its value says."""
        if isinstance(values, dict):
            shares = np.array(list(values.values()))
            return list(values)[int(self.rng.choice(len(values), p=shares / shares.sum()))]
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def between(self, low: float, high: float) -> float:
        """A number, in few digits."""
        return float(f"{self.rng.uniform(low, high):.3g}")


def draw(seed: int, index: int, device: str = "cpu", backends: tuple[str, ...] = ()) -> Problem:
    """Problem number ``index``; of ``backends`` only, if any are named."""
    dice = Dice(np.random.default_rng([seed, index, 0]))
    shares = {name: share for name, share in SHARES[device].items() if not backends or name in backends}
    backend = dice.one(shares)
    function = dice.one(FUNCTIONS)
    dtypes = DTYPES[backend]
    if backend == "triton" and device == "cpu":  # the interpreter cuts off where bfloat16 is to be rounded
        dtypes = {name: share for name, share in dtypes.items() if name != "bfloat16"}
    dtype = dice.one(dtypes)
    data = _data(dice, function)
    shape, hidden, vocab = _sizes(dice, backend, function, data, device)
    options, arrays = _options(dice, backend, function, vocab, data)
    layered = function not in ("padded_index_gather", "dpo_loss", "kto_loss", "linear_top_k")
    none = options.get("reduction") == "none" or function in PER_TOKEN
    blemish = _blemish(dice, function, none, int(np.prod(shape)))
    upstream = _upstream(dice, none)
    needs = _needs(dice, function, arrays)
    way = _way(dice, backend, function, dtype, device)
    if backend == "triton" and device == "cpu" and blemish in ("nan_row", "dead_ignored"):
        options.pop("return_stats", None)  # the interpreter's argmax raises where all elements are NaN
    if "accumulate_own" in way["extras"] and way["plan"] == "budget":
        way["plan"] = "default"  # one chunk, or the vocab order: what that needs at least is no plan's own number
    if way["transform"] == "second" and (not needs or blemish != "none" or not np.prod(shape)):
        way["transform"] = "plain"
    problem = Problem(
        seed, index, device, backend, function, dtype, shape, hidden, vocab, data,
        blemish, options, arrays,
        ignored=dice.one((0.0, 0.0, 0.25, 0.7)) if layered and not dice.chance(0.03) else 1.0 if layered else 0.0,
        upstream="random" if blemish.endswith("upstream") else upstream,
        layouts=_one_apart(_layouts(dice, backend, function, arrays), arrays, data, blemish),
        needs=needs, **way,
    )  # fmt: skip
    if function == "linear_cross_entropy":
        problem = _with_lse_and_shift(dice, problem)
    if function == "padded_index_gather":
        problem = _with_groups(dice, problem)
    return _with_weight_layout(dice, problem) if function in ("linear_cross_entropy", "linear_log_probs") else problem


def _data(dice: Dice, function: str) -> str:
    if function in ("linear_cross_entropy", "cross_entropy", *PER_TOKEN):
        return str(dice.one({
            "random": 0.45, TRAINED: 0.12, "confident": 0.1, "confident_wrong": 0.08, "tied": 0.05, "banned": 0.12,
            "shifted": 0.08,
        }))  # fmt: skip
    return str(dice.one({"random": 0.7, TRAINED: 0.15, "confident": 0.15}))


def _sizes(dice: Dice, backend: str, function: str, data: str, device: str) -> tuple[tuple[int, ...], int, int]:
    if function == "padded_index_gather":
        return (dice.one((1, 3, 17, 64)), dice.one((0, 1, 5, 33, 130))), dice.one((1, 2, 7, 32)), 0
    if device == "cuda":
        shape, hidden, vocab = dice.one(BUCKETS)
    elif data == TRAINED and backend == "eager":
        shape, hidden, vocab = (dice.one((64, 512, 2048)),), dice.one((16, 32, 64)), dice.one((64, 300, 1000))
    else:
        small = backend != "eager"
        tokens = dice.one((1, 2, 3, 7, 16, 40) if small else (1, 2, 3, 5, 8, 17, 33, 64, 130, 300))
        shape = dice.one(((tokens,), (tokens,), (1, tokens), (2, max(1, tokens // 2)), (max(1, tokens // 3), 3)))
        if dice.chance(0.04):
            shape = dice.one(((), (0,), (2, 0)))
        hidden = dice.one((1, 2, 5, 8, 24, 31, 64))
        vocab = dice.one((2, 3, 17, 33, 64, 100, 150) if small else (1, 2, 3, 17, 33, 64, 100, 257, 300, 1000))
    if function == "dpo_loss":
        shape = (2 * dice.one((1, 2)), dice.one((1, 3, 6)))
    if function == "kto_loss":
        shape = (dice.one((1, 2, 3)), dice.one((1, 3, 6)))
    if function == "clipped_policy_loss" and len(shape) < 2:
        shape = (2, 3)
    if data in ("banned", "tied", "confident_wrong", "confident"):
        vocab = max(vocab, 5)
    return tuple(shape), hidden, vocab


def _options(dice: Dice, backend: str, function: str, vocab: int, data: str) -> tuple[dict[str, Any], dict[str, str]]:
    if function == "padded_index_gather":
        return {"pad_to_multiple": dice.one((1, 1, 4, 128))}, {}
    options: dict[str, Any] = {}
    arrays: dict[str, str] = {}
    if dice.chance(0.3):
        options["logit_scale"] = dice.between(0.3, 2.0)
    if dice.chance(0.3):
        options["softcap"] = dice.between(2.0, 40.0)
    if function not in DISTILLATIONS and dice.chance(0.25):
        options["temperature"] = dice.between(0.5, 3.0)
    if function != "cross_entropy" and dice.chance(0.2):
        options.pop("temperature", None)
        arrays["temperature"] = "per_token"
    if data != "tied" and (data == "banned" or dice.chance(0.4)) and function != "cross_entropy":
        arrays["bias"] = "given"
    if function not in ("distillation_loss", "linear_top_k") and dice.chance(0.3):
        options["ignore_index"] = dice.one((0, 1, vocab - 1, -1))
    if function in ("linear_cross_entropy", "cross_entropy"):
        options["reduction"] = dice.one(("mean", "sum", "none"))
        for name, share, low, high in (("label_smoothing", 0.25, 0.01, 0.5), ("z_loss", 0.25, 1e-4, 0.1)):
            if dice.chance(share):
                options[name] = dice.between(low, high)
        if dice.chance(0.3):
            arrays["token_weight"] = dice.one(("mask", "random", "huge", "tiny"))
        if dice.chance(0.3):
            arrays["class_weight"] = dice.one(("positive", "signed", "huge", "tiny", "spread", "sum_1", "unused"))
        if arrays.get("class_weight") == "unused":
            options.pop("label_smoothing", None)  # which uses all of them
        if options["reduction"] == "mean" and dice.chance(0.25):
            options["normalizer"] = dice.between(1.0, 300.0)
            if dice.chance(0.5):
                arrays["normalizer"] = "array"
        if dice.chance(0.4):
            options["return_stats"] = True
    elif function == "linear_log_probs":
        options["with_entropy"] = dice.chance(0.6)
        if dice.chance(0.4):
            options["return_stats"] = True
    elif function == "linear_token_log_probs":
        arrays["ids"] = f"{dice.one({'own': 0.7, 'shared': 0.3})} {dice.one((1, 2, 3, 7, 40))}"
    elif function == "linear_top_k":
        options["k"] = min(vocab, dice.one((1, 2, 5, 30, vocab)))
    else:
        _more_options(dice, function, options, arrays)
    if function == "sparse_distillation_loss":
        arrays |= {"ids": f"own {min(vocab, dice.one((1, 2, 5, max(1, vocab // 2), vocab)))}", "probs": "given"}
    return options, arrays


def _with_lse_and_shift(dice: Dice, problem: Problem) -> Problem:
    options, layouts, shape = dict(problem.options), dict(problem.layouts), problem.shape
    if dice.chance(0.25):
        options["return_lse"] = True
    if problem.blemish != "outside" and 0 not in shape and shape[-1:] > (1,) and dice.chance(0.25):
        options["shift"] = dice.one((1, 1, shape[-1] - 1))
        if layouts["target"] in ("expanded", "broadcast"):  # the last ids are not the others
            layouts["target"] = "step"
    return dataclasses.replace(problem, options=options, layouts=layouts)


def _with_groups(dice: Dice, problem: Problem) -> Problem:
    """Half of the gathers have groups, some of them empty."""
    if dice.chance(0.5):
        return problem
    count = problem.shape[1]
    ends = sorted(int(dice.rng.integers(count + 1)) for _ in range(dice.one((0, 1, 4))))
    sizes = tuple(np.diff([0, *ends, count]).tolist())
    return dataclasses.replace(problem, options=problem.options | {"group_sizes": sizes})


def _with_weight_layout(dice: Dice, problem: Problem) -> Problem:
    """A quarter of the weights are given as [D, V]; each then has a layout of that matrix."""
    if "defer" in problem.extras or not dice.chance(0.25):
        return problem
    layouts = dict(problem.layouts)
    if layouts["weight"] == "expanded":  # the same column everywhere is not the same row
        layouts["weight"] = "step"
    return dataclasses.replace(problem, options=problem.options | {"weight_layout": "dv"}, layouts=layouts)


def _more_options(dice: Dice, function: str, options: dict[str, Any], arrays: dict[str, str]) -> None:
    if dice.chance(0.5):
        arrays["mask"] = dice.one(("bool", "float32", "int64"))
    if function == "clipped_policy_loss":
        _policy_options(dice, options, arrays)
    elif function == "dpo_loss":
        _pair_options(dice, options, arrays)
    elif function == "kto_loss":
        options |= {"beta": dice.between(0.05, 2.0), "reduction": dice.one(("mean", "sum", "none"))}
        options["kl"] = dice.between(-0.2, 2.0)
        arrays |= {"desirable": dice.one(("bool", "float32", "int64"))}
        arrays["reference_log_prob"] = dice.one(("per_token", "per_sequence"))
        for name in ("desirable_weight", "undesirable_weight"):
            if dice.chance(0.3):
                options[name] = dice.between(0.1, 2.0)
    else:
        options |= {"beta": dice.one((0.0, 0.5, 0.9, 1.0)), "reduction": dice.one(("mean", "sum", "none"))}
        if "temperature" not in arrays and dice.chance(0.5):
            options["temperature"] = dice.between(0.5, 3.0)
        if dice.chance(0.4):
            options["nll_coef"] = dice.between(0.1, 2.0)
            arrays["target"] = "given"
        _teacher_options(dice, function, options, arrays)


def _teacher_options(dice: Dice, function: str, options: dict[str, Any], arrays: dict[str, str]) -> None:
    if function == "dense_distillation_loss":
        options["log_teacher"] = dice.chance(0.5)
        arrays["teacher"] = "given"
    elif function == "sparse_distillation_loss":
        options["rest"] = dice.one(("class", "spread") if options["beta"] == 1.0 else ("class", "spread", "drop"))
    else:
        if dice.chance(0.3):
            options["teacher_softcap"] = dice.between(2.0, 40.0)
        if dice.chance(0.5):
            arrays["teacher_bias"] = "given"


def _policy_options(dice: Dice, options: dict[str, Any], arrays: dict[str, str]) -> None:
    options["aggregation"] = dice.one(("token_mean", "sequence_mean"))
    arrays["advantage"] = dice.one(("per_token", "per_sequence"))
    options |= {
        "objective": dice.one({"clip": 0.7, "cispo": 0.3}),
        "ratio": dice.one({"token": 0.65, "sequence": 0.35}),
    }
    if dice.chance(0.6):
        arrays["old_log_prob"] = "given"
    if dice.chance(0.4):
        options["entropy_coef"] = dice.between(0.01, 0.5)
    if dice.chance(0.4):
        options |= {"kl_coef": dice.between(0.01, 0.5), "kl_estimator": dice.one(("k1", "k2", "k3"))}
        options["kl_times_ratio"] = dice.chance(0.5)
        arrays["reference_log_prob"] = "given"
    if dice.chance(0.4):
        options |= {"clip_low": dice.between(0.05, 1.0), "clip_high": dice.between(0.05, 2.0)}
    if options["objective"] == "clip" and dice.chance(0.3):
        options["dual_clip"] = dice.between(1.1, 3.0)
    if dice.chance(0.3):
        arrays["sampler_log_prob"] = "given"
        corrections = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        options |= {"sampler_correction": dice.one(corrections), "sampler_limit": dice.between(0.8, 3.0)}
    if dice.chance(0.3):
        options["normalizer"] = dice.between(1.0, 30.0)


def _pair_options(dice: Dice, options: dict[str, Any], arrays: dict[str, str]) -> None:
    kind = dice.one({"dpo": 0.4, "ipo": 0.15, "cpo": 0.15, "simpo": 0.15, "orpo": 0.15})
    options |= {"loss_type": kind, "beta": dice.between(0.05, 0.5), "reduction": dice.one(("mean", "sum", "none"))}
    if kind in ("dpo", "ipo"):
        arrays["reference_log_prob"] = dice.one(("per_token", "per_sequence"))
    if kind in ("dpo", "cpo", "simpo") and dice.chance(0.3):
        options["label_smoothing"] = dice.between(0.01, 0.5)
    if kind in ("dpo", "cpo", "simpo") and dice.chance(0.3):
        options["margin"] = dice.between(0.1, 1.0)
    if dice.chance(0.4):
        options["nll_coef"] = dice.between(0.0, 1.0)


def _blemish(dice: Dice, function: str, none: bool, tokens: int) -> str:
    if tokens < 2 or function not in ("linear_cross_entropy", "linear_log_probs", "cross_entropy"):
        return "none"
    kinds = {"none": 0.82, "nan_row": 0.05, "dead_ignored": 0.03, "outside": 0.04}
    if none:
        kinds |= {"nan_upstream": 0.06, "inf_upstream": 0.06}
    return str(dice.one(kinds))


def _upstream(dice: Dice, none: bool) -> str:
    return str(dice.one(("random", "random", "expanded", "step", "offset") if none else ("one", "scaled", "scaled")))


def _one_apart(layouts: dict[str, str], arrays: dict[str, str], data: str, blemish: str) -> dict[str, str]:
    """Of an array in which one element differs from the others, elements do not share memory."""
    apart = {
        "nan_row": ("hidden", "logits"),
        "dead_ignored": ("hidden", "logits", "target"),
        "outside": ("target",),
    }.get(blemish, ())
    apart = (*apart, "bias", "logits") if data == "banned" else apart
    apart = (*apart, "class_weight", "target") if arrays.get("class_weight") == "unused" else apart
    shared = ("expanded", "broadcast")
    return {name: "step" if name in apart and layout in shared else layout for name, layout in layouts.items()}


def _layouts(dice: Dice, backend: str, function: str, arrays: dict[str, str]) -> dict[str, str]:
    """Of every array but the upstream gradient: in a third of the problems all are contiguous."""
    names = {
        "padded_index_gather": ["input", "index"],
        "cross_entropy": ["logits", "target"],
        "distillation_loss": ["hidden", "weight", "teacher_hidden", "teacher_weight"],
        "linear_token_log_probs": ["hidden", "weight"],  # and ids, which are among the arrays
        "linear_top_k": ["hidden", "weight"],
        **{name: ["hidden", "weight"] for name in FROM_TARGETS},
    }.get(function, ["hidden", "weight", "target"])
    names = [*names, *(name for name in arrays if name != "normalizer")]
    if dice.chance(0.33):
        return dict.fromkeys(names, "contiguous")
    layouts = LAYOUTS if backend in TORCH else NUMPY_LAYOUTS
    drawn = {name: dice.one(layouts) if dice.chance(0.6) else "contiguous" for name in names}
    if function in FROM_TARGETS:  # one number everywhere is no distribution
        return {n: "step" if layout == "broadcast" and n in OF_TEACHERS else layout for n, layout in drawn.items()}
    return drawn


def _needs(dice: Dice, function: str, arrays: dict[str, str]) -> tuple[str, ...]:
    """The arrays that want a gradient."""
    if function in ("padded_index_gather", "cross_entropy"):
        return ("input" if function == "padded_index_gather" else "logits",)
    names = ("hidden", "weight", "bias") if "bias" in arrays else ("hidden", "weight")
    if dice.chance(0.6):
        return names
    return tuple(name for name in names if dice.chance(0.5))


def _way(dice: Dice, backend: str, function: str, dtype: str, device: str) -> dict[str, Any]:
    """The plan, the transform, and what belongs to one framework or function alone."""
    linear = function in ("linear_cross_entropy", "linear_log_probs")
    plans = {"default": 1.0}
    if linear:
        plans = {"default": 0.35, "tokens": 0.2, "vocab": 0.15, "both": 0.15, "budget": 0.15}
    if function in ("clipped_policy_loss", "dpo_loss", "kto_loss", *OF_IDS):
        plans = {"default": 0.6, "budget": 0.4}
    if function == "padded_index_gather":
        ways = {"plain": 0.7, "twice": 0.3}
    elif backend in TORCH:
        ways = {
            "plain": 0.45,
            "twice": 0.15,
            "autograd_grad": 0.1,
            "checkpoint": 0.1,
            "no_grad": 0.05,
            "downstream": 0.1,
        }
        if function in ("linear_cross_entropy", "linear_log_probs"):
            ways["func"] = 0.1
        ways["second"] = 0.03
        if backend == "eager" and device == "cpu" and linear:
            ways["compile"] = 0.003
    else:
        ways = {"plain": 0.45, "jit": 0.25, "checkpoint": 0.1, "vmap": 0.1, "downstream": 0.1}
    transform = dice.one(ways)
    if backend in TORCH and transform in ("func", "compile"):
        plans.pop("both", None)
    extras: list[str] = []
    if backend in TORCH and function == "linear_cross_entropy" and transform in ("plain", "downstream"):
        extras += [dice.one({"none": 0.7, "accumulate_float32": 0.1, "accumulate_own": 0.05, "defer": 0.15})]
    if backend in TORCH and linear and dtype == "bfloat16" and transform == "plain" and dice.chance(0.15):
        extras += ["autocast"]
    if function == "cross_entropy" and backend in TORCH and transform == "plain" and dice.chance(0.2):
        extras += ["inplace_backward"]
    return {
        "plan": dice.one(plans),
        "plan_at": round(dice.between(0.0, 1.0), 3),
        "transform": transform,
        "extras": tuple(extra for extra in extras if extra != "none"),
    }
