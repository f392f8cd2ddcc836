"""Writes the launch file that was edited for the best changes, and those that it reads, under other names."""

from __future__ import annotations

import re
from pathlib import Path

from meshcast.experiments.advice.advice import Advice
from meshcast.experiments.explain.edited_launch import compare_edited, import_beside, list_edits
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.formats.launch.bash.script import ARGUMENTS
from meshcast.simulator.formats.launch.launch_file import LaunchFile, parse_launch_text


def write_patched(advice: Advice, out: Path, option: str = "--write") -> list[Path]:
    """Writes the launch file of the best changes, or the job file. Returns the files, that which was asked for first.

    A file that the launch file reads, and that is edited, too, is written beside itself under a name with that of
    `out` in it, which the launch file then reads.
    Raises PlanError, and writes nothing, for what is not read back as it was announced.
    """
    best = advice.best
    assert best is not None
    if not advice.program:
        write_file(out, to_yaml(best.trial.job.as_written))
        return [out]
    if advice.patch is None:
        raise PlanError(option, advice.unpatched, "Edit it by hand, as the page says")
    file, edited = advice.patch.file, advice.patch.edited
    text, beside = edited.files.file.text, dict[Path, str]()
    for name, (_, changed) in list_edits(file, edited.files).items():
        if name not in (file.where, ARGUMENTS):
            path = Path(name)
            renamed = path.with_name(f"{path.stem}.{name_tag(Path(file.where), out)}{path.suffix}")
            text, found = re.subn(rf"(?<![\w.-]){re.escape(path.name)}(?![\w-])", renamed.name, text)
            if not found or renamed.exists():
                rule = f"{renamed} exists already" if found else f"what is edited stands in {path}, which it reads, too"
                remedy = f"Edit the files themselves: meshcast export JOB --against {file.where} --write"
                raise PlanError(option, rule, remedy, str(out))
            beside[renamed] = changed
    new = parse_launch_text(text, str(out), file.suffix, out.parent, edited.files.file.options)
    try:
        for path, changed in beside.items():
            write_file(path, changed)
        agrees, words = _read_back(new, advice)
    except MeshcastError as error:
        agrees, words = False, str(error)
    if not agrees:
        for path in beside:
            path.unlink(missing_ok=True)
        raise PlanError(option, words, f"Write it beside {file.where}", str(out))
    write_file(out, text)
    return [out, *beside]


def _read_back(file: LaunchFile, advice: Advice) -> tuple[bool, str]:
    """Returns whether a launch file is forecast as the best changes, and a sentence on it."""
    assert advice.best is not None and advice.patch is not None
    job = advice.best.trial.job
    back = import_beside(file, advice.patch.form, job)[1]
    return compare_edited(job, back, file.where, advice.patch.form)


def name_tag(file: Path, out: Path) -> str:
    """Returns what tells the name of a file that is written from that of the file that was edited: "new"."""
    return out.stem.removeprefix(f"{file.stem}.") or out.stem
