"""The leaves of a job's model as one rank has them: what its kernels are, before anybody runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.forecast.stages import lower_stages
from simulator.ir.modules import LocalShapes, Operator, walk
from simulator.ir.operators import Boundary
from simulator.ir.ops import BYTES, Collective, Gemm, Memory, Work
from simulator.lowering.scope import Scope
from simulator.plan.plan import Plan


@dataclass(frozen=True)
class OperatorOfRank:
    """A leaf at the sizes that the plan leaves to one rank."""

    operator: Operator
    at: LocalShapes

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def forward(self) -> list[Work]:
        """What its forward pass runs here; collectives are no kernels."""
        return kernels(self.operator.forward(self.at))

    @property
    def backward(self) -> list[Work]:
        """The gradients of inputs and weights, each weight's made aside."""
        works = [
            *self.operator.backward_inputs(self.at),
            *self.operator.backward_weights(self.at),
            *self.operator.temporary_gradient_work(self.at),
        ]
        return kernels(works)

    @property
    def weights(self) -> int:
        """Elements of all its weights on this rank."""
        return self.at.size(*self.operator.weights)

    @property
    def shape(self) -> dict[str, Any]:
        """Local sizes of inputs and outputs, and elements of the weights."""
        ins, outs = (
            [[int(n) for n in self.at.dims(t).values()] for t in ts] for ts in (self.operator.ins, self.operator.outs)
        )
        return {"inputs": ins, "outputs": outs, "weights": self.weights}


def parts(plan: Plan) -> list[OperatorOfRank]:
    """The leaves of one layer of each kind and of both ends of the model, once each, in forward order."""
    scope = Scope(plan.mesh, plan.stage_schemes)
    found: dict[str, OperatorOfRank] = {}

    def visit(operator: Operator) -> None:
        if not isinstance(operator, Boundary):
            found.setdefault(operator.name, OperatorOfRank(operator, LocalShapes(scope.division(operator), plan.mesh)))

    for unit in plan.architecture.units:
        walk(unit, visit)
    return list(found.values())


def kernels(works: Iterable[Work]) -> list[Work]:
    """What runs on one rank that is alone. The gradient of a weight is the result of its product, in the format of the
    operands: adding it to one that persists is no part of a module's own backward pass."""
    found = [work for work in works if not isinstance(work, Collective)]
    return [
        replace(work, accumulate=False, out_dtype=work.dtype) if isinstance(work, Gemm) and work.accumulate else work
        for work in found
    ]


def optimizer(plan: Plan) -> tuple[int, Sequence[Work]]:
    """Elements of one layer's weights, one with experts if there are some; clipping's norm and Adam over them."""
    scope = Scope(plan.mesh, plan.stage_schemes)
    kind = max(plan.job.model.kind(i) for i in range(plan.job.model.layers))
    operators = plan.architecture.layer(kind).operators()
    elements = sum(
        OperatorOfRank(operator, LocalShapes(scope.division(operator), plan.mesh)).weights for operator in operators
    )
    _, updates = lower_stages(plan)
    works = {op.name: op.work for op in updates[0].forward if isinstance(op.work, Memory)}
    norm, adam = works["grad-norm"], works["adam"]
    share = elements * BYTES[plan.job.framework.gradients] / norm.read
    return elements, [
        replace(one, read=round(one.read * share), write=round(one.write * share)) for one in (norm, adam)
    ]
