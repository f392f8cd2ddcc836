"""One device of a pipeline, played for real: its stages, its order of actions, its micro-batches in flight.

What would come from other devices is made up, what would go to them is dropped, at the moments at which the simulator
takes memory for it and gives it back. Where sends are hidden, a message that comes in is there one action ahead and one
that goes out stays for one action more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from simulator.plan import Plan
from simulator.schedule import Action, actions_of
from validation.device import Device
from validation.reference.data import tokens
from validation.reference.model import build
from validation.reference.optimizer import Optimizer
from validation.reference.parallel import TensorGroup

Turn = tuple[int, str]
"""A virtual stage and a kind of action."""


@dataclass
class Played:
    """One pass through a device's order.

    seconds: of every action by its stage and kind, in their order. optimizer: seconds of the update. order: what was
    done. held: the most passes of micro-batches through stages whose graphs were kept at once.
    """

    seconds: dict[Turn, list[float]] = field(default_factory=dict)
    optimizer: float = 0.0
    order: list[Action] = field(default_factory=list)
    held: int = 0


@dataclass
class Flight:
    """A micro-batch between its passes through a stage: what came in, and where its gradient goes in. The result itself
    is not kept: it has been sent."""

    entered: Tensor
    edge: Any


class Replay:
    """A device of the pipeline with its stages, their gradients and the optimizer's state.

    Raises PlanError for what the reference trainer lacks.
    """

    def __init__(self, plan: Plan, number: int, device: Device) -> None:
        self.plan, self.number, self.device = plan, number, device
        tensor = plan.family("tensor")
        size = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
        self.tensor = TensorGroup(size, 0, None, any(scheme.use == "tensor/megatron-sp" for scheme in tensor))
        self.order = actions_of(plan.schedule.order(plan.shape, number))
        mine = [i for i in range(plan.shape.stages) if plan.schedule.device(plan.shape, i) == number]
        self.stages = {i: build(plan, i, self.tensor, device.torch) for i in mine}
        self.optimizer = Optimizer([one for stage in self.stages.values() for one in stage.parameters()], plan)
        self.hidden = plan.job.framework.overlap.pp
        self.last = plan.shape.stages - 1
        self.flights: dict[tuple[int, int], Flight] = {}

    def play(self) -> Played:
        """Once through the order and the update, each action by itself between two moments at which the device is done
        with all before."""
        told = Played()
        coming: Tensor | None = self._incoming(self.order[0])
        sent: Tensor | None = None
        for at, action in enumerate(self.order):
            entered, coming = coming, None
            assert entered is not None
            ahead = self.order[at + 1] if at + 1 < len(self.order) else None
            if self.hidden and ahead:
                coming = self._incoming(ahead)
            self.device.sync()
            begin = time.perf_counter()
            left = self._forward(action, entered) if action.kind == "F" else self._backward(action, entered)
            self.device.sync()
            told.seconds.setdefault((action.stage, action.kind), []).append(time.perf_counter() - begin)
            told.order.append(action)
            told.held = max(told.held, len(self.flights))
            sent, entered, left = left if self.hidden else None, None, None
            if not self.hidden and ahead:
                coming = self._incoming(ahead)
        del sent
        begin = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.device.sync()
        told.optimizer = time.perf_counter() - begin
        return told

    # ------------------------------------------------------------------------------------------ actions

    def _incoming(self, action: Action) -> Tensor:
        """What an action waits for: tokens, the stage before's result, or the gradient of one's own."""
        if action.kind == "F" and action.stage == 0:
            return tokens(self.plan, 0, action.microbatch, 0)[0].to(self.device.torch)
        if action.kind != "F" and action.stage == self.last:
            # The loss of a step is the mean over its micro-batches.
            return torch.tensor(1.0 / self.plan.shape.m, device=self.device.torch)
        batch, model = self.plan.job.batch, self.plan.job.model
        assert batch.sequence is not None
        positions = batch.sequence // (self.tensor.size if self.tensor.cuts else 1)
        dtype = self.device.dtype(self.plan.job.framework.weights)
        made = torch.randn(batch.micro, positions, model.hidden, dtype=dtype, device=self.device.torch)
        return made.requires_grad_() if action.kind == "F" else made.mul_(1e-3)

    def _forward(self, action: Action, entered: Tensor) -> Tensor:
        """Hands back what goes on to the next stage."""
        stage = self.stages[action.stage]
        if action.stage == self.last:
            targets = tokens(self.plan, 0, action.microbatch, 0)[1].to(self.device.torch)
            left = stage(entered, targets)
        else:
            left = stage(entered)
        self.flights[action.stage, action.microbatch] = Flight(entered, get_gradient_edge(left))
        return left.detach()  # type: ignore[no-any-return]

    def _backward(self, action: Action, gradient: Tensor) -> Tensor | None:
        """Hands back the gradient that goes on to the stage before."""
        flight = self.flights.pop((action.stage, action.microbatch))
        torch.autograd.backward([flight.edge], [gradient])
        return flight.entered.grad
