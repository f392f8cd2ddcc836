"""Writes output files whole or not at all: every file that meshcast writes goes through here.

A file is written under another name in its folder, flushed to the disk and renamed. Until then whoever reads it finds
what was there before; whatever stops the writing leaves that, and no other file. Both are flushed before and after the
rename, since a file system may else keep the new name and lose the content when the machine stops.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

TEMPORARY = re.compile(r"\.meshcast-[0-9a-f]{16}")
"""Names of files that are being written."""

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end Python without a word to what it runs."""

_writers: dict[Path, int] = {}
"""Files that are being written, each with the number of its process."""


def write_file(path: str | Path, content: str | bytes) -> None:
    """Writes a file whole or not at all. content: text is written as UTF-8. Raises OSError that names the file."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def user_caches() -> Path:
    """Returns the folder of what meshcast keeps for the user between commands; it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "meshcast"


@contextmanager
def replacing(path: str | Path, folder: Path | None = None) -> Iterator[IO[bytes]]:
    """Opens a file that takes the place of `path` at the end of the block, if the block ends without an error.

    Else `path` stays as it was, and the new file is removed: after an error, Ctrl-C, SIGTERM and SIGHUP at once, after
    SIGKILL by the next process that writes into the folder. An earlier file gives its mode and owner to the new file;
    of a symbolic link the file that it leads to is replaced. A device or a pipe, which keeps nothing, is written into.

    folder: where the new file is written, on the same file system, and where the caller removes what SIGKILL leaves;
        the folder of `path` if None.
    Raises OSError that names `path`; also for a file that may not be written, although its folder may.
    """
    target = Path(os.path.realpath(path))
    new, done = target, False
    try:
        before = _find_status(target)
        if before is not None and not (stat.S_ISREG(before.st_mode) or stat.S_ISDIR(before.st_mode)):
            with target.open("wb") as file:
                yield file
            return
        if before is not None and not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if folder is None:
            _remove_abandoned(target.parent)
        while not done:
            new = (folder or target.parent) / f".meshcast-{os.urandom(8).hex()}"
            with _removing_at_end(new), new.open("xb") as file:
                if _is_taken(file.fileno()):  # for abandoned, before it was locked: its name is lost, too
                    new.unlink(missing_ok=True)
                    continue
                yield file
                file.flush()
                _take_over(file.fileno(), before)
                os.fsync(file.fileno())
                if os.name == "nt":  # renames no open file, and has no locks
                    file.close()
                os.replace(new, target)
                done = True
        _flush_folder(target.parent)
    except OSError as error:
        if error.errno is None or str(error.filename) not in ("None", str(new), str(target)):
            raise  # of another file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _find_status(path: Path) -> os.stat_result | None:
    """Returns the status of a file; None if there is none."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_taken(descriptor: int) -> bool:
    """Locks a new file, by which others see that it is being written; returns whether any of them was faster."""
    try:
        _lock(descriptor)
    except BlockingIOError:
        return True
    return not os.fstat(descriptor).st_nlink


def _lock(descriptor: int) -> bool:
    """Locks a file until it is closed; returns False if nobody can. Raises BlockingIOError if another process has."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):  # Windows; a file system without locks
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    """Removes the files of processes that were killed while they wrote into a folder: those that nobody has locked."""
    with suppress(OSError, AttributeError):  # Windows has no such flags, and no locks
        for name in filter(TEMPORARY.fullmatch, os.listdir(folder)):
            with suppress(OSError):  # of another user; gone
                descriptor = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    if _lock(descriptor):
                        (folder / name).unlink()
                finally:
                    os.close(descriptor)


def _take_over(descriptor: int, before: os.stat_result | None) -> None:
    """Gives a file the owner and mode of that which it replaces, as far as this user may."""
    if before is not None and hasattr(os, "fchown"):
        with suppress(OSError):
            os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _flush_folder(folder: Path) -> None:
    """Flushes the names of a folder to the disk. The new file is in place: no error is to say that it is not."""
    if hasattr(os, "O_DIRECTORY"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def _removing_at_end(path: Path) -> Iterator[None]:
    """Removes a file if the block ends by an error, or the process by a signal for which nobody else has a handler."""
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    numbers = [number for number in ENDING if is_main and signal.getsignal(number) == signal.SIG_DFL]
    try:
        _writers[path] = os.getpid()
        for number in numbers:
            signal.signal(number, _remove_and_end)
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    finally:
        _writers.pop(path, None)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _remove_and_end(number: int, frame: FrameType | None) -> None:
    """Removes the files that this process is writing, and ends it by the signal."""
    for path, writer in _writers.items():
        if writer == os.getpid():  # else this process was forked from the writer
            path.unlink(missing_ok=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
