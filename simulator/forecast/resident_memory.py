"""Bytes of parameters, gradients and optimizer state that live through the whole step, on the GPU or off it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import (
    ConvertsWeights,
    HoldsBuffers,
    HoldsStates,
    HoldsUnequalShards,
    KeepsBuckets,
    KeepsOwnStates,
    KeepsSecondaryShards,
    PredictsWeights,
    ShardsStates,
    schemes_with,
)
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import MatrixUpdate
from meshcast.simulator.ir.ops import BYTES, GATHERED_FORMATS, KEPT_FORMATS, TRANSPOSED, Param, StoredFormat
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.lowering.scope import count_shards, shards_at_rest, traits_of
from meshcast.simulator.lowering.update import by_axes
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.program import Program
from meshcast.simulator.report.forecast import OutsideSteps
from meshcast.simulator.scheduling.no_flush import peak_weight_versions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme
from meshcast.simulator.schemes.data.shared.reduce_buckets import count_resting_bytes

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class GradientGrowth:
    """Bytes of the gradients that the backward pass of a step makes.

    mesh, sharding, unequal: what shards them at rest.
    dtype: their number format.
    freed: whether they are freed at the end of the pass; otherwise they stay until the end of the step.
    """

    mesh: Mesh
    sharding: tuple[ShardsStates, ...]
    unequal: tuple[HoldsUnequalShards, ...]
    dtype: str
    freed: bool = False

    def __call__(self, param: Param) -> float:
        """Returns the bytes of the gradient of a parameter on a rank."""
        axes = shards_at_rest(self.sharding, "gradients", param)
        return float(param.size * BYTES[self.dtype] / count_shards(self.mesh, self.unequal, axes))


def growing_gradients(plan: Plan, any_batch: bool = False) -> GradientGrowth | None:
    """Returns the growth of gradients that have no memory before a backward pass: those of the only pass of a step, or
    those that each adds to others in another format; None where all live through the whole step, as those that several
    micro-batches add to do. any_batch: whatever their number is."""
    framework = plan.job.framework
    if framework.update.fresh_gradients and framework.gradients != framework.weights and not plan.job.forward_only:
        return GradientGrowth(plan.mesh, (), (), framework.weights, freed=True)
    single = any_batch or (plan.shape.m == 1 and len(plan.passes.slices) == 1)
    uniform = not (plan.stage_plans or plan.pipelines or plan.job.forward_only) and plan.schedule.flush
    if not (framework.update.gradients_to_none and single and uniform) or _find_offloaded(plan, "gradients"):
        return None
    sharding, unequal = schemes_with(plan.schemes, ShardsStates), schemes_with(plan.schemes, HoldsUnequalShards)
    return GradientGrowth(plan.mesh, tuple(sharding), tuple(unequal), framework.gradients)


def adds_apart(plan: Plan) -> bool:
    """Says whether sharded gradients of a micro-batch are whole before they are added to those of earlier ones."""
    if not plan.job.framework.update.adds_apart or plan.shape.m == 1:
        return False
    shards = {state for scheme in schemes_with(plan.schemes, ShardsStates) for state in scheme.shards}
    return "gradients" in shards and "parameters" not in shards


def find_matrix_update(plan: Plan) -> MatrixUpdate | None:
    """Finds how the optimizer updates the matrices of linear layers; None: as all weights."""
    framework = plan.job.framework
    if framework.update.states.of_matrix is None:
        return None
    shards = {state for scheme in schemes_with(plan.schemes, ShardsStates) for state in scheme.shards}
    options, usual = framework.update.matrices, "all"
    if "optimizer" in shards:
        usual = "exchange" if "parameters" in shards else "gather" if options.cuts else "owner"
    owners = usual if options.replicas == "auto" else options.replicas
    if owners == "gather" and "parameters" in shards:
        owners = "gather-all"
    if owners == "all" and framework.update.optimizer == "dion":
        owners = "replicas"
    gradient, main, moment = (BYTES[each] for each in (framework.gradients, framework.main_weights, framework.moments))
    weight = BYTES[framework.adapters.weights or framework.weights] if framework.main_copy_bytes else 0
    return options.make_update(framework.update.optimizer, owners, gradient, main, moment, weight)


class DeviceParams(tuple[tuple[Param, int], ...]):
    """The parameters on a rank of a device, each with its number of copies."""

    @cached_property
    def traits(self) -> Hashable:
        """What updates and states depend on, see `traits_of`."""
        return tuple((traits_of(param), count) for param, count in self)

    @cached_property
    def groups(self) -> list[tuple[Param, int]]:
        """One of each group of parameters that are sharded alike, with the elements of all, see `by_axes`."""
        return by_axes(self)


KnownStates = dict[Hashable, dict[str, float]]
"""Bytes of states of a rank by what they depend on: the traits of its parameters, its schemes and framework."""


def resident_of_devices(
    plan: Plan,
    every_params: Sequence[DeviceParams],
    program: Program | None = None,
    known: KnownStates | None = None,
    any_batch: bool = False,
) -> list[dict[str, float]]:
    """Counts by device the bytes on a GPU that live through the whole step, by category.

    every_params: of every device.
    program: of the step; without it older versions of weights are left out.
    known: states that were counted before, for this plan or another; new ones are added.
    any_batch: those that live through it with any number of micro-batches.
    """
    counted = known if known is not None else {}

    def resident(device_plan: Plan, params: DeviceParams) -> dict[str, float]:
        states = dict(_count_states(device_plan, params, counted))
        if (growth := growing_gradients(device_plan, any_batch)) and not growth.freed:
            states["gradients"] -= sum(count * growth(param) for param, count in params if param.trained)
        elif adds_apart(device_plan) and not any_batch:
            states["gradients"] *= 2
        holders = schemes_with(device_plan.schemes, HoldsBuffers)
        buffers: float = max(
            sum(scheme.buffer_bytes(each.job) for scheme in holders) for each in device_plan.passes.classes
        )
        if not plan.job.forward_only:
            buffers += dummy_gradient_bytes(plan, params) + cut_gradient_bytes(device_plan, params)
            data_schemes = schemes_with(device_plan.schemes, DataScheme)
            buffers += sum(count_resting_bytes(scheme, scheme.bucket_elements) for scheme in data_schemes)
        if buffers:
            states["buffers"] = float(buffers)
        return states

    states = _of_devices(plan, every_params, resident)
    orders = program.timetable.orders if plan.passes.update_interval and program else ()
    for device, (params, order) in enumerate(zip(every_params, orders, strict=False)):
        versions = peak_weight_versions(plan.schedule, plan.shape, device, order) + _holds_predicted(plan)
        states[device]["parameters"] += stashed_weight_bytes(plan.on(device), params, versions)
    return states


def _holds_predicted(plan: Plan) -> bool:
    """Says whether predicted weights lie beside the newest: these are then no main weights of the optimizer's own."""
    framework = plan.job.framework
    predicts = any(scheme.predicts_weights for scheme in schemes_with(plan.schemes, PredictsWeights))
    return predicts and framework.main_copy_bytes < BYTES[framework.main_weights]


def _count_states(plan: Plan, params: DeviceParams, known: KnownStates) -> dict[str, float]:
    """Returns `resident_bytes`, counted once. known: states that were counted before; new ones are added."""
    return remember(known, _state_key(plan, params), lambda: resident_bytes(plan, params))


def _state_key(plan: Plan, params: DeviceParams) -> Hashable:
    """Returns what the states of a rank depend on."""
    return params.traits, plan.mesh, plan.schemes, plan.job.framework


def offloaded_of_devices(plan: Plan, every_params: Sequence[DeviceParams]) -> list[dict[str, float]]:
    """Counts by device the bytes of states off the GPU, by place; see `offloaded_bytes`."""
    return _of_devices(plan, every_params, offloaded_bytes)


def _of_devices(
    plan: Plan, every_params: Sequence[DeviceParams], count: Callable[[Plan, DeviceParams], dict[str, float]]
) -> list[dict[str, float]]:
    """Returns what `count` finds on every device, counted once for devices of a plan that share their parameters."""
    pairs = [(plan.on(device), params) for device, params in enumerate(every_params)]
    known = {(id(device_plan), id(params)): (device_plan, params) for device_plan, params in pairs}
    counts = {key: count(*pair) for key, pair in known.items()}
    return [dict(counts[id(device_plan), id(params)]) for device_plan, params in pairs]


def resident_bytes(plan: Plan, params: DeviceParams, owned: float | None = None) -> dict[str, float]:
    """Counts the bytes of parameters, gradients and optimizer state in the memory of a GPU; states that schemes keep
    for themselves count as optimizer state. owned: as in `state_bytes`."""
    states = state_bytes(plan, params, owned)
    resident = {state: nbytes * (1 - sum(_find_offloaded(plan, state).values())) for state, nbytes in states.items()}
    resident["parameters"] += _secondary_bytes(plan, params)
    resident["optimizer"] += _own_state_bytes(plan, params).get("gpu", 0.0)
    return resident


def offloaded_bytes(plan: Plan, params: DeviceParams) -> dict[str, float]:
    """Counts the bytes of the states of a rank in host memory (``cpu``) and on disks (``nvme``).

    An optimizer on the host needs room for the gradients that it is sent and, where it flattens and converts them,
    for those as well; DeepSpeed's stage 2 keeps converted gradients alone, and a buffer for the weights that it sends
    back, which is as much.
    """
    offloaded = {"cpu": 0.0, "nvme": 0.0}
    for place, nbytes in _own_state_bytes(plan, params).items():
        if place in offloaded:
            offloaded[place] += nbytes
    if not any(_find_offloaded(plan, state) for state in STATES):
        return offloaded
    for state, nbytes in state_bytes(plan, params).items():
        for place, share in _find_offloaded(plan, state).items():
            offloaded[place] += nbytes * share
    if places := _find_offloaded(plan, "optimizer"):
        framework, shards = plan.job.framework, _shard_counter(plan)
        elements = sum(size / shards("optimizer", param) for param, size in params.groups if param.trained)
        if not _find_offloaded(plan, "gradients"):
            offloaded["cpu"] += BYTES[framework.gradients] * sum(places.values()) * elements
        flattened = framework.update.converts and framework.update.flattens  # on the GPU where they are not
        for place, share in places.items() if flattened else ():
            offloaded[place] += BYTES[framework.main_weights] * share * elements
    return offloaded


def _own_state_bytes(plan: Plan, params: DeviceParams) -> dict[str, float]:
    """Counts the bytes of the states that schemes keep for themselves on a rank, by place."""
    kept: dict[str, float] = defaultdict(float)
    for scheme in schemes_with(plan.schemes, KeepsOwnStates):
        for param, count in params:
            for place, nbytes in scheme.own_states(param).items() if param.trained else ():
                kept[place] += count * nbytes
    return kept


def _find_offloaded(plan: Plan, state: str) -> Mapping[str, float]:
    """Returns where a state is offloaded to, and which share of it; at most a single scheme offloads it."""
    holders = schemes_with(plan.schemes, HoldsStates)
    return next((shares for scheme in holders if (shares := scheme.offloaded_to(state))), {})


def _shard_counter(plan: Plan) -> Callable[[str, Param], float]:
    """Returns what says by how much the elements of a state of a parameter divide on the ranks of a plan."""
    sharding = schemes_with(plan.schemes, ShardsStates)
    unequal = schemes_with(plan.schemes, HoldsUnequalShards)
    return lambda state, param: count_shards(plan.mesh, unequal, shards_at_rest(sharding, state, param))


def _bucket_keeper(plan: Plan) -> Callable[[Param], bool]:
    """Returns what says whether the gradient of a parameter has a place in a separate bucket."""
    bucketing = schemes_with(plan.schemes, KeepsBuckets)
    return lambda param: any(scheme.keeps_bucket(param) for scheme in bucketing)


def whole_bucket_bytes(plan: Plan, params: DeviceParams) -> float:
    """Counts the bytes of whole gradients in separate buckets, which `state_bytes` counts with the gradients."""
    keeps_bucket, nbytes = _bucket_keeper(plan), BYTES[plan.job.framework.weights]
    return float(nbytes * sum(size for param, size in params.groups if param.trained and keeps_bucket(param)))


def _most_owned(plan: Plan, params: DeviceParams) -> float:
    """Returns the elements of matrices that the fullest replica owns over the mean; 1 where none owns whole ones."""
    update = find_matrix_update(plan)
    if update is None or update.owners != "owner":
        return 1.0
    from meshcast.simulator.lowering.matrices import count_most_owned  # only what these optimizers need

    trained = [(param, count) for param, count in params if param.trained]
    return count_most_owned(plan.mesh, schemes_with(plan.schemes, ShardsStates), trained, update)


def state_bytes(plan: Plan, params: DeviceParams, owned: float | None = None) -> dict[str, float]:
    """Counts the bytes of parameters, gradients and optimizer state of a rank, wherever they are.

    Weights that are gathered (ZeRO-3, FSDP) are the optimizer's own copy where the schemes say so; otherwise the
    optimizer keeps main weights of its own, unless the formats are equal. Frozen weights have neither gradients nor
    optimizer state.

    owned: elements of matrices that a replica owns over the mean, where replicas own whole ones; None: of the fullest.
    """
    framework = plan.job.framework
    compute, full = BYTES[framework.weights], BYTES[framework.main_weights]
    trained = BYTES[framework.adapters.weights or framework.weights]
    updated = all(scheme.updates_weights for scheme in schemes_with(plan.schemes, HoldsStates))
    keeps_bucket = _bucket_keeper(plan)
    converts = any(scheme.converts for scheme in schemes_with(plan.schemes, ConvertsWeights))
    stale = framework.update.stale_gradients and framework.gradients != framework.weights
    stale = stale and not framework.fused_gradients
    states, shards = dict.fromkeys(STATES, 0.0), _shard_counter(plan)
    owned = _most_owned(plan, params) if owned is None else owned
    for param, size in params.groups:
        at_rest = {state: shards(state, param) for state in states}
        if param.matrix:
            at_rest["optimizer"] /= owned
        cut = updated and (converts or at_rest["parameters"] > 1)
        if not param.trained:
            codes, constants = param.stored or StoredFormat(compute)
            states["parameters"] += size * (codes / at_rest["parameters"] + constants)
            continue
        main = 0 if cut else framework.main_copy_bytes
        states["parameters"] += size * (full if cut else _kept_bytes(plan, param, trained)) / at_rest["parameters"]
        states["gradients"] += size * BYTES[framework.gradients] / at_rest["gradients"]
        if keeps_bucket(param):
            states["gradients"] += size * compute / at_rest["gradients"]
        if stale and at_rest["gradients"] == 1:
            states["gradients"] += size * compute
        states["optimizer"] += size * main / at_rest["optimizer"]
        states["optimizer"] += size / param.size * moment_bytes(framework, param, at_rest["optimizer"])
    return states


def _kept_bytes(plan: Plan, param: Param, usual: float) -> float:
    """Returns the bytes of an element of a trained weight that is whole, or gathered into a copy. usual: in the format
    of the computation."""
    if not plan.job.framework.update.quantised_weights or param.recipe not in KEPT_FORMATS:
        return usual
    kept = KEPT_FORMATS[param.recipe]
    transposed = kept == GATHERED_FORMATS[param.recipe] and plan.job.cluster.gpu.architecture in TRANSPOSED
    return kept + transposed


def moment_bytes(framework: Framework, param: Param, shards: float) -> float:
    """Returns the bytes of what the optimizer of a rank keeps of a parameter beside its main weights."""
    update = framework.update
    return update.states.count_bytes(param, shards, framework.moments, update.matrices)


def _secondary_bytes(plan: Plan, params: DeviceParams) -> float:
    """Counts the bytes of secondary copies of sharded weights, which are on the GPU wherever the shards are."""
    keepers, elements = schemes_with(plan.schemes, KeepsSecondaryShards), 0.0
    for param, size in params.groups if keepers else ():
        copies = [axes for scheme in keepers if (axes := scheme.secondary_shards(param)) is not None]
        elements += sum(size / plan.mesh.size(axes) for axes in copies)
    return elements * float(BYTES[plan.job.framework.weights])


def count_outside_steps(
    plan: Plan, every_params: Sequence[DeviceParams], known: KnownStates, counted: dict[Hashable, OutsideSteps]
) -> list[OutsideSteps]:
    """Returns by device the memory of a rank outside of its steps.

    every_params, known: as in `resident_of_devices`.
    counted: memory that was counted before; new entries are added.
    """

    def count(device_plan: Plan, params: DeviceParams) -> OutsideSteps:
        def make() -> OutsideSteps:
            return _count_outside(device_plan, params, _count_states(device_plan, params, known))

        return remember(counted, _state_key(device_plan, params), make)

    pairs = [(plan.on(device), params) for device, params in enumerate(every_params)]
    keys = [(id(device_plan), id(params)) for device_plan, params in pairs]
    memory = {key: count(*pair) for key, pair in dict(zip(keys, pairs, strict=True)).items()}
    return [memory[key] for key in keys]


def _count_outside(plan: Plan, params: DeviceParams, states: Mapping[str, float]) -> OutsideSteps:
    """Returns the memory of a rank outside of its steps. states: bytes of its states on the GPU."""
    framework, shards = plan.job.framework, _shard_counter(plan)
    loading, moments = states["parameters"], 0.0
    plain, loads = StoredFormat(BYTES[framework.weights]), framework.memory.loads
    whole = [(param, size * (param.stored or plain).nbytes) for param, size in params.groups]
    trained = [(param, size) for param, size in params.groups if param.trained]
    if loads != "shards":
        cast = BYTES["fp32"] - BYTES[framework.weights] if loads == "fp32" else 0
        casts = sum(size * cast for _, size in trained)
        loading = max(loading, sum(nbytes for _, nbytes in whole) + casts)
    if not framework.update.moments_at_start and not _find_offloaded(plan, "optimizer"):
        moments = sum(
            size / param.size * moment_bytes(framework, param, shards("optimizer", param)) for param, size in trained
        )
    gathered = sum(nbytes for param, nbytes in whole if shards("parameters", param) > 1)
    saved = _saved_whole(framework, params, shards)
    return OutsideSteps(loading, float(min(moments, states["optimizer"])), float(gathered), saved)


def _saved_whole(framework: Framework, params: DeviceParams, shards: Callable[[str, Param], float]) -> float:
    """Returns the bytes of sharded weights that are whole at most while a checkpoint is saved. shards: see
    `_shard_counter`."""
    if framework.memory.saves == "shards":
        return 0.0
    sharded = [(param, count) for param, count in params if shards("parameters", param) > 1]
    if framework.memory.saves == "modules":
        return float(BYTES[framework.weights] * max((param.size for param, _ in sharded), default=0))
    root = sum(count * param.size for param, count in sharded if not param.in_layer)
    layers: list[dict[str, int]] = [{}]  # of which each has a single parameter of a name
    for param, _ in sharded:
        if param.in_layer and param.name in layers[-1]:
            layers.append({})
        if param.in_layer:
            layers[-1][param.name] = param.size
    return float(BYTES[framework.main_weights] * max(root, *(sum(layer.values()) for layer in layers)))


def dummy_gradient_bytes(plan: Plan, params: DeviceParams) -> float:
    """Counts the bytes of the tensors that stand for weight gradients which GEMMs have accumulated elsewhere: one for
    each shape of a trained weight of a linear layer, in the compute format, for ever."""
    framework = plan.job.framework
    if not (framework.dummy_gradients and framework.fused_gradients):
        return 0.0
    shapes = {(param.name, param.matrix) for param, _ in params if param.trained and param.matrix}
    return BYTES[framework.weights] * float(sum(elements for _, elements in shapes))


def cut_gradient_bytes(plan: Plan, params: DeviceParams) -> float:
    """Counts the bytes of gradients that a rank holds of others' shares: contiguous gradients are those of all
    parameters of which it has a part, whole (`copy_grads_in_partition` of DeepSpeed's stage_1_and_2.py). The largest,
    the embedding, is the first in the order in which they are divided; of smaller ones than a share nothing is
    counted."""
    framework, shards = plan.job.framework, _shard_counter(plan)
    if not (framework.bucket.buffers and framework.update.flattens) or _find_offloaded(plan, "gradients"):
        return 0.0
    whole = [(param, size) for param, size in params.groups if param.trained and shards("parameters", param) == 1]
    share = sum(size / shards("gradients", param) for param, size in whole)
    largest = max((param.size for param, _ in whole if shards("gradients", param) > 1), default=0)
    return BYTES[framework.gradients] * max(0.0, math.ceil(largest / share) * share - share) if share else 0.0


def stashed_weight_bytes(plan: Plan, params: DeviceParams, versions: int) -> float:
    """Counts the bytes of the older weight versions on a rank, in the compute format. versions: all, the newest
    included."""
    nbytes = BYTES[plan.job.framework.weights]
    trained = [(param, size) for param, size in params.groups if param.trained]
    shards = _shard_counter(plan)
    cut = (size / shards("parameters", param) for param, size in trained)
    return float((versions - 1) * nbytes * sum(cut))
