"""Gives malformed input to every reader: ``make fuzz``, or ``python -m tests.fuzz.run --reader job --seed 17 -n 1``.

Whatever a file holds, the answer is exit code 0, 1 or 2 (3: too large for its GPUs, under ``--strict``); a refusal is
one line, or the command line's own help; no answer holds a number that is not finite; and it takes less than `SECONDS`
and `NBYTES`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

from typer.testing import Result

from meshcast.experiments.cli.commands import INTERRUPTED
from meshcast.experiments.explain.fitting_changes import NO_CHANGES, MemoryChanges, fitting_changes
from meshcast.hardware.errors import MeshcastError
from tests.fuzz.generate import PLACED, mutate, place
from tests.fuzz.readers import READERS, Reader, invoke, needs_torch
from tests.fuzz.seeds import prepare

SECONDS = 20
"""Most seconds for one file."""

PATIENCE = 3

_begin, _rings, _interruptible = 0.0, 0, False
"""Processor time at which the file began, alarms since then, and whether Ctrl-C ends it with an answer."""

NBYTES = 2 * 2**30
"""Most bytes of memory of the process that reads the files."""

BATCH = 500
"""Files that one process reads before a fresh one takes its place."""

CHANGED = 20
"""One of so many files is told what would fit in place of a plan that does not."""

MISPLACED = 0.01
"""Share of seeds for which something else lies in the place of the file, or nothing."""

NOT_FINITE = re.compile(r"(?<![\w.:/\"'-])(?:nan|[-+]?inf|[-+]?infinity)(?![\w:/\"'-])", re.IGNORECASE)
"""Numbers that are not finite, as Python, JSON and tables write them."""

USAGE = ("Usage: ", "╭─ Error ")
"""Starts of what the command line itself answers to an unknown command or option."""

BELOW = ("  ", "Each line ends with what answers it")
"""Starts of lines below a message: an order of pipeline actions, the questions that a launch file leaves open."""

NOTE = re.compile(
    r"\[\d+/\d+\] |meshcast: (?:.* is read as a launch file of|assumed|approximated|every setting, and|\d+ (?:s|min): )"
)
"""Lines about a launch file before an answer, and of progress."""

FAILED = "meshcast failed"
"""Start of the rule of a `Defect`, which answers one row of many."""


class TooSlow(BaseException):
    """A file took longer than `SECONDS`. No Exception, so that no reader takes it for an error of the file."""


class Outcome(NamedTuple):
    """What one file came to.

    Attributes:
        reader: key of `READERS`.
        seed: that makes the file again.
        answer: "accepted", "refused" or "failed".
        failure: the rule that was broken; empty unless failed.
    """

    reader: str
    seed: int
    answer: str
    failure: str = ""


# --------------------------------------------------------------------------------------------- checks


def check(result: Result, arguments: Sequence[str], given: bytes = b"") -> str:
    """Returns whether a command "accepted" or "refused" its file. Raises AssertionError for any other end.

    given: the file, whose own words an answer may repeat.
    """
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    known = (0, 1, 2, *[3] * (b"--strict" in given), *[INTERRUPTED] * (arguments[:1] == ["search"]))
    assert result.exit_code in known, f"exit code {result.exit_code}"
    assert "Traceback" not in result.output and FAILED not in result.output, "an error of meshcast"
    parsed = "--json" in arguments or arguments[:2] == ["predict", "--jobs"]
    if result.exit_code != 2 and not parsed and (found := NOT_FINITE.search(result.stdout)):
        assert found[0].lower().encode() in given.lower(), f"{found[0]} in an answer"
    if result.stderr.startswith(USAGE):
        assert result.exit_code == 2, "a usage error without its exit code"
        return "refused"
    lines = [line for line in result.stderr.splitlines() if not line.startswith(BELOW) and not NOTE.search(line)]
    answers = []
    if parsed:
        texts = result.stdout.splitlines() if "--json" not in arguments else [result.stdout]
        if result.exit_code == INTERRUPTED and not result.stdout:  # while its plans were counted
            texts = []
        answers = [json.loads(text, parse_constant=_refuse_constant) for text in texts]
        stated = [answer.get("step_time_s") for answer in answers if isinstance(answer, dict)]
        steps = [step for each in stated for step in (each if isinstance(each, list) else [each])]  # those of compare
        assert all(step is None or step > 0 for step in steps), "a step that takes no time"
    if result.exit_code == 0:
        return "accepted"
    refused = bool(answers) and set(answers[0]) == {"error"}
    assert refused or lines, "no message"
    assert len(lines) <= 1 - refused, f"{len(lines)} lines of errors"
    message = result.stderr if not refused else json.dumps(answers[0]["error"] | {"questions": []})
    is_of_job = arguments[:1] == ["predict"] and any(part in ("--jobs", "given.yaml") for part in arguments)
    assert len(message) < (1200 if is_of_job else 4000), f"a message of {len(message)} characters"
    return "refused"


def check_error(error: MeshcastError) -> None:
    """Raises AssertionError for an error that is not one short line with a rule and a remedy."""
    assert error.where and error.rule and error.remedy, "an error lacks its place, rule or remedy"
    assert "\n" not in str(error) and len(str(error)) < 4000, "an error of several lines"
    json.dumps(error.to_dict(), allow_nan=False)


def _refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} in JSON")


def try_file(reader: Reader, folder: Path, content: bytes) -> str:
    """Reads the malformed file; returns and raises as `check`. content: of the file, empty if it is none."""
    with suppress(OSError, EOFError, zlib.error):  # of a gzip file its content
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(1 << 20)
    with chdir(folder):
        if not callable(reader.read):
            answer = check(invoke(reader.words), reader.words, content)
        else:
            try:
                result = reader.read(folder / reader.name)
            except MeshcastError as error:
                check_error(error)
                return "refused"
            if not isinstance(result, Result):
                return "accepted"
            prints_json = reader.form != "words" or result.stdout.startswith("{\n")
            answer = check(result, ["--json"] if prints_json else [], content)
    for path in folder.glob("out*.json"):
        json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    return answer


# ------------------------------------------------------------------------------------------- one file


def make_file(reader: str, seed: int, seeds: Sequence[bytes]) -> bytes:
    """The malformed file of a seed."""
    rng = random.Random(f"{reader} {seed}")
    return mutate(rng.choice(seeds), READERS[reader].form, rng)


def choose_place(reader: str, seed: int) -> str:
    """What lies in the place of the file of a seed; "" for most seeds: the file."""
    rng = random.Random(f"place {reader} {seed}")
    return rng.choice(PLACED) if rng.random() < MISPLACED and READERS[reader].form != "words" else ""


def run_seed(name: str, seed: int, seeds: Sequence[bytes], folder: Path) -> Outcome:
    """Makes the file of a seed, or what lies in its place, and reads it."""
    reader = READERS[name]
    path = folder / reader.name
    path.parent.mkdir(exist_ok=True)
    for left in (path, *folder.glob("out*.*"), *folder.glob(".out*")):  # by the file before
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink(missing_ok=True)
    kind, content = choose_place(name, seed), b""
    if kind:
        place(kind, path)
    else:
        content = make_file(name, seed, seeds)
        path.write_bytes(content)
    global _begin, _rings, _interruptible
    _begin, _rings, _interruptible = time.process_time(), 0, reader.words[:1] == ["search"]
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    # Forecasts of changed plans take most of the time where a plan does not fit: one of many files asks for them.
    changes = (
        nullcontext() if seed % CHANGED == 0 else patch(f"{fitting_changes.__module__}.fitting_changes", _no_changes)
    )
    try:
        with changes:
            return Outcome(name, seed, try_file(reader, folder, content))
    except TooSlow:
        return Outcome(name, seed, "failed", f"more than {SECONDS} s")
    except Exception as error:
        return Outcome(name, seed, "failed", _describe(error))
    finally:
        signal.alarm(0)


def _no_changes(report: object) -> MemoryChanges:
    return NO_CHANGES


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends a file that has computed for `SECONDS`, or waited for `PATIENCE` times as long: on a busy machine a process
    waits for its turn."""
    global _rings
    _rings += 1
    if _rings == 1 and _interruptible:  # it ends with what is proven by then
        signal.alarm(SECONDS // 4)
        raise KeyboardInterrupt
    if time.process_time() - _begin < SECONDS * 0.9 and _rings < PATIENCE:
        signal.alarm(SECONDS)
        return
    raise TooSlow


def _describe(error: Exception) -> str:
    """The error and the line of code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno} " if trace is not None else ""
    return f"{place}{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")


# ------------------------------------------------------------------------------------------ many files


def run_reader(name: str, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Reads the files of some seeds in this process."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        seeds = READERS[name].make_seeds(folder)
        for seed in numbers:
            yield run_seed(name, seed, seeds, folder)


def _run_batch(name: str, numbers: Sequence[int], results: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (NBYTES, NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- until the process ends
    if needs_torch(READERS[name]) and find_spec("torch"):
        import_module("torch.distributed")
    for outcome in run_reader(name, numbers):
        results.send(outcome)


def run_limited(name: str, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Reads the files of some seeds in processes whose memory is limited. A file that ends one is a failure."""
    left = list(numbers)
    while left:
        results, theirs = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=_run_batch, args=(name, left[:BATCH], theirs))
        process.start()
        theirs.close()
        batch = left[:BATCH]
        try:
            while batch and results.poll(4 * SECONDS):
                outcome = results.recv()
                left.remove(outcome.seed)
                batch.remove(outcome.seed)
                yield outcome
        except EOFError:
            pass
        if batch:
            left.remove(batch[0])
            yield Outcome(name, batch[0], "failed", "it ended or stopped the process")
        process.kill() if batch else process.join()
        process.join()


def main(words: Sequence[str] | None = None) -> int:
    """Prints counts by reader, and failures with the command that repeats each; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20_000, help="files in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--reader", choices=READERS, help="one reader only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep", type=Path, help="folder for the files of failures")
    given = parser.parse_args(words)
    names = [given.reader] if given.reader else sorted(READERS, key=lambda name: READERS[name].share)  # slow ones first
    shares = sum(READERS[name].share for name in names)
    begin, total = time.monotonic(), Counter[str]()
    counts = [math.ceil(given.n * READERS[name].share / shares) for name in names]
    numbers = [range(given.seed, given.seed + count) for count in counts]
    with ProcessPoolExecutor(given.workers, get_context("fork")) as pool:  # each waits for processes of its own
        total = sum(pool.map(_try_reader, names, numbers, [given.keep] * len(names)), total)
    print(f"{sum(total.values()):,} files: {_list(total)}; {_cost(begin)}", flush=True)
    return int(total["failed"] > 0)


def _try_reader(name: str, numbers: Sequence[int], keep: Path | None) -> Counter[str]:
    """Prints and returns the counts of one reader."""
    counts, shown, lines, begin = Counter[str](), Counter[str](), list[str](), time.monotonic()
    for outcome in run_limited(name, numbers):
        counts[outcome.answer] += 1
        if outcome.answer == "failed":
            shown[outcome.failure] += 1
            if shown[outcome.failure] <= 2:
                repeat = f"python -m tests.fuzz.run --reader {name!r} --seed {outcome.seed} -n 1"
                lines += [f"  {outcome.failure}", f"    {repeat}"]
                _keep(outcome, keep)
    print("\n".join([f"{name}: {_list(counts)}; {_cost(begin)}", *lines]), flush=True)
    return counts


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[answer]:,} {answer}" for answer in ("accepted", "refused", "failed"))


def _cost(begin: float) -> str:
    """Seconds since `begin`, and the memory of the largest process so far."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return f"{time.monotonic() - begin:,.0f} s, largest process so far {peak / 2**20:,.0f} MiB"


def _keep(outcome: Outcome, folder: Path | None) -> None:
    if folder is None:
        return
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        reader: Any = READERS[outcome.reader]
        content = make_file(outcome.reader, outcome.seed, reader.make_seeds(Path(place)))
    name = re.sub(r"[^\w.]+", "-", f"{outcome.reader}-{outcome.seed}{Path(reader.name).suffix}")
    (folder / name).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
