"""Writes tables as nccl-tests prints them, so that scripts for its output read forecasts too.

Columns and rates are those of nccl-tests a0b82b2 (``src/util.cu``; ``GetBw`` and ``GetCollByteCount`` of each test):
``size`` is the largest buffer on a rank, ``count`` the elements of ``sendcount``'s argument, ``algbw`` size over time,
``busbw`` that times the traffic of a rank over the size. Both halves of a line, out-of-place and in-place, are equal:
a forecast knows no difference. `simulator.formats.nccl_tests` reads the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from meshcast.hardware.errors import to_line
from meshcast.hardware.records import dataclass

ELEMENT_BYTES = {"float": 4, "half": 2, "bfloat16": 2, "uint8": 1}
"""Bytes of an element by the words of nccl-tests."""

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
"""Tests with a reduction operator."""

SHARED = ("all_gather", "reduce_scatter", "alltoall")
"""Tests whose ``count`` is the share of a rank, and whose traffic is that of the other ranks."""

LISTED = 16
"""Most ranks with a line each; of a larger group, equal hosts share a line."""

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"""


@dataclass(frozen=True)
class TableLine:
    """One size.

    Attributes:
        nbytes: largest buffer on a rank [bytes].
        seconds: time of a call [s].
        calls: in a training step; 0 where the table is of no step.
    """

    nbytes: int
    seconds: float
    calls: int = 0


@dataclass(frozen=True)
class NcclTable:
    """A table of a test on a group.

    Attributes:
        test: name of the binary without ``_perf``.
        places: host and GPU of every rank of the group, in their order.
        device: name of the GPUs.
        lines: sizes in ascending order.
        dtype: number format, in the words of nccl-tests.
        comments: lines for the head of the table.
        every_rank: whether every rank has a line, as nccl-tests has it; otherwise equal hosts of more than `LISTED`
            ranks share a line, ``# Ranks 0 to 511 Group 0 on 64 hosts node-0 to node-63 devices 0 to 7 [0x00] name``.
    """

    test: str
    places: Sequence[tuple[str, int]]
    device: str
    lines: Sequence[TableLine]
    dtype: str = "float"
    comments: Sequence[str] = ()
    every_rank: bool = False

    @property
    def members(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def rates(self, line: TableLine) -> tuple[float, float]:
        """``algbw`` and ``busbw`` of a line [GB/s = 1e9 bytes/s]."""
        algbw = line.nbytes / line.seconds / 1e9 if line.seconds else 0.0
        return algbw, algbw * bus_factor(self.test, self.members)

    @property
    def mean_busbw(self) -> float:
        """Mean of ``busbw`` over all sizes, which nccl-tests prints at the end [GB/s]."""
        return sum(self.rates(line)[1] for line in self.lines) / max(len(self.lines), 1)

    def render(self) -> str:
        """Returns the text, with a line break at its end."""
        ranks = self._rank_lines() if self.every_rank or self.members <= LISTED else self._host_lines()
        rows = [self._row(line) for line in self.lines]
        head = [
            f"# Collective test starting: {self.test}_perf",
            *(f"# {to_line(text)}" for text in self.comments),
        ]
        end = f"# Avg bus bandwidth    : {self.mean_busbw:.6g}"
        return "\n".join([*head, "#", "# Using devices", *ranks, "#", HEADER, *rows, end, "#"]) + "\n"

    def _rank_lines(self) -> list[str]:
        return [
            f"#  Rank {rank:2} Group  0 Pid {rank:6} on {host:>10} device {gpu:2} [0x00] {self.device}"
            for rank, (host, gpu) in enumerate(self.places)
        ]

    def _host_lines(self) -> list[str]:
        """Returns a line for neighbouring hosts whose ranks have the same GPUs."""
        hosts = [(host, [gpu for _, gpu in ranks]) for host, ranks in groupby(self.places, key=lambda place: place[0])]
        lines, first = [], 0
        for gpus, run in groupby(hosts, key=lambda host: host[1]):
            names = [host for host, _ in run]
            last = first + len(names) * len(gpus) - 1
            where = f"{len(names)} hosts {names[0]} to {names[-1]}" if len(names) > 1 else f"1 host {names[0]}"
            devices = f"devices {gpus[0]} to {gpus[-1]}" if gpus == list(range(gpus[0], gpus[0] + len(gpus))) else ""
            devices = devices or f"devices {','.join(map(str, gpus))}"
            lines.append(f"#  Ranks {first} to {last} Group  0 on {where} {devices} [0x00] {self.device}")
            first = last + 1
        return lines

    def _row(self, line: TableLine) -> str:
        count = line.nbytes // ELEMENT_BYTES[self.dtype] // (self.members if self.test in SHARED else 1)
        redop = "sum" if self.test in REDUCING else "none"
        root = 0 if self.test in ("broadcast", "reduce") else -1
        algbw, busbw = self.rates(line)
        half = f"  {_digits(line.seconds * 1e6, 7)}  {_digits(algbw, 6)}  {_digits(busbw, 6)}  {'N/A':>5}"
        return f"{line.nbytes:12}  {count:12}  {self.dtype:>8}  {redop:>6}  {root:6}{half}{half}"


def bus_factor(test: str, members: int) -> float:
    """``busbw`` over ``algbw``.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("sendrecv", 8)
    (1.75, 0.875, 1.0)
    """
    if test == "all_reduce":
        return 2.0 * (members - 1) / members
    return (members - 1) / members if test in SHARED else 1.0


def _digits(value: float, width: int) -> str:
    """Returns a number with two decimals, or with fewer where it would not fit, as nccl-tests prints it."""
    decimals = next((n for n in (2, 1, 0) if len(f"{value:.{n}f}") <= width), 0)
    return f"{value:{width}.{decimals}f}"
