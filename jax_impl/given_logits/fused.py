"""The loss on given logits by Pallas kernels: the functions of logits_xla.py, launched. Mirror of
torch_impl/given_logits/fused.py."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax import Array

from logitless.jax_impl.call import Inputs, TokenSums
from logitless.jax_impl.chunk import RunningSums, empty_sums
from logitless.jax_impl.given_logits.xla import LogitRows
from logitless.jax_impl.kernels import architecture
from logitless.jax_impl.kernels.arithmetic import LINES
from logitless.jax_impl.kernels.loops import one_by_one
from logitless.spec import CLASS_SUMS, LossOptions

with contextlib.suppress(ImportError):  # without absl unavailable() says so before anything here is called
    from logitless.jax_impl.given_logits import kernels as logits_kernels
    from logitless.jax_impl.kernels.launch import reference
    from logitless.jax_impl.kernels.pieces import Row

DTYPES = ("bfloat16", "float16", "float32")


def unavailable(device: jax.Device | None, dtype: str) -> str | None:
    """Why these kernels cannot run on ``device`` (None: not known while tracing), or None."""
    return architecture.unusable(device, dtype, DTYPES)


def _row(inputs: Inputs, options: LossOptions) -> Row:
    logits = inputs.hidden
    return Row(logits.shape[1], logits.dtype, options.logit_scale, options.softcap)


def _arguments(row: Row, inputs: Inputs, smoothed: bool) -> dict[str, Array]:
    """What both kernels read; rows shorter than a warpgroup are padded."""
    missing = row.width - row.vocab
    arguments = {
        "logits": jnp.pad(inputs.hidden, ((0, 0), (0, missing))),
        "target": jnp.where(inputs.valid, inputs.target, -1),
    }
    if smoothed and inputs.class_weight is not None:
        arguments["class_weight"] = jnp.pad(inputs.class_weight, (0, missing))
    return arguments


def token_sums(inputs: Inputs, options: LossOptions, statistics: bool, block: int) -> TokenSums:
    """:func:`logits_xla.token_sums`; a program's ``block`` is a row."""
    weighted = options.label_smoothing > 0
    if not inputs.hidden.shape[0]:
        return empty_sums(inputs, weighted, statistics)
    row = _row(inputs, options)

    def launch(arguments: dict[str, Array]) -> dict[str, Array]:
        return logits_kernels.sums(row, arguments, statistics=statistics, weighted=weighted)

    sums = one_by_one(launch)(_arguments(row, inputs, weighted))
    sums = {name: jnp.where(inputs.valid, values, 0) for name, values in sums.items()}
    found = {LINES.get(name, name): values for name, values in sums.items()}
    found = {name: values for name, values in found.items() if name in CLASS_SUMS}
    target_logit = jnp.where(inputs.inside, sums["target_logit"], jnp.nan)
    running = RunningSums(target_logit, inputs.target, sums["anchor"], found)
    return running.finish(sums.get("weighted"))


def gradient(inputs: Inputs, options: LossOptions, known: LogitRows, in_place: bool) -> Array:
    """:func:`logits_xla.gradient`. In place, XLA copies the logits before where something reads them later."""
    if not inputs.hidden.shape[0]:
        return inputs.hidden
    row = _row(inputs, options)
    arguments = _arguments(row, inputs, known.smooth is not None) | {
        "anchor": known.anchor, "log_total": known.log_total, "factor": known.factor, "value": known.target,
    }  # fmt: skip
    if known.smooth is not None:
        arguments["smooth"] = known.smooth

    def launch(arguments: dict[str, Array]) -> Array:
        written = {"logits": reference(arguments["logits"])} if in_place else {}
        return logits_kernels.gradient(row, {**arguments, **written})

    dz: Array = one_by_one(launch)(arguments)
    return dz[:, : row.vocab]
