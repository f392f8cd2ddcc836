"""The page of ``meshcast learn``: errors of rows held back, and the coefficients that have moved."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Table, formatted_numbers
from meshcast.validation.learning.learn import LearnAnswer

MAX_MOVES = 40
"""Maximum number of coefficients on the page; ``--json`` has all of them."""


def page(answer: LearnAnswer, out: Path) -> RenderableType:
    """Returns what was learnt of each section, the coefficients, and how to use the files."""
    errors = formatted_numbers(("rows", ","), (("error", "before"), ".1p"), (("held", "back"), ".1p"), wrap="never")
    table = Table(Column(("hardware", "section"), wrap="letters"), *errors, Column("learnt"), dense=True)
    for section in answer["sections"]:
        held = section["held_back"]
        name = f"{section['hardware']} {section['section']}"
        table.add(name, section["rows"], held["before"], held["after"], _tell_verdict(section))
    moves = [(section, move) for section in answer["sections"] for move in section["coefficients"]]
    parts: list[RenderableType] = [show_table(table)]
    if moves:
        values = formatted_numbers(("before", ".4g"), ("after", ".4g"), wrap="never")
        moved = Table(Column("coefficient", wrap="letters"), *values, Column("meaning"), dense=True)
        for section, move in moves[:MAX_MOVES]:
            name = " ".join(filter(None, (section["hardware"], section["section"], move["library"], move["name"])))
            moved.add(name, move["before"], move["after"], move["meaning"])
        parts += [Text(), show_table(moved)]
        if len(moves) > MAX_MOVES:
            parts.append(Text(f"{len(moves) - MAX_MOVES:,} coefficients more with --json", "dim"))
    parts += [Text(), Text("error %: median of the calibration in use, and of fits that have not seen the row", "dim")]
    if answer["files"]:
        parts += [
            Text(f"written   {', '.join(answer['files'])}"),
            Text(f"use       meshcast predict JOB --calibration {out}"),
        ]
    else:
        parts.append(Text("nothing is written: forecasts stay as they are"))
    return Group(*parts)


def _tell_verdict(section: LearnAnswer) -> str:
    """Says what became of the rows of a section."""
    if section["coefficients"]:
        return f"{len(section['coefficients'])} coefficients"
    if section["held_back"]["after"] is None:
        return "too few rows to hold any back"
    return "nothing: unseen rows are forecast no better"
