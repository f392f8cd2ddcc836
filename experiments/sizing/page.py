"""The page of ``meshcast size``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import labelled_line, show_table
from meshcast.experiments.sizing.answer import SizeAnswer
from meshcast.experiments.sizing.sized_cluster import CHANCE
from meshcast.experiments.sizing.tables import list_notes, make_answers, make_front, make_title


def page(answer: SizeAnswer) -> RenderableType:
    """Returns the answer for each kind of node, the fronts, and what the answer rests on."""
    question = answer.question
    what = "the smallest cluster that meets the deadline" if question.days is not None else "the fastest in the budget"
    lead = f"{what} in {CHANCE:.0%} of simulated runs, of each kind of node; days and cost are means"
    parts: list[RenderableType] = [Text(make_title(answer), "bold"), Text(lead), show_table(make_answers(answer))]
    for kind in answer.kinds:
        if kind.front:
            words = f"{kind.kind.name}: cost against days, which {CHANCE:.0%} of the runs do not exceed"
            parts += [Text(words, "bold"), show_table(make_front(answer, kind))]
    return Group(*parts, *_show_notes(answer))


def _show_notes(answer: SizeAnswer) -> Iterator[RenderableType]:
    """Yields the lines below the tables; lines of the same name stand below each other."""
    notes: dict[str, list[str]] = {}
    for name, sentence in list_notes(answer):
        notes.setdefault(name, []).append(sentence)
    for name, sentences in notes.items():
        yield labelled_line(name, *sentences)
