"""Reads the output of nccl-tests: the table that it prints, and the JSON that it writes with ``-J``.

A size is the largest buffer on a rank: the tensor of an all-reduce, the gathered tensor of an all-gather, the
unreduced tensor of a reduce-scatter, all that a rank sends in an all-to-all (``max(sendBytes, expectedBytes)`` in its
``src/common.cu``), which is how `simulator.ir.ops.Collective` counts too. Format: nccl-tests a0b82b2, ``src/util.cu``;
tables of older versions, which lack some columns, are read by their header.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import json_object, lines, member, text

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
"""Operations that meshcast forecasts, by the names of their binaries without ``_perf``."""

OTHERS = ("alltoallv", "gather", "hypercube", "reduce", "scatter")
"""Other tests of nccl-tests."""

REMEDY = "Name a file with what an nccl-tests binary printed, or wrote with -J"

COLUMNS = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
"""Columns of the table today; the header of a table comes first."""

PLACES = ("out-of-place", "in-place")


@dataclass(frozen=True)
class Size:
    """A line of the table.

    Attributes:
        nbytes: largest buffer on a rank [bytes].
        dtype: number format, in the words of nccl-tests.
        redop: reduction operator.
        seconds: mean time of a call [s], by `PLACES`.
        times: of every single call [s], where they were recorded (``-I 1`` with ``-J``).
        wrong: elements with wrong results.
        where: place of the line, for errors.
    """

    nbytes: int
    dtype: str
    redop: str
    seconds: dict[str, float]
    times: dict[str, tuple[float, ...]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Run:
    """A run of a binary.

    Attributes:
        operation: a value of `OPERATIONS`.
        members: ranks of a group.
        groups: number of groups that ran at the same time.
        places: (machine, rank within it) of every member of the first group, from 0; () if the file does not list the
            ranks of `members`.
        devices: names of the GPUs by rank.
        hosts: names of the machines.
        nccl: version of the library.
        command: that was run.
        clock: ``cpu`` if the host's call was timed (``-C``), which is no time of a collective; else ``gpu``.
        finished: whether the run was complete.
        sizes: lines of the table.
    """

    operation: str
    members: int
    groups: int = 1
    places: tuple[tuple[int, int], ...] = ()
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    nccl: str = ""
    command: str = ""
    clock: str = "gpu"
    finished: bool = True
    sizes: tuple[Size, ...] = ()


def read(path: Path, operation: str | None = None, members: int | None = None) -> list[Run]:
    """Reads the runs in a file: the run of a JSON file, or a run for each table of a text.

    operation: in place of what the file says.
    members: in place of what the file says.
    Raises PlanError for a file that cannot be read.
    """
    if operation is not None and operation not in OPERATIONS.values():
        raise PlanError("--operation", "no such operation", nearest(operation, OPERATIONS.values()), operation)
    if members is not None and members < 2:
        raise PlanError("--members", "a collective has at least 2 members", "Count the ranks of a group", members)
    drafts = [_json(path)] if text(path, REMEDY).lstrip()[:1] == "{" else list(_tables(path))
    if not any(draft.sizes for draft in drafts):
        raise PlanError(str(path), "it holds no table of sizes and times", REMEDY)
    return [_complete_run(draft, path, operation, members) for draft in drafts if draft.sizes]


@dataclass
class _Draft:
    """A run while it is read.

    Attributes:
        test: name of the binary without ``_perf``.
        ranks: (group, device, host) of every rank.
        numbers: of the ranks that were listed.
        columns: of the table.
    """

    test: str = ""
    command: str = ""
    nccl: str = ""
    clock: str = "gpu"
    ranks: list[tuple[int, str, str]] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    sizes: list[Size] = field(default_factory=list)
    finished: bool = False
    columns: tuple[str, ...] = COLUMNS


def _complete_run(draft: _Draft, path: Path, operation: str | None, members: int | None) -> Run:
    """Returns the run of a draft. Raises PlanError if its operation or its members are unknown."""
    where = draft.sizes[0].where.rsplit(":", 1)[0] or str(path)
    if operation is None:
        test = draft.test or _operation_of(path.name)
        if not test:
            rule = "neither its header nor its name says which test it was"
            raise PlanError(where, rule, f"Add --operation; valid: {', '.join(OPERATIONS.values())}")
        if test not in OPERATIONS:
            rule = f"meshcast forecasts no such collective; it reads {', '.join(OPERATIONS)}"
            raise PlanError(where, rule, "Leave the file out, or add --operation", test)
        operation = OPERATIONS[test]
    groups = Counter(group for group, _, _ in draft.ranks)
    size = members or (min(groups.values()) if groups else 0)
    if not members and len(set(groups.values())) > 1:
        rule = f"its groups have {', '.join(map(str, sorted(set(groups.values()))))} ranks"
        raise PlanError(where, rule, "Add --members")
    if operation == "send_recv":
        size = max(size, 2)  # each rank sends to the next: a message has two ends, whatever the number of ranks
    if size < 2:
        rule = "it lists one rank" if size else "it lists no ranks"
        raise PlanError(where, f"{rule}, so the size of a group is not known", "Add --members")
    devices = tuple(device for _, device, _ in draft.ranks)
    hosts = tuple(dict.fromkeys(host for _, _, host in draft.ranks))
    places = _places(draft.ranks, hosts)
    return Run(
        operation,
        size,
        max(len(groups), 1),
        places if len(places) == size else (),
        devices,
        hosts,
        draft.nccl,
        draft.command,
        draft.clock,
        draft.finished,
        tuple(draft.sizes),
    )


def _places(ranks: Sequence[tuple[int, str, str]], hosts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Returns (machine, rank within it) of the members of the first group; ranks of a machine are numbered as
    listed."""
    seen: Counter[str] = Counter()
    places, machines = [], {host: number for number, host in enumerate(hosts)}
    for group, _, host in ranks:
        if group == ranks[0][0]:
            places.append((machines[host], seen[host]))
        seen[host] += 1
    return tuple(places)


def _operation_of(words: str) -> str:
    """Returns the test that a text names: ``/opt/all_reduce_perf_mpi -b 8`` -> ``all_reduce``."""
    tests = sorted((*OPERATIONS, *OTHERS), key=len, reverse=True)
    name = re.search(rf"(?<![a-z_])({'|'.join(tests)})(?:_perf|\b)", words)
    return name[1] if name else ""


# ---------------------------------------------------------------------------------------------- text

RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})(?:\s+Group\s+(\d{1,9}))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)

RANKS = re.compile(
    r"#\s+Ranks\s+(\d{1,9}) to (\d{1,9})\s+Group\s+(\d{1,9}) on (\d{1,9}) hosts? (\S++)"
    r"(?:(?! devices ).)* devices [^\[]*+\[[^\]]*+\]\s*(.*)"
)
"""A line of `nccl_tests_table` for all ranks of equal hosts."""

MAX_RANKS = 10**6
"""Most ranks of such a line."""


def _tables(path: Path) -> Iterator[_Draft]:
    """Yields a run for each table. A header after a table, or a new command, starts the next."""
    draft = _Draft()
    for where, line in lines(path, REMEDY):
        words = line.split()
        opens = line.startswith(("# nccl-tests version", "# Collective test starting", "# nThread"))
        if draft.sizes and (opens or _is_command(line)):
            yield draft
            draft = _Draft()
        if line.startswith("#"):
            _comment(draft, line, words[1:] if words[0] == "#" else [words[0][1:], *words[1:]], where)
        elif words and words[0].isdigit() and not draft.finished:
            draft.sizes.append(_row(draft, words, where))
        elif _is_command(line):
            draft.test, draft.command = _operation_of(line), line.strip().removeprefix("$ ")
    yield draft


def _is_command(line: str) -> bool:
    """Returns whether a line is a command: ``$ ./build/all_reduce_perf -b 8 -e 128M``."""
    return not line.startswith("#") and bool(re.search(r"\w_perf(_mpi)?\s+-", line)) and bool(_operation_of(line))


def _comment(draft: _Draft, line: str, words: list[str], where: str) -> None:
    if rank := RANK.match(line):
        number = int(rank[1])
        if number in draft.numbers:
            rule = "it is listed twice: every process ran alone, so nothing was sent between them"
            raise PlanError(where, rule, "Build nccl-tests with MPI=1 and run it again", f"Rank {number}")
        draft.numbers.add(number)
        draft.ranks.append((int(rank[2] or 0), rank[4].strip(), rank[3]))
    elif span := RANKS.match(line):
        first, last, group, hosts = (int(span[n]) for n in range(1, 5))
        ranks = last - first + 1
        if not hosts or ranks < hosts or ranks % hosts or ranks > MAX_RANKS:
            raise PlanError(where, f"{ranks} ranks are not on {hosts} equal hosts", REMEDY, span[0].strip())
        draft.numbers |= {*range(first, last + 1)}
        draft.ranks += [(group, span[6].strip(), f"{span[5]}+{n * hosts // ranks}") for n in range(ranks)]
    elif line.startswith("# Collective test starting:"):
        draft.test = _operation_of(line.partition(":")[2])
    elif library := re.search(r"nccl-library=(\d{1,9})", line):
        draft.nccl = _version(int(library[1]))
    elif words[:2] == ["size", "count"]:
        draft.columns = tuple("#wrong" if word == "error" else word for word in words)
        draft.clock = "cpu" if "cputime" in words else draft.clock
        draft.columns = tuple("time" if word == "cputime" else word for word in draft.columns)
    elif line.startswith(("# Out of bounds values", "# Avg bus bandwidth")):
        draft.finished = True


def _row(draft: _Draft, words: list[str], where: str) -> Size:
    """Reads a line of the table; a time stamp at its end has two words."""
    columns = draft.columns
    if len(words) not in (len(columns), len(columns) + ("timestamp" in columns)):
        rule = f"a line of this table has {len(columns)} columns, this one {len(words)}"
        raise PlanError(where, f"{rule}: it is cut off, or not part of it", "Remove the line", " ".join(words))
    seconds: dict[str, float] = {}
    wrong: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, word in zip(columns, words, strict=False):
        if name == "time":
            place = PLACES[len(seconds)] if len(seconds) < len(PLACES) else ""
            seconds[place] = _time(word, f"{where} time")
        elif name == "#wrong" and word != "N/A":
            wrong[PLACES[max(len(seconds) - 1, 0)]] = round(_number(word, f"{where} #wrong"))
        elif name not in first:
            first[name] = word
    if "size" not in first or "time" not in columns or "" in seconds:
        raise PlanError(where, "its table has no size, no time or more than two times", REMEDY)
    return Size(
        round(_number(first["size"], f"{where} size")),
        first.get("type", ""),
        first.get("redop", ""),
        seconds,
        wrong=wrong,
        where=where,
    )


def _number(word: Any, where: str) -> float:
    """Reads a number of zero or more. Raises PlanError for anything else."""
    try:
        number = float(word)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < 1e18:
        raise PlanError(where, "a number of zero or more belongs here", "Correct or remove the line", word)
    return number


def _time(word: Any, where: str) -> float:
    """Reads microseconds as seconds. Raises PlanError for anything but a number above 0."""
    microseconds = _number(word, where)
    if not microseconds:
        raise PlanError(where, "a time above 0 belongs here", "Correct or remove the line", word)
    return microseconds * 1e-6


def _version(code: int) -> str:
    """Reads a version: 22809 -> 2.28.9, 2708 -> 2.7.8 (``NCCL_VERSION`` of nccl.h)."""
    low = 1000 if code < 10000 else 10000
    return f"{code // low}.{code % low // 100}.{code % 100}"


# ---------------------------------------------------------------------------------------------- JSON


def _json(path: Path) -> _Draft:
    data = json_object(path, REMEDY)
    config, args = member(data, "config", dict, str(path), REMEDY), data.get("args")
    command = shlex.join(map(str, args)) if isinstance(args, list) else ""
    test = _operation_of(str(args[0])) if isinstance(args, list) and args else ""
    draft = _Draft(test, command, finished="out_of_bounds" in data)
    if isinstance(code := data.get("nccl_version"), int) and 0 < code < 10**6:
        draft.nccl = _version(code)
    devices = config.get("devices")
    for i, device in enumerate(devices if isinstance(devices, list) else []):
        where = f"{path} config.devices.{i}"
        if not isinstance(device, dict):
            raise PlanError(where, "an object belongs here", REMEDY, device)
        group = device.get("group", 0)
        named = str(device.get("device_info", "")).strip(), str(device.get("hostname", ""))
        draft.ranks.append((group if isinstance(group, int) else 0, *named))
    for i, row in enumerate(member(data, "results", list, str(path), REMEDY)):
        where = f"{path} results.{i}"
        if not isinstance(row, dict):
            raise PlanError(where, "an object belongs here", REMEDY, row)
        size, clock = _json_row(row, where)
        draft.sizes.append(size)
        draft.clock = clock or draft.clock
    return draft


def _json_row(row: dict[str, Any], where: str) -> tuple[Size, str]:
    """Returns a row, and its clock, "" for the GPU's."""
    size, clock = Size(round(_number(row.get("size"), f"{where} size")), "", "", {}, where=where), ""
    for place, key in zip(PLACES, ("out_of_place", "in_place"), strict=True):
        body = row.get(key)
        if body is None:  # traces are replayed in place only
            continue
        if not isinstance(body, dict):
            raise PlanError(f"{where} {key}", "an object belongs here", REMEDY, body)
        clock = "cpu" if "cpu_time" in body else clock
        size.seconds[place] = _time(body.get("time", body.get("cpu_time")), f"{where} {key} time")
        if body.get("nwrong") is not None:
            size.wrong[place] = round(_number(body["nwrong"], f"{where} {key} nwrong"))
        each = row.get(f"{key}_per_iter")
        if isinstance(each, dict):
            skipped = each.get("skipped_iterations")
            times = member(each, "times_us", list, f"{where} {key}_per_iter", REMEDY)
            kept = times[skipped if isinstance(skipped, int) and 0 <= skipped < len(times) else 0 :]
            size.times[place] = tuple(_time(time, f"{where} {key}_per_iter times_us") for time in kept)
    if not size.seconds:
        raise PlanError(where, "it has neither an out_of_place nor an in_place time", REMEDY)
    return replace(size, dtype=str(row.get("type", "")), redop=str(row.get("redop", ""))), clock
