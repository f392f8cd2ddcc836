"""The answer as one HTML file for those who decide: figures, a plot, what it rests on."""

from __future__ import annotations

import base64
import io

from meshcast.experiments.render.bokeh.html import Html, KeyFigure, concat, key_figures, paragraph, render_table
from meshcast.experiments.render.bokeh.page import PageSection, render_page
from meshcast.experiments.sizing.answer import SizeAnswer
from meshcast.experiments.sizing.plot import cost_against_days
from meshcast.experiments.sizing.sized_cluster import CHANCE
from meshcast.experiments.sizing.tables import format_money, list_notes, make_answers, make_front, make_title


def render_answer(answer: SizeAnswer) -> str:
    """Returns the HTML of the page."""
    tiles = [_make_tile(answer, number) for number in range(len(answer.kinds))]
    words = f"Clusters on which {CHANCE:.0%} of simulated runs, failures included, keep the limits."
    front = PageSection("answer", "Answer", [paragraph(words), key_figures(tiles), render_table(make_answers(answer))])
    fronts = concat(
        Html("<h3>{}</h3>{}").format(kind.kind.name, render_table(make_front(answer, kind)))
        for kind in answer.kinds
        if kind.front
    )
    notes = concat(Html("<li><b>{}</b> {}</li>").format(name, sentence) for name, sentence in list_notes(answer))
    sections = [
        front,
        PageSection("cost-and-days", "Cost against days", [_draw(answer), fronts]),
        PageSection("grounds", "What it rests on", [Html("<ul>{}</ul>").format(notes)]),
    ]
    return render_page(make_title(answer), Html(""), sections)


def _make_tile(answer: SizeAnswer, number: int) -> KeyFigure:
    """Returns the large figure of a kind of node."""
    kind = answer.kinds[number]
    if kind.chosen is None:
        return KeyFigure(kind.kind.name, "none", "no cluster keeps the limits", bad=True)
    days, cost = kind.chosen.answer.days, kind.chosen.answer.mean(kind.chosen.answer.cost_of)
    remark = f"{days:,.1f} days" + ("" if cost is None else f", {format_money(cost)}")
    return KeyFigure(
        kind.kind.name, f"{kind.chosen.gpus:,} GPUs", remark, bad=answer.keeps_budget(kind.chosen) is False
    )


def _draw(answer: SizeAnswer) -> Html:
    """Returns the plot as an image that is written in the page."""
    image = io.BytesIO()
    cost_against_days(answer).savefig(image, format="png", dpi=200)
    data = base64.b64encode(image.getvalue()).decode()
    return Html('<img alt="cost against days" style="max-width:100%" src="data:image/png;base64,{}">').format(data)
