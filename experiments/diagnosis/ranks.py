"""Steps of traced ranks beside the forecast of theirs: exposed communication, computation, and what the host did while
nothing ran."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.kineto import ON_DEVICE, Event, Trace
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.report.report import Report
from meshcast.validation.traces.comparison import Comparison, compare_step
from meshcast.validation.traces.host_timeline import unite_spans
from meshcast.validation.traces.timeline import Timeline, union_length

MOST_STEPS = 8
"""Most steps of a trace that are looked at, the last ones."""

DATA, ALLOCATION, COLLECTION, SAVE, LATE, OTHER = "data", "allocation", "collection", "save", "late", "other"
"""What the host does in a gap: gets data, allocates memory, collects garbage, saves a checkpoint; late: none of
these, and it is done with launching the next kernel only after the gap has begun; other: none of these either, the next
kernel waits."""

HOST_WORK = (
    # torch marks the next batch of its DataLoader so; the others are annotations of training programs.
    (DATA, re.compile(r"DataLoader|data_?load|get_batch|next_batch|batch_generator", re.I)),
    (ALLOCATION, re.compile(r"^cuda(Malloc|Free|MallocAsync|FreeAsync|HostAlloc|FreeHost)$|^cuMem(Map|Unmap|Create)")),
    (COLLECTION, re.compile(r"^python gc|\bgc[_.]collect|garbage", re.I)),
    (SAVE, re.compile(r"save_?checkpoint|checkpoint_?save|torch\.save|dcp\.(async_)?save", re.I)),
)
"""Kinds of host work by the names of events, tried in this order."""

EXPERTS = re.compile(r"expert|\bmoe|group(ed)?_?(gemm|mm)|GroupProblem", re.I)
"""Names of kernels that compute experts."""


@dataclass(frozen=True)
class Gap:
    """A time in which neither a kernel nor an operator runs.

    begin, seconds: from the step's first kernel; below 0: before it, since the kernels of the step before [s].
    doing: seconds of it by what the host does; they add up to the gap.
    after: name of the slice before it.
    """

    begin: float
    seconds: float
    doing: Mapping[str, float]
    after: str = ""


@dataclass(frozen=True)
class RankStep:
    """A traced step of a rank beside the forecast's.

    rank: its number. step: index of the step among those that the trace marks.
    compared: both timelines.
    gaps: in which nothing runs.
    """

    rank: int
    step: int
    compared: Comparison
    gaps: tuple[Gap, ...]

    def idle(self, kind: str) -> float:
        """Returns the seconds of gaps in which the host does something."""
        return sum(gap.doing.get(kind, 0.0) for gap in self.gaps)

    @property
    def seconds(self) -> float:
        """Duration of the step: from its first kernel to its last, and the longer of the time before it and the
        framework's by the forecast [s]."""
        lead = sum(gap.seconds for gap in self.gaps if gap.begin < 0)
        return self.compared.real.span + max(lead, self.compared.framework_s)

    @cached_property
    def expert_seconds(self) -> float:
        """Seconds of kernels that compute experts."""
        real = self.compared.real.slices
        return sum(part.seconds for part in real if part.stream == COMPUTE and EXPERTS.search(part.name))

    @property
    def dense_seconds(self) -> float:
        """Seconds of all other computation."""
        return self.compared.real.account["compute"] - self.expert_seconds


@dataclass(frozen=True)
class TracedRun:
    """Traced steps of several ranks.

    steps: of every rank, by its number.
    on_gpu: whether GPUs were traced.
    notes: on how traces and forecast belong together.
    """

    steps: Mapping[int, tuple[RankStep, ...]]
    on_gpu: bool = True
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def step(self) -> float:
        """Median of the traced steps of the slowest rank [s]."""
        return max(self.median(lambda step: step.seconds).values())

    @cached_property
    def compute_ratio(self) -> float:
        """Computation of the slowest rank over its forecast."""
        measured = self.median(lambda step: step.compared.real.account["compute"])
        forecast = self.median(lambda step: step.compared.simulated.account["compute"])
        return max(measured[rank] / forecast[rank] if forecast[rank] else 1.0 for rank in self.steps)

    def median(self, figure: Callable[[RankStep], float]) -> dict[int, float]:
        """Returns the median of a figure over the steps of every rank."""
        return {rank: statistics.median(map(figure, steps)) for rank, steps in self.steps.items()}

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """The ranks of each pipeline device of the forecast that were traced: they have equal work."""
        stages: dict[int, list[int]] = {}
        for rank, steps in self.steps.items():
            stages.setdefault(steps[0].compared.device, []).append(rank)
        return stages

    def measure_exposed(self, stream: str) -> dict[int, tuple[float, float]]:
        """Returns exposed communication of a stream, measured and forecast, by pipeline device [s]: of the rank of it
        that has least, since the others wait for it inside their collectives."""
        return self._compare_least(lambda timeline: timeline.exposed.get(stream, 0.0))

    def measure_busy(self, stream: str) -> dict[int, tuple[float, float]]:
        """Returns the same of all communication of a stream, hidden or not."""
        return self._compare_least(
            lambda timeline: union_length(part for part in timeline.slices if part.stream == stream)
        )

    def _compare_least(self, figure: Callable[[Timeline], float]) -> dict[int, tuple[float, float]]:
        measured = self.median(lambda step: figure(step.compared.real))
        forecast = self.median(lambda step: figure(step.compared.simulated))
        return {
            device: (min(measured[rank] for rank in ranks), forecast[ranks[0]]) for device, ranks in self.stages.items()
        }

    @cached_property
    def streams(self) -> list[str]:
        """Streams of communication of any rank."""
        slices = [part for steps in self.steps.values() for part in steps[0].compared.real.slices]
        return list(dict.fromkeys(part.stream for part in slices if part.stream != COMPUTE))


def compare_ranks(traces: Sequence[Trace], report: Report, rank: int | None = None) -> TracedRun:
    """Compares the steps of traces with the forecast of their job.

    rank: of the only trace, if it does not record it.
    Raises PlanError for two traces of a rank, and for what `compare_step` refuses.
    """
    ranks: dict[int, tuple[RankStep, ...]] = {}
    notes: list[str] = []
    for trace in traces:
        number = trace.rank if trace.rank is not None else rank
        if number is None and len(traces) > 1:
            rule = "it does not record its rank, so it is not known which of several it is"
            raise PlanError(trace.file, rule, "Name traces that torch wrote in a distributed run")
        marks = trace.steps()
        indices: Iterable[int | None] = range(max(len(marks) - MOST_STEPS, 1 if len(marks) > 2 else 0), len(marks))
        compared = [
            (index or 0, compare_step(trace, report, number, index)) for index in (indices if marks else [None])
        ]
        number = number or 0
        if number in ranks:
            raise PlanError(trace.file, f"another trace is of rank {number}, too", "Name one trace of each rank")
        ranks[number] = tuple(
            RankStep(number, index, each, tuple(_find_gaps(trace, each, marks[index] if marks else None)))
            for index, each in compared
        )
        notes += [note for note in compared[0][1].notes if not note.startswith("compared is step")]
    return TracedRun(ranks, traces[0].on_gpu, tuple(dict.fromkeys(notes)))


Spans = Sequence[tuple[float, float]]
"""Disjoint intervals in ascending order [s]."""


def _find_gaps(trace: Trace, compared: Comparison, mark: Event | None) -> Iterable[Gap]:
    """Yields the gaps of a step. mark: the host's event that encloses the step."""
    real, work = compared.real, _join_host_work(trace)
    kernels = sorted(trace.of(*ON_DEVICE), key=lambda kernel: kernel.begin)
    begins = [kernel.begin for kernel in kernels]
    at, before = 0.0, ""
    if mark is not None and kernels:
        earlier = max((kernel.end for kernel in kernels[: bisect_left(begins, real.start - 1e-7)]), default=mark.begin)
        lead = min(max(earlier, mark.begin) - real.start, 0.0)
        if lead < 0:
            yield _make_gap(real.start, (lead, 0.0), work, OTHER, before)
    for part in sorted(real.slices, key=lambda part: part.begin):
        if part.begin > at:
            # The next kernel, within a tenth of a microsecond of rounding.
            number = bisect_left(begins, real.start + part.begin - 1e-7)
            launch = trace.launch(kernels[number]) if number < len(kernels) else None
            late = not kernels or (launch is not None and launch.end > real.start + at)
            yield _make_gap(real.start, (at, part.begin), work, LATE if late else OTHER, before)
        if part.begin + part.seconds > at:
            at, before = part.begin + part.seconds, part.name
    if real.span > at:
        yield _make_gap(real.start, (at, real.span), work, LATE if not kernels else OTHER, before)


def _join_host_work(trace: Trace) -> dict[str, Spans]:
    """Returns, for each kind of host work whose names say what it is, the time of it and of all kinds before."""
    joined: dict[str, Spans] = {}
    spans: list[tuple[float, float]] = []
    host = [event for event in trace.events if event.category not in ON_DEVICE]
    for kind, words in HOST_WORK:
        named = {name for name in {event.name for event in host} if words.search(name)}
        spans = unite_spans([*spans, *((event.begin, event.end) for event in host if event.name in named)])
        joined[kind] = spans
    return joined


def _overlap(spans: Spans, begin: float, end: float) -> float:
    """Returns the length of an interval that spans cover."""
    length = 0.0
    for low, high in spans[max(bisect_left(spans, (begin, begin)) - 1, 0) :]:
        if low >= end:
            break
        length += max(0.0, min(high, end) - max(low, begin))
    return length


def _make_gap(start: float, span: tuple[float, float], work: Mapping[str, Spans], rest: str, after: str) -> Gap:
    """Returns a gap of a step, by what the host does in it; of what happens at once the first kind counts."""
    begin, end = span
    doing: dict[str, float] = {}
    covered = 0.0
    for kind, spans in work.items():
        length = _overlap(spans, start + begin, start + end)
        if length > covered:
            doing[kind], covered = length - covered, length
    if end - begin > covered:
        doing[rest] = end - begin - covered
    return Gap(begin, end - begin, doing, after)
