"""Writes docs/inputs.md: what the reader makes of public launch files, by program.

``python -m tools.pages.inputs FOLDER RUNS.jsonl docs/inputs.md`` (``make docs-inputs FILES=... RUNS=...``)

FOLDER holds the files of the corpus as OWNER+NAME@COMMIT/PATH, with 12 digits of the commit, or as OWNER+NAME/PATH;
of a file that is not there the small file counts that states the same.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from meshcast.experiments.render.markdown import escape_text, render_table
from meshcast.experiments.views.table import Table, numbers
from meshcast.hardware.documents.output_file import write_file
from tools.inputs.corpus import PublicFile, find_folder, load_corpus
from tools.inputs.judge import Judgement, judge
from tools.inputs.published_runs import FileForecast, forecast_published_files

MAX_LETTERS = 400
"""Longest text of a file or a plan on the page."""

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


WHY = """\
Where the two differ, by the files (the row is a table beside the measurement, and `validation` assumes what it
leaves out):

- NeMo 1 (dgxc): GPT-3 and Grok-1 do not state `cross_entropy_loss_fusion`, which is off by default; Llama 3.1
  states it, also at v24.11.1. Llama 3.1 405B has the tokenizer of GPT-2 (a vocabulary of 50,257), Grok-1 that of
  Llama 3. GPT-3 has a dropout of 0.1 in both releases. The files are right.
- torchtitan, 405B: with a pipeline weights stay gathered after the forward pass (@9dec370, parallelize_llama.py).
  The file is right.
- Megatron-Bridge, experts: the dispatcher is that of the constant (`moe_flex_dispatcher_backend`), or all-to-all
  where it names none, and HybridEP takes 32 multiprocessors (utils/overrides.py), where the row assumes 16. That
  is what the files state; whether the runs had it is open: the time of Qwen3 235B of 26.02.01 on H100, and those
  of Qwen3 30B of 25.09 on GB200, are nearer to the dispatcher of the row.
- Megatron-Bridge, overlap of tensor ranks: off with NVFP4 for Llama 3, on for Qwen3 235B on H100
  (configs/*/*_pretrain.py). The files are right.
- Megatron-Bridge, recomputation of 25.09: the constants name modules; the row assumes attention. The files are
  right.
- Kimi K2: the recipe has Muon, without the distributed optimizer; its own one shards matrices whole, to which
  ZeRO-1 of the row is nearer.
- DeepSeek-V3 of 26.06 on GB200, Qwen3 30B of 26.06 on H100: functions of other modules, and a later release of the
  same recipe, decide on CUDA graphs. The rows are right.
- BLOOM: the script has a norm behind the embedding (the file is right) and sets CUDA_LAUNCH_BLOCKING, which is not
  read.
"""


def main() -> None:
    """Writes the page."""
    folder, runs, page = map(Path, sys.argv[1:])
    forecasts = list(forecast_published_files(folder, runs))
    text = render_page(list(judge_corpus(folder))) + render_published(forecasts)
    write_file(page, shorten_paths(text, folder))


def shorten_paths(text: str, folder: Path) -> str:
    """Returns the text with the paths of public files relative to the copy of their repository."""
    return re.sub(rf"{re.escape(str(folder))}/(by-commit/)?[\w.+-]+(@[0-9a-f]+)?/", "", text)


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
        write_file(beside, text)
    path = folder / Path(entry.path).name
    write_file(path, entry.states)
    return path


def render_page(judged: Sequence[tuple[Judgement, bool]]) -> str:
    """Returns the page: a table by program, and what was not right."""
    public = sum(is_public for _, is_public in judged)
    lines = [INTRODUCTION, f"{len(judged)} files, {public} of them as they are public; of the others a small one that "]
    lines[-1] += "states the same.\n"
    counts = ("files", "right", "approximated", "asked", "needless", "another plan")
    table = Table("program", *numbers(*counts), *numbers("answered", format=".0%"))
    programs = sorted({judgement.entry.program for judgement, _ in judged})
    for program in (*programs, "all"):
        chosen = [judgement for judgement, _ in judged if program in ("all", judgement.entry.program)]
        table.add(program, *_count_outcomes(chosen))
    lines.append(render_table(table).rstrip())
    lines += ["", "## What is not right", ""]
    for judgement, _ in judged:
        if not judgement.is_expected:
            misses = "; ".join(" ".join(miss.split()) for miss in judgement.misses)
            name, cut = escape_text(judgement.entry.name), escape_text(misses[:MAX_LETTERS])
            lines.append(f"- {judgement.outcome}: {name}: {cut}")
    return "\n".join(lines) + "\n"


def _count_outcomes(judgements: Sequence[Judgement]) -> tuple[float | None, ...]:
    """Returns the number of judgements, those of every outcome, and the share of files that are complete and
    answered."""
    count = Counter(judgement.outcome for judgement in judgements)
    asked, needless = count["asked"] + count["refused"], count["asked needlessly"] + count["not read"]
    complete = len(judgements) - asked
    answered = (count["right"] + count["approximated"]) / complete if complete else None
    return len(judgements), count["right"], count["approximated"], asked, needless, count["another plan"], answered


def render_published(forecasts: Sequence[FileForecast]) -> str:
    """Returns the part of the page on published runs that are forecast from their file."""
    read = [forecast for forecast in forecasts if not forecast.refusal]
    equal = [forecast for forecast in read if not forecast.differing]
    lines = ["", "## Published runs from their launch file", ""]
    lines.append(
        f"{len(forecasts)} published runs have a public launch file: {len(read)} are forecast from it, {len(equal)} of "
        "them with the plan of the structured row (details of its schemes, listed behind it, and the model do not "
        "count). Errors are forecast / measured - 1 of the step time."
    )
    measured = [forecast.errors for forecast in read if forecast.errors]
    if measured:
        file, row = (median(abs(errors[side]) for errors in measured) for side in (0, 1))
        lines[-1] += f" Their median magnitude is {file:.1%} from the files and {row:.1%} from the rows."
    lines += ["", WHY.rstrip()]
    table = Table("run", *numbers("from the file", "from the row", format="+.1%"), "plan")
    for forecast in forecasts:
        pairs = {**forecast.differing, **forecast.details}
        differing = ", ".join(f"{key}: {file} for {row}" for key, (row, file) in pairs.items())
        plan = forecast.refusal or ("" if forecast.differing else "equal; ") + differing
        cut = " ".join(plan.split()).removesuffix(";")[:MAX_LETTERS]
        table.add(escape_text(forecast.run.id), *(forecast.errors or ("", "")), escape_text(cut))
    return "\n".join([*lines, "", render_table(table)])


if __name__ == "__main__":
    main()
