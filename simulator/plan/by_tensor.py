"""What becomes of the tensors that a stage saves for its backward passes, where its memory is short: every one is kept,
swapped to devices with room, offloaded to the host, or recomputed.

What leaves a stage is chosen greedily (`choose`). Swaps come first, of the tensors with most seconds of recomputation a
byte, as long as they find room and hide behind a pass; then offloading, as long as it hides behind a pass and what it
does not hide is shorter than recomputation; then recomputation, of the tensors with fewest seconds a byte. A swap frees
fewer bytes than recomputation, so tensors are swapped only as long as recomputing the others would free enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from meshcast.simulator.ir.capabilities import ChoosesTensors, schemes_with
from meshcast.simulator.plan.by_memory import check_one_stage_a_device
from meshcast.simulator.plan.plan import Plan, replace_scheme
from meshcast.simulator.plan.pricing import JobPricing, SavedTensors, StageTensors
from meshcast.simulator.scheduling.activation_transfer import FEWEST_HELD, Stripe, TensorChoice

ROUNDS = 8
"""Most times that memory is measured again with what was chosen."""

NEAR = 0.5
"""Rate of a link to a keeper over that to the nearest one, from which on it keeps stripes."""


class Budget(NamedTuple):
    """What may leave a stage.

    excess: bytes that have to.
    held: micro-batches that it holds.
    layers: layers of the stage.
    device, host: bytes of one micro-batch that devices, and the host, may take.
    host_s: of a byte to the host, or back [s].
    """

    excess: float
    held: int
    layers: int
    device: float
    host: float
    host_s: float

    def count_freed(self, way: str) -> float:
        """Bytes that a byte of one micro-batch frees: of what is swapped `FEWEST_HELD` micro-batches stay, of what is
        offloaded two layers of one, of what is recomputed one layer."""
        if way == "swap":
            return self.held - min(self.held, FEWEST_HELD)
        return self.held - min({"host": 2, "recompute": 1}[way] / self.layers, 1)


def choose(tensors: Sequence[SavedTensors], budget: Budget) -> TensorChoice:
    """What leaves a stage until its excess has; all that can where that is not enough."""
    dearest = sorted(tensors, key=lambda one: (-one.seconds / one.nbytes, one.names))
    found: dict[str, list[SavedTensors]] = {"swap": [], "host": [], "recompute": []}
    rooms = {"swap": budget.device, "host": budget.host}
    kept, left = list(dearest), budget.excess
    for way, room in rooms.items():
        for one in dearest:
            others = sum(other.nbytes for other in kept if other.seconds < inf and other is not one)
            more = left - budget.count_freed(way) * one.nbytes
            # Of the last layer of a stage nothing hides the copies out and back.
            shown = 2 * one.nbytes / budget.layers * budget.host_s if way == "host" else 0.0
            enough = one.seconds == inf or more <= budget.count_freed("recompute") * others
            if (
                one in kept
                and left > 0
                and budget.count_freed(way)
                and one.nbytes <= room
                and shown < one.seconds
                and enough
            ):
                found[way].append(one)
                kept.remove(one)
                room, left = room - one.nbytes, more
    for one in reversed(dearest):
        if one in kept and left > 0 and one.seconds < inf:
            found["recompute"].append(one)
            left -= budget.count_freed("recompute") * one.nbytes

    def names(way: str) -> tuple[str, ...]:
        return tuple(name for one in found[way] for name in one.names)

    return TensorChoice(names("swap"), names("host"), names("recompute"))


def stripe_shares(stage: StageTensors, room: Sequence[float]) -> dict[int, float]:
    """The shares of the swapped bytes of a stage by keeper: devices with room that are near, each as much as its links
    move in the same time, or where all share the links of a switch, as it has room."""
    near = min((one for one, free in zip(stage.device_s, room, strict=True) if free > 0), default=inf)
    keepers = [j for j, free in enumerate(room) if free > 0 and stage.device_s[j] * NEAR <= near < inf]
    weights = [1 / stage.device_s[j] if stage.own_links else room[j] for j in keepers]
    return {j: weight / sum(weights) for j, weight in zip(keepers, weights, strict=True)}


def swap_budget(stage: StageTensors, shares: dict[int, float], room: Sequence[float], away: int) -> float:
    """Bytes of one micro-batch that find room at the keepers, of `away` micro-batches at once, and move within a
    pass."""
    if not shares:
        return 0.0
    times = [share * stage.device_s[j] for j, share in shares.items()]
    slowest = max(times) if stage.own_links else sum(times)
    return min(stage.pass_s / slowest, *(room[j] / (share * away) for j, share in shares.items()))


def choose_tensors(plan: Plan, pricing: JobPricing, memory: Sequence[float]) -> Plan:
    """The plan whose stages fit, or else free as much as they can, with what becomes of their tensors chosen.

    Stages choose one after another, the first one first, since it holds most micro-batches. Where a stage still misses,
    it frees more in the next round, and where a keeper is too full, it takes less.

    memory: of every device [bytes].
    """
    (scheme,) = schemes_with(plan.schemes, ChoosesTensors)
    check_one_stage_a_device(plan, scheme.use)
    stages = plan.shape.p

    def with_choices(choices: Sequence[TensorChoice]) -> Plan:
        schemes = [scheme.with_tensors(tuple(choices), stage) for stage in range(stages)]
        every = [replace_scheme(plan, scheme, of_stage) for of_stage in schemes]
        return replace(every[0], stage_plans=tuple(every)) if len({*choices}) > 1 else every[0]

    if scheme.tensor_choices:
        return with_choices(scheme.tensor_choices)
    nothing = [TensorChoice()] * stages
    plain = with_choices(nothing)
    before = pricing.measure_peaks(plain)
    excess = [peak - limit for peak, limit in zip(before, memory, strict=True)]
    if max(excess) <= 0:
        return plain
    short, spare = [one > 0 for one in excess], [max(-one, 0.0) for one in excess]
    tensors, found = pricing.price_tensors(plain), nothing
    for _ in range(ROUNDS):
        room, choices = list(spare), list[TensorChoice]()
        for i, stage in enumerate(tensors):
            held = min(plan.shape.m, stages - i)
            stays = min(held, FEWEST_HELD)
            shares = stripe_shares(stage, room) if short[i] and held > stays else {}
            device = swap_budget(stage, shares, room, held - stays + 1)
            host = stage.pass_s / stage.host_s, stage.host_s
            budget = Budget(excess[i], held, max(1, plan.layers[i]), device, *host)
            choice = choose(stage.tensors, budget) if short[i] else TensorChoice()
            nbytes = sum(one.nbytes for one in stage.tensors if one.names[0] in choice.swap)
            if nbytes:
                stripes = tuple(Stripe(j, round(share * nbytes), stage.own_links) for j, share in shares.items())
                choice = replace(choice, stripes=stripes)
                for one in stripes:
                    room[one.keeper] -= one.nbytes * (held - stays + 1)
            choices.append(choice)
        if choices == found:
            break
        found = choices
        after = pricing.measure_peaks(with_choices(found))
        # A peak that does not fall has another cause, such as the logits.
        for i, (peak, now) in enumerate(zip(before, after, strict=True)):
            if short[i] and now >= peak:
                short[i], spare[i] = False, 0.0
        over = [peak - limit for peak, limit in zip(after, memory, strict=True)]
        if max(over) <= 0:
            break
        for i, more in enumerate(over):
            if more > 0 and short[i]:
                excess[i] += more
            elif more > 0:
                spare[i] = max(spare[i] - more, 0.0)
    return with_choices(found)
