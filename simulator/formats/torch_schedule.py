"""CSV files of ``torch.distributed.pipelining`` schedules: a row for each rank, a cell for each step.

A cell is empty (idle) or an action: stage, kind, micro-batch (``2F0``). F is a forward pass, B a whole backward pass,
I and W are the gradients of inputs and of weights; ``(0F3;3B1)OVERLAP_F_B`` is a pair of overlapped passes. This is
torch's format ``compute_only`` (``PipelineScheduleMulti._dump_csv``, torch 2.13). Files of the format
``compute_comms``, which also have messages, are refused: messages follow from the order.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from meshcast.hardware.documents.input_file import Unreadable
from meshcast.hardware.documents.input_file import parse_csv as parse_csv_rows
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import text
from meshcast.simulator.scheduling.schedule import Action, OverlappedPasses, ScheduleItem, actions_of

TORCH_LETTERS = {"F": "F", "BW": "B", "B": "I", "W": "W"}
"""torch's letter of every kind of action that it has."""

KIND_OF_LETTER = {letter: kind for kind, letter in TORCH_LETTERS.items()}

PASS = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")

REMEDY = "Name a CSV file that torch's schedule wrote with _dump_csv(file), or meshcast export schedule"


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule read from a file.

    rows: by device, an entry for each step; None where it idles.
    where: name of the file, for messages.
    """

    rows: list[list[ScheduleItem | None]]
    where: str = "schedule"

    @cached_property
    def orders(self) -> list[list[ScheduleItem]]:
        """The order of every device, without idle steps."""
        return [[item for item in row if item is not None] for row in self.rows]

    @cached_property
    def devices(self) -> list[int]:
        """The device of every stage.

        Raises PlanError, with row and cell, for a stage on two devices, and for devices with unequal numbers of stages.
        """
        device_of: dict[int, int] = {}
        for device, row in enumerate(self.rows):
            for step, item in enumerate(row):
                for action in actions_of([item] if item is not None else []):
                    if device_of.setdefault(action.stage, device) != device:
                        rule = f"stage {action.stage} is on rank {device_of[action.stage]} already"
                        place = _place(self.where, device, step)
                        raise PlanError(place, rule, "A stage has one rank: correct the stages", str(item))
        by_device = Counter(device_of.values())
        counts = [by_device[device] for device in range(len(self.rows))]
        if not device_of or max(device_of) + 1 != len(device_of) or len(set(counts)) > 1:
            rule = (
                "stages are numbered from 0, and every rank has the same number of them; "
                f"these are {_cut_list(sorted(device_of))}, by rank {_cut_list(counts)}"
            )
            raise PlanError(self.where, rule, "Correct the stages")
        return [device_of[stage] for stage in range(len(device_of))]

    @property
    def chunks(self) -> int:
        """Stages a device."""
        return len(self.devices) // len(self.rows)

    @property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for order in self.orders for action in actions_of(order))


def read_csv(path: str | Path) -> TorchSchedule:
    """Reads the schedule in a file. Raises PlanError, with row and cell, for a cell that is no action."""
    return parse_csv(text(Path(path), REMEDY), str(path))


def parse_csv(content: str, where: str = "schedule") -> TorchSchedule:
    """Returns the schedule in the text of a file; otherwise as `read_csv`."""
    try:
        rows = [row.cells for row in parse_csv_rows(content)]
    except Unreadable as error:
        raise error.error(PlanError, where, REMEDY) from None
    if not any(cell for cells in rows for cell in cells):
        raise PlanError(where, "the file has no actions", REMEDY)
    items = [[_parse_item(cell, _place(where, d, i)) for i, cell in enumerate(cells)] for d, cells in enumerate(rows)]
    return TorchSchedule(items, where)


def write_csv(rows: Sequence[Sequence[ScheduleItem | None]], where: str = "schedule") -> str:
    """Writes the text of a file for `parse_csv` and torch.

    Raises PlanError for actions that torch's format does not have.
    """
    file = io.StringIO(newline="")
    csv.writer(file).writerows([_format_item(item, where) for item in row] for row in rows)
    return file.getvalue()


def _cut_list(numbers: Sequence[int]) -> str:
    """Returns the first numbers of a list, for messages."""
    return f"{', '.join(map(str, numbers[:20]))}{', ...' if len(numbers) > 20 else ''}"


def _place(where: str, device: int, step: int) -> str:
    return f"{where} row {device + 1} cell {step + 1}"


def _parse_item(cell: str, place: str) -> ScheduleItem | None:
    if not cell:
        return None
    if match := OVERLAP.fullmatch(cell):
        forward, backward = (_parse_action(part.strip(), place) for part in match.groups())
        if forward.kind != "F" or backward.kind not in ("BW", "B"):
            rule = "overlapped passes are a forward pass and then a backward pass"
            raise PlanError(place, rule, "Write (0F3;3B1)OVERLAP_F_B", cell)
        return OverlappedPasses(forward, backward)
    return _parse_action(cell, place)


def _parse_action(cell: str, place: str) -> Action:
    if match := PASS.fullmatch(cell):
        stage, letter, microbatch = match.groups()
        return Action(int(stage), KIND_OF_LETTER[letter], int(microbatch))
    if MESSAGE.fullmatch(cell):
        rule = "the file is in torch's format with communication (compute_comms), and messages follow from the order"
        raise PlanError(place, rule, 'Write the file with _dump_csv(file, format="compute_only")', cell)
    rule = "a cell is stage, kind (F, B, I or W) and micro-batch, or empty"
    raise PlanError(place, rule, "Write it like 2F0", cell)


def _format_item(item: ScheduleItem | None, where: str) -> str:
    if item is None:
        return ""
    if isinstance(item, OverlappedPasses):
        return f"({_format_item(item.forward, where)};{_format_item(item.backward, where)})OVERLAP_F_B"
    if item.slice or item.kind not in TORCH_LETTERS:
        remedy = "Export a schedule of whole micro-batches whose actions are F, BW, B and W"
        raise PlanError(where, "torch's format does not have an action of this schedule", remedy, str(item))
    return f"{item.stage}{TORCH_LETTERS[item.kind]}{item.microbatch}"
