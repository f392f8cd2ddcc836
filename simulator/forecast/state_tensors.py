"""The tensors in which a program holds the states of a rank, in the order in which it makes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.reserved_memory import StateTensors
from meshcast.simulator.forecast.resident_memory import DeviceParams, growing_gradients, moment_bytes, resident_bytes
from meshcast.simulator.ir.capabilities import HoldsUnequalShards, ShardsStates, schemes_with
from meshcast.simulator.ir.ops import Param
from meshcast.simulator.lowering.scope import count_shards, shards_at_rest
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import TensorKind

CATEGORY = {"weights": "parameters", "gradients": "gradients", "main": "optimizer", "moments": "optimizer"}
"""Memory category of every state."""


@dataclass(frozen=True)
class _ParamStates:
    """Bytes of the states of a parameter on a rank, of `elements` / `shards` elements where the optimizer has some.

    main: of the optimizer's states but for moments.
    """

    elements: int
    shards: float
    weights: float
    gradients: float
    main: float
    moments: float


def state_tensors(plan: Plan, params: DeviceParams, resident: dict[str, float]) -> StateTensors:
    """Returns the tensors of the states of a rank.

    resident: bytes that live through the whole step, by category; what belongs to no parameter counts as a tensor of
        its category.
    """
    layout, at_start = plan.job.framework.memory.states, plan.job.framework.update.moments_at_start
    distinct = {id(param): _count_states(plan, param) for param, _ in params}
    states = [distinct[id(param)] for param in _in_order(params)]
    parts = list(_cut_buffer(states)) if layout == "buffers" else states
    by_state = {
        "weights": [state.weights for state in states],
        "gradients": [state.gradients for state in states],
        "main": [state.main for state in parts],
        "moments": [nbytes for state in parts for nbytes in (state.moments / 2, state.moments / 2)],
    }
    held = dict(resident)
    for name, sizes in by_state.items():
        held[CATEGORY[name]] = held.get(CATEGORY[name], 0.0) - sum(sizes)
    if layout == "flat":
        half = sum(by_state["moments"]) / 2
        by_state |= {"main": [sum(by_state["main"])], "moments": [half, half]}
    weights = _list_kinds(by_state, "weights")
    if layout != "apart":
        by_state |= {name: [sum(by_state[name])] for name in ("weights", "gradients")}
    first, others = _list_kinds(by_state, "weights", "gradients"), _list_kinds(by_state, "main")
    others += [(category, round(nbytes)) for category, nbytes in held.items() if nbytes >= 1]
    late = _list_kinds(by_state, "moments")
    others, late = ([*others, *late], []) if at_start else (others, late)
    if layout == "apart":
        return StateTensors((), (), [*first, *others], late)
    return StateTensors(weights if layout == "buffers" else (), first, others, late)


def _list_kinds(by_state: Mapping[str, Sequence[float]], *names: str) -> list[TensorKind]:
    """Returns the tensors of some states."""
    return [(CATEGORY[name], round(nbytes)) for name in names for nbytes in by_state[name] if nbytes >= 1]


def _count_states(plan: Plan, param: Param) -> _ParamStates:
    growth, sharding = growing_gradients(plan), schemes_with(plan.schemes, ShardsStates)
    axes = shards_at_rest(sharding, "optimizer", param)
    shards = float(count_shards(plan.mesh, schemes_with(plan.schemes, HoldsUnequalShards), axes))
    held = resident_bytes(plan, DeviceParams([(param, 1)]), 1.0)
    gradients = held["gradients"] - (growth(param) if growth and param.trained else 0.0)
    moments = moment_bytes(plan.job.framework, param, shards) if param.trained else 0.0
    moments = min(moments, held["optimizer"])
    return _ParamStates(param.size, shards, held["parameters"], gradients, held["optimizer"] - moments, moments)


def _in_order(params: DeviceParams) -> Iterable[Param]:
    """Yields every copy of the parameters, layer by layer."""
    for count, layer in groupby(params, key=lambda pair: pair[1]):
        members = [param for param, _ in layer]
        for _ in range(count):
            yield from members


def _cut_buffer(states: Sequence[_ParamStates]) -> Iterable[_ParamStates]:
    """Yields the optimizer's states on a rank that holds those of a contiguous part of a buffer: of few parameters,
    whole, and not a part of each.

    The buffer of parameters that are sharded alike begins with the last of them, and rank 0 has the begin of it.
    """
    by_shards: dict[float, list[_ParamStates]] = defaultdict(list)
    for state in reversed(states):
        if state.main + state.moments:
            by_shards[state.shards].append(state)
    for shards, members in by_shards.items():
        left = sum(state.elements for state in members) / shards
        for state in members:
            share = min(1.0, left / state.elements)
            left -= share * state.elements
            main, moments = share * shards * state.main, share * shards * state.moments
            yield _ParamStates(state.elements, 1.0, 0.0, 0.0, main, moments)
