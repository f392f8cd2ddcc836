"""One device of a pipeline, played for real: its stages, its order of actions, its micro-batches in flight.

What would come from other devices is made up, what would go to them is dropped, at the moments at which the simulator
takes memory for it and gives it back. Where sends are hidden, a message that comes in is there one action ahead and one
that goes out stays for one action more. What one stage of the device gives to the next is handed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from simulator.plan.plan import Plan
from simulator.scheduling.schedule import Action
from validation.measurements.device import Device
from validation.reference.deferred_weight_gradients import DeferredWeightGradients
from validation.reference.model import build_stage, share_tied_embedding
from validation.reference.optimizer import Optimizer
from validation.reference.orders import action_orders
from validation.reference.tensor_parallel import TensorGroup
from validation.reference.tokens import make_tokens

Turn = tuple[int, str]
"""A virtual stage and a kind of action."""


@dataclass
class Played:
    """One pass through a device's order.

    seconds: of every action by its stage and kind, in their order. optimizer: seconds of the update. order: what was
    done. held: the most passes of micro-batches through stages of which something was kept at once.
    """

    seconds: dict[Turn, list[float]] = field(default_factory=dict)
    optimizer: float = 0.0
    order: list[Action] = field(default_factory=list)
    held: int = 0


@dataclass
class Flight:
    """A micro-batch between its passes through a stage: what came in, and where its gradient goes in. The result itself
    is not kept: it has been sent. left: between the gradients of inputs and those of weights, the work on the latter.
    """

    entered: Tensor | None
    edge: Any
    left: Callable[[], None] | None = None


class Replay:
    """A device of the pipeline with its stages, their gradients and the optimizer's state.

    Raises PlanError for what the reference trainer lacks.
    """

    def __init__(self, plan: Plan, number: int, device: Device) -> None:
        self.plan, self.number, self.device = plan, number, device
        tensor = plan.family("tensor")
        size = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
        self.tensor = TensorGroup(size, 0, None, any(scheme.use == "tensor/megatron-sp" for scheme in tensor))
        self.order = action_orders(plan)[number]
        mine = [i for i in range(plan.shape.stages) if plan.device(i) == number]
        self.stages = {i: build_stage(plan, i, self.tensor, device.torch) for i in mine}
        share_tied_embedding(self.stages.values())
        params = list(dict.fromkeys(one for stage in self.stages.values() for one in stage.parameters()))
        self.optimizer = Optimizer(params, plan)
        self.deferred = DeferredWeightGradients(params if any(action.kind == "W" for action in self.order) else [])
        self.hidden = plan.job.framework.overlap.pp
        self.last = plan.shape.stages - 1
        self.flights: dict[tuple[int, int], Flight] = {}
        self.handed: dict[tuple[int, bool, int], Tensor] = {}

    def play(self) -> Played:
        """Once through the order and the update, each action by itself between two moments at which the device is done
        with all before."""
        told = Played()
        coming: Tensor | None = self._incoming(self.order[0])
        sent: Tensor | None = None
        for at, action in enumerate(self.order):
            entered, coming = coming, None
            if entered is None:
                entered = self.handed.pop((action.stage, action.kind == "F", action.microbatch), None)
            ahead = self.order[at + 1] if at + 1 < len(self.order) else None
            if self.hidden and ahead:
                coming = self._incoming(ahead)
            self.device.sync()
            begin = time.perf_counter()
            left = self._done(action, entered)
            self.device.sync()
            told.seconds.setdefault((action.stage, action.kind), []).append(time.perf_counter() - begin)
            told.order.append(action)
            told.held = max(told.held, len(self.flights))
            near = self._near(action)
            if near in self.stages and left is not None:
                self.handed[near, action.kind == "F", action.microbatch] = left
            sent = left if self.hidden and near not in self.stages else None
            entered = left = None
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

    def _near(self, action: Action, back: bool = False) -> int:
        """The stage to which an action gives something, or (back) from which it takes something."""
        return action.stage + (1 if (action.kind == "F") is not back else -1)

    def _incoming(self, action: Action) -> Tensor | None:
        """What an action waits for: tokens, the stage before's result, or the gradient of one's own. None where nothing
        comes in, or a stage of this device has handed it on."""
        if action.kind == "W" or self._near(action, back=True) in self.stages:
            return None
        if action.kind == "F" and action.stage == 0:
            return make_tokens(self.plan, 0, action.microbatch, 0)[0].to(self.device.torch)
        if action.kind != "F" and action.stage == self.last:
            # The loss of a step is the mean over its micro-batches.
            return torch.tensor(1.0 / self.plan.shape.m, device=self.device.torch)
        batch, model = self.plan.job.batch, self.plan.job.model
        assert batch.sequence is not None
        positions = batch.sequence // (self.tensor.size if self.tensor.shards_sequence else 1)
        dtype = self.device.dtype(self.plan.job.framework.weights)
        made = torch.randn(batch.micro, positions, model.hidden, dtype=dtype, device=self.device.torch)
        return made if action.kind == "F" else made.mul_(1e-3)

    def _done(self, action: Action, entered: Tensor | None) -> Tensor | None:
        """Does an action with what came in. Hands back what goes on to another stage."""
        if action.kind == "W":
            left = self.flights.pop((action.stage, action.microbatch)).left
            assert left is not None
            left()
            return None
        assert entered is not None
        return self._forward(action, entered) if action.kind == "F" else self._backward(action, entered)

    def _forward(self, action: Action, entered: Tensor) -> Tensor:
        """Hands back what goes on to the next stage."""
        stage = self.stages[action.stage]
        if entered.is_floating_point():
            entered.requires_grad_()
        if action.stage == self.last:
            targets = make_tokens(self.plan, 0, action.microbatch, 0)[1].to(self.device.torch)
            left = stage(entered, targets)
        else:
            left = stage(entered)
        self.flights[action.stage, action.microbatch] = Flight(entered, get_gradient_edge(left))
        return left.detach()  # type: ignore[no-any-return]

    def _backward(self, action: Action, gradient: Tensor) -> Tensor | None:
        """Hands back the gradient that goes on to the stage before. Where the gradients of weights have an action of
        their own, the flight keeps what these need."""
        flight = self.flights.pop((action.stage, action.microbatch))
        assert flight.entered is not None
        with self.deferred.defer(action.kind == "B"):
            torch.autograd.backward([flight.edge], [gradient])
        if action.kind == "B":
            self.flights[action.stage, action.microbatch] = Flight(None, None, self.deferred.take_work())
        return flight.entered.grad
