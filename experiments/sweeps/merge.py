"""``meshcast merge``: joins the results of all shards of a sweep into the result of the whole sweep, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshcast.experiments.sweeps.fingerprint import Fingerprint, parse_fingerprint
from meshcast.experiments.sweeps.output import Output, count_written, read_about, tell_changes
from meshcast.experiments.sweeps.store import WHOLE, Shard, arrow_types, parse_shard, row_schema, summarize
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import MeshcastError, PlanError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 1_000
"""Rows of a shard that are read at once: there may be thousands of shards."""

MAX_NAMED = 10
"""Maximum number of missing shards that a message names."""


class ShardFile(NamedTuple):
    """The result of a shard.

    about: what its metadata say of the whole sweep: version, points, points of a chunk, job.
    fingerprint: of the whole sweep.
    """

    path: Path
    shard: Shard
    about: Fields
    fingerprint: Fingerprint


def merge(
    paths: Sequence[Path], out: Path, watch: Callable[[int, int], None] = lambda done, points: None
) -> tuple[list[str], Fields]:
    """Joins the results of all shards of a sweep into `out`; returns the fields that vary and the summary of the rows.

    watch: called with the number of points that are joined and of all points.
    Raises PlanError for a file that is damaged, no result of a sweep, or of another sweep; for a shard that is missing
    or given twice; and if `out` cannot be written.
    """
    import pyarrow.parquet as pq

    shards = _check_together([_read_shard(path) for path in paths])
    whole = shards[0].about | {"fingerprint": shards[0].fingerprint}
    output = Output(out)
    if out.exists() and any(out.samefile(shard_file.path) for shard_file in shards):
        raise PlanError("--out", "it is one of the shards, which would be overwritten", "Name another file", str(out))
    _refuse_place(output, shards[0])
    schema = pq.read_schema(shards[0].path).with_metadata({"meshcast": json.dumps(whole)})
    with output.writing():
        output.lock()
        _refuse_unfinished(output)
        try:
            rows = [ShardRows(shard, schema) for shard in shards]
            output.write_result(schema, _read_chunks(rows, whole["points"], whole["chunk"], watch))
        finally:
            output.remove_parts()
    fields = schema.names[1 : schema.names.index("status")]
    return fields, summarize(out, fields, whole["points"])


def _read_shard(path: Path) -> ShardFile:
    import pyarrow.parquet as pq

    if not path.is_file():
        rule = "it is a folder" if path.is_dir() else "no such file"
        raise PlanError(str(path), rule, "Name the results of `meshcast sweep --shard`")
    about = read_about(path)
    try:
        assert about is not None
        fingerprint = parse_fingerprint(about["fingerprint"])
        shard = parse_shard(fingerprint.pop("shard", str(WHOLE)))
        assert all(isinstance(about[key], int) and about[key] > 0 for key in ("points", "chunk"))
        schema = pq.read_schema(path)
        fields = {column.name: column.type for column in list(schema)[1 : schema.names.index("status")]}
        assert schema.equals(row_schema(about["job"], fields)) and {*fields.values()} <= {*arrow_types().values()}
    except (AssertionError, LookupError, TypeError, ValueError, MeshcastError):
        raise _explain_damage(path) from None
    return ShardFile(path, shard, about, fingerprint)


def _explain_damage(path: Path) -> PlanError:
    rule = "it is no result of `meshcast sweep`, or is damaged"
    return PlanError(str(path), rule, "Leave it out, or delete it and run its shard again")


def _check_together(shards: list[ShardFile]) -> list[ShardFile]:
    """Returns the shards by number. Raises PlanError unless they are all shards of a sweep, each of them once."""
    if not shards:
        raise PlanError("merge", "there are no files", "Name the results of all shards")
    first = shards[0]
    by_number: dict[int, ShardFile] = {}
    for shard in shards:
        if shard.fingerprint != first.fingerprint:
            differ = tell_changes(first.fingerprint, shard.fingerprint)
            rule = f"it holds rows of another sweep than {first.path}; other: {differ}"
            raise PlanError(str(shard.path), rule, "Leave it out, or forecast its shard again with --restart")
        if shard.shard.of != first.shard.of:
            rule = f"it is shard {shard.shard}, and {first.path} is shard {first.shard}"
            raise PlanError(str(shard.path), rule, "Name the shards of one division of the sweep")
        if shard.about | {"fingerprint": None} != first.about | {"fingerprint": None}:
            rule = f"it was written by another version of meshcast than {first.path}"
            raise PlanError(str(shard.path), rule, "Forecast its shard again with --restart")
        if (other := by_number.setdefault(shard.shard.number, shard)) is not shard:
            if shard.path == other.path:
                raise PlanError(str(shard.path), "it is named twice", "Name it once")
            raise PlanError(str(shard.path), f"it is shard {shard.shard}, as {other.path} is", "Name one of the two")
    if missing := [number for number in range(first.shard.of) if number not in by_number]:
        named = ", ".join(map(str, missing[:MAX_NAMED])) + ", ..." * (len(missing) > MAX_NAMED)
        words = f"shard {named} is" if len(missing) == 1 else f"shards {named} are"
        rule = f"it is shard {first.shard} of a sweep, of which {words} missing"
        raise PlanError(str(first.path), rule, "Run `meshcast sweep --shard` for them, and name their files too")
    return [by_number[number] for number in sorted(by_number)]


def _refuse_place(output: Output, first: ShardFile) -> None:
    """Raises PlanError if the result would replace anything but a result of the same sweep."""
    output.refuse_place()
    output.refuse_foreign_parts()
    _refuse_unfinished(output)
    if (finished := output.read_finished()) not in (None, first.fingerprint):
        rule = f"{output.out} holds rows of another sweep; changed: {tell_changes(finished, first.fingerprint)}"
        raise PlanError("--out", rule, "Name another --out, or delete this file")


def _refuse_unfinished(output: Output) -> None:
    """Raises PlanError if there are parts of a sweep, which would be removed."""
    if output.read_begun() is not None:
        rule = f"{output.parts} holds rows of an unfinished sweep"
        raise PlanError("--out", rule, "Name another --out, or finish that sweep first")


def _read_chunks(
    shards: list[ShardRows], points: int, chunk: int, watch: Callable[[int, int], None]
) -> Iterator[pa.Table]:
    """Yields the rows of every chunk of the sweep, in order."""
    chunks = -(-points // chunk)
    place = {number: rows for rows in shards for number in rows.file.shard.chunks(chunks)}
    for number in range(chunks):
        last = min((number + 1) * chunk, points)
        yield place[number].take(number * chunk, last)
        watch(last, points)
    for rows in shards:
        rows.finish()


class ShardRows:
    """Reads the rows of a shard in order, from the compressed file in memory: a process may open fewer files."""

    def __init__(self, file: ShardFile, schema: pa.Schema) -> None:
        """schema: of the whole sweep."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.file, self._schema, self._left = file, schema, schema.empty_table()
        with self._reading():
            content = pa.BufferReader(file.path.read_bytes())
            opened = pq.ParquetFile(content, page_checksum_verification=True)
            self._batches, self._unread = opened.iter_batches(BATCH), count_written(opened.metadata)

    def take(self, first: int, last: int) -> pa.Table:
        """Returns the next rows, with first <= index < last. Raises PlanError for other rows before them."""
        import numpy as np
        import pyarrow as pa

        taken = [self._schema.empty_table()]
        while self._fill():
            count = int(np.searchsorted(self._left["index"].to_numpy(), last))
            taken.append(self._left.slice(0, count))
            self._left = self._left.slice(count)
            if len(self._left):
                break
        rows = pa.concat_tables(taken)
        index = rows["index"].to_numpy()
        if len(index) and (index[0] < first or (np.diff(index) <= 0).any()):
            raise _explain_damage(self.file.path)
        return rows

    def finish(self) -> None:
        """Raises PlanError for rows of no chunk, or rows that Arrow skips, those of a page of damaged kind."""
        if self._fill() or self._unread:
            raise _explain_damage(self.file.path)

    def _fill(self) -> bool:
        """Reads a batch if none is left; returns whether there are rows."""
        import pyarrow as pa

        with self._reading():
            while not len(self._left) and (batch := next(self._batches, None)) is not None:
                self._left = pa.Table.from_batches([batch]).replace_schema_metadata(self._schema.metadata)
                self._unread -= len(batch)
        if not self._left.schema.equals(self._schema):
            raise _explain_damage(self.file.path)
        return len(self._left) > 0

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns errors of a damaged file into a PlanError that names it."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError):
            raise _explain_damage(self.file.path) from None
