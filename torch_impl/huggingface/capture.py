"""A model's forward without its logits: the LM head is replaced by a recorder of its input (:mod:`.lm_head`).

Where the head cannot be captured, the caller may have the plain path instead: the model runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal, cast, get_args

from torch import Tensor, nn

from logitless import spec
from logitless.planning import ChunkPlan, Preference, check_memory_budget, check_plan_argument
from logitless.spec import LogProbResults, Reduction, TokenStats
from logitless.torch_impl.api import linear_cross_entropy, linear_log_probs
from logitless.torch_impl.given_logits.api import cross_entropy
from logitless.torch_impl.huggingface.adapters import Product, check_product, plain_layer, product
from logitless.torch_impl.huggingface.lm_head import (
    LogitOptions,
    Recorder,
    check_probes,
    check_whole,
    find_head,
    is_probes,
    logit_options,
    replaced,
)
from logitless.torch_impl.huggingface.plain_logits import log_probs

Fallback = Literal["error", "logits"]
"""What happens where a head cannot be captured."""
FALLBACKS: tuple[str, ...] = get_args(Fallback)

# What a forward that ran has shown of its module, with fallback="logits": why its head cannot be captured.
REFUSED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
# The reason that the last warning about a module gave.
WARNED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

# What the losses do to logits that a model has made: nothing.
PLAIN: LogitOptions = {"logit_scale": 1.0, "softcap": None}

NOT_TWICE = (
    "fallback='logits' runs no forward twice: this one may have changed buffers and caches. The module's next forward "
    "makes its logits: call it again if that does no harm"
)


class CapturedHead:
    """What :func:`capture_lm_head` found: the arguments of a linear cross-entropy but for the target.

    :meth:`linear_cross_entropy` and :meth:`linear_log_probs` are the functions of these names on it. They are here, and
    no other loss is, because they alone are defined by logits as well: so one program serves both paths of
    ``capture_lm_head(fallback="logits")``. What else takes hidden states and a weight needs a head that is captured.
    """

    def __init__(self, head: nn.Module | None, options: LogitOptions) -> None:
        """head: None for the plain path."""
        self.options = options
        """logit_scale and softcap, as keyword arguments of the losses. On the plain path 1 and None: the logits are the
        model's own, after both."""
        self._head = head
        self._product: Product | None = None
        self._logits: Tensor | None = None

    @property
    def logit_scale(self) -> float:
        return self.options["logit_scale"]

    @property
    def softcap(self) -> float | None:
        return self.options["softcap"]

    @property
    def hidden(self) -> Tensor:
        """[..., D]: what went into the head in the latest forward of the module, attached to its graph; under LoRA
        [..., D + r].

        Raises RuntimeError before that, and, as weight and bias do, on the plain path.
        """
        if self._product is None:
            self._check_captured("hidden")
            raise _no_forward("hidden")
        return self._product.hidden

    @property
    def weight(self) -> Tensor:
        """[V, D]: the head's own parameter, which may be the embedding's too; gradients go there. Under PEFT's LoRA
        [V, D + r], and of the latest forward: gradients go to the adapter."""
        return self._layer("weight").weight if self._product is None else self._product.weight

    @property
    def bias(self) -> Tensor | None:
        """[V], or None."""
        return self._layer("bias").bias if self._product is None else self._product.bias

    @property
    def logits(self) -> Tensor | None:
        """None where the head is captured. On the plain path [..., V], the latest forward's, attached to its graph.

        Raises RuntimeError there before a forward.
        """
        if self._head is None and self._logits is None:
            raise _no_forward("logits")
        return self._logits

    def linear_cross_entropy(
        self,
        target: Tensor,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        token_weight: Tensor | None = None,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        normalizer: Tensor | float | None = None,
        plan: ChunkPlan | Preference | None = None,
        memory_budget: int | None = None,
        backend: str | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, TokenStats[Tensor]]:
        """:func:`linear_cross_entropy` of the latest forward, on the plain path :func:`cross_entropy` of its logits.

        Arguments: those of :func:`linear_cross_entropy` that both functions have, with the same meaning; temperature is
        a number. plan and memory_budget have no effect on the plain path, which has the logits already.

        Returns and raises as they do; RuntimeError before a forward.
        """
        _check_limits(temperature, plan, memory_budget)
        if self.logits is None:
            function = functools.partial(
                linear_cross_entropy, self.hidden, self.weight, target, self.bias, plan=plan,
                memory_budget=memory_budget, **self.options,
            )  # fmt: skip
        else:
            function = functools.partial(cross_entropy, self.logits, target)
        found: Tensor | tuple[Tensor, TokenStats[Tensor]] = function(
            reduction=reduction, ignore_index=ignore_index, token_weight=token_weight, class_weight=class_weight,
            label_smoothing=label_smoothing, z_loss=z_loss, temperature=temperature, normalizer=normalizer,
            backend=backend, return_stats=return_stats,
        )  # fmt: skip
        return found

    def linear_log_probs(
        self,
        target: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        with_entropy: bool = False,
        return_stats: bool = False,
        plan: ChunkPlan | Preference | None = None,
        memory_budget: int | None = None,
        backend: str | None = None,
    ) -> LogProbResults[Tensor]:
        """:func:`linear_log_probs` of the latest forward, on the plain path of its logits: the same results, of which
        the same are differentiable.

        Arguments: as for :meth:`linear_cross_entropy`, with_entropy and return_stats as for :func:`linear_log_probs`.
        With either of these two the plain path takes several times the logits' memory.

        Returns (log_prob, entropy) or (log_prob, entropy, stats). Raises as :meth:`linear_cross_entropy`.
        """
        _check_limits(temperature, plan, memory_budget)
        if self.logits is not None:
            wanted = spec.wanted_statistics(with_entropy, return_stats)
            return log_probs(self.logits, target, temperature, ignore_index, wanted, backend)
        return linear_log_probs(
            self.hidden, self.weight, target, self.bias, temperature=temperature, ignore_index=ignore_index,
            with_entropy=with_entropy, return_stats=return_stats, plan=plan, memory_budget=memory_budget,
            backend=backend, **self.options,
        )  # fmt: skip

    def _layer(self, name: str) -> nn.Linear:
        self._check_captured(name)
        return cast(nn.Linear, plain_layer(cast(nn.Module, self._head)))

    def _check_captured(self, name: str) -> None:
        if self._head is None:
            raise RuntimeError(
                f"{name}: the head is not captured, a warning has said why; with fallback='logits' allowed are logits "
                f"and the methods linear_cross_entropy and linear_log_probs"
            )


def _no_forward(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: no forward of the module that was given to capture_lm_head has run its LM head yet; call that "
        f"module itself, inside the with block"
    )


def _check_limits(temperature: float, plan: ChunkPlan | Preference | None, memory_budget: int | None) -> None:
    """Check what one of the paths would not."""
    spec.check_factor("temperature", temperature)
    check_plan_argument(plan, memory_budget)
    check_memory_budget(memory_budget)


@contextlib.contextmanager
def capture_lm_head(module: nn.Module, *, fallback: Fallback = "error") -> Iterator[CapturedHead]:
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

    With ``fallback="logits"`` one program serves every model:

        with capture_lm_head(model, fallback="logits") as head:
            model(input_ids, attention_mask=mask)
        loss = head.linear_cross_entropy(target)

    Arguments:
        module: a model whose output is the logits, has them as ``.logits`` or under "logits", or first in a tuple.
        fallback: what happens where the head cannot be captured. "error": NotImplementedError. "logits": the plain
            path. The module runs as it is, its output must have ``.logits`` or "logits", and the losses are made of
            these; one warning for each module and reason says why and what to do. Where the forward itself shows it,
            that forward is an error even so: it may have changed buffers and caches, so it is not run twice. From then
            on the module takes the plain path, in later blocks too, until a block with "error" succeeds.

    Yields a :class:`CapturedHead`. Raises TypeError for what is not a module; NotImplementedError, with the reason, for
    a head that cannot be found or is not a plain linear map, and, from the forward, for a model that treats its logits
    otherwise or, on the plain path, names none; ValueError for labels and for a fallback that there is not;
    RuntimeError where the head is captured already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, allowed is a torch.nn.Module")
    spec.check_choice("fallback", fallback, FALLBACKS)
    _check_alone(module)
    capture = _Capture(module, fallback)
    handles = [
        module.register_forward_pre_hook(capture.begins, with_kwargs=True),
        module.register_forward_hook(capture.ends),
    ]
    try:
        yield capture.found
    except Exception as error:
        capture.notice()
        if capture.refused:
            error.add_note(NOT_TWICE)
        raise
    else:
        capture.notice()
    finally:
        for handle in handles:
            handle.remove()
        capture.recording.close()


def _check_alone(module: nn.Module) -> None:
    """Raise RuntimeError where another block, or a patched forward, has one of the module's heads."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    if _is_recorded(module) or any(isinstance(getattr(hook, "__self__", None), _Capture) for hook in hooks):
        raise _captured_already()


class _Capture:
    """What runs around every forward of a block's module."""

    def __init__(self, module: nn.Module, fallback: Fallback) -> None:
        self.module, self.fallback = module, fallback
        self.recorder, self.recording = Recorder(), contextlib.ExitStack()
        self.running = False
        """Whether a forward has begun, of a head that is captured, and not come to its end."""
        self.refused = False
        """Whether a forward of this block has shown that the head cannot be captured."""
        self.found = CapturedHead(None, PLAIN)
        try:
            self._check_known()
            owner, head = find_head(module)
            check_whole(owner, head)
            self.found = CapturedHead(head, logit_options(owner))
            self.recording.enter_context(replaced(head, "forward", self.recorder))
        except NotImplementedError as refusal:
            self._run_plain(refusal)

    def begins(self, _: nn.Module, __: object, named: dict[str, object]) -> None:
        """Before a forward: nothing is recorded, and labels are refused."""
        self.notice()
        self.recorder.hidden = self.found._product = self.found._logits = None
        if named.get("labels") is not None:
            raise ValueError(
                "labels: got some inside capture_lm_head, allowed is None: the loss is computed from what the block "
                "gives, not by the model"
            )
        if self.found._head is not None:
            try:
                self._check_known()
                check_product(self.found._head)
            except NotImplementedError as refusal:
                self._run_plain(refusal)
            else:
                self.running = True
        if self.found._head is None and _is_recorded(self.module):
            raise _captured_already()

    def ends(self, _: nn.Module, __: object, output: object) -> None:
        """After a forward: check the probes after the model's own operations, then let its hidden states be read."""
        if self.found._head is None:
            self.found._logits = _own_logits(output)
            return
        recorded, self.recorder.hidden, self.running = self.recorder.hidden, None, False
        try:
            if recorded is None:
                raise NotImplementedError(
                    "module: its forward did not run the LM head that was found; nothing was captured"
                )
            check_probes(self.found.options, _probes_of(output))
        except NotImplementedError as refusal:
            self._refuse(str(refusal))
            raise
        self.found._product = product(self.found._head, recorded)
        REFUSED.pop(self.module, None)

    def notice(self) -> None:
        """Notice a forward that ran the head and failed after it: on the probes, as far as can be seen from here."""
        if self.running and self.recorder.hidden is not None:
            self._refuse("module: its forward failed on the few numbers that stand for its logits")
        self.running = False

    def _refuse(self, reason: str) -> None:
        if self.fallback == "logits":
            REFUSED[self.module], self.refused = reason, True

    def _check_known(self) -> None:
        """Raise NotImplementedError where a forward has shown that the head cannot be captured."""
        if self.fallback == "logits" and self.module in REFUSED:
            raise NotImplementedError(REFUSED[self.module])

    def _run_plain(self, refusal: NotImplementedError) -> None:
        """From now on the plain path, with a warning; without a fallback raise the refusal."""
        if self.fallback == "error":
            raise refusal
        reason = str(refusal)
        if WARNED.get(self.module) != reason:
            warnings.warn(
                f"logitless: capture_lm_head takes the plain path: {type(self.module).__name__} makes full logits, for "
                f"its LM head cannot be captured. {reason}. fallback='error' makes this an error",
                stacklevel=5,  # the with statement
            )
            WARNED[self.module] = reason
        self.recording.close()
        self.found._head, self.found.options, self.refused = None, PLAIN, False


def _is_recorded(module: nn.Module) -> bool:
    """Whether a head inside the module is a recorder now."""
    return any(isinstance(one.__dict__.get("forward"), Recorder) for one in module.modules())


def _captured_already() -> RuntimeError:
    return RuntimeError("module: got one whose LM head is captured already, allowed is one capture at a time")


def _named_logits(output: object) -> object:
    """``output.logits`` or output["logits"], or None."""
    found = getattr(output, "logits", None)
    return output.get("logits") if found is None and isinstance(output, dict) else found


def _probes_of(output: object) -> Tensor:
    """What a captured forward has made of the probes. Raises NotImplementedError where it shows nothing of it."""
    found = _named_logits(output)
    if found is None:
        found = output[0] if isinstance(output, tuple | list) and output else output
    if not is_probes(found):
        raise NotImplementedError(
            f"module: its forward gave {type(output).__name__} without logits that could be checked, allowed are "
            f"logits, an output with .logits or 'logits', or a tuple that begins with them"
        )
    return found


def _own_logits(output: object) -> Tensor:
    """The logits that a plain forward names. Any other tensor may be something else, as hidden states are."""
    found = _named_logits(output)
    if not isinstance(found, Tensor):
        raise NotImplementedError(
            f"module: its forward gave {type(output).__name__}, allowed on the plain path (fallback='logits') is an "
            f"output with .logits or 'logits': models of transformers have one with return_dict=True"
        )
    return found
