"""Sharded weights, by hand: lifetimes of whole units, sent bytes, and the time of a step."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.validation.contract.played import FREE, Ideal, Played, play_job
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import LAYER, H, V, job_on, moved
from tests.simulator.schemes.small_jobs import MODEL as SIX_LAYERS

N, LAYERS = 4, 4
MODEL = {**SIX_LAYERS, "layers": LAYERS}
UNITS = [V * H, *[LAYER] * LAYERS, H + V * H]
"""Parameters of the embedding, the layers, the final norm with the output layer."""


def sharded(
    batch: int = 1, price: Any = FREE, engine: Engine = "simpy", *more: str, tied: bool = False, **framework: Any
) -> Played:
    """`batch` micro-batches on each of four ranks."""
    schemes = [{"use": "data/fsdp", "over": "dp"}, *({"use": use} for use in more)]
    model = {**MODEL, "tied": tied, "qkv_bias": False}
    traits = {"set": {"launch_s": 0.0, **framework}}
    job = job_on({"dp": N}, *schemes, samples=N * batch, model=model, framework=traits)
    return play_job(job, price, engine=engine)


ALONE = {"overlap": {"dp": False, "pp": True}}


@pytest.mark.parametrize("framework", [{}, ALONE])
def test_a_table_of_both_ends_is_gathered_once_and_stays(framework: dict[str, Any]) -> None:
    """Weights of the table through both passes of a micro-batch, its gradient from the output layer's backward on."""
    played = sharded(2, **framework, tied=True)
    table, *layers = [2 * size for size in UNITS[:-1]]
    ending = 2 * H
    assert moved(played, "all_gather") == [table, *layers, ending, ending, *layers] * 2
    assert moved(played, "reduce_scatter") == [4 * H, *[4 * LAYER] * 4, 4 * V * H] * 2
    (forward,) = {task for task in played.program.tasks if task.forward}
    (backward,) = {task for task in played.program.tasks if not task.forward}
    place = CATEGORIES.index("parameters"), CATEGORIES.index("gradients")
    assert [forward.memory.net[i] for i in place] == [table, 0.0]
    assert [backward.memory.net[i] for i in place] == [-table, 0.0]
    assert backward.memory.top[place[1]] == 4 * (V * H + 2 * LAYER), "and those of a layer and the one after it"


def computing(played: Played) -> tuple[list[float], list[float]]:
    """Seconds that each unit computes forward and backward, from the embedding to the loss."""
    found: list[list[float]] = []
    for action in (0, 1):
        each = []
        for part in played.task(action).parts:
            prices = zip(part.block.ops, part.seconds, strict=True)
            each += [sum(seconds for op, seconds in prices if op.stream == "compute")] * part.count
        found.append(each)
    return found[0], found[1][::-1]


@pytest.mark.parametrize(("engine", "overlap"), drawn_grid(["simpy", "sweep", "matrices"], [True, False]))
def test_with_free_computing_a_step_is_its_traffic(engine: Engine, overlap: bool) -> None:
    """3 M in every micro-batch, and the norm's four bytes."""
    links = 1e6
    played = sharded(3, Ideal(inf, inf, links), engine, overlap={"dp": overlap, "pp": True})
    moved = 3 * sum(2 * 2 * size + 4 * size for size in UNITS)
    assert played.step.span == pytest.approx((moved + 4) / links)


def test_without_overlap_nothing_is_hidden_forward() -> None:
    """Each unit is gathered, then computes; a scatter is in the way of the next gather."""
    played = sharded(1, Ideal(links=1e7), **ALONE)
    span = played.times.span
    busy = sum(
        played.flat.seconds[number]
        for number, op in played.instances()
        if isinstance(op.work, Collective) or op.stream == "compute"
    )
    # The last kernel of a layer adds the residual's gradient, and makes none of a weight.
    overlapped = sum(played.flat.seconds[number] for number, op in played.instances() if op.name == "add dx")
    # Nothing that comes in holds back the gather that begins the backward pass: it runs during the loss.
    ahead = min(2 * UNITS[-1] / 1e7, computing(played)[0][-1])
    assert span == pytest.approx(busy - overlapped - ahead)


@pytest.mark.parametrize("links", [1e6, 1e7, 1e8, 1e9])
def test_the_next_unit_is_gathered_while_one_computes(links: float) -> None:
    """A step by hand: forward each unit lasts as long as its computing or the next gather; backward its own scatter
    stands behind the gather, too."""
    played = sharded(1, Ideal(links=links))
    forward, backward = computing(played)
    # The last kernel of a layer adds the residual's gradient, and makes none of a weight.
    last = next(played.flat.seconds[number] for number, op in played.instances() if op.name == "add dx")
    overlapped = [0.0, *[last] * 4, 0.0]
    gather, scatter = ([n * size / links for size in UNITS] for n in (2, 4))
    now = data = gather[0]
    for unit, next_one in pairwise([*range(len(UNITS)), None]):
        assert unit is not None
        if next_one is not None:
            data = max(data, now) + gather[next_one]
        now = max(now + forward[unit], data)
    for unit in reversed(range(len(UNITS))):
        begun = now
        if unit == len(UNITS) - 1:
            # Nobody gathers ahead for the first one; the gather behind it follows at once.
            data = data + gather[unit]
            now, begun = max(now, data), data
        if unit > 0:
            data = max(data, begun) + gather[unit - 1]
        arrived, now = data, now + backward[unit]
        data = max(data, now - overlapped[unit]) + scatter[unit]
        now = max(now, arrived) if unit else data
    update = sum(played.flat.seconds[number] for number, op in played.instances() if op.phase == "U")
    assert played.times.span == pytest.approx(now + update)


def test_gradients_are_whole_until_they_are_scattered() -> None:
    """Gradients of the computing unit, and of the one before, which are still being reduced."""
    assert sharded(1).category_peak(0, "gradients") == 2 * 4 * LAYER
