"""The steps of a call as opaque operations of PyTorch's: what torch.compile puts into its graphs.

Each hides a whole forward or a whole backward, so that compiled and eager mode run the same code on the same kernels.
The functions have the names and arguments of steps.py; they are not differentiable themselves (autograd.py is). What
waits between forward and backward leaves as a list of tensors and comes back as one; nothing that comes in is written
to, and no result shares memory with an argument or another result. Which layout a
graph's tensors will have is not known before it runs, so arguments are made plain here.

``torch.ops.logitless``: loss, loss_gradients, log_probs, log_probs_gradients. Their ``call`` is a :class:`Recipe` in
JSON; ``token_chunk`` stands beside it because it may be a symbol (torch_impl/compiled/tracing.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from logitless.planning import ChunkPlan, Preference
from logitless.scratch import Kind, Order
from logitless.spec import STATISTICS, LossOptions, Statistics, TokenStats, log_prob_statistics
from logitless.torch_impl import steps
from logitless.torch_impl.backend import Waiting, WaitingLoss, backend_named
from logitless.torch_impl.call import Arrays, Call, Gradients, LatePlan, Layout, Needs, accumulation_dtype, is_turned
from logitless.torch_impl.checks import plain, planner

_ARRAYS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weight, Tensor? class_weight"
_ARRAYS += ", Tensor? temperature"
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature"
_CALL = "str call, SymInt token_chunk"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A :class:`Call` without tensors, sizes or symbols: constants only, for a graph to hold."""

    options: tuple[Any, ...]
    compute_dtype: str
    statistics: Statistics
    lse: bool
    backend: Kind
    wanted: tuple[bool, bool, bool]
    """Whether gradients of hidden, weight and bias are wanted."""
    held: bool
    """Whether the forward makes the gradients, and they wait for the backward."""
    order: Order | None
    """The plan's; None: the plan is chosen when the call runs."""
    one_pass: bool
    limit: int | None
    """The plan's vocab_chunk; or, for a plan that is chosen later, the memory budget."""
    prefer: Preference
    """For a plan that is chosen later."""
    turned: bool
    """Whether the operation's weight, and its gradient, is [D, V]."""

    @staticmethod
    def of(call: Call, needs: Needs, turned: bool) -> Recipe:
        plan = call.plan
        return Recipe(
            options=dataclasses.astuple(call.options),
            compute_dtype=str(call.compute_dtype).removeprefix("torch."),
            statistics=call.statistics,
            lse=call.lse,
            backend=call.backend,
            wanted=(needs.hidden is not None, needs.weight is not None, needs.bias is not None),
            held=needs.any and steps.one_pass(call),
            order=None if isinstance(plan, LatePlan) else plan.order,
            one_pass=plan.one_pass,
            limit=plan.memory_budget if isinstance(plan, LatePlan) else plan.vocab_chunk,
            prefer=plan.prefer if isinstance(plan, LatePlan) else "balanced",
            turned=turned,
        )

    def text(self) -> str:
        # A NumPy number is none of JSON's.
        return json.dumps(dataclasses.asdict(self), default=operator.methodcaller("item"))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype

    @property
    def loss_options(self) -> LossOptions:
        return LossOptions(*self.options)

    def arrays(self, tensors: Sequence[Any]) -> Arrays:
        """An operation's tensors, with the weight as [V, D] again."""
        arrays = Arrays(*tensors)
        return arrays._replace(weight=arrays.weight.contiguous().T) if self.turned else arrays

    def needs(self, arrays: Arrays) -> Needs:
        """The dtypes of the wanted gradients: their arguments' own."""
        pairs = zip(arrays[:3], self.wanted, strict=True)
        hidden, weight, bias = (array.dtype if wanted and array is not None else None for array, wanted in pairs)
        return Needs(hidden, weight, bias)

    def call(self, arrays: Arrays, token_chunk: int) -> Call:
        """The call again, where sizes are numbers."""
        plan = self._plan(arrays, token_chunk)
        # What a compiled call leaves behind are tensors in the graph's order, so it runs as it is.
        return Call(self.loss_options, plan, self.dtype, self.statistics, True, self.backend, True, lse=self.lse)

    def _plan(self, arrays: Arrays, token_chunk: int) -> ChunkPlan:
        tokens, (vocab, size) = arrays.target.numel(), arrays.weight.shape
        if self.order is not None:
            sizes = tokens, size, vocab, self.compute_dtype
            return ChunkPlan(*sizes, self.order, self.one_pass, token_chunk, self.limit or 0, self.backend)
        order = "tokens" if self.one_pass else None
        planned = planner(arrays, self.dtype, self.backend)
        return planned(tokens=tokens, memory_budget=self.limit, order=order, one_pass=self.one_pass, prefer=self.prefer)


@functools.lru_cache(maxsize=1024)
def _recipe(text: str) -> Recipe:
    fields = json.loads(text)
    return Recipe(**fields | {name: tuple(fields[name]) for name in ("options", "wanted")})


# ---------------------------------------------------------------------------------------------------------------------
# The operations, and what they give in shapes and dtypes


@torch.library.custom_op(
    "logitless::loss", mutates_args=(), schema=f"({_ARRAYS}, Tensor? normalizer, {_CALL}) -> Tensor[]"
)
def _loss(*arguments: Any) -> list[Tensor]:
    """[loss, lse and the statistics if asked for, and for the backward: what waits, or the known sums]."""
    *tensors, normalizer, text, token_chunk = arguments
    recipe = _recipe(text)
    arrays = plain(recipe.arrays(tensors))
    call, needs = recipe.call(arrays, token_chunk), recipe.needs(arrays)

    def run(call: Call) -> list[Tensor]:
        step = steps.loss(arrays, normalizer, call, needs)
        saved = list(step.saved)
        if recipe.held:
            saved = cast(WaitingLoss, step.waiting).tensors(_held_layout(arrays, recipe, token_chunk))
        return [value for value in (step.loss, step.lse, *step.stats, *saved) if value is not None]

    return _whole("loss", arrays, call, needs, run, normalizer)


@_loss.register_fake
def _(*arguments: Any) -> list[Tensor]:
    *tensors, _, text, token_chunk = arguments
    recipe = _recipe(text)
    arrays = recipe.arrays(tensors)
    dtype, shape = accumulation_dtype(recipe.dtype), arrays.target.shape
    results = [_new(arrays, shape if recipe.loss_options.reduction == "none" else (), dtype)]
    if recipe.lse:
        results.append(_new(arrays, shape, dtype))
    if recipe.statistics:
        results += _new_statistics(arrays, tuple(STATISTICS), dtype)
    if recipe.held:
        layout = _held_layout(arrays, recipe, token_chunk)
        return results + [_new(arrays, *shape_and_dtype) for shape_and_dtype in layout.values()]
    if recipe.needs(arrays).any:
        results += [_new(arrays, (), dtype)] + [_new(arrays, (arrays.target.numel(),), dtype) for _ in range(3)]
    return results


@torch.library.custom_op(
    "logitless::loss_gradients",
    mutates_args=(),
    schema=f"({_ARRAYS}, Tensor[] saved, Tensor upstream, Tensor? g_lse, {_CALL}) -> Tensor[]",
)
def _loss_gradients(*arguments: Any) -> list[Tensor]:
    """The wanted gradients of hidden, weight and bias; saved: what :func:`_loss` left for them."""
    *tensors, saved, upstream, g_lse, text, token_chunk = arguments
    recipe = _recipe(text)
    arrays = plain(recipe.arrays(tensors))
    call, needs = recipe.call(arrays, token_chunk), recipe.needs(arrays)

    def run(call: Call) -> list[Tensor]:
        if recipe.held:
            return _present(steps.held_gradients(arrays, call, needs, saved, upstream), recipe)
        return _present(steps.loss_gradients(arrays, call, needs, tuple(saved), None, upstream, g_lse), recipe)

    return _whole("loss_gradients", arrays, call, needs, run, *saved, upstream, g_lse)


@torch.library.custom_op(
    "logitless::log_probs",
    mutates_args=(),
    schema=f"({_HEAD}, {_CALL}) -> Tensor[]",
)
def _log_probs(*arguments: Any) -> list[Tensor]:
    """[log p, the statistics of :func:`spec.log_prob_statistics`, and for the backward the known sums]."""
    *tensors, text, token_chunk = arguments
    recipe = _recipe(text)
    arrays = plain(recipe.arrays(Arrays.of_head(*tensors)))
    call, needs = recipe.call(arrays, token_chunk), recipe.needs(arrays)

    def run(call: Call) -> list[Tensor]:
        step = steps.log_probs(arrays, call, needs)
        return [step.log_prob, *step.stats, *step.saved]

    return _whole("log_probs", arrays, call, needs, run)


@_log_probs.register_fake
def _(*arguments: Any) -> list[Tensor]:
    *tensors, text, _ = arguments
    recipe = _recipe(text)
    arrays = recipe.arrays(Arrays.of_head(*tensors))
    dtype = accumulation_dtype(recipe.dtype)
    results = [_new(arrays, arrays.target.shape, dtype)]
    results += _new_statistics(arrays, log_prob_statistics(recipe.statistics), dtype)
    if recipe.needs(arrays).any:
        kept = 3 + len(steps.kept_sums(recipe.statistics))
        results += [_new(arrays, (arrays.target.numel(),), dtype) for _ in range(kept)]
    return results


@torch.library.custom_op(
    "logitless::log_probs_gradients",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor[] saved, Tensor?[] upstream, {_CALL}) -> Tensor[]",
)
def _log_probs_gradients(*arguments: Any) -> list[Tensor]:
    """The wanted gradients of hidden, weight and bias; saved: what :func:`_log_probs` left for them."""
    *tensors, saved, upstream, text, token_chunk = arguments
    recipe = _recipe(text)
    arrays = plain(recipe.arrays(Arrays.of_head(*tensors)))
    call, needs = recipe.call(arrays, token_chunk), recipe.needs(arrays)

    def run(call: Call) -> list[Tensor]:
        return _present(steps.log_probs_gradients(arrays, call, needs, tuple(saved), None, upstream), recipe)

    return _whole("log_probs_gradients", arrays, call, needs, run, *saved, *upstream)


@_loss_gradients.register_fake
@_log_probs_gradients.register_fake
def _(*arguments: Any) -> list[Tensor]:
    arrays, recipe = Arrays(*arguments[:4]), _recipe(arguments[-2])
    pairs = zip(arrays[:3], recipe.wanted, strict=True)
    return [array.new_empty(array.shape) for array, wanted in pairs if wanted and array is not None]


def _whole(
    name: str, arrays: Arrays, call: Call, needs: Needs, run: Callable[[Call], list[Tensor]], *others: Tensor | None
) -> list[Tensor]:
    """``run(call)``: an operation's results, as one step of the call's backend. ``others``: what it reads beside
    ``arrays``."""
    return backend_named(call.backend).run_step(name, arrays, call, needs, run, others)


def _new(arrays: Arrays, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return arrays.hidden.new_empty(shape, dtype=dtype)


def _new_statistics(arrays: Arrays, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
    dtypes = (getattr(torch, STATISTICS[name].dtype or "", dtype) for name in names)
    return [_new(arrays, arrays.target.shape, own) for own in dtypes]


def _held_layout(arrays: Arrays, recipe: Recipe, token_chunk: int) -> Layout:
    backend, needs = backend_named(recipe.backend), recipe.needs(arrays)
    return backend.held_layout(arrays.target.numel(), arrays, recipe.loss_options, recipe.dtype, token_chunk, needs)


def _present(gradients: Gradients, recipe: Recipe) -> list[Tensor]:
    weight = gradients.weight
    every = (gradients.hidden, weight if weight is None or not recipe.turned else weight.T, gradients.bias)
    return [gradient.contiguous() for gradient in every if gradient is not None]


# ---------------------------------------------------------------------------------------------------------------------
# The steps


def _named(gradients: list[Tensor], needs: Needs, turned: bool) -> Gradients:
    left = iter(gradients)
    hidden, weight, bias = (next(left) if dtype else None for dtype in (needs.hidden, needs.weight, needs.bias))
    return Gradients(hidden, weight.T if turned and weight is not None else weight, bias)


def _lying(arrays: Arrays) -> tuple[Arrays, bool]:
    """A call's arrays with the weight as it lies in memory, and whether that is [D, V]."""
    turned = is_turned(arrays.weight)
    return arrays._replace(weight=arrays.weight.T) if turned else arrays, turned


def _chunk(call: Call) -> int:
    return 0 if isinstance(call.plan, LatePlan) else call.plan.token_chunk


def loss(arrays: Arrays, normalizer: Tensor | float | None, call: Call, needs: Needs) -> steps.Loss:
    """:func:`steps.loss`."""
    dtype, device = accumulation_dtype(call.compute_dtype), arrays.hidden.device
    if normalizer is not None and not isinstance(normalizer, Tensor):  # a number here may be a symbol
        normalizer = torch.full((), normalizer, dtype=dtype, device=device)
    arrays, turned = _lying(arrays)
    results = torch.ops.logitless.loss(*arrays, normalizer, Recipe.of(call, needs, turned).text(), _chunk(call))
    own = call.differentiable
    first = own + call.constants
    stats = tuple(results[own:first]) if call.statistics else (None,) * len(TokenStats._fields)
    return steps.Loss(results[0], results[1] if call.lse else None, stats, tuple(results[first:]), None)


def loss_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | None, upstream: Tensor,
    g_lse: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """:func:`steps.loss_gradients`; what waits is in ``saved``, and may be used more than once."""
    del waiting
    lying, turned = _lying(arrays)
    recipe = Recipe.of(call, needs, turned)
    if recipe.held and not backend_named(call.backend).PRODUCTS_WAIT:
        return steps.held_gradients(arrays, call, needs, list(saved), upstream)
    gradients = torch.ops.logitless.loss_gradients(*lying, list(saved), upstream, g_lse, recipe.text(), _chunk(call))
    return _named(gradients, needs, turned)


def log_probs(arrays: Arrays, call: Call, needs: Needs) -> steps.LogProbs:
    """:func:`steps.log_probs`."""
    arrays, turned = _lying(arrays)
    results = torch.ops.logitless.log_probs(*arrays.head, Recipe.of(call, needs, turned).text(), _chunk(call))
    own = call.differentiable + call.constants
    return steps.LogProbs(results[0], tuple(results[1:own]), tuple(results[own:]), None)


def log_probs_gradients(
    arrays: Arrays, call: Call, needs: Needs, saved: tuple[Tensor, ...], waiting: Waiting | Tensor | None,
    upstream: Sequence[Tensor | None],
) -> Gradients:  # fmt: skip
    """:func:`steps.log_probs_gradients`."""
    del waiting
    arrays, turned = _lying(arrays)
    recipe = Recipe.of(call, needs, turned).text()
    gradients = torch.ops.logitless.log_probs_gradients(*arrays.head, list(saved), list(upstream), recipe, _chunk(call))
    return _named(gradients, needs, turned)
