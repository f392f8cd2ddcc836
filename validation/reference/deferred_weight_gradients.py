"""Defers weight gradients of the reference trainer: the actions B and W of zero-bubble schedules, run in torch.

In B the backward functions of linears and embeddings (`validation.reference.functions`) compute the input gradient and
append the computation of the weight gradient to a queue, which keeps the input and the output gradient. W runs the
queue. All other saved activations are freed in B (arXiv 2401.10241, section 2). torch's ``stage_backward_input``
would hold the whole graph until W and compute the gradients of norms twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from meshcast.validation.reference.optimizer import gradient

ComputeGradient = Callable[[], Tensor]
"""Computes the gradient of a parameter."""


class DeferredWeightGradients:
    """Queue of the deferred weight gradients of a set of parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.active = False
        self._pending: deque[tuple[Tensor, ComputeGradient]] = deque()
        for param in params:
            param.deferred = self  # type: ignore[attr-defined]

    @contextmanager
    def defer(self, active: bool = True) -> Iterator[None]:
        """Defers the weight gradients of backward passes inside the block, if `active`."""
        self.active = active
        try:
            yield
        finally:
            self.active = False

    def append(self, param: Tensor, compute: ComputeGradient) -> None:
        self._pending.append((param, compute))

    def take_work(self) -> Callable[[], None]:
        """Empties the queue and returns a function that computes its gradients and frees the tensors that they need."""
        pending, self._pending = self._pending, deque()
        return partial(_add_gradients, pending)


def deferral_of(param: Tensor) -> DeferredWeightGradients | None:
    """Returns the queue for a parameter's gradient; None while gradients are not deferred."""
    deferred = getattr(param, "deferred", None)
    return deferred if deferred is not None and deferred.active else None


def _add_gradients(pending: deque[tuple[Tensor, ComputeGradient]]) -> None:
    """Computes and accumulates the gradients in order, freeing the tensors of each before the next."""
    with torch.no_grad():
        while pending:
            param, compute = pending.popleft()
            gradient(param).add_(compute())
