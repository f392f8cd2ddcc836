"""The result of a sweep on disk: a Parquet file, and the folder of parts beside it, its workplace.

Files are written whole or not at all, under other names in the folder of parts (`hardware.documents.output_file`). A
lock in that folder keeps a second process from writing the same result.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.sweeps.fingerprint import Fingerprint, changed_inputs, parse_fingerprint
from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from meshcast.hardware.documents.output_file import TEMPORARY, replacing
from meshcast.hardware.errors import PlanError, cut_middle, escape_controls

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

GROUP = 20_000
"""Rows in a row group of the result."""

ROWS = "rows"
"""Key of the metadata of a result for the number of its rows: some points may have none."""

PART = re.compile(r"\d{7}\.parquet")
"""Names of the files of chunks in the folder of parts."""

OTHER_FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".xlsx")
"""Endings that promise another format than Parquet."""


class Output:
    """The file `out` and its folder of parts. Raises PlanError if they cannot be written."""

    def __init__(self, out: Path) -> None:
        self.out, self.parts = out, parts_folder(out)

    def refuse_place(self) -> None:
        """Raises PlanError without a folder for the result, for a name of another format, or a symbolic link."""
        if self.out.suffix.lower() in OTHER_FORMATS:
            rule = "rows are written as Parquet, whatever the name"
            remedy = f"Write {self.out.with_suffix('.parquet').name}; pandas.read_parquet(...).to_csv(...) converts it"
            raise PlanError("--out", rule, remedy, str(self.out))
        if not self.out.parent.is_dir():
            rule = f"there is no folder {self.out.parent}"
            raise PlanError("--out", rule, "Make it, or name a file in one that there is", str(self.out))
        for path in (self.out, self.parts):
            if path.is_symlink():
                rule = f"{path} is a symbolic link to {os.readlink(path)}, which would be overwritten"
                raise PlanError("--out", rule, "Name that file itself, or remove the link")

    def refuse_foreign_parts(self) -> None:
        """Raises PlanError if the folder of parts has files like ours, of no sweep."""
        names = set(os.listdir(self.parts)) if self.parts.is_dir() else set()
        ours = "_lock" in names or self.read_begun() is not None
        if not ours and (parts := sorted(filter(PART.fullmatch, names))):
            rule = f"{self.parts} holds {parts[0]}, and no sweep has made this folder"
            raise PlanError("--out", rule, "Name another --out, or move the folder away")

    def read_begun(self) -> Fingerprint | None:
        """Reads the fingerprint of the sweep whose parts are stored; None if there is no note of it."""
        path = self.parts / "_sweep.json"
        if not path.exists():
            return None
        try:
            return parse_fingerprint(parse_json(read_text(path, DESCRIPTION))["fingerprint"])
        except (Unreadable, LookupError, TypeError):
            return parse_fingerprint("unreadable")

    def read_finished(self) -> Fingerprint | None:
        """Reads the fingerprint in the result; None if there is no file. Refuses a file that is no sweep's."""
        if not self.out.exists():
            return None
        if not self.out.is_file():
            raise PlanError("--out", f"{self.out} is not a regular file", "Name another file")
        if (about := read_about(self.out)) is None:
            rule = f"{self.out} exists and is not the result of a sweep, or is damaged"
            raise PlanError("--out", rule, "Name another file, or delete this one")
        return parse_fingerprint(about["fingerprint"])

    def lock(self) -> None:
        """Makes the folder of parts and locks it until the process ends; PlanError if another process has."""
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

    def write_result(self, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """Writes the rows of tables, each of a chunk of points in the order of the grid, into the result.

        Equal chunks give equal bytes: a row group ends with the chunk that fills it.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        options = {"compression": "zstd", "write_page_checksum": True}
        with (
            self.writing(),
            replacing(self.out, self.parts) as file,
            pq.ParquetWriter(file, schema, **options) as writer,
        ):
            group: list[pa.Table] = []
            count = 0
            for rows in tables:
                group.append(rows)
                count += len(rows)
                if sum(map(len, group)) >= GROUP:
                    writer.write_table(pa.concat_tables(group).combine_chunks())
                    group.clear()
            if group:
                writer.write_table(pa.concat_tables(group).combine_chunks())
            writer.add_key_value_metadata({ROWS: str(count)})

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError into a PlanError that says how many points are stored."""
        try:
            yield
        except OSError as error:
            rule = f"{self.out} cannot be written ({error.strerror or error}){self.tell_kept()}"
            remedy = "Free disk space, or name a file in a writable folder, and run the command again"
            raise PlanError("--out", rule, remedy) from None

    def tell_kept(self) -> str:
        """Returns how many points are stored, as the end of a sentence; "" if none are."""
        return ""

    def empty_parts(self) -> None:
        """Removes the parts; the fingerprint first, since a folder without it counts as empty."""
        names = set(os.listdir(self.parts))
        for name in ("_sweep.json", *filter(PART.fullmatch, names), *filter(TEMPORARY.fullmatch, names)):
            if name in names:
                (self.parts / name).unlink()

    def remove_parts(self) -> None:
        """Removes the folder of parts; the lock, by which it is known as ours, last."""
        self.empty_parts()
        (self.parts / "_lock").unlink(missing_ok=True)
        with suppress(OSError):  # it holds files of somebody else
            self.parts.rmdir()
        self._locked.close()


def parts_folder(out: Path) -> Path:
    """Returns the folder of the stored chunks of an unfinished sweep."""
    return out.parent / f"{out.name}.parts"  # `with_name` fails for a path without a name, as "."


def read_about(path: Path) -> dict[str, Any] | None:
    """Reads what the metadata of a result say of its sweep; None for a file that is no sweep's, or is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = parse_json((pq.read_schema(path).metadata or {})[b"meshcast"].decode(), constants=True)
        return about if "fingerprint" in about else None
    except (pa.ArrowException, Unreadable, OSError, ValueError, LookupError, TypeError):
        return None


def count_written(about: pq.FileMetaData) -> int:
    """Returns number of rows that were written to a result, by its metadata; 0 if they do not say so: it is edited."""
    count = (about.metadata or {}).get(ROWS.encode(), b"")
    return int(count) if re.fullmatch(rb"\d{1,18}", count) else 0


def tell_changes(stored: Fingerprint, current: Fingerprint) -> str:
    """Returns the kinds of input that differ between two fingerprints, at most five by name."""
    changed = changed_inputs(stored, current)
    return ", ".join([cut_middle(kind, 80) for kind in changed[:5]] + ["..."] * (len(changed) > 5))
