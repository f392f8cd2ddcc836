"""What the parts of a model cost, for plans that divide it by cost.

A cost is how long the forward and the backward pass of one micro-batch take, alone on the GPU that has the stage, at
the prices of the forecast: of the embedding, of a layer of every kind, and of what stands behind the layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from simulator.costs.costs import Costs
from simulator.engine.play import alone
from simulator.lowering.lower import Lowering
from simulator.plan.partition import Weights
from simulator.program.block import Price
from simulator.program.build import task_of

if TYPE_CHECKING:
    from hardware import Cluster
    from simulator.plan.plan import Plan


def weights_of(plan: Plan) -> list[Weights]:
    """The weights on every part's device [s]. What is said of a whole stage (layers that are computed again, when
    weights are gathered) counts for each layer as if it were a stage."""
    known: dict[Cluster, Weights] = {}
    found = []
    for part in range(plan.parts):
        cluster = plan.clusters[plan.device(part)]
        if cluster not in known:
            known[cluster] = _on(plan, Costs(cluster, plan.mesh, plan.job.framework.speeds).estimate)
        found.append(known[cluster])
    return found


def _on(plan: Plan, price: Price) -> Weights:
    framework, model = plan.job.framework, plan.job.model
    host = 0.0 if framework.cuda_graphs else framework.launch_s
    lowering = Lowering(plan.mesh, plan.schemes, framework.regather, None, framework.fused_gradients)
    known: dict[Hashable, float] = {}

    def cost(layers: range, first: bool = False, last: bool = False) -> float:
        stage_ops = lowering.run(plan.blocks.stage(layers, first, last))
        return sum(alone(task_of(stage_ops, kind, price, again=False), host) for kind in ("F", "BW"))

    def of_layer(layer: int) -> float:
        kind = model.kind(layer)
        if kind not in known:
            known[kind] = cost(range(layer, layer + 1))
        return known[kind]

    layers = [of_layer(layer) for layer in model.every_layer]
    return Weights(cost(range(0), first=True), layers, cost(range(0), last=True))
