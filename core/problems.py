"""The list of problems for tests, parity checks and benchmarks. Each has a name, tags and a seed.

A :class:`Problem` describes the arrays; :meth:`Problem.case` makes them in NumPy. Their values are rounded to the
problem's dtype and held in float32 (float64). Every framework converts them exactly, so all see the same values.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from logitless.rounding import Floats, round_to
from logitless.spec import LossOptions

Recipe = Literal[
    "random", "shifted_up", "shifted_down", "confident", "confident_wrong", "tied", "minus_inf", "trained", "banned"
]  # fmt: skip

CONFIDENCES = (0.9, 0.99, 0.999, 0.9999, 0.99999)
WRONG_NATS = (50.0, 80.0, 120.0, 500.0, 5000.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What to compute, and on what kind of data."""

    name: str
    shape: tuple[int, ...]
    """Shape of target; hidden has one more axis of size ``hidden``."""
    hidden: int
    vocab: int
    dtype: str = "float32"
    options: LossOptions = LossOptions()  # noqa: RUF009 (frozen)
    bias: bool = False
    ignored: float = 0.0
    """Share of tokens whose target is ``options.ignore_index``."""
    token_weight: Literal["none", "mask", "random"] = "none"
    class_weight: Literal["none", "positive", "signed"] = "none"
    normalizer: float | None = None
    upstream: float = 1.0
    recipe: Recipe = "random"
    tags: tuple[str, ...] = ()
    seed: int = 0

    @property
    def tokens(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def with_dtype(self, dtype: str) -> Problem:
        """The same problem in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def with_options(self, **changes: object) -> Problem:
        """The same problem with other loss options."""
        options = dataclasses.replace(self.options, **changes)  # type: ignore[arg-type]  # the options check themselves
        return dataclasses.replace(self, options=options)

    def case(self) -> Case:
        """Make the arrays; the same ones on every machine."""
        return _make_case(self)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem's arrays in NumPy: ids in int64, values of the problem's dtype in float32 or float64."""

    problem: Problem
    hidden: Floats
    weight: Floats
    target: NDArray[np.int64]
    bias: Floats | None
    token_weight: Floats | None
    class_weight: Floats | None
    upstream: Floats
    """Gradient of the loss: a scalar, or for reduction="none" one number per token."""

    def normalizer(self) -> float:
        """What the summed losses are divided by: mean's denominator, or 1."""
        if self.problem.options.reduction != "mean":
            return 1.0
        if self.problem.normalizer is not None:
            return self.problem.normalizer
        target = self.target.reshape(-1)
        valid = target != self.problem.options.ignore_index
        t = np.ones(target.size) if self.token_weight is None else self.token_weight.reshape(-1).astype(np.float64)
        k = np.ones(self.problem.vocab) if self.class_weight is None else self.class_weight.astype(np.float64)
        counts = np.where(valid, t * k[np.where(valid, target, 0)], 0.0)
        return float(counts.sum()) if np.any(counts != 0) else np.inf

    def upstream_rows(self) -> NDArray[np.float64]:
        """The factor g of every token, [N]: the upstream gradient divided by the normalizer."""
        rows = np.broadcast_to(self.upstream, self.problem.shape).reshape(-1).astype(np.float64)
        return rows / self.normalizer()

    def commonest_targets(self, count: int = 10) -> NDArray[np.int64]:
        """The most frequent ids. Their rows of dW hold the largest sums."""
        target = self.target.reshape(-1)
        ids, counts = np.unique(target[target != self.problem.options.ignore_index], return_counts=True)
        return ids[np.argsort(-counts, kind="stable")[:count]]

    def given_ids(self, count: int, *, shared: bool = False) -> NDArray[np.int64]:
        """``count`` ids for every token, [..., count], or [count] for all of them; some are ignored.

        A token's target is among its own, and where there are four or more so is an id twice. An ignored token's are
        all ignored.
        """
        problem = self.problem
        rng = np.random.default_rng([problem.seed, zlib.crc32(problem.name.encode()), count, shared])
        shape = () if shared else problem.shape
        ids = rng.integers(0, problem.vocab, (*shape, count))
        ignored = rng.random(ids.shape) < 0.2 * (count > 1)
        if count > 3:
            ids[..., 2] = ids[..., 0]
        if not shared:
            ids[..., count // 2], ignored[..., count // 2] = self.target, False
            ignored |= (self.target == problem.options.ignore_index)[..., None]
        return np.where(ignored, problem.options.ignore_index, ids)

    def reduce(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Token losses [N] to the problem's reduction."""
        if self.problem.options.reduction == "none":
            return losses.reshape(self.problem.shape)
        return np.asarray(losses.sum() / self.normalizer())


def _make_case(problem: Problem) -> Case:
    rng = np.random.default_rng([problem.seed, zlib.crc32(problem.name.encode())])
    tokens, size, vocab = problem.tokens, problem.hidden, problem.vocab
    x: Floats = rng.standard_normal((tokens, size))
    w: Floats = rng.standard_normal((vocab, size)) * size**-0.5
    b: Floats | None = rng.standard_normal(vocab) if problem.bias else None
    y = rng.integers(0, vocab, tokens)
    x, w, b = _apply_recipe(problem.recipe, x, w, b, y)
    if problem.recipe == "trained":
        y[:] = _drawn_targets(problem.options, x, w, b, rng)
    ignored = rng.random(tokens) < problem.ignored
    y = np.where(ignored, problem.options.ignore_index, y).astype(np.int64)
    t = {"none": None, "mask": (rng.random(tokens) < 0.7) * 1.0, "random": rng.uniform(0.1, 2.0, tokens)}
    k = {"none": None, "positive": rng.uniform(0.2, 2.0, vocab), "signed": rng.standard_normal(vocab) + 0.7}
    token_weight, class_weight = t[problem.token_weight], k[problem.class_weight]
    per_token = problem.options.reduction == "none"
    upstream = rng.standard_normal(tokens).reshape(problem.shape) if per_token else np.asarray(1.0)
    side = "float64" if problem.dtype == "float64" else "float32"
    return Case(
        problem,
        hidden=round_to(x, problem.dtype).reshape(*problem.shape, size),
        weight=round_to(w, problem.dtype),
        target=y.reshape(problem.shape),
        bias=None if b is None else round_to(b, problem.dtype),
        token_weight=None if token_weight is None else round_to(token_weight, side).reshape(problem.shape),
        class_weight=None if class_weight is None else round_to(class_weight, side),
        upstream=round_to(upstream * problem.upstream, side),
    )


def _drawn_targets(
    o: LossOptions, x: Floats, w: Floats, b: Floats | None, rng: np.random.Generator
) -> NDArray[np.int64]:
    """One id per token, drawn from the model's own softmax."""
    z = o.logit_scale * (x @ w.T + (0.0 if b is None else b))
    z = z if o.softcap is None else o.softcap * np.tanh(z / o.softcap)
    p = np.exp(z - z.max(axis=1, keepdims=True)).cumsum(axis=1)
    ids: NDArray[np.int64] = (p < rng.random((len(p), 1)) * p[:, -1:]).sum(axis=1)
    return ids


def _apply_recipe(
    recipe: Recipe, x: Floats, w: Floats, b: Floats | None, y: NDArray[np.int64]
) -> tuple[Floats, Floats, Floats | None]:
    """Turn random data into the recipe's case. x, w and y are changed in place."""
    tokens, size = x.shape
    vocab = w.shape[0]
    if recipe == "shifted_up":
        b = (0.0 if b is None else b) + np.full(vocab, 1000.0)
    elif recipe == "shifted_down":
        b = (0.0 if b is None else b) + np.full(vocab, -1000.0)
    elif recipe == "minus_inf":
        b = np.zeros(vocab) if b is None else b
        b[-1] = -np.inf
        y[:] = y % (vocab - 1)
    elif recipe == "banned":  # no target is a banned id; id 0, which stands for an ignored token's, is banned
        b = np.zeros(vocab) if b is None else b
        b[::7] = -np.inf
        y[:] = np.where(y % 7 == 0, y % (vocab - 1) + 1, y)
        y[:] = np.where(y % 7 == 0, 1, y)
    elif recipe == "trained":  # one hidden axis gives a Zipf distribution, which most heads learn first
        x[:, 0], w[:, 0] = 3.0, -np.log(np.arange(1, vocab + 1.0)) / 3.0
    elif recipe == "tied":  # two classes at 2²⁴, the others at 0
        x[:], w[:] = 0.0, 0.0
        x[:, 0], w[:2, 0] = 2.0**12, 2.0**12
        y[:] = np.arange(tokens) % 2
    elif recipe in ("confident", "confident_wrong"):
        # Targets cycle over a few classes. Each class has a hidden axis of its own: its logit is one product of two
        # numbers, and all other logits are 0.
        classes = min(size, vocab - 1, 8)
        y[:] = np.arange(tokens) % classes
        x[:], w[:] = 0.0, 0.0
        w[np.arange(classes), np.arange(classes)] = 1.0
        if recipe == "confident":
            p = np.array(CONFIDENCES)[(np.arange(tokens) // classes) % len(CONFIDENCES)]
            x[np.arange(tokens), y] = np.log(p / (1 - p) * (vocab - 1))
        else:
            nats = np.array((*WRONG_NATS, 0.0, 0.0))[(np.arange(tokens) // classes) % (len(WRONG_NATS) + 2)]
            x[np.arange(tokens), (y + 1) % classes] = nats
    return x, w, b


ALL_OPTIONS = LossOptions(ignore_index=42, label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
MOST_OPTIONS = LossOptions(ignore_index=42, label_smoothing=0.1, z_loss=1e-4, logit_scale=1.5)

PROBLEMS: tuple[Problem, ...] = (
    # Shaped like the heads of models, scaled down in tokens and width.
    Problem("block", (8, 128), 1024, 4096, tags=("model", "large")),
    Problem("block_bias", (8, 128), 1024, 4096, bias=True, tags=("model", "large")),
    Problem(
        "block_all", (8, 128), 1024, 4096, options=ALL_OPTIONS, bias=True, ignored=0.2, class_weight="positive",
        tags=("model", "large"),
    ),
    Problem("gpt2", (2, 24), 48, 50257, ignored=0.25, tags=("model", "odd")),
    Problem("qwen", (2, 8), 32, 152063, tags=("model", "odd")),
    Problem("gemma", (4, 32), 72, 8192, options=LossOptions(softcap=30.0), tags=("model",)),
    Problem("cohere", (4, 32), 64, 4000, options=LossOptions(logit_scale=0.0625), tags=("model",)),
    Problem("sft", (4, 64), 64, 2048, options=LossOptions(z_loss=1e-4), ignored=0.5, normalizer=77.0, tags=("model",)),
    # Odd sizes, every option.
    Problem("odd", (4, 47), 31, 123, tags=("odd",)),
    Problem("odd_bias", (4, 47), 31, 123, bias=True, upstream=3.0, tags=("odd",)),
    Problem(
        "odd_all", (4, 47), 31, 123, options=ALL_OPTIONS, bias=True, ignored=0.2, class_weight="positive",
        tags=("odd",),
    ),
    Problem(
        "odd_most", (4, 47), 31, 123, options=MOST_OPTIONS, bias=True, ignored=0.2, class_weight="positive",
        token_weight="random", upstream=-2.5, tags=("odd",),
    ),
    Problem(
        "odd_softcap", (4, 47), 31, 123, options=LossOptions(softcap=2.0, logit_scale=1.5, z_loss=1e-3), bias=True,
        token_weight="random", tags=("odd",),
    ),
    Problem("odd_sum", (4, 47), 31, 123, options=LossOptions("sum"), token_weight="mask", tags=("odd",)),
    Problem("odd_none", (4, 47), 31, 123, options=LossOptions("none"), bias=True, ignored=0.2, tags=("odd",)),
    Problem(
        "odd_none_all", (4, 47), 31, 123, options=dataclasses.replace(ALL_OPTIONS, reduction="none"), bias=True,
        ignored=0.2, token_weight="mask", class_weight="positive", tags=("odd",),
    ),
    Problem(
        "odd_none_most", (4, 47), 31, 123, options=dataclasses.replace(MOST_OPTIONS, reduction="none"), bias=True,
        ignored=0.2, token_weight="random", class_weight="signed", tags=("odd",),
    ),
    Problem("signed", (60,), 24, 301, class_weight="signed", bias=True, tags=("odd",)),
    Problem(
        "signed_smooth", (60,), 24, 301, options=LossOptions(label_smoothing=0.3, z_loss=0.01), class_weight="signed",
        tags=("odd",),
    ),
    Problem("one_token", (1,), 7, 5, tags=("odd",)),
    Problem("one_class", (6,), 5, 1, bias=True, tags=("odd",)),
    Problem("one_feature", (9,), 1, 17, tags=("odd",)),
    Problem("no_axes", (), 16, 33, tags=("odd",)),
    Problem("no_token", (0,), 16, 33, bias=True, tags=("odd",)),
    Problem("all_ignored", (3, 5), 16, 33, bias=True, ignored=1.1, tags=("odd",)),
    Problem("all_ignored_none", (3, 5), 16, 33, options=LossOptions("none"), ignored=1.1, tags=("odd",)),
    Problem("ragged", (515,), 24, 300, ignored=0.3, tags=("odd",)),
    # Extreme values.
    Problem("shifted_up", (96,), 32, 500, recipe="shifted_up", tags=("extreme",)),
    Problem("shifted_down", (96,), 32, 500, recipe="shifted_down", tags=("extreme",)),
    Problem("confident", (80,), 16, 1000, recipe="confident", tags=("extreme",)),
    Problem("confident_wrong", (112,), 16, 1000, recipe="confident_wrong", tags=("extreme",)),
    Problem(
        "confident_wrong_none", (112,), 16, 1000, options=LossOptions("none", z_loss=1e-4), recipe="confident_wrong",
        tags=("extreme",),
    ),
    Problem("tied", (8,), 4, 64, recipe="tied", tags=("extreme",)),
    Problem("minus_inf", (40,), 16, 64, recipe="minus_inf", tags=("extreme",)),
    Problem("banned", (60,), 16, 64, bias=True, ignored=0.2, recipe="banned", tags=("extreme",)),
    Problem(
        "banned_none", (60,), 16, 64, options=LossOptions("none", softcap=20.0), bias=True, ignored=0.2,
        recipe="banned", tags=("extreme",),
    ),
    # Targets drawn from the model's own softmax: the gradients of common tokens nearly cancel.
    Problem("trained", (2, 512), 64, 768, recipe="trained", tags=("trained",)),
    Problem(
        "trained_bias", (4, 128), 48, 512, bias=True, ignored=0.1, upstream=3.0, recipe="trained", tags=("trained",)
    ),
    Problem(
        "trained_weights", (4, 128), 48, 512, options=LossOptions("sum", z_loss=1e-4), token_weight="mask",
        recipe="trained", tags=("trained",),
    ),
    Problem(
        "trained_softcap", (4, 128), 48, 512, options=LossOptions(softcap=15.0, logit_scale=1.5), recipe="trained",
        tags=("trained",),
    ),
    Problem("trained_smooth", (4, 128), 48, 512, options=LossOptions(label_smoothing=0.01), recipe="trained",
            class_weight="positive", tags=("trained",)),
    Problem("trained_none", (4, 128), 48, 512, options=LossOptions("none"), bias=True, ignored=0.1, recipe="trained",
            tags=("trained",)),
    # The sum of all logits, where a softcap stands between them and the sum of the weight's rows.
    Problem("capped_smooth", (60,), 24, 301, options=LossOptions(softcap=5.0, label_smoothing=0.2), tags=("odd",)),
)  # fmt: skip

BY_NAME = {problem.name: problem for problem in PROBLEMS}
