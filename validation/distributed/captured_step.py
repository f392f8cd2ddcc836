"""Training steps replayed from a CUDA graph, for jobs with `framework.set.cuda_graphs`: the host makes one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hardware.errors import PlanError
from simulator.plan.plan import Plan
from validation.distributed.data_parallel import data_scheme_of
from validation.distributed.trainer import Inputs, Trainer

REHEARSALS = 3
"""Steps that run eagerly before one is captured: libraries choose their kernels and allocate their workspaces."""


def check(plan: Plan, device: str) -> None:
    """Raises PlanError for a plan whose step cannot be captured."""
    if not plan.job.framework.cuda_graphs:
        return
    where, remedy = "framework.set.cuda_graphs", "Set it to false"
    if device != "cuda":
        raise PlanError(where, "only CUDA devices have graphs", remedy, True)
    if plan.shape.p > 1 or data_scheme_of(plan):
        rule = "the reference trainer captures steps without pipeline and data parallelism"
        raise PlanError(where, rule, remedy, True)


class CapturedStep:
    """The step of a trainer: the first calls run eagerly, one is captured, and later ones are replayed."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.place.device.cuda is not None
        self.trainer, self.cuda = trainer, trainer.place.device.cuda
        self.calls = 0
        self.stream = self.cuda.new_stream()
        self.inputs: Inputs = (None, None)
        self.graph: Any = None

    def __call__(self, inputs: Inputs) -> None:
        """Runs one step."""
        self.calls += 1
        if self.calls <= REHEARSALS:
            self.stream.wait_stream(self.cuda.current_stream())
            with self.cuda.use_stream(self.stream):
                self.trainer.step(inputs)
            self.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.inputs = _copy(inputs[0]), _copy(inputs[1])
            self.graph, _ = self.cuda.capture_graph(lambda: self.trainer.step(self.inputs))
        for kept, given in zip(self.inputs, inputs, strict=True):
            if kept is not None and given is not None:
                kept.copy_(given)
        self.graph.replay()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
