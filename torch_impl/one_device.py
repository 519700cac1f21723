"""The road of a call on one device. Beside it stands that of several ranks, distributed/sharding.py.

checks.py checks arrays and request, chooses a backend and a plan, and makes the :class:`Call` that the autograd
functions of autograd.py carry. Its mirror: the second half of jax_impl/api.py.
"""

from __future__ import annotations

from torch import Tensor

from logitless.torch_impl import autograd, checks
from logitless.torch_impl.call import Arrays, Request
from logitless.torch_impl.compiled import tracing, transforms
from logitless.torch_impl.kernels import first_check


@tracing.kept_whole
def values(arrays: Arrays, normalizer: Tensor | float | None, request: Request) -> tuple[Tensor, ...]:
    """:func:`autograd.values` of a call on one device."""
    arrays, request = Arrays(*arrays), Request(*request)
    tracing.check_transforms("linear_log_probs" if request.log_probs else "linear_cross_entropy")
    plain, call = first_check.checked(lambda: checks.ready(arrays, normalizer, request))
    if tracing.in_transform():
        return transforms.values(plain, normalizer, call)
    return autograd.values(plain, normalizer, call)
