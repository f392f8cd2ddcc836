"""Weight gradients computed later than input gradients: the actions B and W of zero-bubble schedules.

In B the backward pass of a linear or embedding computes its input gradient and keeps its input and output gradient for
W; all other saved activations are freed (arXiv 2401.10241, section 2). torch's own ``stage_backward_input`` would hold
the whole graph until W and compute the gradients of norms twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from validation.reference.optimizer import gradient

ComputeGradient = Callable[[], Tensor]
"""Computes the gradient of one parameter."""


class DeferredWeightGradients:
    """The weight gradients of a set of parameters that backward passes have deferred."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.active = False
        self._pending: deque[tuple[Tensor, ComputeGradient]] = deque()
        for param in params:
            param.deferred = self  # type: ignore[attr-defined]

    @contextmanager
    def defer(self, active: bool = True) -> Iterator[None]:
        """Backward passes inside the block defer weight gradients, if `active`."""
        self.active = active
        try:
            yield
        finally:
            self.active = False

    def append(self, param: Tensor, compute: ComputeGradient) -> None:
        self._pending.append((param, compute))

    def take_work(self) -> Callable[[], None]:
        """The gradients deferred since the last call, as one function that computes them and frees what they need."""
        pending, self._pending = self._pending, deque()
        return partial(_add_gradients, pending)


def deferral_of(param: Tensor) -> DeferredWeightGradients | None:
    """Collector of a parameter's deferred gradient; None while gradients are not deferred."""
    deferred = getattr(param, "deferred", None)
    return deferred if deferred is not None and deferred.active else None


def _add_gradients(pending: deque[tuple[Tensor, ComputeGradient]]) -> None:
    """Computes and accumulates the gradients in order, freeing the tensors of each before the next."""
    with torch.no_grad():
        while pending:
            param, compute = pending.popleft()
            gradient(param).add_(compute())
