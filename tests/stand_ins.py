"""Stand-ins for programs that are not installed: the classes and functions that our adapters meet, as documented."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def put_in(path: str, **names: Any) -> None:
    """Make ``import path`` find a module with these names, where the package is not installed."""
    if is_installed(path.split(".")[0]):
        return
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__path__ = []
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    for name, value in names.items():
        setattr(sys.modules[path], name, value)


@contextlib.contextmanager
def without(package: str, ours: str) -> Iterator[None]:
    """Afterwards neither a stand-in of the package nor our adapter is left among the modules."""
    stands_in = not is_installed(package)
    yield
    if stands_in:
        for name in [name for name in sys.modules if name.split(".")[0] == package or name == ours]:
            del sys.modules[name]


def torchtitan() -> None:
    """Of torchtitan 0.3's ``components/loss.py``."""

    class CrossEntropyLoss:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            global_vocab_size: int | None = None

    class ChunkedLossWrapper:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8
            loss_fn: Any = dataclasses.field(default_factory=CrossEntropyLoss.Config)

        def set_lm_head(self, lm_head: Any) -> None:
            self.lm_head = lm_head

    put_in("torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper, CrossEntropyLoss=CrossEntropyLoss)


def axolotl() -> None:
    """Of Axolotl 0.19's ``integrations/base.py``."""

    class BasePlugin:
        def get_input_args(self) -> str | None:
            return None

        def pre_model_load(self, cfg: Any) -> None:
            pass

        def post_model_load(self, cfg: Any, model: Any) -> None:
            pass

    put_in("axolotl.integrations.base", BasePlugin=BasePlugin)


def verl() -> None:
    """Of verl 0.9's ``utils/kernel/linear_cross_entropy.py``, and a module that has imported the function."""

    def linear_cross_entropy(
        hidden: Any, weight: Any, labels: Any, temperature: Any = 1.0, reduction: Any = "none", group: Any = None
    ) -> Any:
        raise AssertionError("verl's own needs a GPU")

    put_in("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=linear_cross_entropy)
    put_in("verl.models.mcore.model_forward_fused", linear_cross_entropy=linear_cross_entropy)


def tokamax() -> None:
    """Of tokamax 0.0.17's ``_src/ops/linear_softmax_cross_entropy_loss/api.py``."""
    implementations: dict[str, Any] = {}

    def linear_softmax_cross_entropy_loss(
        x: Any, labels: Any, weights: Any, *, reduction: str = "sum", precision: Any = None, implementation: Any = None
    ) -> Any:
        if precision is not None:
            raise NotImplementedError("a precision is not supported")
        if implementation not in implementations:
            raise ValueError(f"Unsupported implementation: {implementation}")
        return implementations[implementation](x, labels, weights, reduction=reduction)

    put_in(
        "tokamax._src.ops.linear_softmax_cross_entropy_loss.api", IMPLEMENTATIONS=implementations,
        linear_softmax_cross_entropy_loss=linear_softmax_cross_entropy_loss,
    )  # fmt: skip
    put_in("tokamax", linear_softmax_cross_entropy_loss=linear_softmax_cross_entropy_loss)


def levanter() -> None:
    """Of levanter's ``kernels/pallas/fused_cross_entropy_loss``: what it does with an implementation."""
    import jax.numpy as jnp

    implementations: dict[str, Any] = {}

    def fused_cross_entropy_loss_and_logsumexp_penalty(
        x: Any, labels: Any, w: Any, *, reduction: str | None = "mean", weight: Any = None,
        logsumexp_weight: float | None = 0.0, block_size: int | None = None, block_sizes: Any = None,
        dtype: Any = jnp.float32, logit_soft_cap: float | None = None, precision: Any = None,
        implementation: Any = None, return_argmax: bool = False,
    ) -> Any:  # fmt: skip
        function = implementation if callable(implementation) else implementations[implementation]
        options = {"block_sizes": block_sizes, "dtype": dtype, "logit_soft_cap": logit_soft_cap, "precision": precision}
        loss, lse, *argmax = function(x, labels, w, **options, **({"return_argmax": True} if return_argmax else {}))
        loss = loss + (logsumexp_weight or 0.0) * lse**2
        scaled = loss if weight is None else loss * weight
        count = len(loss) if weight is None else weight.sum()
        reduced = {None: scaled, "sum": scaled.sum(), "mean": scaled.sum() / count}[reduction]
        return (reduced, *argmax) if return_argmax else reduced

    put_in(
        "levanter.kernels.pallas.fused_cross_entropy_loss", IMPLEMENTATIONS=implementations,
        fused_cross_entropy_loss_and_logsumexp_penalty=fused_cross_entropy_loss_and_logsumexp_penalty,
    )  # fmt: skip


def maxtext() -> None:
    """Of MaxText 0.2.5's ``utils/vocabulary_tiling.py``, ``utils/sharding.py`` and of what calls them."""
    from jax.sharding import NamedSharding, PartitionSpec

    axes = {"activation_embed_and_logits_batch": ("data", "fsdp"), "activation_length": "context"}

    def create_sharding(mesh: Any, names: tuple[str, ...]) -> Any:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(name, "tensor") for name in names)))

    def vocab_tiling_nnx_loss(model: Any, hidden_states: Any, data: Any, config: Any, is_train: bool) -> Any:
        raise AssertionError("the stand-in has no loss")

    def vocab_tiling_linen_loss(
        hidden_states: Any, data: Any, config: Any, model: Any, params: Any, is_train: bool
    ) -> Any:
        raise AssertionError("the stand-in has no loss")

    losses = {"vocab_tiling_nnx_loss": vocab_tiling_nnx_loss, "vocab_tiling_linen_loss": vocab_tiling_linen_loss}
    put_in("maxtext.utils.sharding", create_sharding=create_sharding)
    put_in("maxtext.utils.vocabulary_tiling", **losses)
    put_in("maxtext.trainers.pre_train.train", **losses)
