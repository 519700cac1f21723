"""What autograd keeps of a forward, layer by layer, and what the loss has in it. Mirror of jax_impl/profiling.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from logitless.saved import SavedTensors
from logitless.torch_impl.api import linear_cross_entropy

_PATH = "logitless.path"  # in the metadata of a node of autograd's graph

# Nodes whose result is the whole of their one argument, in another dtype or shape.
_SAME = {
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias")
}


def profile_saved_tensors(
    function: Callable[..., Any], *arguments: Any, module: nn.Module | None = None, **options: Any
) -> SavedTensors:
    """Run ``function(*arguments, **options)`` once, and list what autograd keeps of it for the backward.

    Counted when the call has returned, in the bytes of whole storages (a view keeps all of its storage), each storage
    once, at the layer that saved it first: tensors that operations have saved, and tensors that custom functions hold
    on their context (such as gradients that wait for the upstream scalar). A layer is the innermost module whose
    forward was running; "" is outside of all. Nothing is differentiated, and what the function returns is dropped.

    Weights are parameters and buffers, and a parameter's copy in another dtype, as torch.autocast makes them (not of a
    frozen one: nothing then says where a copy comes from). Everything else is an activation, an input that requires
    grad too. Without a module every leaf that requires grad is a weight.

    Arguments:
        function: a torch.nn.Module, or any callable that runs one.
        module: whose layers to tell apart, if ``function`` is not a module itself; None: no layers.

    Returns :class:`logitless.saved.SavedTensors`; ``rich.print`` shows it as a table, and its ``to_depth`` adds up the
    layers of each block.

    Of an activation checkpoint only its inputs are kept, and counted. Under torch.compile the layers are one graph and
    cannot be told apart.
    """
    if module is None and isinstance(function, nn.Module):
        module = function
    recorder = _Recorder()
    handles = [] if module is None else recorder.watch(module)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(recorder.pack, _Kept.unpack):
            result = function(*arguments, **options)
    finally:
        for handle in handles:
            handle.remove()
    recorder.claim(result)
    kept = [(path, saved.tensor, saved.source) for path, ref in recorder.saved if (saved := ref()) is not None]
    leaves = [] if module is None else [*module.parameters(), *module.buffers()]
    for node in _nodes(result):
        leaf = getattr(node, "variable", None)
        leaves += [leaf] if leaf is not None and (module is None or isinstance(leaf, nn.Parameter)) else []
        kept += [(_metadata(node)[_PATH], tensor, None) for tensor in _tensors_in(getattr(node, "__dict__", {}), set())]
    weights = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    found: dict[int, tuple[str, int, bool]] = {}
    for path, tensor, source in kept:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            is_weight = bool(weights & {storage.data_ptr(), source})
            found.setdefault(storage.data_ptr(), (path, storage.nbytes(), is_weight))
    return SavedTensors.of(found.values())


def profile_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> dict[str, SavedTensors]:
    """What the loss keeps for its backward, with full logits and without: {"full logits": ..., "logitless": ...}.

    hidden [..., D], weight [V, D], target [...], bias [V] as for :func:`linear_cross_entropy`, whose other options the
    second takes (``memory_budget``, ``plan``, ``backend``, ...); the first is torch.nn.functional.cross_entropy on
    float32 logits. Everything that comes in counts as weights.
    """

    def full(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        z = nn.functional.linear(x, w, b)
        return nn.functional.cross_entropy(z.float().flatten(0, -2), target.flatten().long())

    def ours(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        return linear_cross_entropy(x, w, target, b, **options)

    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (hidden, weight, bias)]
    return {name: profile_saved_tensors(loss, *leaves) for name, loss in (("full logits", full), ("logitless", ours))}


class _Kept:
    """What autograd holds instead of a saved tensor: it dies with the node of the graph that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an operation's own result would keep the operation
        self.source = _source(tensor.grad_fn)

    def unpack(self) -> Tensor:
        return self.tensor


class _Recorder:
    """What was saved while which layer ran. Everything is held weakly: only what the graph keeps must count."""

    def __init__(self) -> None:
        self.running = [""]
        self.saved: list[tuple[str, weakref.ref[_Kept]]] = []

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks that say which layer is running. What comes into a layer is a result of the layer around it."""

        def before(path: str) -> Callable[..., None]:
            def enter(_: nn.Module, arguments: object) -> None:
                self.claim(arguments)
                self.running.append(path)

            return enter

        def leave(_: nn.Module, __: object, result: object) -> None:
            self.claim(result)
            self.running.pop()

        handles: list[RemovableHandle] = []
        for path, layer in module.named_modules():
            handles += [layer.register_forward_pre_hook(before(path)), layer.register_forward_hook(leave)]
        return handles

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self.saved.append((self.running[-1], weakref.ref(kept)))
        return kept

    def claim(self, results: object) -> None:
        """Write the running layer's path on those nodes of the graph behind some results that have none yet."""
        for node in _nodes(results, lambda node: _PATH not in _metadata(node)):
            _metadata(node)[_PATH] = self.running[-1]


def _source(node: Node | None) -> int | None:
    """The address of the leaf that a tensor made by this node is a copy of, if of one."""
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return None if leaf is None else leaf.untyped_storage().data_ptr()


def _metadata(node: Node) -> dict[str, str]:
    metadata: Any = node.metadata  # a dict, where torch's types say a method
    own: dict[str, str] = metadata
    return own


def _nodes(results: object, wanted: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """The nodes of autograd's graph behind some results, as far as they are wanted."""
    pending = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or not wanted(node):
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        yield node


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in containers and objects that are not torch's own."""
    if isinstance(value, ModuleType | FunctionType | type) or id(value) in seen:
        return
    if isinstance(value, Tensor):
        yield value
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts: Iterable[object] = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] != "torch":
        parts = vars(value).values()
    else:
        return
    for part in parts:
        yield from _tensors_in(part, seen)
