"""Output files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshcast.hardware.documents import output_file
from meshcast.hardware.documents.output_file import replacing, write_file
from tests.experiments.cli.samples import unprivileged

posix = pytest.mark.skipif(os.name != "posix", reason="modes, signals and devices of POSIX")


@pytest.fixture(params=["earlier", "absent"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file in a folder of its own, with and without content."""
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "file.txt"
    if request.param == "earlier":
        path.write_text("before")
    return path


def look(path: Path) -> dict[str, bytes]:
    """Returns what is in the folder of a file."""
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


def test_the_new_file_is_seen_once_it_is_whole(place: Path) -> None:
    before = look(place)
    with replacing(place) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert {name: content for name, content in look(place).items() if name in before} == before
    assert look(place) == {"file.txt": b"new" * 100_000}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit, OSError(errno.ENOSPC, "full")])
def test_what_stops_the_writing_leaves_what_was_there(place: Path, error: BaseException) -> None:
    before = look(place)
    with pytest.raises(BaseException) as told, replacing(place) as file:
        file.write(b"new")
        raise error
    assert look(place) == before
    assert not isinstance(told.value, OSError) or told.value.filename == str(place)


@posix
def test_a_full_disk_is_told_of_the_file(place: Path) -> None:
    import resource

    before, limits = look(place), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError) as told:
            write_file(place, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(place)) and look(place) == before


def test_an_error_of_another_file_stays(place: Path) -> None:
    with pytest.raises(FileNotFoundError) as told, replacing(place):
        (place.parent / "absent").read_bytes()
    assert told.value.filename == str(place.parent / "absent")


@posix
def test_a_file_that_may_not_be_written_stays() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders admit nobody else
        Path(folder).chmod(0o755)
        shut, locked = Path(folder) / "shut", Path(folder) / "open" / "locked"
        for path in (shut / "file", locked):
            path.parent.mkdir()
            path.write_text("before")
        (shut / "file").chmod(0o666)
        shut.chmod(0o555)
        locked.parent.chmod(0o777)
        locked.chmod(0o444)
        with unprivileged():
            write_file(locked.with_name("other"), "new")
            for path in (shut / "file", shut / "other", locked):
                before = look(path)
                with pytest.raises(PermissionError) as told:
                    write_file(path, "new")
                assert told.value.filename == str(path) and look(path) == before


@posix
def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    path, link, fresh = tmp_path / "run.sh", tmp_path / "link.sh", tmp_path / "fresh.sh"
    path.write_text("before")
    path.chmod(0o750)
    link.symlink_to("run.sh")
    before = os.umask(0o027)
    try:
        write_file(link, "new")
        write_file(fresh, "new")
    finally:
        os.umask(before)
    assert link.is_symlink() and path.read_text() == "new" and fresh.read_text() == "new"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, fresh)] == [0o750, 0o640]


@posix
def test_a_device_and_a_pipe_are_written_into(tmp_path: Path) -> None:
    write_file("/dev/null", "new")
    assert Path("/dev/null").is_char_device()
    pipe, heard = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "new")
    reader.join(10)
    assert heard == ["new"] and [*tmp_path.iterdir()] == [pipe] and pipe.is_fifo()
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write_file("/dev/full", "new")


@contextmanager
def writer(path: Path) -> Iterator[Callable[[int], int]]:
    """Starts a process that is writing a file; yields what sends it a signal and returns its exit code."""
    ready, told = os.pipe()
    process = os.fork()
    if process == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        try:
            with replacing(path) as file:
                file.write(b"new")
                file.flush()
                os.write(told, b"x")
                while True:
                    time.sleep(0.01)  # `signal.pause` would wait for ever for a signal that came just before it
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(1)
    assert os.read(ready, 1) == b"x"

    def send(number: int) -> int:
        os.kill(process, number)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    try:
        yield send
    finally:
        os.close(ready)
        os.close(told)


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_leaves_what_was_there(place: Path, number: int) -> None:
    before = look(place)
    with writer(place) as send:
        assert len(look(place)) == len(before) + 1
        assert send(number) == (130 if number == signal.SIGINT else -number)
    assert look(place) == before


@posix
def test_what_a_killed_process_leaves_is_removed_and_what_a_living_one_writes_is_not(place: Path) -> None:
    before = look(place)
    with writer(place) as living:
        with writer(place) as killed:
            assert killed(signal.SIGKILL) == -signal.SIGKILL
        assert len(look(place)) == len(before) + 2
        write_file(place.with_name("other.txt"), "other")
        assert len(look(place)) == len(before) + 2, "the file of the living process, and the new one"
        living(signal.SIGKILL)
    write_file(place, "new")
    assert look(place) == {"file.txt": b"new", "other.txt": b"other"}


@posix
def test_a_signal_that_somebody_handles_does_not_stop_the_writing(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with replacing(tmp_path / "file") as file:
            file.write(b"new")
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] and look(tmp_path / "file") == {"file": b"new"}


def test_a_file_is_written_by_a_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=write_file, args=(tmp_path / "file", "new"))
    thread.start()
    thread.join()
    assert (tmp_path / "file").read_text() == "new"
    assert output_file.TEMPORARY.fullmatch(".meshcast-0123456789abcdef")


@posix
def test_a_new_file_that_is_taken_for_abandoned_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, removed = output_file._lock, list[str]()

    def remove_once(descriptor: int) -> bool:
        if not removed:
            removed.extend(entry.name for entry in place.parent.iterdir() if entry != place)
            (place.parent / removed[0]).unlink()
        return lock(descriptor)

    monkeypatch.setattr(output_file, "_lock", remove_once)
    write_file(place, "new")
    assert removed and look(place) == {"file.txt": b"new"}


@posix
def test_a_new_file_that_another_process_looks_at_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It will be removed by its name: this process may neither go on with it nor use the name again."""
    lock, looked = output_file._lock, list[int]()

    def look_first(descriptor: int) -> bool:
        if not looked:
            (name,) = [one for one in os.listdir(place.parent) if output_file.TEMPORARY.fullmatch(one)]
            looked.append(os.open(place.parent / name, os.O_RDWR))
            assert lock(looked[0])
        return lock(descriptor)

    monkeypatch.setattr(output_file, "_lock", look_first)
    write_file(place, "new")
    os.close(looked[0])
    assert place.read_text("utf-8") == "new" and os.listdir(place.parent) == [place.name]


@posix
def test_a_file_is_locked_until_it_has_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def look_before(source: Path, target: Path) -> None:
        output_file._remove_abandoned(place.parent)
        replace(source, target)

    monkeypatch.setattr(output_file.os, "replace", look_before)
    write_file(place, "new")
    assert place.read_text("utf-8") == "new"
