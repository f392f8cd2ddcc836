"""Static orders with passes of input and weight gradients: bubbles and peaks at many shapes and times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.building_block import reorder_warmup_and_cooldown, repeat_block
from meshcast.simulator.scheduling.schedule import Action, PassDurations, PipelineShape, Schedule, actions_of
from tests.draws import drawn
from tests.simulator.scheduling.schedules import bubbles, make_schedule, near, played
from tests.strategies import SECONDS

CONFIGURATIONS = [
    ((8, 24), (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433), (3, 0.1055)),
    ((32, 96), (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641, 0.1421, 0.0038), (2, 0.1493)),
    ((8, 32), (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039), (3, 0.0818)),
    ((8, 24), (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698, 0.1323, 0.0029), (4, 0.0808)),
    ((8, 64), (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294, 0.0554, 0.0010), (4, 0.0320)),
    ((16, 64), (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516, 0.1088, 0.0054), (3, 0.0852)),
    ((16, 48), (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066), (3, 0.1104)),
]
"""p and m; milliseconds of F, B, W and a hop; bubble rates of 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p; chunks and rate of
interleaved 1F1B. Qi et al. 2024, arXiv 2401.10241, tables 5 and 6."""


@pytest.mark.parametrize(
    ("shape", "times", "rates", "interleaved"), drawn(CONFIGURATIONS, keep=lambda row: row[0] <= (8, 32))
)
def test_the_zero_bubble_papers_configurations(
    shape: tuple[int, int], times: tuple[float, ...], rates: tuple[float, ...], interleaved: tuple[int, float]
) -> None:
    """Of 1F1B-I the paper counts p hops less than a replay of the order has.

    By these rates interleaving should gain 18 % over 1F1B in the first row; table 4 measures 11 %. What is missing from
    the measured gain is 0.40 to 0.52 ms a pass in all eight rows, whatever messages (10 to 28 MB), links (NVLink or
    RoCE) and passes are, so neither messages nor waits for them explain it.
    """
    (p, m), (*passes, hop), (v, rate) = shape, times, interleaved
    uses = ("1f1b", {}), ("zb-h1", {}), ("zb-h2", {}), ("zb-auto", {}), ("zb-auto", {"memory_limit": 2 * p})
    for (use, options), wanted in zip(uses, rates, strict=True):
        answered = played(use, p, m, passes, hop=hop, **options)
        assert answered["bubble_rate_span"] == pytest.approx(wanted, abs=5.1e-5 if use == "zb-auto" else 1e-4)
    answered = played("interleaved-1f1b", p, m, passes, v=v, hop=hop)
    work, bubble = m * sum(passes), (p - 1) * sum(passes) / v
    idle = bubble + (2 * p * v - p - 2) * hop
    assert idle / (work + idle) == pytest.approx(rate, abs=1e-4)
    assert answered["makespan"] == near(work + bubble + (2 * p * v - 2) * hop)
    assert rate <= answered["bubble_rate_span"] < rate + 0.005


def test_only_v_min_waits_for_every_micro_batch_of_unequal_passes() -> None:
    for m, bubble in ((8, 93), (12, 117), (16, 141)):
        assert bubbles(played("v-min", 4, m, (8, 10, 6)), m, (8, 10, 6)) == near((bubble, bubble))
        assert bubbles(played("v-half", 4, m, (8, 10, 6)), m, (8, 10, 6)) == near((30, 30))


TIMES = [(4, 5, 3), (18.5, 18.1, 9.3), (1, 2, 1), (1, 1, 2)]
MAKESPANS = {
    (2, 2): (65, 247.1, 23, 18),
    (2, 6): (152, 579.3, 54, 49),
    (3, 3): (101, 394.3, 35, 29),
    (3, 9): (245, 945.9, 89, 77),
    (4, 4): (148, 567.4, 52, 40),
    (4, 8): (226, 873.3, 82, 70),
    (5, 3): (139, 539.5, 49, 36),
    (5, 12): (349, 1349.9, 128, 107),
    (8, 7): (266, 1035.9, 95, 73),
    (8, 16): (482, 1864.5, 176, 144),
    (8, 24): (674, 2598.9, 248, 208),
}
"""By p and m, the makespans for `TIMES` of F, B and W of a chunk. Orders of the generator `zbv_greedy.py` of the paper
(https://github.com/sail-sg/zero-bubble @3fd87fd1), played with these times. It knows no times but equal ones; an order
that takes all passes for equally long takes 145 in place of 144 for the last of p = 8 and m = 16."""
OF_THE_AUTHORS = [(*shape, *row) for shape, spans in MAKESPANS.items() for row in zip(TIMES, spans, strict=True)]


@pytest.mark.parametrize(
    ("p", "m", "times", "makespan"), drawn(OF_THE_AUTHORS, [*OF_THE_AUTHORS[::5], (8, 16, (1, 1, 2), 144)])
)
def test_v_half_is_no_slower_than_the_order_of_its_authors(
    p: int, m: int, times: tuple[float, float, float], makespan: float
) -> None:
    assert played("v-half", p, m, tuple(2 * t for t in times))["makespan"] <= makespan * (1 + 1e-9)


@given(p=st.integers(1, 9), m=st.integers(1, 24), times=st.tuples(SECONDS, SECONDS, SECONDS))
def test_v_half_holds_the_logits_of_one_micro_batch(p: int, m: int, times: Any) -> None:
    shape = PipelineShape(p, m, 2)
    alike = [(t,) * shape.stages for t in times]
    durations = PassDurations(alike[0], alike[1], alike[2], (0.0,) * shape.stages)
    for order in make_schedule("v-half").orders(shape, durations):
        held = 0
        for action in actions_of(order):
            if action.stage == shape.stages - 1:
                held += (action.kind == "F") - (action.kind == "W")
                assert held <= 1


def played_in_slots(schedule: Schedule, shape: PipelineShape, orders: Any) -> tuple[int, list[int]]:
    """Bubble in slots, and the peak chunks of every device, for passes of one slot."""

    class Given(type(schedule)):  # type: ignore[misc]
        name = "given"

        def orders(self, shape: PipelineShape, durations: Any = None) -> Any:
            return orders

    found = timetable(Given(("pp",)), shape)
    done: dict[Action, int] = {}
    free = [0] * shape.p
    for number in found.sequence:
        action, device = found.actions[number], found.device_of[number]
        need = found.actions[found.need[number]] if found.need[number] >= 0 else None
        done[action] = free[device] = max(free[device], done[need] if need else 0) + 1
    peaks = []
    for order in orders:
        held = [0]
        for action in order:
            held.append(held[-1] + (action.kind == "F") - (action.kind == "W"))
        peaks.append(max(held))
    return max(free) - 3 * shape.v * shape.m, peaks


@pytest.mark.parametrize("use", ["v-half", "v-min"])
@given(p=st.integers(1, 12), m=st.integers(1, 40))
def test_reordering_is_never_longer_and_holds_no_more_on_any_device(use: str, p: int, m: int) -> None:
    schedule: Any = make_schedule(use)
    shape = PipelineShape(p, m, 2)
    plain = repeat_block(schedule, shape, schedule.block(shape))
    longest, most = played_in_slots(schedule, shape, plain)
    length, held = played_in_slots(schedule, shape, reorder_warmup_and_cooldown(schedule, shape, plain))
    assert length <= longest
    assert all(now <= before for now, before in zip(held, most, strict=True))
    if m >= 2 * p > 4:
        alone = {"v-min": 4 * p - 5 if p % 3 else 4 * p - 3, "v-half": (7 * p - 7) // 2 if p % 2 else (7 * p - 4) // 2}
        assert longest == alone[use]


def test_passes_that_fall_on_one_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="0F1 and 0B0 fall on one slot"):
        repeat_block(make_schedule("1f1b"), PipelineShape(1, 2), [(0, 3)])
