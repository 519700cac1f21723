"""A model's forward without its logits: the LM head is replaced by a recorder of its input (:mod:`.lm_head`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from logitless.torch_impl.huggingface.adapters import Product, plain_layer, product
from logitless.torch_impl.huggingface.lm_head import (
    LogitOptions,
    Recorder,
    check_probes,
    find_head,
    is_probes,
    logit_options,
    replaced,
)


class CapturedHead:
    """What :func:`capture_lm_head` found: the arguments of a linear cross-entropy but for the target."""

    def __init__(self, head: nn.Module, options: LogitOptions) -> None:
        self.options = options
        """logit_scale and softcap, as keyword arguments of the losses."""
        self.logit_scale, self.softcap = options["logit_scale"], options["softcap"]
        self._head = head
        self._recorder = Recorder()
        self._product: Product | None = None

    @property
    def hidden(self) -> Tensor:
        """[..., D]: what went into the head in the latest forward of the module, attached to its graph; under LoRA
        [..., D + r].

        Raises RuntimeError before that.
        """
        if self._product is None:
            raise RuntimeError(
                "hidden: no forward of the module that was given to capture_lm_head has run its LM head yet; call that "
                "module itself, inside the with block"
            )
        return self._product.hidden

    @property
    def weight(self) -> Tensor:
        """[V, D]: the head's own parameter, which may be the embedding's too; gradients go there. Under PEFT's LoRA
        [V, D + r], and of the latest forward: gradients go to the adapter."""
        return cast(nn.Linear, plain_layer(self._head)).weight if self._product is None else self._product.weight

    @property
    def bias(self) -> Tensor | None:
        """[V], or None."""
        return cast(nn.Linear, plain_layer(self._head)).bias if self._product is None else self._product.bias


@contextlib.contextmanager
def capture_lm_head(module: nn.Module) -> Iterator[CapturedHead]:
    """Run ``module``'s forward without logits: its LM head only records what it is given.

        with capture_lm_head(model) as head:
            model(input_ids, attention_mask=mask)
        loss = linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)

    The head is what ``module.get_output_embeddings()`` gives, of the module or of the one inner module that has it
    (PEFT, DistributedDataParallel), else the one inner module called lm_head, embed_out or output_projection. It must
    be a torch.nn.Linear with a floating weight, alone or under PEFT's LoRA, modules_to_save or trainable_token_indices
    (:mod:`.adapters`). Tied weights, a bias, autocast and torch.no_grad are as in the model.
    logit_scale and softcap are read where Hugging Face models keep them (Cohere's logit_scale, Granite's
    logits_scaling, Falcon-H1's lm_head_multiplier, Gemma 2's final_logit_softcapping, RecurrentGemma's logits_soft_cap,
    xLSTM's output_logit_soft_cap), and every forward is checked to do just that.

    The model's own output holds len(PROBES) numbers in place of each token's logits: do not use it. Labels must not be
    given to the model: its own loss would be of those numbers. The target is shifted by the caller. The module is as
    before when the block ends, whatever happens in it.

    Arguments: module: a model whose output is the logits, has them as ``.logits`` or under "logits", or first in a
    tuple.

    Yields a :class:`CapturedHead`. Raises TypeError for what is not a module; NotImplementedError, with the reason, for
    a head that cannot be found or is not a plain linear map, and, from the forward, for a model that treats its logits
    otherwise; ValueError for labels; RuntimeError where the head is captured already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, allowed is a torch.nn.Module")
    owner, head = find_head(module)
    captured = CapturedHead(head, logit_options(owner))
    if isinstance(head.__dict__.get("forward"), Recorder):
        raise RuntimeError("module: got one whose LM head is captured already, allowed is one capture at a time")
    handles = [
        module.register_forward_pre_hook(lambda _, __, options: _begin(captured, options), with_kwargs=True),
        module.register_forward_hook(lambda _, __, output: _publish(captured, output)),
    ]
    try:
        with replaced(head, "forward", captured._recorder):
            yield captured
    finally:
        for handle in handles:
            handle.remove()


def _begin(captured: CapturedHead, options: dict[str, object]) -> None:
    """A forward begins: nothing is recorded, and labels are refused."""
    captured._recorder.hidden = captured._product = None
    if options.get("labels") is not None:
        raise ValueError(
            "labels: got some inside capture_lm_head, allowed is None: the model makes no logits here; compute the "
            "loss from head.hidden and head.weight"
        )


def _publish(captured: CapturedHead, output: object) -> None:
    """Check the probes after the model's own operations, then let its hidden states be read."""
    recorded, captured._recorder.hidden = captured._recorder.hidden, None
    if recorded is None:
        raise NotImplementedError("module: its forward did not run the LM head that was found; nothing was captured")
    logits = _logits_of(output)
    if logits is None:
        raise NotImplementedError(
            f"module: its forward gave {type(output).__name__} without logits that could be checked, allowed are "
            f"logits, an output with .logits or 'logits', or a tuple that begins with them"
        )
    check_probes(captured.options, logits)
    captured._product = product(captured._head, recorded)


def _logits_of(output: object) -> Tensor | None:
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None:
        found = output[0] if isinstance(output, tuple | list) and output else output
    return found if is_probes(found) else None
