"""Executes the forward and backward passes of a plan operator by operator, every tensor in the layout that the schemes
of the plan give it, and compares loss and gradients with the reference model trained by a single process.

The modules, their layouts and the layouts of gradients are those that the simulator lowers; DTensor turns a layout
into another. What is compared is the meaning of layouts, so the passes are not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.layout import PARTIAL, Layout, output_layout, required_layout
from meshcast.simulator.ir.layout import Tensor as NamedTensor
from meshcast.simulator.ir.modules import Layer, Operator, Unit
from meshcast.simulator.ir.operators import Linear, Loss
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed.layouts.operators import RankShards, compute
from meshcast.validation.reference.model import build_stage
from meshcast.validation.reference.tensor_parallel import TensorGroup
from meshcast.validation.reference.tokens import make_tokens

REFERENCE = {
    "qkv": "attention.qkv",
    "proj": "attention.proj",
    "up": "mlp.up",
    "down": "mlp.down",
    "final_norm": "norm",
}
"""Modules of the reference model whose operators have other names."""

Placements = tuple[Placement, ...]


def compare_layouts(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the relative differences of loss and gradients of the first micro-batch in fp64; collective over all
    ranks.

    loss: of the loss.
    gradient: largest difference of a gradient over the largest entry of the same parameter of the reference model.
    worst: name of that tensor.
    compared: number of tensors.
    """
    plan = resolve_plan(load_job(job))
    check_alike(plan, "the check of layouts")
    _check(plan)
    replicas = (make_tokens(plan, 0, 0, replica) for replica in range(plan.ranks.replicas))
    tokens = [torch.cat(part) for part in zip(*replicas, strict=True)]
    # The whole reference model on a single rank, in fp64.
    alone = {**job, "cluster": {**job["cluster"], "gpus": 1}, "plan": {"mesh": dict.fromkeys(plan.mesh.named_axes, 1)}}
    serial = build_stage(resolve_plan(load_job(alone)), None, TensorGroup(), torch.device("cpu"), torch.float64)
    loss = serial(*tokens)
    loss.backward()
    executor = LayoutExecutor(plan, dict(serial.named_parameters()))
    difference = abs(executor.run(*tokens) / float(loss) - 1)
    off = {name: float((have - part.gradient).abs().max()) / part.largest for name, have, part in executor.gradients()}
    worst = max(off, key=lambda name: off[name])
    return {"loss": difference, "gradient": off[worst], "worst": worst, "compared": len(off)}


def _check(plan: Plan) -> None:
    """Raises PlanError for schemes that change ops, and for a tied embedding."""
    for i, scheme in enumerate(plan.stage_schemes):
        changes = type(scheme).lower is not Scheme.lower or type(scheme).lower_stage is not Scheme.lower_stage
        if changes and scheme.family != "data":
            rule = "the executor of layouts runs schemes that only shard operators"
            raise PlanError(f"plan.schemes[{i}].use", rule, "Use tensor/annotated", scheme.use)
    if plan.job.model.tied:
        raise PlanError("model.tied", "the executor of layouts has no tied embedding", "Give false", True)


class LayoutExecutor:
    """The operators of a whole model on a rank.

    parameters: of the reference model.
    shards: for each weight its shard on this rank, the placements of the shard, and the weight that it is a shard of.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
        self.plan, self.parameters = plan, parameters
        axes = plan.mesh.axes
        self.mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.scope = Scope(plan.mesh, plan.stage_schemes)
        self.shards: dict[str, tuple[Tensor, Placements, WholeWeight]] = {}

    def run(self, ids: Tensor, targets: Tensor) -> float:
        """Runs both passes; returns the loss."""
        x, layer = ids, 0
        for unit in self.plan.model_parts.architecture.stage(self.plan.job.model.every_layer, True, True).units:
            for _ in range(unit.count):
                inside = isinstance(unit, Layer)
                x = self._run_unit(unit, f"layers.{layer}." if inside else "", x, targets)
                layer += inside
        loss_sum = x.sum() / targets.numel()
        loss_sum.backward()
        (loss,) = (operator for operator in unit.operators() if isinstance(operator, Loss))
        summed = dict.fromkeys(required_layout(loss.outs[0], self.scope.division(loss)), PARTIAL)
        return float(self._global(loss_sum.detach(), self._placements((), summed)).full_tensor())

    def gradients(self) -> Iterator[tuple[str, Tensor, WholeWeight]]:
        """Yields every weight with its whole gradient, beside that of the reference model."""
        for name, (shard, placements, weight) in self.shards.items():
            assert shard.grad is not None
            yield name, self._global(shard.grad, placements).full_tensor(), weight

    def _run_unit(self, unit: Unit, prefix: str, x: Tensor, targets: Tensor) -> Tensor:
        self.scope.enter(unit)
        values = {unit.residual_in.name if unit.residual_in is not None else "ids": x}
        for operator in unit.operators():
            divide = self.scope.division(operator)
            tokens = NamedTensor("targets", dict(self.plan.model_parts.architecture.token_dims))
            target_shards = self._reshard(targets, tokens, ({}, required_layout(tokens, divide)), ({}, {}))
            at = RankShards(divide, self.mesh, self.plan.job.model, target_shards)
            ins = [self._input(tensor, values[tensor.name], operator) for tensor in operator.ins]
            weights = [self._weight(weight, operator, prefix) for weight in operator.weights]
            outs = compute(operator, ins, weights, at)
            values |= {tensor.name: out for tensor, out in zip(operator.outs, outs, strict=True)}
        return outs[0]

    def _input(self, tensor: NamedTensor, value: Tensor, operator: Operator) -> Tensor:
        """Returns an input in the layout that its reader needs; its gradient comes back in the layout that its maker
        needs."""
        divide = self.scope.division(operator)
        produced: Layout = {}
        back: Layout = {}
        if tensor.name in self.scope.producer:
            theirs, maker = self.scope.producer[tensor.name]
            produced = self.scope.produced_layout(tensor)
            back = tensor.layout_of_producer(required_layout(theirs, self.scope.division(maker)))
        there = produced, required_layout(tensor, divide)
        return self._reshard(value, tensor, there, (output_layout(tensor, divide), back))

    def _weight(self, weight: NamedTensor, operator: Operator, prefix: str) -> Tensor:
        """Returns a weight as the operator needs it, from its shard at rest, to which its gradient comes back."""
        divide, rest = self.scope.division(operator), self.scope.at_rest(operator, weight)
        name = f"{prefix}{weight.name}"
        if name not in self.shards:
            whole = WholeWeight.of(weight, operator, prefix, self.parameters)
            placements = self._placements(weight.dims, rest)
            shard = distribute_tensor(whole.value.contiguous(), self.mesh, placements).to_local()
            self.shards[name] = shard.clone().requires_grad_(), placements, whole
        used = required_layout(weight, divide)
        summed = {axis: PARTIAL for axis, dim in divide.items() if any(out.has(dim) for out in operator.outs)}
        return self._reshard(self.shards[name][0], weight, (rest, used), (summed | dict(used), rest))

    # ------------------------------------------------------------------------------------------ layouts

    def _placements(self, dims: Iterable[str], layout: Layout) -> Placements:
        """Returns DTensor's placements for a layout."""
        order = [*dims]
        states = (layout.get(axis) for axis in self.plan.mesh.axes)
        return tuple(
            Replicate() if state is None else Partial() if state == PARTIAL else Shard(order.index(state))
            for state in states
        )

    def _global(self, local: Tensor, placements: Placements) -> DTensor:
        return DTensor.from_local(local.contiguous(), self.mesh, placements, run_check=False)

    def _reshard(
        self, value: Tensor, tensor: NamedTensor, there: tuple[Layout, Layout], back: tuple[Layout, Layout]
    ) -> Tensor:
        """Changes the layout of a tensor, and backward that of its gradient."""
        layouts = [self._placements(tensor.dims, layout) for layout in (*there, *back)]
        return _Reshard.apply(value, self, *layouts)  # type: ignore[no-any-return]

    def convert(self, local: Tensor, source: Placements, target: Placements) -> Tensor:
        """Returns this rank's part of a tensor in another layout."""
        return self._global(local, source).redistribute(placements=target).to_local().contiguous()


class _Reshard(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, executor: LayoutExecutor, *layouts: Placements) -> Any:
        ctx.executor, (produced, needed, *ctx.back) = executor, layouts
        return executor.convert(value.detach(), produced, needed).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.executor.convert(grad, *ctx.back), *[None] * 5


class WholeWeight(NamedTuple):
    """A whole weight of the simulator, as a part of a parameter of the reference model.

    value: the weight.
    gradient: its gradient.
    largest: largest entry of the gradient of the parameter.
    """

    value: Tensor
    gradient: Tensor
    largest: float

    @classmethod
    def of(cls, weight: NamedTensor, operator: Operator, prefix: str, parameters: Mapping[str, Tensor]) -> WholeWeight:
        """Returns a weight of an operator in the unit `prefix`. A linear layer of the reference model has the rows of
        all its matrices in a single matrix; elsewhere parameters have the names of the operators that use them."""
        module, _, kind = weight.name.rpartition(".")
        if isinstance(operator, Linear):
            module, kind = operator.name, "weight" if len(weight.dims) > 1 else "bias"
        module = module or kind
        name = f"{prefix}{REFERENCE.get(module, module)}.{kind if kind == 'bias' else 'weight'}"
        param = parameters[name]
        assert param.grad is not None
        value, gradient, largest = param.detach(), param.grad, float(param.grad.abs().max())
        if isinstance(operator, Linear):
            similar = [other for other in operator.weights if len(other.dims) == len(weight.dims)]
            rows = [int([*other.dims.values()][-1].size) for other in similar]
            place = [other.name for other in similar].index(weight.name)
            value, gradient = (whole.split(rows)[place].T for whole in (value, gradient))
        return cls(value, gradient, largest)
