"""Stores the rows of a sweep: a file for every chunk of points in a folder of parts, which are joined into a Parquet
file at the end.

A resumed sweep skips the chunks that are stored, if the `fingerprint` of its inputs is the same; its joined file has
the same bytes. A part that was damaged or renamed since then is forecast again: the pages of its columns have
checksums, and its metadata the fingerprint and the number of its chunk. No part is stored once an input has changed
since the sweep began.
"""

from __future__ import annotations

import heapq
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshcast.experiments.sweeps.columns import make_table
from meshcast.experiments.sweeps.fingerprint import Fingerprint, SweepInputs
from meshcast.experiments.sweeps.grid import Sweep
from meshcast.experiments.sweeps.output import Output, count_written, tell_changes
from meshcast.experiments.sweeps.selection import STATUSES
from meshcast.experiments.sweeps.simulated_runs import COLUMNS, RANKED_BY_RUN, simulates_runs
from meshcast.hardware.documents.output_file import replacing
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.figures import columns, shown_in
from meshcast.simulator.report.version import product_version

if TYPE_CHECKING:
    import pyarrow as pa

BEST = 10
"""Number of best plans in the summary."""

MAX_REASONS = 1_000
"""Maximum number of distinct reasons in the summary."""

MAX_SHARDS = 10_000
"""Maximum number of shards of a sweep: as many as it may have chunks."""

RANKED_BY = "tokens_per_s_per_gpu"
"""Figure by which the best plans are ranked, largest value first."""

Row = dict[str, Any]


class Shard(NamedTuple):
    """Part `number`, counted from 0, of `of` parts of a sweep; `Shard(0, 1)` is the whole sweep.

    Chunks of points are dealt in turn. A chunk stays whole since its points share most of their work, and so that the
    shards have the chunks of the whole sweep. Blocks of chunks would share a little more, but a grid has regions that
    are cheap or left out: docs/sweeps.md has figures.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def chunks(self, count: int) -> range:
        """Returns numbers of the chunks of this shard, of a sweep of `count` chunks."""
        return range(self.number, count, self.of)


WHOLE = Shard(0, 1)


def parse_shard(text: str) -> Shard:
    """Reads ``3/16``. Raises PlanError if there is no such shard."""
    numbers = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    if numbers is None:
        raise PlanError("--shard", "a shard is its number and the number of all, counted from 0", "Write 3/16", text)
    shard = Shard(int(numbers[1]), int(numbers[2]))
    if not 1 <= shard.of <= MAX_SHARDS:
        raise PlanError("--shard", f"a sweep has 1 to {MAX_SHARDS:,} shards", "Write fewer, like 3/16", text)
    if shard.number >= shard.of:
        rule = f"the shards of {shard.of} are 0/{shard.of} to {shard.of - 1}/{shard.of}"
        raise PlanError("--shard", rule, "Count them from 0", text)
    return shard


class Store(Output):
    """The rows of a sweep, or of a shard of it, on disk. Raises PlanError, with the number of stored points, if they
    cannot be written.

    chunks: numbers of the chunks to be stored, of all chunks of the sweep.
    kept: numbers of the chunks that are stored.
    finished: whether the result was there already.
    """

    def __init__(self, out: Path, sweep: Sweep, chunk: int, restart: bool = False, shard: Shard = WHOLE) -> None:
        super().__init__(out)
        self.sweep, self.chunk, self.shard = sweep, chunk, shard
        self.chunks = shard.chunks(-(-sweep.points // chunk))
        self.inputs = SweepInputs(sweep, chunk)
        self.fingerprint = {**self.inputs.fingerprint, **({} if shard == WHOLE else {"shard": str(shard)})}
        self.kept: set[int] = set()
        with self.writing():
            self._open(restart)

    @property
    def points(self) -> int:
        """Number of points of the shard, those that `where` leaves out included."""
        return self._count_points(self.chunks)

    @property
    def points_kept(self) -> int:
        return self.points if self.finished else self._count_points(self.kept)

    def _count_points(self, chunks: Collection[int]) -> int:
        last = self.sweep.points // self.chunk  # the only chunk that may be short
        short = (last + 1) * self.chunk - self.sweep.points if last in chunks else 0
        return len(chunks) * self.chunk - short

    def _open(self, restart: bool) -> None:
        self.finished = False
        self.refuse_place()
        self._refuse_changed_inputs()
        self.refuse_foreign_parts()
        self.read_finished()  # refuses a file of no sweep
        if not restart and not self.parts.is_dir():
            self.finished = self._is_finished()
            if self.finished:
                return
        self.lock()
        begun = self.read_begun()
        if not restart:
            if begun not in (None, self.fingerprint):
                raise _other_inputs(self.parts, begun, self.fingerprint)
            self.finished = begun is None and self._is_finished()
        if self.finished:
            self.remove_parts()
            return
        if begun is None or restart:
            self.empty_parts()
        self.kept = {n for n in self.chunks if self._read_part(n) is not None}
        if begun != self.fingerprint or restart:
            about = {"sweep": self.sweep.name, "fingerprint": self.fingerprint}
            self._write(self.parts / "_sweep.json", json.dumps(about).encode())

    def _is_finished(self) -> bool:
        """Returns whether the result is that of this sweep. Raises PlanError for another sweep, or other columns."""
        import pyarrow.parquet as pq

        whole = self.read_finished()
        if whole not in (None, self.fingerprint):
            raise _other_inputs(self.out, whole, self.fingerprint)
        if whole is not None and not pq.read_schema(self.out).equals(self._schema):
            raise refuse_damage(self.out, "its columns are not those that this command writes")
        return whole is not None

    def _refuse_changed_inputs(self) -> None:
        """Raises PlanError if an input has changed on disk since this process may have read it."""
        if changed := self.inputs.find_changes():
            rule = f"inputs of the rows have changed since the command began; changed: {', '.join(changed)}"
            remedy = "Run the command again"
            if self.kept:
                rule, remedy = rule + self.tell_kept(), f"{remedy}; undo the change first to go on with these points"
            raise PlanError("sweep", rule, remedy)

    # ------------------------------------------------------------------------------------ writing

    def keep(self, number: int, rows: Sequence[Row]) -> None:
        """Stores the rows of a chunk. Raises PlanError if an input has changed since the sweep began."""
        import pyarrow.parquet as pq

        self._refuse_changed_inputs()
        file = io.BytesIO()
        pq.write_table(make_table(rows, self._part_schema(number)), file, write_page_checksum=True)
        with self.writing():
            self._write(self._part(number), file.getbuffer())
        self.kept.add(number)

    def join(self) -> None:
        """Joins all parts into the result, then removes them."""
        self.write_result(self._schema, self._read_parts())
        with suppress(OSError):  # the next run removes what stays
            self.remove_parts()

    def _read_parts(self) -> Iterator[pa.Table]:
        for number in self.chunks:
            if (rows := self._read_part(number)) is None:
                rule = f"{self._part(number)} was damaged while the sweep was running"
                raise PlanError("--out", rule, "Run the command again: only its points are forecast again")
            yield rows

    def _read_part(self, number: int) -> pa.Table | None:
        """Reads the rows of a chunk; None for a file that is damaged, or holds rows of another chunk or sweep."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = self._part(number)
        if part.is_fifo():  # which waits for a writer without end
            part.unlink()
            return None
        try:
            with pq.ParquetFile(part, page_checksum_verification=True) as file:
                rows, count = file.read(use_threads=False), file.metadata.num_rows
        except (pa.ArrowException, OSError, ValueError):  # ValueError: a name that is not UTF-8
            return None
        if len(rows) != count or not rows.schema.equals(self._part_schema(number), check_metadata=True):
            return None
        first, last = number * self.chunk, min((number + 1) * self.chunk, self.sweep.points)
        indices = rows["index"].to_pylist()
        in_place = indices == sorted(set(indices)) and all(first <= index < last for index in indices)
        complete = len(indices) == last - first or bool(self.sweep.where)
        return rows.replace_schema_metadata(self._schema.metadata) if in_place and complete else None

    def _part_schema(self, number: int) -> pa.Schema:
        return self._schema.with_metadata({**self._schema.metadata, b"chunk": str(number)})

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:07}.parquet"

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        with replacing(path, self.parts) as file:
            file.write(data)

    def tell_kept(self) -> str:
        if not self.kept:
            return ""
        return f"; {self.points_kept:,} of {self.points:,} points are kept in {self.parts}"

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns: index, varied fields, status, figures, limits."""
        fields = {name: arrow_types()[column_type(self.sweep.values(name))] for name in self.sweep.fields}
        about = {
            "version": product_version(),
            "fingerprint": self.fingerprint,
            "points": self.sweep.points,
            "chunk": self.chunk,
            "job": self.sweep.job,
        }
        return row_schema(self.sweep.job, fields).with_metadata({"meshcast": json.dumps(about)})

    # ------------------------------------------------------------------------------------ reading

    def summary(self) -> dict[str, Any]:
        """Reads from the result: counts by status, the best plans that fit, the reasons of invalid points."""
        return summarize(self.out, self.sweep.fields, self.points)


def row_schema(job: Mapping[str, Any], fields: Mapping[str, pa.DataType]) -> pa.Schema:
    """Returns the columns of the rows of a sweep. fields: those that vary."""
    import pyarrow as pa

    keys = {*job, *(name.split(".")[0] for name in fields)}
    figures = {figure.name: arrow_types()[figure.kind] for figure in columns(keys)}
    text = pa.string()
    figures |= {column.name: arrow_types()[float] for column in COLUMNS} if simulates_runs(job, fields) else {}
    names = {"index": pa.int64(), **fields, "status": text, "reason": text, **figures, "limits": text}
    return pa.schema(list(names.items()))


def arrow_types() -> dict[type, pa.DataType]:
    import pyarrow as pa

    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def summarize(out: Path, fields: Sequence[str], points: int) -> dict[str, Any]:
    """Reads from the result of a sweep: counts by status, the best plans that fit, the reasons of invalid points.

    fields: those that vary.
    points: number of points, those that are left out included.
    Raises PlanError for a damaged file.
    """
    import pyarrow as pa

    try:
        return _summarize(out, fields, points)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise refuse_damage(out, str(error)) from None


def refuse_damage(out: Path, reason: str) -> PlanError:
    """Returns the error about a file of rows that is not as it was written."""
    return PlanError("--out", f"{out} is damaged ({reason})", "Make it again with --restart, or restore the file")


def _summarize(out: Path, fields: Sequence[str], points: int) -> dict[str, Any]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    simulated = RANKED_BY_RUN in pq.read_schema(out).names
    ranked_by = RANKED_BY_RUN if simulated else RANKED_BY
    shown = ["index", *fields, *(figure.name for figure in shown_in("best"))]
    shown += [column.name for column in COLUMNS] if simulated else []
    statuses, reasons = Counter[str](), Reasons()
    best: list[Row] = []
    last = -1
    with pq.ParquetFile(out, page_checksum_verification=True) as file:
        for batch in file.iter_batches(columns=[*shown, "status", "reason"], use_threads=False):
            last = _check_batch(out, batch, last)
            statuses.update(_count_values(batch["status"]))
            reasons.add(_count_values(batch["reason"].drop_null()))
            # `pc.equal` would look for its second value among the types of pandas.
            fits = batch.filter(pc.match_substring_regex(batch["status"], pattern="^fits$")).select(shown)
            order = [(ranked_by, "descending"), ("index", "ascending")]
            plans = fits.take(pc.sort_indices(fits, order)[:BEST]).to_pylist()
            best = heapq.nsmallest(BEST, [*best, *plans], lambda row: (-row[ranked_by], row["index"]))
        rows, written = file.metadata.num_rows, count_written(file.metadata)
    if odd := statuses.keys() - {*STATUSES}:
        raise refuse_damage(out, f"no row has the status {min(odd, key=str)!r}")
    if rows != written:
        raise refuse_damage(out, f"it has {rows:,} rows, and {written:,} were written")
    return {
        "meshcast": product_version(),
        "out": str(out),
        "points": points,
        "excluded": points - rows,
        "rows": rows,
        "status": {status: statuses[status] for status in STATUSES},
        "best": best,
        "equal": 0 if simulated else count_equal(best),
        "invalid": reasons.most_common(),
    }


def _check_batch(out: Path, batch: pa.RecordBatch, last: int) -> int:
    """Returns the last index of a batch of rows. Raises PlanError for points out of order, or figures that are not
    finite. last: index of the row before."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = [last, *batch["index"].to_pylist()]
    if any(number is None or number <= before for before, number in pairwise(numbers)):
        raise refuse_damage(out, "its points are not in their order, each once")
    for name in (column.name for column in batch.schema if not pa.types.is_string(column.type)):
        if pc.any(pc.invert(pc.is_finite(batch[name].cast("float64")))).as_py():
            raise refuse_damage(out, f"a {name} is no finite number")
    return numbers[-1]


class Reasons:
    """Counts of the reasons of invalid points; those that differ in numbers alone are merged."""

    def __init__(self) -> None:
        self._counts, self._first = Counter[str](), dict[str, str]()

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds reasons with their counts; beyond `MAX_REASONS` distinct ones they are other reasons."""
        for reason, count in counts.items():
            same = re.sub(r"\d[\d,.]*", "#", reason)
            same = same if same in self._first or len(self._first) < MAX_REASONS else "other reasons"
            self._counts[same] += count
            self._first.setdefault(same, reason if same != "other reasons" else same)

    def most_common(self) -> list[dict[str, Any]]:
        """Returns the reasons, the most frequent first, each as it was met first."""
        return [{"count": count, "reason": self._first[same]} for same, count in self._counts.most_common()]


def count_equal(rows: Sequence[dict[str, Any]]) -> int:
    """Returns the number of plans whose throughput lies within the interval of the best, that included.

    rows: the best plans, the best first, with the ends of the intervals of their steps.
    """
    if not rows:
        return 0
    best = rows[0]
    least = best[RANKED_BY] * best["step_time_s"] / best["interval_high_s"]
    return sum(row[RANKED_BY] >= least for row in rows)


def _other_inputs(path: Path, stored: Fingerprint, current: Fingerprint) -> PlanError:
    """Returns the error for rows of other inputs: it names the kinds of input that differ."""
    remedy = "name another --out, or discard these rows with --restart"
    if "version" in stored:
        rule = f"{path} is damaged, or was written by another version of meshcast"
        return PlanError("--out", rule, remedy.capitalize())
    rule = f"{path} holds rows of another sweep; changed: {tell_changes(stored, current)}"
    return PlanError("--out", rule, f"Undo the change, {remedy}")


def _count_values(column: Any) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in column.value_counts().to_pylist()}


def column_type(values: Iterable[Any]) -> type:
    """Returns the narrowest type that holds all values: bool, int, float or str."""
    kinds = {type(value) for value in values if value is not None}
    for kind, admits in ((bool, {bool}), (int, {int}), (float, {int, float})):
        if kinds and kinds <= admits:
            return kind
    return str
