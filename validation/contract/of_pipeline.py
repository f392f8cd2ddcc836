"""Settings at which closed forms of pipeline schedules are checked, and how their quantities are measured."""

from __future__ import annotations

from functools import cache
from itertools import product

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.scheduling.schedule import PipelineSetting, PipelineShape, Schedule, actions_of
from meshcast.validation.contract.measure import remembered
from meshcast.validation.pipelines import cases as pipeline
from meshcast.validation.pipelines.cases import ScheduleCase, ScheduleReplay, replay

TIMES = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 1.25, 0.75), (3.0, 2.0, 1.0), (0.5, 4.0, 0.125), (5.0, 0.25, 2.0)]


T_LOSS = 1.5
"""Time of a loss that couples the samples of a batch."""


MOST_P, MOST_M = 4, 20
"""Devices and micro-batches of the largest shapes."""


@cache
def settings(kind: type[Schedule]) -> list[PipelineSetting]:
    """Shapes that the schedule exists for, with the triples of `TIMES` in turn."""
    chosen = [shape for shape in shapes(kind) if shape.m in (*range(1, 9), 12, 15, 16, 20, 21, 24)]  # type: ignore[arg-type]
    return [PipelineSetting(shape, *TIMES[number % len(TIMES)]) for number, shape in enumerate(chosen, 1)]


@cache
def shapes(kind: type[Schedule]) -> list[PipelineShape]:
    """All shapes that the schedule exists for, of up to 4 chunks and the most devices and micro-batches."""
    sizes = product(range(1, MOST_P + 1), range(1, MOST_M + 1), range(1, 5), {False, kind.couples_samples})
    every = (PipelineShape(p, m, v * kind.directions, batch_loss=couples) for p, m, v, couples in sizes)
    return [shape for shape in every if exists(kind, shape)]


def exists(kind: type[Schedule], shape: PipelineShape) -> bool:
    """Whether the schedule exists for a shape; each direction has chunks of its own."""
    if shape.v % kind.directions:
        return False
    try:
        kind(("pp",), kind.Options(chunks=shape.v // kind.directions)).check(shape)
    except PlanError:
        return False
    return True


@remembered
def _replay(setting: PipelineSetting, use: str, hop: float = 0.0) -> ScheduleReplay:
    return replay(_case(setting, use, hop))


def _case(setting: PipelineSetting, use: str, hop: float = 0.0) -> ScheduleCase:
    shape = setting.shape
    name = use.partition("/")[2]
    times = {"t_f": setting.t_f, "t_b": setting.t_b, "t_w": setting.t_w, "hop": hop}
    sizes = {"p": shape.p, "m": shape.m, "v": shape.v // directions_of(use)}
    loss = {"t_loss": T_LOSS} if shape.batch_loss else {}
    return ScheduleCase.model_validate({"schedule": name, **sizes, **times, **loss})


def directions_of(use: str) -> int:
    """Directions of a schedule through its devices."""
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    return kind.directions


def bubble(setting: PipelineSetting, use: str) -> float:
    """Beside all passes of a device; with a loss of the batch beside that and the forward passes ahead of it, too."""
    shape = setting.shape
    ahead = T_LOSS + shape.m * setting.t_f if shape.batch_loss else 0.0
    return _replay(setting, use).makespan - shape.m * setting.t_total - ahead


def bubble_span(setting: PipelineSetting, use: str) -> float:
    """The bubble of the longest span of a device, from its first begin to its last end."""
    return max(_replay(setting, use).spans) - setting.shape.m * setting.t_total


def max_idle(setting: PipelineSetting, use: str) -> float:
    """The longest idle time of a device between the first begin and the last end of all devices."""
    played = _replay(setting, use)
    return played.makespan - min(played.busy)


def most_in_flight_b(setting: PipelineSetting, use: str) -> int:
    """Peak over all devices."""
    return max(in_flight_b(setting, use))


def in_flight_w(setting: PipelineSetting, use: str) -> list[int]:
    return _replay(setting, use).in_flight("W")


def most_in_flight_w(setting: PipelineSetting, use: str) -> int:
    return max(in_flight_w(setting, use))


def in_flight_b(setting: PipelineSetting, use: str) -> list[int]:
    return _replay(setting, use).in_flight("B")


def layers_in_flight(setting: PipelineSetting, use: str) -> list[int]:
    """Of the stages with layers alone: peak of forward passes whose backward pass has not ended."""
    orders, p = _replay(setting, use).table.orders, setting.shape.p
    peaks = []
    for order in orders:
        held = [0]
        for action in actions_of(order):
            if action.stage < p:
                held.append(held[-1] + {"F": 1, "BW": -1}[action.kind])
        peaks.append(max(held))
    return peaks


def period(setting: PipelineSetting, use: str) -> float | None:
    """Time between two updates of a schedule without a flush [s]."""
    return pipeline.period(_case(setting, use))


def weight_versions(setting: PipelineSetting, use: str) -> list[int] | None:
    return pipeline.count_weight_versions(_case(setting, use))


def bubble_per_hop(setting: PipelineSetting, use: str) -> float:
    hop = min(setting.t_f, setting.t_b + setting.t_w) / 8
    return (_replay(setting, use, hop).makespan - _replay(setting, use).makespan) / hop


MEASURES = {
    "bubble": bubble,
    "bubble_span": bubble_span,
    "max_idle": max_idle,
    "in_flight_b": in_flight_b,
    "most_in_flight_b": most_in_flight_b,
    "in_flight_w": in_flight_w,
    "most_in_flight_w": most_in_flight_w,
    "bubble_per_hop": bubble_per_hop,
    "layers_in_flight": layers_in_flight,
    "period": period,
    "weight_versions": weight_versions,
}
