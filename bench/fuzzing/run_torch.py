"""A problem carried out by logitless.torch_impl."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.fuzzing.data import Arrays, given
from bench.fuzzing.plans import plan_arguments
from bench.fuzzing.problems import RESULTS, Found, Problem
from logitless import torch_impl

JUNK_ID = 10**6
MORE_UPSTREAMS = ("upstream_entropy", "upstream_lse", "upstream_squared")


def run(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """The outputs by name, as NumPy arrays; what was written to an argument, under "written"."""
    device = "cuda" if problem.device == "cuda" else "cpu"
    # The compiler would keep a symbol of every size it has seen: each problem begins anew.
    if problem.transform == "compile":
        torch._dynamo.reset()
    tensors = {name: _tensor(problem, name, values, device) for name, values in given(problem, arrays).items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.autocast(device, torch.bfloat16, enabled="autocast" in problem.extras), _repeating(problem):
        for _ in range(problem.runs):
            outputs = _Run(problem, tensors).outputs()
    written = [name for name, tensor in tensors.items() if _changed(problem, name, before[name], tensor.detach())]
    outputs = {name: _numpy(value) for name, value in outputs.items() if value is not None}
    return outputs | {"written": np.array(len(written))}


def _repeating(problem: Problem) -> contextlib.AbstractContextManager[object]:
    """Steps of the interpreted kernels are repeated, too."""
    if problem.runs == 1 or problem.device == "cuda":
        return contextlib.nullcontext()
    from logitless.torch_impl.kernels import replay

    return mock.patch.object(replay.settings, "on_cpu", True)


def _changed(problem: Problem, name: str, before: Tensor, after: Tensor) -> bool:
    return not (name == "logits" and "inplace_backward" in problem.extras) and not torch.equal(
        before.nan_to_num(), after.nan_to_num()
    )


def _numpy(value: Tensor) -> Any:
    value = value.detach().cpu()
    return value.double().numpy() if value.is_floating_point() else value.numpy()


def _tensor(problem: Problem, name: str, values: Any, device: str) -> Tensor:
    """The values in their dtype and layout, with other values in the memory between."""
    values = np.array(values, order="C")  # torch.tensor keeps the strides of what it copies
    tensor = torch.tensor(values)
    if name in ("hidden", "weight", "bias", "logits", "input") or name.startswith("teacher_"):
        dtype = getattr(torch, problem.dtype)
        mixed = "autocast" in problem.extras
        tensor = tensor.to(torch.float32 if mixed and dtype == torch.bfloat16 else dtype)
    elif problem.function == "padded_index_gather" and name == "upstream":
        tensor = tensor.to(getattr(torch, problem.dtype))
    elif values.dtype == np.int64 and name != "mask" and problem.index % 3 == 0:
        tensor = tensor.to(torch.int32)
    layout = problem.layouts.get(name, "contiguous")
    if name.startswith("upstream"):
        layout = {"expanded": "broadcast", "step": "step", "offset": "offset"}.get(problem.upstream, "contiguous")
    return _laid_out(tensor.to(device), layout)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    if tensor.dim() == 0 or tensor.numel() == 0 or layout == "contiguous":
        return tensor
    junk = JUNK_ID if not tensor.is_floating_point() else 1e4
    if tensor.dtype == torch.bool:
        junk = 1
    shape = list(tensor.shape)
    if layout == "offset":
        memory = tensor.new_full((tensor.numel() + 3,), junk)
        view = memory[3:].view(shape)
    elif layout == "step":
        view = tensor.new_full((*shape[:-1], 2 * shape[-1]), junk)[..., ::2]
    elif layout == "step_rows":
        view = tensor.new_full((3 * shape[0], *shape[1:]), junk)[1::3]
    elif layout == "transposed":
        view = tensor.new_full(shape[::-1], junk).permute(*reversed(range(len(shape))))
    elif layout == "expanded":
        return tensor[:1].clone().expand(shape)
    else:
        return tensor.reshape(-1)[:1].clone().reshape([1] * len(shape)).expand(shape)
    view.copy_(tensor)
    return view


class _Run:
    """One problem's call, gradients and statistics."""

    def __init__(self, problem: Problem, tensors: dict[str, Tensor]) -> None:
        self.problem, self.tensors = problem, tensors
        self.function = getattr(torch_impl, problem.function)
        self.needs = {name: tensors[name] for name in problem.needs}
        names = {"upstream", *MORE_UPSTREAMS}
        self.arguments = {name: tensor for name, tensor in tensors.items() if name not in names}
        self.options = dict(problem.options)
        if problem.function != "padded_index_gather":
            self.options["backend"] = problem.backend
        if problem.arrays.get("normalizer") == "array":
            self.options["normalizer"] = torch.tensor(
                self.options["normalizer"], dtype=torch.float64 if problem.dtype == "float64" else torch.float32
            )
        self.options |= plan_arguments(problem)
        if "inplace_backward" in problem.extras:
            self.options["inplace_backward"] = True
        self.buffer: Tensor | None = None
        self.deferred: Any = None

    def call(self, changed: dict[str, Tensor]) -> tuple[Any, Any]:
        """The differentiable results, and the statistics."""
        arguments = self.arguments | changed
        if "inplace_backward" in self.problem.extras:
            arguments["logits"] = arguments["logits"].clone(memory_format=torch.contiguous_format)
        returned = self.function(**arguments, **self.options)
        stats = None
        if isinstance(returned, tuple) and self.problem.function == "linear_cross_entropy":
            returned, *more = returned
            if self.options.get("return_lse"):
                returned = (returned, more.pop(0))
            stats = more[0] if self.options.get("return_stats") else None
            self.deferred = more[-1] if "defer" in self.problem.extras else None
        elif self.options.get("return_stats"):
            *results, stats = returned
            returned = results[0]
            if self.problem.function == "linear_log_probs":
                returned = (*results, stats.lse, stats.sum_p_squared)
        elif self.problem.function == "linear_top_k":
            returned, ids = returned
            stats = Found(ids)
        return returned, stats

    def upstreams(self, returned: Any, factor: float = 1.0) -> tuple[Tensor, ...]:
        values = (self.tensors["upstream"], *(self.tensors[name] for name in MORE_UPSTREAMS if name in self.tensors))
        return tuple(
            (factor * g).to(m.dtype).expand_as(m) if factor != 1.0 else _alike(g, m)
            for g, m in zip(values, _several(returned), strict=False)
        )  # fmt: skip

    def outputs(self) -> dict[str, Any]:
        transform = self.problem.transform
        if transform == "no_grad":
            with torch.no_grad():
                returned, stats = self.call({})
            return self._named(returned, stats, {})
        if transform == "func" and self.needs:
            return self._by_func()
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.needs.items()}
        self._beyond(leaves)
        returned, stats = self._forward(leaves)
        named = self._named(returned, stats, {})
        kept = {name: value.detach().clone() for name, value in named.items() if value is not None}
        if not leaves:
            return kept
        return kept | {f"d{name}": grad for name, grad in self._backward(returned, leaves).items()}

    def _beyond(self, leaves: dict[str, Tensor]) -> None:
        extras = self.problem.extras
        if "defer" in extras:
            self.options["defer_weight_grad"] = True
        for extra in extras:
            if extra.startswith("accumulate") and "weight" in leaves:
                wide = torch.float64 if self.problem.dtype == "float64" else torch.float32
                dtype = wide if extra == "accumulate_float32" else leaves["weight"].dtype
                self.buffer = torch.zeros(leaves["weight"].shape, dtype=dtype, device=leaves["weight"].device)
                self.options["accumulate_into"] = self.buffer

    def _forward(self, leaves: dict[str, Tensor]) -> tuple[Any, Any]:
        transform = self.problem.transform
        if transform == "checkpoint":
            from torch.utils.checkpoint import checkpoint

            return checkpoint(lambda: self.call(leaves), use_reentrant=False)  # type: ignore[no-any-return]
        if transform == "compile":
            return torch.compile(lambda: self.call(leaves), backend="aot_eager")()
        return self.call(leaves)

    def _backward(self, returned: Any, leaves: dict[str, Tensor]) -> dict[str, Any]:
        transform, results = self.problem.transform, _several(returned)
        if transform == "autograd_grad":
            grads = torch.autograd.grad(results, list(leaves.values()), self.upstreams(returned), allow_unused=True)
            return dict(zip(leaves, grads, strict=True))
        if transform == "second":
            return self._second(returned, leaves)
        if transform == "twice":  # another upstream gradient first, through the same graph
            torch.autograd.grad(results, list(leaves.values()), self.upstreams(returned, -0.5), retain_graph=True)
        if transform == "downstream":  # a caller's own product, in place where a mask would be
            gs = self.upstreams(returned)
            total: Any = sum((m * g).sum() for m, g in zip(results, gs, strict=False))
            total.backward()
        else:
            torch.autograd.backward(results, self.upstreams(returned))
        if self.deferred is not None:
            self.deferred.compute()
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        if self.buffer is not None:
            grads["weight"] = self.buffer
        return grads

    def _second(self, returned: Any, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """A derivative of the gradient, in one of the ways that torch has; it has to be refused."""
        results, inputs = _several(returned), list(leaves.values())
        way = self.problem.index % 3
        if way == 0:
            from torch.autograd.functional import hvp

            def total(*tensors: Tensor) -> Tensor:
                again, _ = self.call(dict(zip(leaves, tensors, strict=True)))
                return sum((m.sum() for m in _several(again)), torch.zeros((), device=tensors[0].device))

            hvp(total, tuple(leaf.detach() for leaf in inputs), tuple(torch.ones_like(leaf) for leaf in inputs))
            return {}
        grads = torch.autograd.grad(results, inputs, self.upstreams(returned), create_graph=True)
        total_of_grads = sum((g.sum() for g in grads), torch.zeros((), device=inputs[0].device))
        if way == 1:
            torch.autograd.grad(total_of_grads, inputs, allow_unused=True)
        else:
            total_of_grads.backward()
        return {}

    def _by_func(self) -> dict[str, Any]:
        import torch.func

        def results(chosen: dict[str, Tensor]) -> Any:
            returned, stats = self.call(chosen)
            return _several(returned), stats

        returned, pull, stats = torch.func.vjp(results, self.needs, has_aux=True) if self._has_stats else _no_stats(
            results, self.needs
        )  # fmt: skip
        (grads,) = pull(self.upstreams(returned))
        return self._named(returned, stats, {f"d{name}": grad for name, grad in grads.items()})

    @property
    def _has_stats(self) -> bool:
        return bool(self.options.get("return_stats"))

    def _named(self, returned: Any, stats: Any, grads: dict[str, Any]) -> dict[str, Any]:
        results = _several(returned)
        outputs = dict(zip(RESULTS.get(self.problem.function, ("loss", "lse")), results, strict=False))
        if stats is not None:
            outputs |= {f"stats.{name}": value for name, value in stats._asdict().items()}
        return outputs | grads


def _no_stats(results: Any, needs: dict[str, Tensor]) -> Any:
    import torch.func

    returned, pull = torch.func.vjp(lambda chosen: results(chosen)[0], needs)
    return returned, pull, None


def _several(returned: Any) -> tuple[Tensor, ...]:
    """Results as a tuple, without None."""
    return tuple(m for m in returned if m is not None) if isinstance(returned, tuple) else (returned,)


def _alike(g: Tensor, m: Tensor) -> Tensor:
    """The upstream gradient in the result's dtype, its layout kept where it has one."""
    return g if g.dtype == m.dtype and g.shape == m.shape else g.to(m.dtype).expand_as(m)
