"""A problem's arrays in NumPy: floats in float32 or float64 that hold values of the dtype, ids in int64."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.fuzzing.problems import DISTILLATIONS, FROM_TARGETS, OF_IDS, PER_TOKEN, Problem
from logitless.rounding import round_to

Arrays = dict[str, Any]

# A class's logit in the trained data falls by this times the logarithm of its number, as words' frequencies do.
ZIPF = 1.0


def make(problem: Problem) -> Arrays:
    """Every array of the call by the name of its argument, "upstream" and, with an entropy, lse or sum of squares,
    "upstream_entropy", "upstream_lse" or "upstream_squared"."""
    rng = problem.rng()
    if problem.function == "padded_index_gather":
        return _gather(problem, rng)
    arrays = _head(problem, rng)
    arrays["target"] = _ignore(problem, rng, arrays["target"])
    arrays |= _weights(problem, rng, arrays["target"]) | _known(problem, rng)
    arrays = {name: _shared(values, problem.layouts.get(name, "")) for name, values in arrays.items()}
    _spoil(problem, rng, arrays)
    if problem.function == "distillation_loss":
        arrays |= _teacher(problem, rng)
    if problem.function == "linear_token_log_probs":
        arrays["ids"] = _shared(_ids(problem, rng, arrays["target"]), problem.layouts["ids"])
    if problem.function in FROM_TARGETS:
        arrays |= _targets(problem, rng)
    if problem.function in OF_IDS or (problem.function in DISTILLATIONS and "target" not in problem.arrays):
        del arrays["target"]
    if problem.function == "cross_entropy":
        _to_logits(problem, arrays)
    return arrays | _upstreams(problem, rng)


def given(problem: Problem, arrays: Arrays) -> Arrays:
    """The arrays as a call gets them: the weight perhaps as [D, V]; with a shift, a target whose first ids are no
    position's, and no ids at all."""
    if problem.turned:
        arrays = arrays | {"weight": arrays["weight"].T}
    shift = problem.options.get("shift", 0)
    if not shift:
        return arrays
    y = arrays["target"]
    return arrays | {"target": np.concatenate([np.full_like(y[..., :shift], problem.vocab), y[..., :-shift]], axis=-1)}


def side_dtype(problem: Problem) -> str:
    """Of weights, masks' floats and upstream gradients."""
    return "float64" if problem.dtype == "float64" else "float32"


def _gather(problem: Problem, rng: Any) -> Arrays:
    rows, places = problem.shape
    padded = len(problem.padded_places)
    values = round_to(rng.standard_normal((rows, problem.hidden)), problem.dtype)
    arrays = {"input": values, "index": rng.integers(0, rows, places)}
    arrays = {name: _shared(values, problem.layouts[name]) for name, values in arrays.items()}
    return arrays | {"upstream": round_to(rng.standard_normal((padded, problem.hidden)), problem.dtype)}


def _head(problem: Problem, rng: Any) -> Arrays:
    """Hidden states, weight, bias and targets of the kind of data."""
    tokens, size, vocab, dtype = problem.tokens, problem.hidden, problem.vocab, problem.dtype
    x, w = rng.standard_normal((tokens, size)), rng.standard_normal((vocab, size)) * size**-0.5
    b = rng.standard_normal(vocab) if "bias" in problem.arrays else None
    y = rng.integers(0, vocab, tokens)
    classes = min(size, vocab - 1, 8)
    if problem.data == "trained":
        x[:, 0], w[:, 0] = 3.0, -ZIPF * np.log(np.arange(1, vocab + 1)) / 3
    elif problem.data in ("confident", "confident_wrong"):
        y = np.arange(tokens) % classes
        x[:], w[:] = 0.0, 0.0
        w[np.arange(classes), np.arange(classes)] = 1.0
        nats = rng.choice(
            [3.0, 7.0, 12.0, 20.0] if problem.data == "confident" else [0.0, 30.0, 60.0, 120.0, 500.0], tokens
        )
        x[np.arange(tokens), y if problem.data == "confident" else (y + 1) % classes] = nats
    elif problem.data == "tied":
        x[:], w[:] = 0.0, 0.0
        x[:, 0], w[:2, 0] = 2.0**12, 2.0**12
        y = np.arange(tokens) % 2
    elif problem.data == "shifted" and b is not None:
        b += rng.choice([-1000.0, 1000.0])
    if problem.data == "banned" and b is not None:
        banned = rng.choice(vocab, max(1, vocab // 5), replace=False)
        b[banned] = -np.inf
        y = rng.choice(np.setdiff1d(np.arange(vocab), banned), tokens)
    x, w, b = round_to(x, dtype), round_to(w, dtype), None if b is None else round_to(b, dtype)
    # Views of one element or row for all: values first, so that a model can be sampled from them.
    x, w, b = (_shared(a, problem.layouts.get(name, "")) for name, a in (("hidden", x), ("weight", w), ("bias", b)))
    if problem.data == "trained":
        y = _sampled(problem, rng, x, w, b)
    arrays: Arrays = {"hidden": x.reshape(*problem.shape, size), "weight": w, "target": y.reshape(problem.shape)}
    return arrays if b is None else arrays | {"bias": b}


def _sampled(problem: Problem, rng: Any, x: Any, w: Any, b: Any) -> Any:
    """Targets from the model's own softmax, so that gradients cancel as they do in a trained model."""
    z = x.astype(np.float64) @ w.T.astype(np.float64) + (0.0 if b is None else b)
    z = z * problem.options.get("logit_scale", 1.0)
    if "softcap" in problem.options:
        z = problem.options["softcap"] * np.tanh(z / problem.options["softcap"])
    z = z / problem.options.get("temperature", 1.0)
    return np.argmax(z + rng.gumbel(size=z.shape), axis=1)


def _ignore(problem: Problem, rng: Any, target: Any) -> Any:
    ignored = rng.random(target.shape) < problem.ignored
    if "shift" in problem.options:
        ignored[..., -problem.options["shift"] :] = True
    return np.where(ignored, problem.options.get("ignore_index", -100), target).astype(np.int64)


def _weights(problem: Problem, rng: Any, target: Any) -> Arrays:
    """Token weights and class weights; where these are "unused", some of no target's class are no numbers."""
    tokens, vocab = problem.shape, problem.vocab
    kinds = {
        "mask": lambda: (rng.random(tokens) < 0.7) * 1.0,
        "random": lambda: rng.uniform(0.1, 2.0, tokens),
        "huge": lambda: np.full(tokens, 1e5) * rng.uniform(0.5, 2.0, tokens),
        "tiny": lambda: np.full(tokens, 1e-5) * rng.uniform(0.5, 2.0, tokens),
    }
    class_kinds = {
        "positive": lambda: rng.uniform(0.2, 2.0, vocab),
        "signed": lambda: rng.uniform(0.2, 2.0, vocab) * np.where(rng.random(vocab) < 0.15, -1.0, 1.0),
        "huge": lambda: 1e5 * rng.uniform(0.5, 2.0, vocab),
        "tiny": lambda: 1e-5 * rng.uniform(0.5, 2.0, vocab),
        "spread": lambda: rng.choice([1e-5, 1.0, 1e5], vocab),
        "unused": lambda: rng.uniform(0.2, 2.0, vocab),
        "sum_1": lambda: (lambda k: k / k.sum())(rng.uniform(0.5, 2.0, vocab)),
    }
    arrays: Arrays = {}
    if "token_weight" in problem.arrays:
        arrays["token_weight"] = kinds[problem.arrays["token_weight"]]()
    if "class_weight" in problem.arrays:
        arrays["class_weight"] = class_kinds[problem.arrays["class_weight"]]()
        if problem.arrays["class_weight"] == "unused":
            unused = np.setdiff1d(np.arange(vocab), target)
            arrays["class_weight"][unused[::2]] = rng.choice([np.nan, np.inf, 3e38])
    return {name: round_to(values, side_dtype(problem)) for name, values in arrays.items()}


def _known(problem: Problem, rng: Any) -> Arrays:
    """The constants of the losses on top."""
    arrays: Arrays = {}
    for name in ("advantage", "old_log_prob", "reference_log_prob", "sampler_log_prob"):
        if name in problem.arrays:
            shape = problem.shape[:-1] if problem.arrays[name] == "per_sequence" else problem.shape
            values = rng.standard_normal(shape)
            if name != "advantage":  # somewhere near what random logits give
                values = -np.log(max(2, problem.vocab)) + 0.3 * values
            arrays[name] = round_to(values, side_dtype(problem))
    if "temperature" in problem.arrays:
        arrays["temperature"] = round_to(rng.uniform(0.5, 3.0, problem.shape), side_dtype(problem))
    if "mask" in problem.arrays:
        arrays["mask"] = (rng.random(problem.shape) < 0.7).astype(problem.arrays["mask"])
    if "desirable" in problem.arrays:
        arrays["desirable"] = (rng.random(problem.shape[:1]) < 0.5).astype(problem.arrays["desirable"])
    return arrays


def _teacher(problem: Problem, rng: Any) -> Arrays:
    size, dtype = problem.hidden + 3, problem.dtype
    arrays = {
        "teacher_hidden": round_to(rng.standard_normal((*problem.shape, size)), dtype),
        "teacher_weight": round_to(rng.standard_normal((problem.vocab, size)) * size**-0.5, dtype),
    }
    if "teacher_bias" in problem.arrays:
        arrays["teacher_bias"] = round_to(rng.standard_normal(problem.vocab), dtype)
    return {name: _shared(values, problem.layouts.get(name, "")) for name, values in arrays.items()}


def _targets(problem: Problem, rng: Any) -> Arrays:
    """A teacher's probabilities, or those of some ids of every token, of which some places are none."""
    p = rng.dirichlet(np.full(problem.vocab, 0.5), problem.shape) * 0.999 + 0.001 / problem.vocab
    side = side_dtype(problem)
    if problem.function == "dense_distillation_loss":
        values = round_to(np.log(p) if problem.options["log_teacher"] else p, side)
        return {"teacher": _shared(values, problem.layouts["teacher"])}
    ids = np.argsort(rng.random((*problem.shape, problem.vocab)), axis=-1)[..., : problem.count]
    ignore = problem.options.get("ignore_index", -100)
    ids = _shared(np.where(rng.random(ids.shape) < 0.15, ignore, ids), problem.layouts["ids"])
    probs = np.take_along_axis(p, np.clip(ids, 0, problem.vocab - 1), -1)
    probs = _shared(round_to(probs, side), problem.layouts["probs"])
    total = probs.sum(-1, keepdims=True)  # a repeated row stands beside other ids
    return {"ids": ids.astype(np.int64), "probs": probs / np.maximum(total, 1.0).astype(probs.dtype)}


def _ids(problem: Problem, rng: Any, target: Any) -> Any:
    """Some ids of every token, the target among them, or of all tokens; an ignored token's are all ignored."""
    kind, ignore = problem.arrays["ids"].split()[0], problem.options.get("ignore_index", -100)
    shape = () if kind == "shared" else problem.shape
    ids = rng.integers(0, problem.vocab, (*shape, problem.count))
    ids = np.where(rng.random(ids.shape) < 0.15, ignore, ids)
    if kind == "own":
        ids[..., rng.integers(problem.count)] = target
        ids = np.where((target == ignore)[..., None], ignore, ids)
    return ids.astype(np.int64)


def _to_logits(problem: Problem, arrays: Arrays) -> None:
    """Hidden states and weight become logits in the dtype; some classes are banned in them."""
    x, w = arrays.pop("hidden").astype(np.float64), arrays.pop("weight").astype(np.float64)
    with np.errstate(invalid="ignore"):
        z = x @ w.T
    if problem.data == "banned":
        banned = np.arange(problem.vocab) % 5 == 3
        at_target = np.arange(problem.vocab) == arrays["target"][..., None]
        z = np.where(banned & ~at_target, -np.inf, z)
    if problem.blemish == "dead_ignored":
        z = np.where(np.isnan(z), -np.inf, z)
    arrays["logits"] = _shared(round_to(z, problem.dtype), problem.layouts["logits"])


def _upstreams(problem: Problem, rng: Any) -> Arrays:
    none = problem.options.get("reduction") == "none" or problem.function in PER_TOKEN
    arrays: Arrays = {"upstream": rng.choice([0.25, 3.0, -2.5]) if problem.upstream == "scaled" else 1.0}
    if none:
        shape = problem.shape
        if problem.function == "dpo_loss":
            shape = (problem.shape[0] // 2,)
        elif problem.function == "kto_loss":
            shape = problem.shape[:1]
        elif problem.function in OF_IDS:
            shape = (*problem.shape, problem.count)
        arrays["upstream"] = rng.standard_normal(shape)
    if problem.blemish.endswith("upstream"):
        arrays["upstream"].flat[rng.integers(problem.tokens)] = np.nan if problem.blemish.startswith("nan") else np.inf
    stated = problem.function == "linear_log_probs" and problem.options.get("return_stats", False)
    if problem.options.get("with_entropy") or stated:
        arrays["upstream_entropy"] = rng.standard_normal(problem.shape)
    if problem.options.get("return_lse") or stated:
        arrays["upstream_lse"] = rng.standard_normal(problem.shape)
    if stated:
        arrays["upstream_squared"] = rng.standard_normal(problem.shape)
    if problem.upstream == "expanded":
        arrays = {name: _shared(values, "broadcast") for name, values in arrays.items()}
    return {name: round_to(values, side_dtype(problem)) for name, values in arrays.items()}


def _spoil(problem: Problem, rng: Any, arrays: Arrays) -> None:
    """What the blemish does to the arguments, in one token."""
    if problem.blemish in ("nan_row", "dead_ignored"):
        token = rng.integers(problem.tokens)
        arrays["hidden"] = arrays["hidden"].copy()
        arrays["hidden"].reshape(-1, problem.hidden)[token] = np.nan
        if problem.blemish == "dead_ignored":
            arrays["target"] = arrays["target"].copy()
            arrays["target"].reshape(-1)[token] = problem.options.get("ignore_index", -100)
    elif problem.blemish == "outside":
        arrays["target"] = arrays["target"].copy()
        outside = [i for i in (problem.vocab, problem.vocab + 5, -7) if i != problem.options.get("ignore_index", -100)]
        arrays["target"].reshape(-1)[rng.integers(problem.tokens)] = rng.choice(outside)


def _shared(values: Any, layout: str) -> Any:
    """The values that a view of this layout can have: "expanded" repeats the first row, "broadcast" one element."""
    if values is None or layout not in ("expanded", "broadcast") or not np.ndim(values) or not np.size(values):
        return values
    first = values[:1] if layout == "expanded" else values.reshape(-1)[:1].reshape((1,) * values.ndim)
    return np.broadcast_to(first, values.shape).copy()
