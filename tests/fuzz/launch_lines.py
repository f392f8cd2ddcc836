"""Launch files with lines dropped, doubled, cut or mixed up: none ends in a traceback, and no setting vanishes.

``python -m tests.fuzz.launch_lines -n 20000 --seed 0`` goes over the small files of the corpus. Of a dropped line that
states settings, the job is another one, or every one of them was listed as without influence, or as not followed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, read_launch_file, reading_launch_files
from meshcast.simulator.loading.load import read_launch_job
from tests.fuzz.generate import mutate_script
from tools.inputs.corpus import PublicFile, load_corpus
from tools.inputs.judge import read_command
from tools.pages.inputs import write_small_file


@dataclass(frozen=True)
class Read:
    """A file as it was read: its job, and the settings that have an effect by their place."""

    job: str
    imported: ImportedJob


def read_text(entry: PublicFile, path: Path, text: str) -> Read | None:
    """Reads a text in place of the file of an entry; None if it is refused. Other errors pass."""
    path.write_text(text, "utf-8")
    options = read_command(entry.command)
    options = LaunchOptions(options.environment, options.arguments, assume_defaults=True)
    changes = [
        f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in entry.given.items()
    ]
    try:
        with reading_launch_files(options):
            read = read_launch_job(path, changes)
    except MeshcastError:
        return None
    assert read.launch is not None
    return Read(json.dumps(read.data, sort_keys=True, default=str), read.launch)


def find_lost_setting(number: int, whole: Read, rest: Read) -> str | None:
    """Returns a setting on a line that the forecast pretends to follow, although it is the same without.

    A setting with a key may state the default; one without a key states nothing.
    """
    if whole.job != rest.job:
        return None
    gone = {entry.shown for entry in rest.imported.findings.taken}
    followed = [entry for entry in whole.imported.findings.taken if entry.place.endswith(f":{number}")]
    return next((entry.shown for entry in followed if not entry.keys and entry.shown not in gone), None)


def find_unlisted(read: Read, path: Path) -> list[str]:
    """Returns the arguments of the command that counts which are in none of the four classes."""
    launch = read_launch_file(path).launch
    findings = read.imported.findings
    listed = {shown for shown, _ in findings.listed} | {entry.shown for entry in findings.taken}
    arguments = launch.arguments.values() if launch is not None else ()
    return [stated.shown for stated in arguments if stated.shown not in listed]


def drop_lines(entry: PublicFile, folder: Path) -> Iterator[str]:
    """Yields what is lost of an entry, line by line."""
    path = write_small_file(entry, folder)
    text = entry.states
    whole = read_text(entry, path, text)
    if whole is not None:
        with reading_launch_files(read_command(entry.command)):
            yield from (f"{entry.name}: not listed: {shown}" for shown in find_unlisted(whole, path))
    lines = text.splitlines(keepends=True)
    for number, _ in enumerate(lines, 1) if whole is not None else ():
        rest = read_text(entry, path, "".join(lines[: number - 1] + lines[number:]))
        if whole is not None and rest is not None and (lost := find_lost_setting(number, whole, rest)):
            yield f"{entry.name}: line {number}: taken, and without effect: {lost}"


def mutate_states(entry: PublicFile, choose: random.Random) -> str:
    """Returns the small file of an entry, malformed."""
    return mutate_script(entry.states.encode(), "script", choose).decode("utf-8", "replace")


def main() -> None:
    """Reads mutated files, and prints what was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    corpus, choose, count = load_corpus(), random.Random(options.seed), Counter[str]()
    for entry in corpus:
        with tempfile.TemporaryDirectory() as place:
            for lost in drop_lines(entry, Path(place)):
                print(lost, flush=True)
                count["lost settings"] += 1
            count["lines dropped"] += len(entry.states.splitlines())
    while count["lines dropped"] + count["mutated files"] < options.n:
        entry = choose.choice(corpus)
        text = mutate_states(entry, choose)
        with tempfile.TemporaryDirectory() as place:
            try:
                count["read" if read_text(entry, write_small_file(entry, Path(place)), text) else "refused"] += 1
            except Exception as error:
                print(f"{entry.name}: {error!r}\n{text}", flush=True)
                count["tracebacks"] += 1
        count["mutated files"] += 1
    print(dict(count))


if __name__ == "__main__":
    main()
