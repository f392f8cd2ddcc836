"""Stores the rows of a sweep: a file for every chunk of points in a folder of parts, which are joined into one Parquet
file at the end.

After a crash a part is complete or absent: it is written under another name, flushed to disk and renamed. A resumed
sweep skips the chunks that are stored, if the `fingerprint` of its inputs is the same; its joined file has the same
bytes. A part that was damaged or renamed since then is forecast again: the pages of its columns have checksums, and its
metadata the fingerprint and the number of its chunk. No part is stored once an input has changed since the sweep began.
A lock keeps a second process from writing the same parts.
"""

from __future__ import annotations

import heapq
import io
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from experiments.sweeps.fingerprint import Fingerprint, Inputs, changed_inputs, parse_fingerprint
from experiments.sweeps.grid import Sweep
from hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from hardware.errors import PlanError, cut_middle, escape_controls
from simulator.report.figures import columns, shown_in
from simulator.report.report import product_version

if TYPE_CHECKING:
    import pyarrow as pa

GROUP = 20_000
"""Rows in a row group of the joined file."""

BEST = 10
"""Number of best plans in the summary."""

MOST_REASONS = 1_000
"""Maximum number of distinct reasons in the summary."""

RANKED_BY = "tokens_per_s_per_gpu"
"""Figure by which the best plans are ranked, largest value first."""

PART = re.compile(r"\d{7}\.parquet")
"""Names of the files of chunks."""

Row = dict[str, Any]


class Store:
    """The rows of one sweep on disk. Raises PlanError, with the number of stored points, if they cannot be written."""

    def __init__(self, out: Path, sweep: Sweep, chunk: int, restart: bool = False) -> None:
        self.out, self.sweep, self.chunk = out, sweep, chunk
        self.parts = parts_folder(out)
        self.chunks = -(-sweep.points // chunk)
        self.inputs = Inputs(sweep, chunk)
        self.fingerprint = self.inputs.fingerprint
        self.kept: set[int] = set()
        with self._writing():
            self._open(restart)

    @property
    def points_kept(self) -> int:
        """Number of points whose chunks are stored."""
        if self.finished:
            return self.sweep.points
        last = self.chunks - 1
        short = self.chunks * self.chunk - self.sweep.points if last in self.kept else 0
        return len(self.kept) * self.chunk - short

    def _open(self, restart: bool) -> None:
        self.finished = False
        if not self.out.parent.is_dir():
            rule = f"there is no folder {self.out.parent}"
            raise PlanError("--out", rule, "Make it, or name a file in one that there is", str(self.out))
        for path in (self.out, self.parts):
            if path.is_symlink():
                rule = f"{path} is a symbolic link to {os.readlink(path)}, which would be overwritten"
                raise PlanError("--out", rule, "Name that file itself, or remove the link")
        self._refuse_changed_inputs()
        self._refuse_foreign_parts()
        self._fingerprint_of_out()  # refuses a file that no sweep has made
        if not restart and not self.parts.is_dir():
            self.finished = self._is_finished()
            if self.finished:
                return
        self._lock()
        about = self.parts / "_sweep.json"
        begun = _read_fingerprint(about)
        if not restart:
            if begun not in (None, self.fingerprint):
                raise _other_inputs(self.parts, begun, self.fingerprint)
            self.finished = begun is None and self._is_finished()
        if self.finished:
            self._remove_parts()
            return
        if begun is None or restart:
            self._empty_parts()
        self.kept = {n for n in range(self.chunks) if self._read_part(n) is not None}
        if begun != self.fingerprint or restart:
            self._write(about, json.dumps({"sweep": self.sweep.name, "fingerprint": self.fingerprint}).encode())

    def _is_finished(self) -> bool:
        """Whether the joined file is that of this sweep. Raises PlanError for that of another one."""
        whole = self._fingerprint_of_out()
        if whole not in (None, self.fingerprint):
            raise _other_inputs(self.out, whole, self.fingerprint)
        return whole is not None

    def _refuse_changed_inputs(self) -> None:
        """Raises PlanError if an input has changed on disk since this process may have read it."""
        if changed := self.inputs.find_changes():
            rule = f"inputs of the rows have changed since the command began; changed: {', '.join(changed)}"
            remedy = "Run the command again"
            if self.kept:
                rule, remedy = rule + self._tell_kept(), f"{remedy}; undo the change first to go on with these points"
            raise PlanError("sweep", rule, remedy)

    def _refuse_foreign_parts(self) -> None:
        """Raises PlanError if the folder of parts has files like ours, and no sweep has made it."""
        names = set(os.listdir(self.parts)) if self.parts.is_dir() else set()
        ours = "_lock" in names or _read_fingerprint(self.parts / "_sweep.json") is not None
        if not ours and (found := sorted(filter(PART.fullmatch, names))):
            rule = f"{self.parts} holds {found[0]}, and no sweep has made this folder"
            raise PlanError("--out", rule, "Name another --out, or move the folder away")

    def _fingerprint_of_out(self) -> Fingerprint | None:
        """Reads the fingerprint in the joined file; None if there is no file. Refuses a file that is no sweep's."""
        if not self.out.exists():
            return None
        if not self.out.is_file():
            raise PlanError("--out", f"{self.out} is not a regular file", "Name another file")
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            written = (pq.read_schema(self.out).metadata or {})[b"meshcast"].decode()
            return parse_fingerprint(parse_json(written, constants=True)["fingerprint"])
        except (pa.ArrowException, Unreadable, OSError, ValueError, LookupError, TypeError):
            rule = f"{self.out} exists and is not the result of a sweep, or is damaged"
            raise PlanError("--out", rule, "Name another file, or delete this one") from None

    def _lock(self) -> None:
        """Makes the folder of parts and locks it, or raises PlanError if another process has; the system frees the lock
        when a process ends."""
        while True:
            self.parts.mkdir(exist_ok=True)
            path = self.parts / "_lock"
            with suppress(FileNotFoundError):  # another process, at its end, has removed the folder since
                self._locked = path.open("a+")
                self._lock_file()
                if os.path.samestat(os.fstat(self._locked.fileno()), path.stat()):  # else removed before it was locked
                    break
        with suppress(OSError):  # a full disk is a matter of the rows
            self._locked.truncate(0)
            self._locked.write(f"process {os.getpid()} on {platform.node()}")
            self._locked.flush()

    def _lock_file(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked workers
        except (BlockingIOError, PermissionError):
            self._locked.seek(0)
            holder = escape_controls(self._locked.read(200)) or "another process"
            rule = f"{holder} is writing {self.out}"
            raise PlanError("--out", rule, "Wait for it, or name another --out") from None
        except OSError:  # a file system without locks
            pass

    # ------------------------------------------------------------------------------------ writing

    def keep(self, number: int, rows: Sequence[Row]) -> None:
        """Stores the rows of one chunk. Raises PlanError if an input has changed since the sweep began."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._refuse_changed_inputs()
        columns = {
            name: [_to_cell(row.get(name), pa.types.is_string(kind)) for row in rows]
            for name, kind in zip(self._schema.names, self._schema.types, strict=True)
        }
        file = io.BytesIO()
        pq.write_table(pa.table(columns, schema=self._part_schema(number)), file, write_page_checksum=True)
        with self._writing():
            self._write(self._part(number), file.getbuffer())
        self.kept.add(number)

    def join(self) -> None:
        """Joins all parts into one file, then removes them."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        write = self._replacing(self.out)
        options = {"compression": "zstd", "write_page_checksum": True}
        with self._writing(), write as file, pq.ParquetWriter(file, self._schema, **options) as writer:
            tables: list[pa.Table] = []
            for number in range(self.chunks):
                if (rows := self._read_part(number)) is None:
                    rule = f"{self._part(number)} was damaged while the sweep was running"
                    raise PlanError("--out", rule, "Run the command again: only its points are forecast again")
                tables.append(rows)
                if sum(map(len, tables)) >= GROUP or number == self.chunks - 1:
                    writer.write_table(pa.concat_tables(tables).combine_chunks())
                    tables.clear()
        self.finished = True
        with suppress(OSError):  # the next run removes what stays
            self._remove_parts()

    def _read_part(self, number: int) -> pa.Table | None:
        """Reads the rows of a chunk; None for a file that is damaged, or holds rows of another chunk or sweep."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self._part(number), page_checksum_verification=True) as file:
                rows = file.read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError):  # ValueError: a name that is not UTF-8
            return None
        if not rows.schema.equals(self._part_schema(number), check_metadata=True):
            return None
        first, last = number * self.chunk, min((number + 1) * self.chunk, self.sweep.points)
        found = rows["index"].to_pylist()
        in_place = found == sorted(set(found)) and all(first <= index < last for index in found)
        complete = len(found) == last - first or bool(self.sweep.where)
        return rows.replace_schema_metadata(self._schema.metadata) if in_place and complete else None

    def _part_schema(self, number: int) -> pa.Schema:
        return self._schema.with_metadata({**self._schema.metadata, b"chunk": str(number)})

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:07}.parquet"

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        with self._replacing(path) as file:
            file.write(data)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[IO[bytes]]:
        """Opens a temporary file that replaces `path` once it is complete and on disk."""
        beside = self.parts / "_writing"
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        if hasattr(os, "O_DIRECTORY"):
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns an OSError into a PlanError that says how many points are stored."""
        try:
            yield
        except OSError as error:
            rule = f"{self.out} cannot be written ({error.strerror or error})"
            if self.kept:
                rule += self._tell_kept()
            remedy = "Free disk space, or name a file in a writable folder, and run the command again"
            raise PlanError("--out", rule, remedy) from None

    def _tell_kept(self) -> str:
        return f"; {self.points_kept:,} of {self.sweep.points:,} points are kept in {self.parts}"

    def _empty_parts(self) -> None:
        """Removes the parts; the fingerprint first, since a folder without it counts as empty."""
        names = set(os.listdir(self.parts))
        for name in ("_sweep.json", *filter(PART.fullmatch, names), "_writing"):
            if name in names:
                (self.parts / name).unlink()

    def _remove_parts(self) -> None:
        """Removes the folder of parts; the lock, by which it is known as ours, last."""
        self._empty_parts()
        (self.parts / "_lock").unlink(missing_ok=True)
        with suppress(OSError):  # it holds files of somebody else
            self.parts.rmdir()
        self._locked.close()

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns: index, varied fields, status, figures, limits."""
        import pyarrow as pa

        kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
        given = {*self.sweep.job, *(name.split(".")[0] for name in self.sweep.fields)}
        names = {
            "index": pa.int64(),
            **{name: kinds[_column_type(self.sweep.values(name))] for name in self.sweep.fields},
            "status": pa.string(),
            "reason": pa.string(),
            **{figure.name: kinds[figure.kind] for figure in columns(given)},
            "limits": pa.string(),
        }
        about = {"version": product_version(), "fingerprint": self.fingerprint, "job": self.sweep.job}
        return pa.schema(list(names.items()), {"meshcast": json.dumps(about)})

    # ------------------------------------------------------------------------------------ reading

    def summary(self) -> dict[str, Any]:
        """Reads from the joined file: counts by status, the best plans that fit, the reasons of invalid points.

        Raises PlanError for a damaged file.
        """
        import pyarrow as pa

        try:
            return self._summarize()
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            rule = f"{self.out} is damaged ({error})"
            raise PlanError("--out", rule, "Forecast it again with --restart, or restore the file") from None

    def _summarize(self) -> dict[str, Any]:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        shown = ["index", *self.sweep.fields, *(figure.name for figure in shown_in("best"))]
        statuses, reasons, first = Counter[str](), Counter[str](), dict[str, str]()
        best: list[Row] = []
        with pq.ParquetFile(self.out, page_checksum_verification=True) as file:
            for batch in file.iter_batches(columns=[*shown, "status", "reason"], use_threads=False):
                statuses.update(_count_values(batch["status"]))
                for reason, count in _count_values(batch["reason"].drop_null()).items():
                    same = re.sub(r"\d[\d,.]*", "#", reason)  # reasons that differ in numbers only are one
                    same = same if same in first or len(first) < MOST_REASONS else "other reasons"
                    reasons[same] += count
                    first.setdefault(same, reason if same != "other reasons" else same)
                fits = batch.filter(pc.equal(batch["status"], "fits")).select(shown)
                order = [(RANKED_BY, "descending"), ("index", "ascending")]
                found = fits.take(pc.sort_indices(fits, order)[:BEST]).to_pylist()
                best = heapq.nsmallest(BEST, [*best, *found], lambda row: (-row[RANKED_BY], row["index"]))
            rows = file.metadata.num_rows
        return {
            "meshcast": product_version(),
            "out": str(self.out),
            "points": self.sweep.points,
            "excluded": self.sweep.points - rows,
            "rows": rows,
            "status": {status: statuses[status] for status in ("fits", "does-not-fit", "invalid")},
            "best": best,
            "invalid": [{"count": count, "reason": first[same]} for same, count in reasons.most_common()],
        }


def parts_folder(out: Path) -> Path:
    """Returns the folder of the stored chunks of an unfinished sweep."""
    return out.with_name(out.name + ".parts")


def _read_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint in the note of a sweep; None if there is no note."""
    if not path.exists():
        return None
    try:
        return parse_fingerprint(parse_json(read_text(path, DESCRIPTION))["fingerprint"])
    except (Unreadable, LookupError, TypeError):
        return parse_fingerprint("unreadable")


def _other_inputs(path: Path, stored: Fingerprint, current: Fingerprint) -> PlanError:
    """The error for rows that were made from other inputs: it names the kinds of input that differ."""
    remedy = "name another --out, or discard these rows with --restart"
    if "version" in stored:
        rule = f"{path} is damaged, or was written by another version of meshcast"
        return PlanError("--out", rule, remedy.capitalize())
    changed = changed_inputs(stored, current)
    listed = ", ".join([cut_middle(one, 80) for one in changed[:5]] + ["..."] * (len(changed) > 5))
    rule = f"{path} holds rows of another sweep; changed: {listed}"
    return PlanError("--out", rule, f"Undo the change, {remedy}")


def _count_values(column: Any) -> dict[str, int]:
    return {one["values"]: one["counts"] for one in column.value_counts().to_pylist()}


def _column_type(values: Iterator[Any]) -> type:
    """Returns the narrowest type that holds all values: bool, int, float or str."""
    kinds = {type(value) for value in values if value is not None}
    for kind, admits in ((bool, {bool}), (int, {int}), (float, {int, float})):
        if kinds and kinds <= admits:
            return kind
    return str


def _to_cell(value: Any, text: bool) -> Any:
    """Converts a value for its column; in a column of text, a value that is not text is written as JSON."""
    return value if not text or value is None or isinstance(value, str) else json.dumps(value)
