"""Import, export, import: the same job for every file of the corpus whose program can be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.formats.launch.convert import MODELS_ELSEWHERE, compare_keys, import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import flatten_for_export, flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, reading_launch_files
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import read_launch_job
from tests.draws import drawn
from tests.launch_files import export, load
from tools.inputs.corpus import PROGRAMS, PublicFile, load_corpus
from tools.inputs.judge import read_command
from tools.pages.inputs import write_small_file

CORPUS = load_corpus()

MODELS = ((), ("model=llama3-8b",))
"""Changes of a job, the second ones for a file that leaves the model open."""

GONE = {
    "torchtitan": {"precision.compute", "plan.tensor_overlap", "framework.set.overlap.tp"},
}
"""Keys that earlier releases of a program say, and its latest one cannot: torchtitan has no recipe ``tensorwise`` as an
argument of its converter any more, and refuses async tensor parallelism without compilation."""


def read_jobs(program: str, folder: Path) -> Iterator[tuple[PublicFile, ImportedJob, Job]]:
    """Yields the files of a program that make a job which can be written."""
    for number, entry in enumerate(drawn([entry for entry in CORPUS if entry.program == program], keep=2)):
        (place := folder / str(number)).mkdir()
        path, options = write_small_file(entry, place), read_command(entry.command)
        options = LaunchOptions(options.environment, options.arguments, assume_defaults=True)
        stated = [
            f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in entry.given.items()
        ]
        for model in MODELS:
            try:
                with reading_launch_files(options):
                    read = read_launch_job(path, [*stated, *model])
                job = load(read.data, place)
            except MeshcastError:
                continue
            if read.launch is not None and read.launch.form in EXPORTS:
                yield entry, read.launch, job
            break


@pytest.mark.parametrize("program", drawn(PROGRAMS, {"torchtitan", "axolotl", "accelerate", "nemo"}))
def test_a_file_that_is_written_again_is_the_same_job(program: str, tmp_path: Path) -> None:
    """What a program cannot say stands in the header, and is what the file had assumed."""
    for entry, imported, job in read_jobs(program, tmp_path):
        exported = export(job, imported.form)
        allowed = imported.assumed.keys() | GONE.get(imported.form, set())
        assert exported.unsaid.keys() <= allowed, (entry.name, exported.unsaid)
        assert all(f"#   {key}: " in exported.text for key in exported.unsaid), entry.name
        model = job.as_written["model"] if imported.form in MODELS_ELSEWHERE else None
        silent = LaunchOptions(assume_defaults=True)
        again = import_text(
            exported.text, "again", imported.form, job.as_written["cluster"], model, folder=job.folder, options=silent
        )
        back = load(again.job, job.folder)
        assert compare_keys(flatten_for_export(job), flatten_job(back)) == exported.unsaid, entry.name
        assert (back.batch, back.run) == (job.batch, job.run), entry.name
