"""One pipeline device run for real, without the others: its stages, its order of actions, its micro-batches in flight.

Messages from other devices are random tensors and messages to them are dropped, at the moments at which the simulator
allocates and frees their memory: with overlapped sends a received message exists an action ahead and a sent message
    stays
for another action. Messages between stages of this device are passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from meshcast.hardware.records import dataclass
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import Action
from meshcast.validation.measurements.device import Device
from meshcast.validation.reference.deferred_weight_gradients import DeferredWeightGradients
from meshcast.validation.reference.model import build_stage, share_tied_embedding
from meshcast.validation.reference.optimizer import Optimizer
from meshcast.validation.reference.orders import action_orders
from meshcast.validation.reference.tensor_parallel import TensorGroup
from meshcast.validation.reference.tokens import make_tokens
from meshcast.validation.stages.action_forecasts import StageAction


@dataclass
class PlayedOrder:
    """One run through a device's order of actions.

    seconds: durations by stage and kind of action, in order [s].
    optimizer: duration of the optimizer update [s].
    order: the actions that ran.
    held: largest number of (stage, micro-batch) pairs in flight at once.
    """

    seconds: dict[StageAction, list[float]] = field(default_factory=dict)
    optimizer: float = 0.0
    order: list[Action] = field(default_factory=list)
    held: int = 0


@dataclass
class InFlight:
    """A micro-batch in flight in a stage, between its forward and backward pass, or between B and W.

    entered: input of the forward pass.
    edge: graph edge where its output gradient enters; the output itself has been sent.
    weight_gradients: between B and W, the deferred computation of weight gradients.
    """

    received: Tensor | None
    edge: Any
    weight_gradients: Callable[[], None] | None = None


class DeviceReplay:
    """A pipeline device with its stages, gradients and optimizer state.

    Raises PlanError for a plan that the reference trainer does not support.
    """

    def __init__(self, plan: Plan, number: int, device: Device) -> None:
        self.plan, self.number, self.device = plan, number, device
        tensor = plan.family("tensor")
        size = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
        self.tensor = TensorGroup(size, 0, None, any(scheme.use == "tensor/megatron-sp" for scheme in tensor))
        self.order = action_orders(plan)[number]
        mine = [i for i in range(plan.shape.stages) if plan.model_parts.device(i) == number]
        self.stages = {i: build_stage(plan, i, self.tensor, device.torch) for i in mine}
        share_tied_embedding(self.stages.values())
        params = list(dict.fromkeys(param for stage in self.stages.values() for param in stage.parameters()))
        self.optimizer = Optimizer(params, plan)
        self.deferred = DeferredWeightGradients(params if any(action.kind == "W" for action in self.order) else [])
        self.overlaps_sends = plan.job.framework.overlap.pp
        self.last = plan.shape.stages - 1
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        self.passed_on: dict[tuple[int, bool, int], Tensor] = {}

    def play(self) -> PlayedOrder:
        """Runs the order and the optimizer update once; the device is synchronised before and after each action."""
        played = PlayedOrder()
        next_received: Tensor | None = self._receive(self.order[0])
        sent: Tensor | None = None
        for at, action in enumerate(self.order):
            received, next_received = next_received, None
            if received is None:
                received = self.passed_on.pop((action.stage, action.kind == "F", action.microbatch), None)
            following = self.order[at + 1] if at + 1 < len(self.order) else None
            if self.overlaps_sends and following:
                next_received = self._receive(following)
            output, seconds = self.device.run_timed(partial(self._run_action, action, received))
            played.seconds.setdefault((action.stage, action.kind), []).append(seconds)
            played.order.append(action)
            played.held = max(played.held, len(self.in_flight))
            target = self._neighbour(action)
            if target in self.stages and output is not None:
                self.passed_on[target, action.kind == "F", action.microbatch] = output
            sent = output if self.overlaps_sends and target not in self.stages else None
            received = output = None
            if not self.overlaps_sends and following:
                next_received = self._receive(following)
        del sent
        _, played.optimizer = self.device.run_timed(self._update)
        return played

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------ actions

    def _neighbour(self, action: Action, back: bool = False) -> int:
        """Returns the stage that receives an action's output, or with `back` the stage that sends its input."""
        return action.stage + (1 if (action.kind == "F") is not back else -1)

    def _receive(self, action: Action) -> Tensor | None:
        """Returns the input of an action: tokens, an activation, or the gradient of the stage's output.

        None if the action has no input, or a stage of this device passes it on.
        """
        if action.kind == "W" or self._neighbour(action, back=True) in self.stages:
            return None
        if action.kind == "F" and action.stage == 0:
            return make_tokens(self.plan, 0, action.microbatch, 0)[0].to(self.device.torch)
        if action.kind != "F" and action.stage == self.last:
            # The gradient of the mean loss over the micro-batches.
            return torch.tensor(1.0 / self.plan.shape.m, device=self.device.torch)
        batch, model = self.plan.job.batch, self.plan.job.model
        assert batch.sequence is not None
        positions = batch.sequence // (self.tensor.size if self.tensor.shards_sequence else 1)
        dtype = self.device.dtype(self.plan.job.framework.weights)
        message = torch.randn(batch.micro, positions, model.hidden, dtype=dtype, device=self.device.torch)
        return message if action.kind == "F" else message.mul_(1e-3)

    def _run_action(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Runs an action on its input; returns its message for another stage."""
        if action.kind == "W":
            compute = self.in_flight.pop((action.stage, action.microbatch)).weight_gradients
            assert compute is not None
            compute()
            return None
        assert received is not None
        return self._forward(action, received) if action.kind == "F" else self._backward(action, received)

    def _forward(self, action: Action, received: Tensor) -> Tensor:
        """Returns the output for the next stage."""
        stage = self.stages[action.stage]
        if received.is_floating_point():
            received.requires_grad_()
        if action.stage == self.last:
            targets = make_tokens(self.plan, 0, action.microbatch, 0)[1].to(self.device.torch)
            output = stage(received, targets)
        else:
            output = stage(received)
        self.in_flight[action.stage, action.microbatch] = InFlight(received, get_gradient_edge(output))
        return output.detach()  # type: ignore[no-any-return]

    def _backward(self, action: Action, gradient: Tensor) -> Tensor | None:
        """Returns the gradient for the previous stage. A B action leaves its weight gradients in flight for W."""
        flight = self.in_flight.pop((action.stage, action.microbatch))
        assert flight.received is not None
        with self.deferred.defer(action.kind == "B"):
            torch.autograd.backward([flight.edge], [gradient])
        if action.kind == "B":
            self.in_flight[action.stage, action.microbatch] = InFlight(None, None, self.deferred.take_work())
        return flight.received.grad
