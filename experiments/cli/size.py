"""``meshcast size``: how many nodes a training needs, days and money."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    check_folder,
    check_place,
    check_suffix,
    emit_or_show,
    plan_figures,
    unwritable_folder,
    writing,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import OUTPUT, argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.experiments.sizing.options import SizeOptions
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file

SECONDS_BETWEEN_LINES = 10.0
"""Time between two lines of progress where stderr is no terminal [s]."""


class SizeCommandOptions(SizeOptions, LaunchFileOptions):
    """Options of ``meshcast size``."""

    job: Annotated[Path, argument("JOB|MODEL", "A job or a launch file; a model by its name, or its config.json.")]
    change: Annotated[
        tuple[str, ...], option("--set", "Change a field of the job, e.g. run.recovery.spares=4.", "FIELD=VALUE")
    ] = ()
    jobs_to: Annotated[Path | None, option("--jobs-to", "Write the clusters of the answer as jobs.", "FOLDER")] = None
    html: Annotated[Path | None, option("--html", "Write the answer as a page, .html.", "FILE", panel=OUTPUT)] = None
    plot: Annotated[str | None, option("--plot", "Draw cost against days (.png, .svg or .pdf).", "FILE")] = None
    width: WidthOption = None
    as_json: AsJson = False


def size(options: SizeCommandOptions) -> None:
    """Finds the smallest cluster of each kind of node that meets a deadline, and shows its days and money."""
    from meshcast.experiments.sizing.page import page
    from meshcast.experiments.sizing.question import read_question
    from meshcast.experiments.sizing.size import answer_question

    files, paper = plan_figures(options.plot, options.width, ("size",))
    if options.html is not None:
        from meshcast.experiments.render.bokeh.library import check_library

        check_library()
        check_suffix(options.html, (".html", ".htm"), "the page", "--html")
        check_place(options.html, "--html")
    if options.jobs_to is not None:
        check_folder(options.jobs_to, "--jobs-to")
    if options.job.exists():
        tell_launch(options.job, options.change)
    question = read_question(options.job, options, options.change, of_command=True)
    progress = SizeProgress()
    try:
        answer = answer_question(question, options.workers, progress)
    finally:
        progress.end()
    for path in files.values():
        from meshcast.experiments.render.matplotlib.sheet import save
        from meshcast.experiments.sizing.plot import cost_against_days

        with writing_figure(path):
            save(partial(cost_against_days, answer), path, paper)
    if options.html is not None:
        from meshcast.experiments.sizing.html_page import render_answer

        with writing(options.html, "--html"):
            write_file(options.html, render_answer(answer))
        say(f"wrote {options.html}", err=True)
    if options.jobs_to is not None:
        chosen = [(kind.kind.name, kind.chosen.job) for kind in answer.kinds if kind.chosen is not None]
        _write_jobs(options.jobs_to, {name.replace("/", "-"): job for name, job in chosen if job is not None})
    emit_or_show(options.as_json, answer.to_dict, lambda: page(answer))


def _write_jobs(folder: Path, jobs: dict[str, dict[str, object]]) -> None:
    """Writes jobs as NAME.yaml, and says so."""
    paths = [folder / f"{name}.yaml" for name in jobs]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, job in zip(paths, jobs.values(), strict=True):
            write_file(path, to_yaml(job))
    except OSError as error:
        raise unwritable_folder(folder, error.strerror or str(error), "--jobs-to") from None
    say(f"wrote {', '.join(map(str, paths)) or 'no job'}", err=True)


class SizeProgress:
    """Shows on stderr which cluster is looked at: a line that is replaced on a terminal, else one every ten seconds."""

    def __init__(self) -> None:
        self._terminal, self._count = sys.stderr.isatty(), 0
        self._began = self._written = time.monotonic()

    def __call__(self, node: str, nodes: int) -> None:
        self._count += 1
        now = time.monotonic()
        words = f"{now - self._began:,.0f} s: cluster {self._count}, {node}:{nodes}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{words}")
            sys.stderr.flush()
        elif now - self._written >= SECONDS_BETWEEN_LINES:
            self._written = now
            say(f"meshcast: {words}", err=True)

    def end(self) -> None:
        """Removes the line from a terminal."""
        if self._terminal and self._count:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
