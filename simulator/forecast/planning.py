"""Resolves the plan of a job at the prices of its forecast: `partition: by-cost` and balanced slices need durations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from meshcast.simulator.engine.peak_memory import peaks
from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.layer_costs import SliceTimes, stage_layer_costs
from meshcast.simulator.forecast.program import build_program, device_prices, host_launch_seconds
from meshcast.simulator.forecast.resident_memory import resident_of_devices, state_bytes
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stage_messages import choose_messages
from meshcast.simulator.forecast.stages import device_params
from meshcast.simulator.ir.capabilities import MeasuresMemory, schemes_with
from meshcast.simulator.ir.ops import COMPUTE, HostCopy, Op, StageOps, Work
from meshcast.simulator.job.job import Job
from meshcast.simulator.lowering.offload import saved_activations
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.plan.partition import LayerCosts
from meshcast.simulator.plan.plan import Plan, replace_scheme
from meshcast.simulator.plan.resolve import resolve
from meshcast.simulator.program.block import Price, Prices
from meshcast.simulator.program.program import variants_of

if TYPE_CHECKING:
    from meshcast.simulator.plan.by_tensor import StageTensors

MOVED = 1 << 24
"""Bytes of the messages that say how fast tensors move."""


def resolve_plan(job: Job, shared_work: SharedWork | None = None, price: Prices | None = None) -> Plan:
    """The resolved plan of `job`.

    price: of the ops of slices, for all devices or for each; by default that of the plan's clusters.
    Raises PlanError for the first rule that the plan breaks.
    """
    shared = shared_work or SharedWork()

    def layer_costs(plan: Plan) -> list[LayerCosts]:
        return stage_layer_costs(plan, lambda own, cluster: shared.costs(own, cluster).estimate)

    def work_seconds(plan: Plan, work: Work) -> float:
        return shared.costs(plan.on(0), plan.clusters[0]).estimate(work).seconds

    def prices(plan: Plan) -> Sequence[Price]:
        own = price if price is not None else [one.estimate for one in shared.device_costs(plan)]
        return device_prices(plan, own)

    def slice_times(plan: Plan) -> SliceTimes:
        return SliceTimes(plan, prices(plan), shared.units, host_launch_seconds(plan))

    def step_seconds(plan: Plan) -> float:
        return play(build_program(plan, prices(plan), shared)[1]).span

    def device_peaks(plan: Plan) -> list[float]:
        stages, program = build_program(plan, prices(plan), shared)
        resident = resident_of_devices(plan, device_params(plan, stages), program)
        return [float(peak.total) for peak in peaks(program, resident)]

    def tensor_costs(plan: Plan) -> list[StageTensors]:
        stages, _ = build_program(plan, prices(plan), shared)
        return [_stage_tensors(plan, device, stages[device], shared) for device in range(plan.devices)]

    parts = shared.parts_of_plans
    plan = resolve(job, layer_costs, work_seconds, slice_times, step_seconds, device_peaks, tensor_costs, parts)
    measures = any(scheme.measures_memory for scheme in schemes_with(plan.every_scheme, MeasuresMemory))
    return _place_states(plan, prices, shared) if measures else plan


def _stage_tensors(plan: Plan, device: int, stage: StageOps | Sequence[StageOps], shared: SharedWork) -> StageTensors:
    """The tensors that the layers of a stage save, and their costs on its device."""
    from meshcast.simulator.plan.by_tensor import SavedTensors, StageTensors

    costs, messages = shared.costs(plan.on(device), plan.clusters[device]), choose_messages(plan)
    up = plan.clusters[device].node.scale_up

    def seconds(ops: Iterable[Op]) -> float:
        return sum(costs.estimate(op.work).seconds for op in ops if op.work is not None and op.stream == COMPUTE)

    def byte_seconds(work: Work) -> float:
        return costs.estimate(work).seconds / MOVED

    found: dict[tuple[str, ...], SavedTensors] = {}
    passes = [0.0, 0.0]
    for unit_run in variants_of(stage)[0].unit_runs:
        fragment, count = unit_run.fragment, unit_run.count
        both = seconds(fragment.forward), seconds(fragment.backward)
        passes = [before + one * count for before, one in zip(passes, both, strict=True)]
        forward, made_by = set(fragment.forward), defaultdict[Op | None, dict[str, int]](dict)
        makers = {use.key: use.op for use in fragment.tensor_uses if use.made and use.op in forward}
        for key, nbytes in (saved_activations(unit_run) if unit_run.marks else {}).items():
            made_by[makers.get(key)][key] = nbytes
        for maker, saved in made_by.items():
            names = tuple(sorted({key.partition("@")[0] for key in saved}))
            before = found.get(names, SavedTensors(names, 0.0, 0.0))
            again = before.seconds + (seconds([maker]) if maker else inf) * count
            found[names] = SavedTensors(names, before.nbytes + sum(saved.values()) * count, again)
    others = [messages.plain(MOVED, device, other) for other in range(plan.devices)]
    to = tuple(inf if other == device else byte_seconds(work) for other, work in enumerate(others))
    alone = up is not None and not up.switched.value and plan.devices <= plan.clusters[device].gpus_per_node
    return StageTensors(tuple(found.values()), min(passes), to, byte_seconds(HostCopy(MOVED)), alone)


def _place_states(plan: Plan, prices: Callable[[Plan], Sequence[Price]], shared: SharedWork) -> Plan:
    """The plan after a warm-up step, in which schemes measure what memory they may use for states.

    Raises PlanError where stages or replicas differ.
    """
    check_alike(plan, schemes_with(plan.every_scheme, MeasuresMemory)[0].use)
    stages, program = build_program(plan, prices(plan), shared)
    used = [peak.total for peak in peaks(program, [{} for _ in range(plan.devices)])]
    states = [state_bytes(plan, params) for params in device_params(plan, stages)]
    # The device that has least room decides.
    tightest = max(range(plan.devices), key=lambda device: used[device] + sum(states[device].values()))
    memory = min(float(cluster.gpu.memory) for cluster in plan.clusters)

    for scheme in schemes_with(plan.schemes, MeasuresMemory):
        if scheme.measures_memory:
            plan = replace_scheme(plan, scheme, scheme.place_states(memory, used[tightest], states[tightest]))
    return plan
