"""Pages of pipeline orders: the table of devices and slots in a terminal, and the CSV file for torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views import palette
from meshcast.experiments.views.table import Column, Table, numbers
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import validate_data
from meshcast.simulator.formats.torch_schedule import read_csv, write_csv
from meshcast.simulator.ir.registry import find_scheme, is_scheme, scheme_names
from meshcast.simulator.job.shorthand import SCHEDULES_ELSEWHERE
from meshcast.simulator.scheduling.schedule import BETWEEN_PASSES, Action, Schedule, actions_of
from meshcast.validation.pipelines.cases import ScheduleCase, ScheduleReplay, replay

if TYPE_CHECKING:
    from meshcast.experiments.render.matplotlib.schedules import ShownSchedule

STYLES = {
    kind: f"{palette.ink_on(palette.rgb(looks.colour))} on {looks.colour}" for kind, looks in palette.ACTIONS.items()
}
"""By kind of action: readable letters on its colour. Passes that run with the pass before look like it."""

TRANSFER = palette.FAINT
"""Colour of transfers of activations."""

PAGE_COLUMNS = 100
"""Columns of characters of a page; a wider table continues below."""

MAX_SHOWN = 100_000
"""Most forward passes of chunks in a schedule that is shown: some ten seconds, and 20 MB of JSON."""


def play_to_show(name: str, p: int | None, m: int | None, v: int | None) -> ScheduleReplay:
    """Returns the same as `play_in_slots`. Raises PlanError, before any work, for a schedule too long to read."""
    if p is not None and m is not None and (chunks := p * m * (v or 1)) > MAX_SHOWN:
        rule = f"p x m x v is {chunks:,}, and at most {MAX_SHOWN:,} are shown"
        raise PlanError("--m", rule, "Show fewer micro-batches: the order repeats. `export` writes longer ones", m)
    return play_in_slots(name, p, m, v)


MAX_CELLS = 100_000
"""Rows times slots of a page: some seconds, and a thousand screens."""


def play_in_slots(name: str, p: int | None, m: int | None, v: int | None) -> ScheduleReplay:
    """Returns a schedule played in slots: F, B and W of a chunk take a slot each, a whole backward pass two.

    name: of a schedule, or of a CSV file, which fixes p, m and v.
    p: devices.
    m: micro-batches.
    v: chunks a device.
    Raises PlanError for numbers beyond the limits of `ScheduleCase` and a schedule that does not exist for them.
    """
    case: dict[str, Any] = {"schedule": name, "p": p, "m": m}
    if name.endswith(".csv"):
        schedule = read_csv(name)
        case = {"schedule": "from-file", "path": name, "p": len(schedule.rows), "m": schedule.microbatches}
        for option, wanted, stated in (("--p", case["p"], p), ("--m", case["m"], m), ("--v", schedule.chunks, v)):
            if stated not in (None, wanted):
                raise PlanError(option, f"{name} is for {wanted}", "Leave it out", stated)
    elif p is None or m is None:
        option = "--p" if p is None else "--m"
        rule = "a schedule is for a number of devices and of micro-batches"
        raise PlanError(option, rule, f"Write meshcast list schedule {name} --p 4 --m 8")
    elif not is_scheme(f"pipeline/{name}"):
        known = [use.partition("/")[2] for use in scheme_names() if use.startswith("pipeline/")]
        raise PlanError("schedule", "no such schedule", nearest(name, known, SCHEDULES_ELSEWHERE), name)
    durations = dict.fromkeys(("t_f", "t_b", "t_w"), 1.0)
    return replay(validate_data(ScheduleCase, {**case, "v": v or 1, **durations}, "schedule ", PlanError))


def export_csv(name: str, p: int | None, m: int | None, v: int | None) -> str:
    """Returns the text of torch's CSV file of a schedule.

    Raises PlanError for schedules that torch's format does not have: two directions, a graph of stages, slices,
    activation transfers, no flush.
    """
    table = play_in_slots(name, p, m, v).table
    kind = None if name.endswith(".csv") else find_scheme(f"pipeline/{name}")
    if kind is not None and issubclass(kind, Schedule) and not kind.flush:
        raise PlanError(
            "schedule",
            "torch's schedules have a flush at the end of every step",
            "Export a schedule with a flush",
            name,
        )
    parts = [tuple(others) for others in table.stages.predecessors]
    if parts != [(stage - 1,) if stage else () for stage in range(table.shape.stages)]:
        rule = "in torch's format the stages are one chain, from the first to the last"
        raise PlanError("schedule", rule, "Export a schedule with one chain of stages", name)
    return write_csv(table.orders, name)


def tabulate_shown(shown: Sequence[ShownSchedule]) -> RenderableType:
    """Returns the figures of schedules that were drawn, as a table."""
    title = "schedule" if "slots" in shown[0].cells else "job"
    rows = [(figures.name, *figures.cells.values()) for figures in shown]
    return show_table(Table(Column(title, style="bold"), *numbers(*shown[0].cells), rows=rows, edges=False))


# ------------------------------------------------------------------------------------------- the table


def rows(run: ScheduleReplay) -> list[list[dict[str, Any]]]:
    """Returns every action with its begin and end in slots, by device."""
    unit = _slot_time(run)
    return [
        [
            {"action": str(action), "begin": begin / unit, "end": end / unit}
            for action, begin, end in zip(actions_of(order), begins, ends, strict=True)
        ]
        for order, begins, ends in zip(run.table.orders, run.begin, run.end, strict=True)
    ]


def _slot_time(run: ScheduleReplay) -> float:
    """Returns duration of the shortest pass."""
    begins, ends = (list(chain.from_iterable(times)) for times in (run.begin, run.end))
    durations = (end - begin for begin, end in zip(begins, ends, strict=True))
    return min((seconds for seconds in durations if seconds > 0), default=1.0)


def answer(name: str, run: ScheduleReplay) -> dict[str, Any]:
    """Returns the table as JSON."""
    shape = run.table.shape
    head = {"schedule": name, "p": shape.p, "m": shape.m, "v": shape.v, "slots": run.makespan / _slot_time(run)}
    return {**head, "in_flight_b": run.in_flight("B"), "rows": rows(run)}


def page(name: str, run: ScheduleReplay) -> RenderableType:
    """Returns the table in a terminal: a row a device, a column a slot, continued below where it is too wide."""
    shape, unit = run.table.shape, _slot_time(run)
    lanes = [lane for device in range(shape.p) for lane in _lanes(run, device, unit)]
    steps = max((at + length for _, cells in lanes for at, length, _, _ in cells), default=0)
    if len(lanes) * steps > MAX_CELLS:
        rule = f"its table has {len(lanes):,} rows of {steps:,} slots, and a page shows at most {MAX_CELLS:,} cells"
        raise PlanError(name, rule, "Use fewer micro-batches or devices, or --json")
    width = 1 + max([len(str(steps)), *(-(-len(text) // length) for _, c in lanes for _, length, text, _ in c)])
    head = max(len(title) for title, _ in lanes) + 2
    fit = max(1, (PAGE_COLUMNS - head) // width)
    title = f"{Path(name).name}: {shape.p} devices, {shape.m} micro-batches, {shape.stages} stages"
    lines = [Text(title, style="bold")]
    for start in range(0, steps, fit):
        numbers = "".join(f"{step:<{width}}" for step in range(start, min(start + fit, steps)))
        lines += [Text(), Text(" " * head + numbers, style="dim", no_wrap=True)]
        lines += [_line(title.ljust(head), cells, start, min(start + fit, steps), width) for title, cells in lanes]
    busy = sum(run.busy) / len(run.busy)
    held = " ".join(map(str, run.in_flight("B")))
    lines += [
        Text(),
        Text(f"{run.makespan / unit:,.6g} slots, bubble {1 - busy / run.makespan:.1%}, chunks in flight {held}"),
    ]
    return Group(*lines)


Cells = list[tuple[int, int, str, str]]
"""First slot, number of slots, text, style; in the order of slots."""


def _lanes(run: ScheduleReplay, device: int, unit: float) -> list[tuple[str, Cells]]:
    """Returns the rows of a device: its passes, and its activation transfers if there are any."""
    table = run.table
    several = table.stages.devices.count(device) > 1
    passes, transfers = dict[int, tuple[int, str, str]](), defaultdict[int, list[str]](list)
    actions = actions_of(table.orders[device])
    for number, (action, begin, end) in enumerate(zip(actions, run.begin[device], run.end[device], strict=True)):
        at, length = round(begin / unit), max(1, round((end - begin) / unit))
        if action.kind in BETWEEN_PASSES:
            transfers[at].append(str(action))
        elif table.slots[table.slot[table.starts[device] + number]].follows:
            passes[at] = (length, f"{passes[at][1]}+{_label(action, several)}", passes[at][2])
        else:
            passes[at] = (length, _label(action, several), STYLES[action.kind])
    lanes = [(f"device {device}", sorted((at, *cell) for at, cell in passes.items()))]
    if transfers:
        cells = sorted((at, 1, " ".join(words), TRANSFER) for at, words in transfers.items())
        lanes.append(("  transfers", cells))
    return lanes


def _label(action: Action, several: bool) -> str:
    """Returns text of an action, without the stage if the device has only this."""
    return str(action) if several else str(action).removeprefix(str(action.stage))


def _line(title: str, cells: Cells, start: int, stop: int, width: int) -> Text:
    """Returns the slots from `start` to `stop` of a row: idle slots are empty, passes of several slots continue in
    dots."""
    line = Text(title, no_wrap=True)
    at, slot = start, itemgetter(0)
    before = max(0, bisect_right(cells, start, key=slot) - 1)  # it may continue into this line
    for begin, length, text, style in cells[before : bisect_left(cells, stop, key=slot)]:
        first, last = max(begin, start), min(begin + length, stop)
        if first >= last:
            continue
        line.append(" " * (width * (first - at)))
        shown = text if begin >= start else ""
        line.append(f"{shown:·<{width * (last - first) - 1}}" if length > 1 else shown.ljust(width - 1), style=style)
        line.append(" ")
        at = last
    return line
