"""Schedules as torch writes them: the CSV of ``torch.distributed.pipelining``, one row a rank, one cell a step.

A cell is empty where the rank idles, or one action: stage, kind, micro-batch (``2F0``). F is a forward pass, B a
backward pass at once, I and W the gradients of inputs and those of weights; ``(0F3;3B1)OVERLAP_F_B`` are two passes
together. This is torch's format ``compute_only`` (``PipelineScheduleMulti._dump_csv``, torch 2.13); in the other one,
``compute_comms``, messages are actions too, and it is refused: where messages go follows from the order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hardware.errors import PlanError
from simulator.bridges.files import text
from simulator.scheduling.schedule import Action, OverlappedPasses, ScheduleItem, actions_of

SPELT = {"F": "F", "BW": "B", "B": "I", "W": "W"}
"""Kinds of actions in torch's letters."""

KINDS = {letter: kind for kind, letter in SPELT.items()}

PASS = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
TOGETHER = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")

REMEDY = "Name a CSV file that torch's schedule wrote with _dump_csv(file), or meshcast export schedule"


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule from a file. rows: by device, its steps; None where it idles. where: the file's name."""

    rows: list[list[ScheduleItem | None]]
    where: str = "schedule"

    @cached_property
    def orders(self) -> list[list[ScheduleItem]]:
        """What every device does, in order."""
        return [[turn for turn in row if turn is not None] for row in self.rows]

    @cached_property
    def devices(self) -> list[int]:
        """The device of every stage.

        Raises PlanError, with row and cell, for a stage on two devices, and for stages not shared evenly.
        """
        found: dict[int, int] = {}
        for device, row in enumerate(self.rows):
            for step, turn in enumerate(row):
                for action in actions_of([turn] if turn is not None else []):
                    if found.setdefault(action.stage, device) != device:
                        rule = f"stage {action.stage} is on rank {found[action.stage]} already"
                        place = _place(self.where, device, step)
                        raise PlanError(place, rule, "A stage has one rank: correct the stages", str(turn))
        held = [sum(device == own for own in found.values()) for device in range(len(self.rows))]
        if not found or max(found) + 1 != len(found) or len(set(held)) > 1:
            rule = (
                f"stages are numbered from 0, and every rank has like many; these are {sorted(found)}, by rank {held}"
            )
            raise PlanError(self.where, rule, "Correct the stages")
        return [found[stage] for stage in range(len(found))]

    @property
    def chunks(self) -> int:
        """Stages of a device."""
        return len(self.devices) // len(self.rows)

    @property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for order in self.orders for action in actions_of(order))


def read_csv(path: str | Path) -> TorchSchedule:
    """The schedule in a file. Raises PlanError, with row and cell, for what is no action."""
    return parse_csv(text(Path(path), REMEDY), str(path))


def parse_csv(told: str, where: str = "schedule") -> TorchSchedule:
    """The same of its text."""
    rows = list(csv.reader(io.StringIO(told, newline="")))
    if not any(cell.strip() for row in rows for cell in row):
        raise PlanError(where, "it holds no actions", REMEDY)
    found = [[_turn(cell.strip(), _place(where, d, i)) for i, cell in enumerate(row)] for d, row in enumerate(rows)]
    return TorchSchedule(found, where)


def write_csv(rows: Sequence[Sequence[ScheduleItem | None]], where: str = "schedule") -> str:
    """Orders as the text of a file, for `parse_csv` and torch.

    Raises PlanError for what torch has no word for.
    """
    file = io.StringIO(newline="")
    csv.writer(file).writerows([_cell(turn, where) for turn in row] for row in rows)
    return file.getvalue()


def _place(where: str, device: int, step: int) -> str:
    return f"{where} row {device + 1} cell {step + 1}"


def _turn(cell: str, place: str) -> ScheduleItem | None:
    if not cell:
        return None
    if match := TOGETHER.fullmatch(cell):
        forward, backward = (_action(part.strip(), place) for part in match.groups())
        if forward.kind != "F" or backward.kind not in ("BW", "B"):
            rule = "two passes together are a forward pass and then a backward pass"
            raise PlanError(place, rule, "Write (0F3;3B1)OVERLAP_F_B", cell)
        return OverlappedPasses(forward, backward)
    return _action(cell, place)


def _action(cell: str, place: str) -> Action:
    if match := PASS.fullmatch(cell):
        stage, letter, microbatch = match.groups()
        return Action(int(stage), KINDS[letter], int(microbatch))
    if MESSAGE.fullmatch(cell):
        rule = "it is torch's format with communication (compute_comms), and messages follow from the order"
        raise PlanError(place, rule, 'Write the file with _dump_csv(file, format="compute_only")', cell)
    rule = "a cell is stage, kind (F, B, I or W) and micro-batch, or empty"
    raise PlanError(place, rule, "Write it like 2F0", cell)


def _cell(turn: ScheduleItem | None, where: str) -> str:
    if turn is None:
        return ""
    if isinstance(turn, OverlappedPasses):
        return f"({_cell(turn.forward, where)};{_cell(turn.backward, where)})OVERLAP_F_B"
    if turn.slice or turn.kind not in SPELT:
        remedy = "Export a schedule of whole micro-batches whose actions are F, BW, B and W"
        raise PlanError(where, "torch's file has no word for an action of this schedule", remedy, str(turn))
    return f"{turn.stage}{SPELT[turn.kind]}{turn.microbatch}"
