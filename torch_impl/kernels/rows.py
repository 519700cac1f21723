"""What is known of the tokens before the first product, and the losses after it, in few launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.spec import LossOptions
from logitless.torch_impl import chunk
from logitless.torch_impl.call import Arrays, Inputs, KnownRows, TokenSums
from logitless.torch_impl.distributed import parallel
from logitless.torch_impl.distributed.parallel import Shard
from logitless.torch_impl.kernels.architecture import most_warps
from logitless.torch_impl.kernels.launch import cdiv, launch_named

with contextlib.suppress(ImportError):  # without triton, fused.unavailable() says so before a kernel is launched
    from logitless.torch_impl.kernels import portable as kernels


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# Tokens of a program, and of a turn of the programs that go through all of them alone.
TOKEN_BLOCK, TURN_BLOCK = 1024, 4096
# Programs at most that share what is prepared of the tokens. Each of them goes through all tokens once.
PREPARING_PROGRAMS = 64
NO_OPTIONS = LossOptions()


@dataclasses.dataclass(frozen=True)
class Rows(Inputs):
    """A call's arrays, and its tokens in the forms that the kernels read."""

    index: Tensor  # [N] int32 target, −1 for an id outside the vocabulary, −2 for one that another rank has
    key: Tensor  # [N] int32 target, V for an ignored token, an id outside the vocabulary, and one of another rank
    order: Tensor  # [N] int32: the valid tokens, then the ignored ones
    count: Tensor  # [1] int32: how many are valid
    progress: Tensor  # [2] int32: zeros but during a launch whose programs keep pace (hopper.keep_pace)
    relative: Tensor  # [N] token_weight over the largest of them, divided by the token's temperature
    norm: Tensor  # []: 1 / Σ t k_y (1 for a sum)
    largest: Tensor  # []: logit_scale times the largest token weight
    unit: Tensor  # []: norm times largest
    class_index: Tensor  # [N] int64: where class_table has k_y
    class_table: Tensor | None


def prepare(arrays: Arrays, options: LossOptions, dtype: torch.dtype, shard: Shard | None = None) -> Rows:
    """:func:`chunk.prepare`, and the tokens' order."""
    hidden, weight, bias, target, token_weight, class_weight, temperature = arrays
    tokens, vocab, device = target.numel(), weight.shape[0], hidden.device
    share = TOKEN_BLOCK * max(1, cdiv(tokens, TOKEN_BLOCK * PREPARING_PROGRAMS))
    flat = target.reshape(-1)
    wide, whole, flag = (torch.empty(tokens, dtype=d, device=device) for d in (torch.int64, torch.int32, torch.bool))
    inside, key = torch.empty_like(flag), torch.empty_like(whole)
    order, count, progress = (torch.empty(n, dtype=torch.int32, device=device) for n in (max(1, tokens), 1, 2))
    weights, relative = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(2))
    norm, largest, unit = (torch.empty((), dtype=torch.float32, device=device) for _ in range(3))
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    shard, shared = shard or parallel.whole(vocab), None
    target, class_index, class_table = wide, wide, class_weight
    values: dict[str, Any] = {
        "given_ptr": flat, "given_weight_ptr": None if token_weight is None else token_weight.reshape(-1),
        "class_weight_ptr": None if shard.split else class_weight, "target_ptr": wide,
        "valid_ptr": flag.view(torch.int8), "inside_ptr": inside.view(torch.int8), "weight_ptr": weights,
        "index_ptr": whole, "key_ptr": key, "order_ptr": order, "count_ptr": count, "progress_ptr": progress,
        "relative_ptr": relative, "norm_ptr": norm, "largest_ptr": largest, "unit_ptr": unit, "tokens": tokens,
        "share": share, "vocab": shard.vocab, "shard_start": shard.start, "entries": vocab, "BY_TOKEN": False,
        "ignore_index": options.ignore_index, "scale": float(options.logit_scale), "MEAN": options.reduction == "mean",
        "TURN": TURN_BLOCK if tokens > TOKEN_BLOCK else TOKEN_BLOCK, "BLOCK": TOKEN_BLOCK, "num_warps": 16,
    }  # fmt: skip
    grid = (max(1, cdiv(tokens, share)),)
    with on_device(device):
        launch_named(kernels.prepare_kernel, grid, values)
        if shard.split:
            target = shard.local_ids(wide, vocab)
            shared = chunk.shared_classes(shard, class_weight, target)
        if shared is not None:  # once more, for the mean
            class_index, class_table = torch.arange(tokens, device=device), shared
            launch_named(kernels.prepare_kernel, grid, values | {"class_weight_ptr": shared, "BY_TOKEN": True})
    if temperature is not None:
        temperature = temperature.reshape(-1).float().masked_fill(~flag, 1.0)
        relative = relative / temperature
    return Rows(
        hidden=hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype), ids=wide, target=target, valid=flag, inside=inside,
        token_weight=weights, class_weight=class_weight, shard=shard, shared_classes=shared, index=whole, key=key,
        order=order, count=count, progress=progress, relative=relative, norm=norm, largest=largest, unit=unit,
        class_index=class_index, class_table=class_table, temperature=temperature,
    )  # fmt: skip


def normalizer(inputs: Rows, options: LossOptions, given: Tensor | float | None) -> Tensor:
    """:func:`chunk.normalizer`."""
    if options.reduction == "mean" and given is not None:
        return chunk.normalizer(inputs, options, given)
    return inputs.norm


def log_probs(inputs: Rows, sums: TokenSums) -> Tensor:
    """:func:`chunk.log_probs`: a loss without options is −log p."""
    out = torch.empty_like(sums.log_total)
    if out.numel():
        _launch_losses(inputs, NO_OPTIONS, sums, None, out, sign=-1.0)
    return out


def entropy(inputs: Rows, sums: TokenSums) -> Tensor:
    """:func:`chunk.entropy`, in memory of its own. The kernels wrote 0 where ignored."""
    assert sums.entropy is not None
    return sums.entropy.clone()


def log_prob_rows(
    inputs: Rows, options: LossOptions, sums: TokenSums, g_log_prob: Tensor | None, g: Mapping[str, Tensor]
) -> KnownRows:
    """:func:`chunk.log_prob_rows`."""
    tokens, device = sums.log_total.shape[0], sums.log_total.device
    wanted = {"factor": True, "target": True, "alpha": bool(g), "gamma": "entropy" in g, "delta": "sum_p_squared" in g}
    made = {
        name: torch.empty(tokens, dtype=torch.float32, device=device) for name, is_wanted in wanted.items() if is_wanted
    }
    read = {
        "target_logit": sums.target_logit, "anchor": sums.anchor, "log_total": sums.log_total,
        "entropy": sums.entropy, "others_squared": sums.others_squared, "temperature": inputs.temperature,
        "g_log_prob": g_log_prob, "g_entropy": g.get("entropy"), "g_lse": g.get("lse"),
        "g_squared": g.get("sum_p_squared"), "valid": inputs.valid.view(torch.int8),
    }  # fmt: skip
    values = {f"{name}_ptr": None if vector is None else vector.contiguous() for name, vector in read.items()}
    values |= {f"{name}_ptr": made.get(name) for name in wanted}
    if tokens:
        constants = {"HAS_CAP": options.softcap is not None, "BLOCK": TOKEN_BLOCK, "tokens": tokens}
        constants["HAS_TEMPERATURE"] = inputs.temperature is not None
        scalars = {"scale": float(options.logit_scale), "cap": float(options.softcap or 1.0)}
        with on_device(device):
            launch_named(kernels.log_prob_rows_kernel, (cdiv(tokens, TOKEN_BLOCK),), values | constants | scalars)
    return KnownRows(sums.anchor, sums.log_total, **made)


def losses(inputs: Rows, options: LossOptions, sums: TokenSums) -> Tensor:
    """:func:`chunk.losses`."""
    out = torch.empty_like(sums.log_total)
    if out.numel():
        _launch_losses(inputs, options, sums, None, out)
    return out


def total_loss(inputs: Rows, options: LossOptions, sums: TokenSums, norm: Tensor) -> Tensor:
    """:func:`chunk.total_loss`, summed in a fixed order."""
    if sums.total is not None:
        return sums.total
    out = torch.empty((), dtype=torch.float32, device=norm.device)
    _launch_losses(inputs, options, sums, norm, out)
    return out


def _launch_losses(
    inputs: Rows, options: LossOptions, sums: TokenSums, norm: Tensor | None, out: Tensor, sign: float = 1.0
) -> None:
    tokens, vocab = sums.log_total.shape[0], inputs.vocab
    several = norm is not None and tokens > TOKEN_BLOCK
    smooth = options.label_smoothing > 0
    class_sum = inputs.class_weight_sum() if smooth and inputs.class_weight is not None else None
    values = {
        "target_logit_ptr": sums.target_logit,
        "anchor_ptr": sums.anchor,
        "log_total_ptr": sums.log_total,
        "weighted_ptr": sums.weighted_logits,
        "valid_ptr": inputs.valid.view(torch.int8),
        "weight_ptr": inputs.token_weight,
        "target_ptr": inputs.class_index,
        "class_weight_ptr": inputs.class_table,
        "class_sum_ptr": class_sum,
        "norm_ptr": norm,
        "out_ptr": out,
        "tokens": tokens,
        "vocab": vocab,
        "keep": sign * (1.0 - options.label_smoothing),
        "z_loss": float(options.z_loss),
        "per_entry": options.label_smoothing / vocab,
        "HAS_CLASS": inputs.class_weight is not None,
        "SMOOTHING": smooth,
        "HAS_Z": options.z_loss != 0,
        "SUM": norm is not None,
        "BLOCK": TURN_BLOCK if several else TOKEN_BLOCK,
        "num_warps": most_warps(out.device.index),
    }
    with on_device(out.device):
        launch_named(kernels.loss_kernel, (1 if norm is not None else cdiv(tokens, TOKEN_BLOCK),), values)
