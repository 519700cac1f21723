"""What a backend does, as a type, and the backends by name. Mirror of torch_impl/backend.py.

A backend is a module with the functions of :class:`Backend`: jax_impl/xla.py and jax_impl/kernels/fused.py. N tokens,
D hidden, V vocabulary entries (of this device, if the call is sharded).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless import spec
from logitless.jax_impl.call import Gradients, Inputs, KnownRows, Needs, RawArray, TokenSums
from logitless.planning import ChunkPlan
from logitless.spec import LossOptions, Statistics

BACKENDS = ("pallas", "xla")

Held = TypeVar("Held")


class Backend(Protocol[Held]):
    """``Held``: what a forward leaves for its backward, a pytree of arrays that only this backend reads.

    Only plain operations are given ``inputs.into``, and give it with dW added in dW's place.
    """

    def unavailable(self, device: jax.Device | None, dtype: str, /) -> str | None:
        """Why this backend cannot compute in ``dtype`` on that device, or None. Device None: tracing, not known."""

    def one_pass(self, dtype: jnp.dtype, options: LossOptions, /) -> bool:
        """Whether gradients can be made before lse is known."""

    def holds(self, dtype: jnp.dtype, /) -> bool:
        """Whether exponentials can wait for an upstream gradient per token."""

    def own_target_logits(self, inputs: Inputs, options: LossOptions, /) -> Array:
        """[N] the logits of the targets whose rows are on this device, 0 elsewhere."""

    def token_sums(self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics, /) -> TokenSums:
        """[N] each: what the forward knows of every token. 2·N·D·V flops."""

    def loss_gradients(
        self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool, /
    ) -> tuple[TokenSums, Held]:
        """Sums, and gradients that wait for the upstream scalar. 6·N·D·V flops in all. Only where :meth:`one_pass`.

        g [N]: normalizer times token weight and logit_scale, 0 where ignored.
        """

    def token_gradients(
        self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, g: Array, needs: Needs, statistics: bool, /
    ) -> tuple[TokenSums, Held]:
        """Sums, and exponentials [N, V] that wait for upstream gradients [N]. Only where :meth:`holds`."""

    def finish(self, held: Held, options: LossOptions, plan: ChunkPlan, needs: Needs, upstream: Array, /) -> Gradients:
        """dX [N, D], dW [V, D], db [V] from what waited, for the upstream gradient, a scalar or [N]."""

    def known_gradients(
        self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array, needs: Needs, /
    ) -> Gradients:
        """dX, dW and db from rows [N] that are known. 6·N·D·V flops. g [N]: upstream gradient, weights included."""

    def token_logits(
        self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, statistics: Statistics, /
    ) -> tuple[TokenSums, Array]:
        """Sums, and logits [N, V] that wait for :meth:`logits_gradients`. Only where :meth:`holds`."""

    def logits_gradients(
        self, inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, needs: Needs, logits: Array, /
    ) -> Gradients:
        """:meth:`known_gradients` from the logits that :meth:`token_logits` has left."""


def known_gradients(
    backend: Backend[Held], inputs: Inputs, options: LossOptions, plan: ChunkPlan, known: KnownRows, g: Array,
    needs: Needs,
) -> Gradients:  # fmt: skip
    """:meth:`Backend.known_gradients`, in any order of the plan: in "both", dX before dW and db."""
    plan = plan.with_whole_slices
    if plan.order != "both":
        return backend.known_gradients(inputs, options, plan, known, g, needs)
    (first, second), made = plan.halves, Gradients(None, None, None)
    others = needs._replace(hidden=False)
    if needs.hidden:
        alone = inputs._replace(into=None)
        made = backend.known_gradients(alone, options, first, known, g, Needs(True, False, False))
        made, known = lax.optimization_barrier((made, known))  # their scratch is not held at once
    if not any(others):
        return made
    return backend.known_gradients(inputs, options, second, known, g, others)._replace(hidden=made.hidden)


def backend_named(name: str) -> Backend[Any]:
    """The backend of that name. Only a backend reads what it has left waiting, so its type does not matter.

    Pallas is imported when its backend is first asked for.
    """
    if name == "pallas":
        from logitless.jax_impl.kernels import fused

        return fused
    from logitless.jax_impl import xla

    return xla


def _devices_of(array: object) -> set[jax.Device]:
    """The devices of a concrete array; none of a tracer or of another value."""
    return array.devices() if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) else set()


def device_of(array: object) -> jax.Device:
    """Where the call will most likely run: an array's own device, else JAX's default."""
    return next(iter(_devices_of(array) or jax.devices()))


def on_several_devices(array: object) -> bool:
    return len(_devices_of(array)) > 1


def chosen_backend(
    name: str | None, array: RawArray, reason: str | None, unavailable: Callable[[jax.Device | None, str], str | None]
) -> str:
    """The backend to use: the one asked for, or the kernels where they run on a GPU, else plain operations.

    The kernels do not run if there is a ``reason`` why not, or where ``unavailable`` gives one for the device of
    ``array`` and its dtype.
    """
    device = device_of(array)
    if name == "xla" or (name is None and device.platform != "gpu"):
        return "xla"
    if reason is None:
        # What is traced may be compiled for another device than JAX's default one.
        traced = name == "pallas" and isinstance(array, jax.core.Tracer)
        reason = unavailable(None if traced else device, str(array.dtype))
    if name is not None and reason is not None:
        raise spec.unavailable_error(name, reason, usable="xla")
    return "pallas" if reason is None else "xla"
