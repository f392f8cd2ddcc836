"""Which layers form a stage."""

from __future__ import annotations

from hardware.errors import PlanError


def layers_of_stages(partition: str | tuple[int, ...], layers: int, stages: int) -> list[int]:
    """Transformer layers of every virtual stage, first to last.

    ``even``: the same number each. ``ends-as-layers``: embedding and output layer take one place each. A list
    says it outright.

    Raises PlanError where the layers do not fit the stages.
    """
    if partition == "even":
        if layers % stages:
            near = max(1, round(layers / stages)) * stages
            divisors = [n for n in range(1, layers + 1) if layers % n == 0]
            below = max((n for n in divisors if n <= stages), default=1)
            rule = f"{layers} layers must divide evenly over pp x chunks = {stages} stages"
            ends = (layers + 2) % stages == 0 and stages > 1
            remedy = f"{below} stages would work, or {near} layers, or a list of layers in plan.partition"
            remedy = f"partition: ends-as-layers would work; {remedy}" if ends else remedy
            raise PlanError("plan.partition", rule, remedy, partition)
        return [layers // stages] * stages
    if partition == "ends-as-layers":
        places = layers + 2
        if stages < 2 or places % stages or places // stages < 1:
            rule = f"{layers} layers and 2 ends must divide evenly over {stages} stages (at least 2)"
            raise PlanError("plan.partition", rule, "Use even, or a list of layers", partition)
        each = places // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if isinstance(partition, str):
        raise PlanError(
            "plan.partition", "no such partition", "Valid: even, ends-as-layers, or a list of layers", partition
        )
    if len(partition) != stages or sum(partition) != layers or min(partition) < 0:
        rule = f"a list gives the layers of each of the {stages} stages and sums to {layers}"
        rule += f"; this one has {len(partition)} entries with the sum {sum(partition)}"
        raise PlanError("plan.partition", rule, "Correct the list, or use even", list(partition))
    if min(partition[1:-1], default=1) < 1:
        rule = "a stage inside the pipeline has at least one layer"
        raise PlanError("plan.partition", rule, "Use fewer stages, or another list", list(partition))
    return list(partition)
