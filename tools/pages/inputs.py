"""Writes docs/inputs.md: what the reader makes of public launch files, by program.

``python -m tools.pages.inputs FOLDER RUNS.jsonl docs/inputs.md`` (``make docs-inputs FILES=... RUNS=...``)

FOLDER holds the files of the corpus as OWNER+NAME@COMMIT/PATH, with 12 digits of the commit, or as OWNER+NAME/PATH;
of a file that is not there the small one counts that states the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.inputs.corpus import PublicFile, find_folder, load_corpus
from tools.inputs.judge import Judgement, judge
from tools.inputs.published_runs import FileForecast, forecast_published_files

INTRODUCTION = """\
# Public launch files

Made by `make docs-inputs` from a folder of public files. `tools/inputs/corpus` lists them, by repository, commit and
path, with the facts that each determines: degrees, sharding, precision, recomputation, batch, the model's shape. Facts
were written by reading the code of the programs, by others than those who wrote the reader.

*Right*: forecast with the plan of the file. *Approximated*: forecast with another plan, which the answer names, with a
second forecast that bounds the error, or with the direction of the error. *Asked*: refused with a question that the
file leaves open; or refused by name, where the program is not read. *Needless*: asked, or not read, though the file
holds all that is needed. *Another plan*: forecast with another plan than its own, without a word.
"""


def main() -> None:
    """Writes the page."""
    folder, runs, page = map(Path, sys.argv[1:])
    forecasts = list(forecast_published_files(folder, runs))
    text = render_page(list(judge_corpus(folder))) + render_published(forecasts)
    page.write_text(text, "utf-8")


def judge_corpus(folder: Path | None, corpus: Sequence[PublicFile] | None = None) -> Iterator[tuple[Judgement, bool]]:
    """Yields the judgement of every entry, and whether it is of the public file."""
    for entry in corpus if corpus is not None else load_corpus():
        public = find_public_file(entry, folder) if folder is not None else None
        if public is not None:
            yield judge(entry, public), True
            continue
        with tempfile.TemporaryDirectory() as place:
            yield judge(entry, write_small_file(entry, Path(place))), False


def find_public_file(entry: PublicFile, folder: Path) -> Path | None:
    """Returns the public file of an entry, if it and its companions are in the folder."""
    copy = find_folder(folder, entry.repository, entry.commit, [entry.path, *entry.companions])
    return copy / entry.path if copy is not None else None


def write_small_file(entry: PublicFile, folder: Path) -> Path:
    """Writes the small file of an entry, with those beside it, and returns its path."""
    for name, text in entry.states_beside.items():
        beside = folder / name
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, "utf-8")
    path = folder / Path(entry.path).name
    path.write_text(entry.states, "utf-8")
    return path


def render_page(judged: Sequence[tuple[Judgement, bool]]) -> str:
    """The page: a table by program, and what was not right."""
    public = sum(is_public for _, is_public in judged)
    lines = [INTRODUCTION, f"{len(judged)} files, {public} of them as they are public; of the others a small one that "]
    lines[-1] += "states the same.\n"
    lines += [
        "| program | files | right | approximated | asked | needless | another plan | answered |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    programs = sorted({judgement.entry.program for judgement, _ in judged})
    for program in (*programs, "all"):
        chosen = [judgement for judgement, _ in judged if program in ("all", judgement.entry.program)]
        lines.append(_render_row(program, chosen))
    lines += ["", "## What is not right", ""]
    for judgement, _ in judged:
        if not judgement.is_expected:
            misses = "; ".join(" ".join(miss.split()) for miss in judgement.misses)
            lines.append(f"- {judgement.outcome}: {judgement.entry.name}: {_escape(misses)}")
    return "\n".join(lines) + "\n"


def _render_row(program: str, judgements: Sequence[Judgement]) -> str:
    count = Counter(judgement.outcome for judgement in judgements)
    asked, needless = count["asked"] + count["refused"], count["asked needlessly"] + count["not read"]
    complete = len(judgements) - asked
    answered = f"{(count['right'] + count['approximated']) / complete:.0%}" if complete else ""
    numbers = (len(judgements), count["right"], count["approximated"], asked, needless, count["another plan"])
    return f"| {program} | {' | '.join(map(str, numbers))} | {answered} |"


def render_published(forecasts: Sequence[FileForecast]) -> str:
    """The part of the page on published runs that are forecast from their file."""
    read = [forecast for forecast in forecasts if not forecast.refusal]
    equal = [forecast for forecast in read if not forecast.differing]
    lines = ["", "## Published runs from their launch file", ""]
    lines.append(
        f"{len(forecasts)} published runs have a public launch file: {len(read)} are forecast from it, {len(equal)} of "
        "them with the plan of the structured row. Errors are forecast / measured - 1 of the step time."
    )
    lines += ["", "| run | from the file | from the row | plan |", "|---|--:|--:|---|"]
    for forecast in forecasts:
        errors = [f"{error:+.1%}" for error in forecast.errors] if forecast.errors else ["", ""]
        differing = ", ".join(f"{key}: {file} for {row}" for key, (row, file) in forecast.differing.items())
        plan = forecast.refusal or differing or "equal"
        lines.append(f"| {forecast.run.id} | {errors[0]} | {errors[1]} | {_escape(' '.join(plan.split()))} |")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A text without marks that Markdown knows."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")[:400]


if __name__ == "__main__":
    main()
