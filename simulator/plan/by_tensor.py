"""What becomes of the tensors that a stage saves for its backward passes, where its memory is short: every tensor is
kept, swapped to devices with room, offloaded to the host, or recomputed.

What leaves a stage is chosen greedily (`choose`). Swaps come first, of the tensors with most seconds of recomputation a
byte, as long as they find room and hide behind a pass; then offloading, as long as it hides behind a pass and what it
does not hide is shorter than recomputation; then recomputation, of the tensors with fewest seconds a byte. A swap frees
fewer bytes than recomputation, so tensors are swapped only as long as recomputing the others would free enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
"""Rate of a link to a keeper over that to the nearest keeper, from which on it keeps stripes."""


class Budget(NamedTuple):
    """What may leave a stage.

    excess: bytes that have to.
    held: micro-batches that it holds.
    layers: layers of the stage.
    device, host: bytes of a micro-batch that devices, and the host, may take.
    host_s: of a byte to the host, or back [s].
    """

    excess: float
    held: int
    layers: int
    device: float
    host: float
    host_s: float

    def count_freed(self, way: str) -> float:
        """Counts the bytes that a byte of a micro-batch frees: of what is swapped `FEWEST_HELD` micro-batches stay, of
        what is offloaded two layers of a micro-batch, of what is recomputed a layer."""
        if way == "swap":
            return self.held - min(self.held, FEWEST_HELD)
        return self.held - min({"host": 2, "recompute": 1}[way] / self.layers, 1)


class LeavingTensors:
    """The saved tensors of a stage that leave it, until its excess has.

    Attributes:
        by_way: those that are swapped, go to the host, and are recomputed.
    """

    def __init__(self, tensors: Sequence[SavedTensors], budget: Budget) -> None:
        self.by_way: dict[str, list[SavedTensors]] = {"swap": [], "host": [], "recompute": []}
        self._dearest = sorted(tensors, key=lambda saved: (-saved.seconds / saved.nbytes, saved.names))
        self._kept = list(self._dearest)
        self._budget, self._excess = budget, budget.excess

    def move(self, way: str, room: float) -> None:
        """Lets the dearest tensors leave that have room elsewhere, as long as that pays."""
        for saved in self._dearest:
            if saved in self._kept and self._excess > 0 and saved.nbytes <= room and self._pays(way, saved):
                self._leave(way, saved)
                room -= saved.nbytes

    def recompute(self) -> None:
        """Lets the cheapest of the other tensors leave."""
        for saved in reversed(self._dearest):
            if saved in self._kept and self._excess > 0 and saved.seconds < inf:
                self._leave("recompute", saved)

    def _pays(self, way: str, saved: SavedTensors) -> bool:
        """Returns whether moving frees memory and hides, and recomputing the other tensors would free enough."""
        budget, freed = self._budget, self._budget.count_freed(way)
        # Of the last layer of a stage nothing hides the copies out and back.
        shown = 2 * saved.nbytes / budget.layers * budget.host_s if way == "host" else 0.0
        others = sum(other.nbytes for other in self._kept if other.seconds < inf and other is not saved)
        rest = self._excess - freed * saved.nbytes
        enough = saved.seconds == inf or rest <= budget.count_freed("recompute") * others
        return freed != 0 and shown < saved.seconds and enough

    def _leave(self, way: str, saved: SavedTensors) -> None:
        self.by_way[way].append(saved)
        self._kept.remove(saved)
        self._excess -= self._budget.count_freed(way) * saved.nbytes


def choose(tensors: Sequence[SavedTensors], budget: Budget) -> TensorChoice:
    """Returns what leaves a stage until its excess has; all that can where that is not enough."""
    leaving = LeavingTensors(tensors, budget)
    leaving.move("swap", budget.device)
    leaving.move("host", budget.host)
    leaving.recompute()
    swap, host, recompute = (tuple(name for saved in way for name in saved.names) for way in leaving.by_way.values())
    return TensorChoice(swap, host, recompute)


def stripe_shares(stage: StageTensors, room: Sequence[float]) -> dict[int, float]:
    """Returns the shares of the swapped bytes of a stage by keeper: devices with room that are near, each as much as
    its links move in the same time, or where all share the links of a switch, as it has room."""
    near = min((seconds for seconds, free in zip(stage.device_s, room, strict=True) if free > 0), default=inf)
    keepers = [j for j, free in enumerate(room) if free > 0 and stage.device_s[j] * NEAR <= near < inf]
    weights = [1 / stage.device_s[j] if stage.own_links else room[j] for j in keepers]
    return {j: weight / sum(weights) for j, weight in zip(keepers, weights, strict=True)}


def swap_budget(stage: StageTensors, shares: dict[int, float], room: Sequence[float], away: int) -> float:
    """Counts the bytes of a micro-batch that find room at the keepers, of `away` micro-batches at once, and move within
    a pass."""
    if not shares:
        return 0.0
    times = [share * stage.device_s[j] for j, share in shares.items()]
    slowest = max(times) if stage.own_links else sum(times)
    return min(stage.pass_s / slowest, *(room[j] / (share * away) for j, share in shares.items()))


class StageBudgets:
    """What the stages of a plan have to free, and have room for [bytes].

    Attributes:
        excess: of every device.
    """

    def __init__(self, peaks: Sequence[float], memory: Sequence[float], microbatches: int) -> None:
        """Prepares the choice. memory: of every device [bytes]."""
        self._peaks, self._memory, self._microbatches = peaks, memory, microbatches
        self.excess = [peak - limit for peak, limit in zip(peaks, memory, strict=True)]
        self._short = [nbytes > 0 for nbytes in self.excess]
        self._spare = [max(-nbytes, 0.0) for nbytes in self.excess]

    def choose(self, stages: Sequence[StageTensors], layers: Sequence[int]) -> list[TensorChoice]:
        """Returns what becomes of the tensors of every stage. Stages choose in turn, the first stage first,
        since it holds most micro-batches."""
        room = list(self._spare)
        return [
            self._choose(number, stage, max(1, layers[number]), room) if self._short[number] else TensorChoice()
            for number, stage in enumerate(stages)
        ]

    def _choose(self, number: int, stage: StageTensors, layers: int, room: list[float]) -> TensorChoice:
        """Returns the choice of a stage, and takes what it swaps from the room of its keepers."""
        held = min(self._microbatches, len(room) - number)
        away = held - min(held, FEWEST_HELD)
        shares = stripe_shares(stage, room) if away else {}
        device = swap_budget(stage, shares, room, away + 1)
        budget = Budget(self.excess[number], held, layers, device, stage.pass_s / stage.host_s, stage.host_s)
        choice = choose(stage.tensors, budget)
        swapped = sum(saved.nbytes for saved in stage.tensors if saved.names[0] in choice.swap)
        if not swapped:
            return choice
        stripes = tuple(Stripe(keeper, round(share * swapped), stage.own_links) for keeper, share in shares.items())
        for stripe in stripes:
            room[stripe.keeper] -= stripe.nbytes * (away + 1)
        return replace(choice, stripes=stripes)

    def correct(self, peaks: Sequence[float]) -> bool:
        """Lets stages that still miss free more, and keepers that are too full take less; returns whether any is."""
        over = [peak - limit for peak, limit in zip(peaks, self._memory, strict=True)]
        for number, (before, peak) in enumerate(zip(self._peaks, peaks, strict=True)):
            # A peak that does not fall has another cause, such as the logits.
            if self._short[number] and peak >= before:
                self._short[number], self._spare[number] = False, 0.0
            if over[number] > 0 and self._short[number]:
                self.excess[number] += over[number]
            elif over[number] > 0:
                self._spare[number] = max(self._spare[number] - over[number], 0.0)
        return max(over) > 0


def choose_tensors(plan: Plan, pricing: JobPricing, memory: Sequence[float]) -> Plan:
    """Returns the plan whose stages fit, or else free as much as they can, with what becomes of their tensors chosen.

    memory: of every device [bytes].
    """
    (scheme,) = schemes_with(plan.schemes, ChoosesTensors)
    check_one_stage_a_device(plan, scheme.use)
    with_choices = partial(_with_choices, plan, scheme)
    if scheme.tensor_choices:
        return with_choices(scheme.tensor_choices)
    chosen = [TensorChoice()] * plan.shape.p
    plain = with_choices(chosen)
    budgets = StageBudgets(pricing.measure_peaks(plain), memory, plan.shape.m)
    if max(budgets.excess) <= 0:
        return plain
    tensors = pricing.price_tensors(plain)
    for _ in range(ROUNDS):
        choices = budgets.choose(tensors, plan.layers)
        if choices == chosen:
            break
        chosen = choices
        if not budgets.correct(pricing.measure_peaks(with_choices(chosen))):
            break
    return with_choices(chosen)


def _with_choices(plan: Plan, scheme: ChoosesTensors, choices: Sequence[TensorChoice]) -> Plan:
    stages = [replace_scheme(plan, scheme, scheme.with_tensors(tuple(choices), i)) for i in range(plan.shape.p)]
    return replace(stages[0], stage_plans=tuple(stages)) if len({*choices}) > 1 else stages[0]
