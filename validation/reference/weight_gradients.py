"""Gradients of weights made apart from those of inputs, later: what zero-bubble schedules do.

The backward pass of a linear layer or a table then makes the gradient of its input, and puts its input and the gradient
of its result aside; all else that a forward pass has kept is given back (arXiv 2401.10241, section 2). torch's own way
(``stage_backward_input``) would hold the whole graph until the weights' turn, and make gradients of norms twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from validation.reference.optimizer import gradient

Make = Callable[[], Tensor]
"""Makes the gradient of a weight."""


class Later:
    """Where the backward passes of some parameters put what gradients of weights need, while they are told to."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.waits = False
        self._aside: deque[tuple[Tensor, Make]] = deque()
        for param in params:
            param.later = self  # type: ignore[attr-defined]

    @contextmanager
    def waiting(self, waits: bool = True) -> Iterator[None]:
        """Backward passes within leave the gradients of weights for later, if they are to."""
        self.waits = waits
        try:
            yield
        finally:
            self.waits = False

    def put(self, param: Tensor, make: Make) -> None:
        self._aside.append((param, make))

    def taken(self) -> Callable[[], None]:
        """What was put aside since this was called last, as the work that is left: done once, it holds nothing."""
        aside, self._aside = self._aside, deque()
        return partial(_make, aside)


def of(param: Tensor) -> Later | None:
    """Where to put the work on the gradient of a parameter; None where it is not to be put off."""
    later = getattr(param, "later", None)
    return later if later is not None and later.waits else None


def _make(aside: deque[tuple[Tensor, Make]]) -> None:
    """Adds the gradients in their order, and lets go of each one's tensors before the next."""
    with torch.no_grad():
        while aside:
            param, make = aside.popleft()
            gradient(param).add_(make())
