"""A model's hidden states and head in the place of its logits.

The mirror of torch_impl/huggingface/capture.py. PyTorch runs a model with a recorder as its head; JAX has the whole
forward as a program before it runs, in which the head can be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypedDict, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.jax_impl.capture.head import read_head
from logitless.jax_impl.capture.nnx_modules import Call
from logitless.jax_impl.capture.program import Program
from logitless.spec import WeightLayout

Tree = object
"""A pytree."""


class HeadOptions(TypedDict):
    """What a model does to its logits, and how its weight lies, as keyword arguments of the losses."""

    logit_scale: float
    softcap: float | None
    weight_layout: WeightLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CapturedHead:
    """What :func:`capture_lm_head` found: the arguments of a linear cross-entropy but for the target.

    A pytree: it may leave jax.jit, jax.checkpoint and a loss function's has_aux.
    """

    hidden: Array
    """[..., D]: what the head multiplies, with the leading axes of the logits."""
    weight: Array
    """[V, D] or [D, V]: the head's own parameter, which may be the embedding's too."""
    bias: Array | None
    """[V], or None."""
    output: Tree
    """What the forward gave, with None in the place of the logits: auxiliary losses, caches, Linen's variables."""
    logit_scale: float = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(metadata={"static": True})
    weight_layout: WeightLayout = dataclasses.field(metadata={"static": True})

    @property
    def options(self) -> HeadOptions:
        """logit_scale, softcap and weight_layout, as keyword arguments of linear_cross_entropy and linear_log_probs."""
        return {"logit_scale": self.logit_scale, "softcap": self.softcap, "weight_layout": self.weight_layout}


def capture_lm_head(forward: Callable[..., Tree]) -> Callable[..., CapturedHead]:
    """A function that runs ``forward`` without its logits, and gives what its LM head is given, and the head.

        head = capture_lm_head(model)(ids)                       # flax.nnx
        head = capture_lm_head(model.apply)(variables, ids)      # flax.linen
        head = capture_lm_head(jax.vmap(model))(ids)             # Equinox
        loss = linear_cross_entropy(head.hidden, head.weight, target, head.bias, **head.options)

    ``forward`` is traced, and the logits' way is read from their end: through a scale and a softcap, both constant, and
    a bias, back to one product z = f(hidden @ weight.T + bias). That product is the head, whatever module made it. Its
    operands are computed as in the forward, and differentiable; the product is not. So nothing needs to be named or
    replaced, and loss and gradients are those of the full logits, tied weights included.

    What is between product and logits may be multiplied or divided by constants, tanh, one bias [V], dtypes, and moves
    of tokens: transpose, reshape, slices of leading axes. A weight that is turned or rounded from float32 for the
    product is captured before that. Works inside and outside of jit, grad, vmap and checkpoint, which may be inside of
    ``forward`` too; leave jax.vmap over the tokens inside of it, for a vmap around it repeats the weight.

    Of flax.nnx a module, its method, and modules among the arguments are taken as they are, with changes of their state
    (dropout, batch statistics). A module that a function closes over can be read, but not changed.

    Arguments:
        forward: gives logits, or has them as ``.logits`` or under "logits", or first in a tuple or list. It is traced
            at every call, with its arguments as they are: numbers and flags stay Python's.

    The function returned takes forward's arguments and returns a :class:`CapturedHead`. It computes forward's other
    results too (under jax.jit, where they are used): what needs logits there makes them.

    Raises TypeError for what cannot be called; from the function NotImplementedError, with the reason, for logits that
    are anything else: another operation between (a mask, a padded vocabulary that is cut), a sum of products (LoRA), a
    scale that is trained, a quantised head, a precision of its own, a head inside of a loop or jax.shard_map.
    """
    if not callable(forward):
        raise TypeError(f"forward: got {type(forward).__name__}, allowed is a function that gives logits")

    def captured(*arguments: object, **named: object) -> CapturedHead:
        call, output = Call(forward, arguments, named), _Output()

        def run() -> tuple[Array, list[Array], list[Array]]:
            given, state = call.run()
            return *output.arrays_of(given), state

        program = Program(jax.make_jaxpr(run)())
        logits, *others = program.outputs
        head = read_head(program, logits)
        wanted = [head.hidden, head.weight, *([] if head.bias is None else [head.bias])]
        found = program.evaluate([*wanted, *others])
        hidden, weight, *bias = found[: len(wanted)]
        others_found = found[len(wanted) :]
        call.update(others_found[output.count :])
        weight, *bias = _of_one_dtype(weight, *bias)
        return CapturedHead(
            head.laid_out(hidden), weight, bias[0] if bias else None, output.filled(others_found[: output.count]),
            logit_scale=head.logit_scale, softcap=head.softcap, weight_layout=head.weight_layout,
        )  # fmt: skip

    return captured


def _of_one_dtype(*arrays: Array) -> list[Array]:
    """A weight and a bias, which the losses take in one dtype. What is widened is rounded by the loss as it was."""
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


class _Output:
    """What a forward gives: logits, other arrays, and what is no array."""

    count: int
    """How many other arrays there are."""

    def arrays_of(self, output: Tree) -> tuple[Array, list[Array]]:
        """The logits and the other arrays. Keeps nothing of the trace."""
        logits = _logits_of(output)
        leaves, self._tree = jax.tree.flatten(output)
        others = [leaf for leaf in leaves if _is_array(leaf) and leaf is not logits]
        self.count = len(others)
        self._leaves = [None if leaf is logits else _PLACE if _is_array(leaf) else leaf for leaf in leaves]
        return logits, others

    def filled(self, others: list[Array]) -> Tree:
        """The output with arrays in their places and None in that of the logits."""
        each = iter(others)
        return jax.tree.unflatten(self._tree, [next(each) if leaf is _PLACE else leaf for leaf in self._leaves])


_PLACE = object()


def _is_array(leaf: object) -> TypeGuard[Array]:
    return isinstance(leaf, Array | np.ndarray)


def _logits_of(output: Tree) -> Array:
    found = getattr(output, "logits", None)
    if found is None:
        found = output
        if isinstance(output, Mapping):
            found = output.get("logits")
        elif isinstance(output, tuple | list) and output:
            found = output[0]
    if not _is_array(found):
        raise NotImplementedError(
            f"forward: it gave {type(output).__name__} without logits, allowed are logits, an output with .logits or "
            f"'logits', or a tuple or list that begins with them"
        )
    return found
