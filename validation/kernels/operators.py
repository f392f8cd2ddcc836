"""The operators of a job's model at the sizes of a rank, and the works of their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.modules import LocalShapes, Operator, walk
from meshcast.simulator.ir.operators import Boundary
from meshcast.simulator.ir.ops import BYTES, Collective, Gemm, Memory, Work
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.plan.plan import Plan


@dataclass(frozen=True)
class LocalOperator:
    """An operator at the sizes that the plan leaves to a rank.

    Attributes:
        operator: of the model.
        at: its sizes on a rank.
    """

    operator: Operator
    at: LocalShapes

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def forward(self) -> list[Work]:
        """Kernels of its forward pass; collectives are left out."""
        return kernels(self.operator.forward(self.at))

    @property
    def backward(self) -> list[Work]:
        """Kernels of the gradients of inputs and weights; weight gradients go to temporaries."""
        works = [
            *self.operator.backward_inputs(self.at),
            *self.operator.backward_weights(self.at),
            *self.operator.temporary_gradient_work(self.at),
        ]
        return kernels(works)

    @property
    def weights(self) -> int:
        """Number of elements of all its weights on this rank."""
        return self.at.size(*self.operator.weights)

    @property
    def shape(self) -> dict[str, Any]:
        """Local sizes of inputs and outputs, and number of elements of the weights."""
        ins, outs = (
            [[int(n) for n in self.at.dims(t).values()] for t in ts] for ts in (self.operator.ins, self.operator.outs)
        )
        return {"inputs": ins, "outputs": outs, "weights": self.weights}


def local_operators(plan: Plan) -> list[LocalOperator]:
    """Lists the operators of a layer of each kind and of both ends of the model, once each, in forward order."""
    scope = Scope(plan.mesh, plan.stage_schemes)
    operators: dict[str, LocalOperator] = {}

    def visit(operator: Operator) -> None:
        if not isinstance(operator, Boundary):
            operators.setdefault(
                operator.name, LocalOperator(operator, LocalShapes(scope.division(operator), plan.mesh))
            )

    for unit in plan.model_parts.architecture.units:
        walk(unit, visit)
    return list(operators.values())


def kernels(works: Iterable[Work]) -> list[Work]:
    """Returns the works that run on a rank alone. A weight gradient is the result of its GEMM, in the format of the
    operands: accumulating it into the main gradient is no part of a module's own backward pass."""
    local_works = [work for work in works if not isinstance(work, Collective)]
    return [
        replace(work, accumulate=False, out_dtype=work.dtype) if isinstance(work, Gemm) and work.accumulate else work
        for work in local_works
    ]


def optimizer(plan: Plan) -> tuple[int, Sequence[Work]]:
    """Counts the elements of a layer's weights (with experts if there are some); gradient norm and Adam over them."""
    scope = Scope(plan.mesh, plan.stage_schemes)
    kind = max(plan.job.model.kind(i) for i in range(plan.job.model.layers))
    operators = plan.model_parts.architecture.layer(kind).operators()
    elements = sum(
        LocalOperator(operator, LocalShapes(scope.division(operator), plan.mesh)).weights for operator in operators
    )
    _, updates = lower_stages(plan)
    works = {op.name: op.work for op in updates[0].forward if isinstance(op.work, Memory)}
    share = elements * BYTES[plan.job.framework.gradients] / works["grad-norm"].read
    return elements, [
        replace(works[name], read=round(works[name].read * share), write=round(works[name].write * share))
        for name in ("grad-norm", "convert", "adam")
        if name in works
    ]
