"""The page: controls, what the rules refuse, the answer with its figures, a pinned one beside it, a search, texts to
copy. The answer is drawn first; figures and what the controls offer follow, unless another change comes before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from meshcast.experiments.explorer.background_search import BackgroundSearch
from meshcast.experiments.explorer.controls import Control
from meshcast.experiments.explorer.explored_job import ExploredJob
from meshcast.experiments.render.bokeh.html import Html, concat, details, listing, paragraph
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.render.bokeh.sections import breakdown, memory, summary, timeline
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.formats.launch.convert import export_job
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.formatting import describe_value
from meshcast.simulator.report.report import Report

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import Button, Div, Select, UIElement

REFUSED = " ✕"
"""Behind a value that the rules refuse with the others as they are."""

UNSTATED = "default"

POLL_MS = 200
"""Time between two looks at the search [ms]."""

ANSWER_WIDTH = 440
"""Width below which answers stand below each other [px]."""

BELOW = (0, 8, 6, 0)
"""Margin of a control."""

STALE, CURRENT = {"opacity": "0.4"}, {"opacity": "1"}
"""Styles of figures: of the job before the last change, until they follow; of the job as it is."""

END = object()

TEMPLATE = """
{% block preamble %}<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{{ style }}</style>{% endblock %}
{% block contents %}<header><h1>{{ title | e }}</h1></header>
<main class="explorer"><div>{{ embed(roots.controls) }}</div>
<div>{{ embed(roots.answers) }}</div><div>{{ embed(roots.texts) }}</div>
</main>{% endblock %}
"""


def read_style() -> str:
    return (resources.files("meshcast.experiments.render.bokeh") / "page.css").read_text("utf-8")


class ExplorerPage:
    """The page of a session.

    explored: the job and its controls.
    """

    def __init__(self, job: Job, document: Document) -> None:
        from bokeh.models import Column, Row, Select

        self.explored, self._document, self._style = ExploredJob(job), document, read_style()
        self._pinned: list[UIElement] = []
        self._search: BackgroundSearch | None = None
        self._later: Iterator[None] = iter(())
        self._scheduled = self._updating = self._drawn = False
        self._selects: dict[str, Select] = {}
        self._refusal, self._status = self._text("", "refusal"), self._text("", "status")
        self._reasons = self._text("", "reasons")
        for control in self.explored.list_controls():
            select = Select(title=control.label, width=122, margin=BELOW)
            select.on_change("value", partial(self._choose, control.field))
            self._selects[control.field] = select
        boxes = Row(*self._selects.values(), styles={"flex-wrap": "wrap"}, sizing_mode="stretch_width")
        buttons = Row(*self._make_buttons(), styles={"flex-wrap": "wrap"}, sizing_mode="stretch_width")
        parts = [boxes, buttons, self._status, self._refusal, self._reasons]
        controls = Column(*parts, sizing_mode="stretch_width", name="controls")
        self._answers = Row(name="answers", sizing_mode="stretch_width", styles={"flex-wrap": "wrap", "gap": "20px"})
        document.add_root(controls)
        document.add_root(self._answers)
        document.add_root(Column(*self._make_texts(), sizing_mode="stretch_width", name="texts"))
        document.title = f"{job.model.name}: meshcast explore"
        document.template = TEMPLATE
        document.template_variables["style"] = self._style
        document.on_session_destroyed(lambda _: self.cancel_search())
        self._begin_answer()
        self.show()

    def _text(self, html: str, name: str) -> Div:
        from bokeh.models import Div

        return Div(text=html, name=name, margin=0, sizing_mode="stretch_width", stylesheets=[self._style])

    def _make_buttons(self) -> Iterable[Button]:
        from bokeh.models import Button

        self._seek = Button(label="Best plan", name="search", button_type="primary", margin=(4, 8, 4, 0), width=122)
        self._seek.on_click(self.toggle_search)
        self._pin = Button(label="Pin as A", name="pin", margin=(4, 8, 4, 0), width=122)
        self._pin.on_click(self.toggle_pin)
        return self._seek, self._pin

    def _make_texts(self) -> Iterable[UIElement]:
        """Makes the job file and the launch file, each with a button that copies it."""
        from bokeh.models import Button, CustomJS, Select, TextAreaInput

        program = self.explored.job.framework.name
        chosen = program if program in EXPORTS else EXPORTS[0]
        self._program = Select(title="launch file of", options=[*EXPORTS], value=chosen, margin=BELOW)
        self._program.sizing_mode = "stretch_width"
        self._program.on_change("value", lambda attr, old, new: self._show_launch())
        copying = "navigator.clipboard.writeText(text.value)"
        self._file = TextAreaInput(
            title="job file", rows=9, max_length=None, margin=BELOW, sizing_mode="stretch_width", name="file"
        )
        self._launch = TextAreaInput(rows=9, max_length=None, margin=BELOW, sizing_mode="stretch_width", name="launch")
        texts = (("Copy the job file", [self._file]), ("Copy the launch file", [self._program, self._launch]))
        for label, text in texts:
            yield from text
            button = Button(label=label, margin=BELOW, sizing_mode="stretch_width")
            button.js_on_click(CustomJS(args={"text": text[-1]}, code=copying))
            yield button

    # ------------------------------------------------------------------------------------------- changes

    def _choose(self, field: str, _: str, __: str, word: str) -> None:
        """Takes a change of a control; a word that it does not offer is none."""
        control = next((control for control in self.explored.list_controls() if control.field == field), None)
        values = {_word(value): value for value in control.values} if control else {}
        if not self._updating and word in values and word != _word(self.explored.get(field)):
            self.explored.change(field, values[word])
            self.show()

    def show(self) -> None:
        """Shows the answer; what takes longer follows."""
        refusal = self.explored.refusal
        self._refusal.text = paragraph(f"Refused, nothing is changed: {refusal}", "refused") if refusal else ""
        self._updating = True
        for control in self.explored.list_controls():
            self._offer(control, {})
        self._updating = False
        try:
            report = self.explored.forecast()
            parts = self._draw(summary.make_section(report)) + self._draw(breakdown.make_section(report))
        except MeshcastError as error:
            self._refusal.text = paragraph(f"No forecast: {error}", "refused")
            self._answer.children = self._figures.children = [self._text("", "nothing")]
            self._later, self._drawn = iter(()), True
            return
        self._answer.children, self._figures.styles, self._drawn = parts, STALE, False
        self._later = self._follow(report)
        self._go_on()

    def _begin_answer(self) -> None:
        """Begins an answer in a place of its own, beside a pinned one."""
        from bokeh.models import Column

        nothing = self._text("", "nothing")
        self._answer, self._figures = (Column(nothing, sizing_mode="stretch_width") for _ in range(2))
        current = self._wrap("B" if self._pinned else "", [self._answer, self._figures])
        self._answers.children = [*self._pinned, current]

    def _wrap(self, name: str, parts: list[UIElement]) -> UIElement:
        from bokeh.models import Column

        head = [self._text(Html("<h2>{}</h2>").format(name), f"name-{name}")] if name else []
        styles = {"flex": f"1 1 {ANSWER_WIDTH}px", "min-width": f"min({ANSWER_WIDTH}px, 100%)"}
        return Column(*head, *parts, styles=styles, sizing_mode="stretch_width")

    def _draw(self, section: PageSection) -> list[UIElement]:
        """Returns a section of ``meshcast report`` as models of Bokeh."""
        parts: list[UIElement] = []
        words: list[Html] = [Html("<h3>{}</h3>").format(section.title)]
        for part in section.body:
            if isinstance(part, Drawing):
                parts += [self._text(concat(words), section.name), part.model]
                words = []
            else:
                words.append(part)
        return [*parts, *([self._text(concat(words), section.name)] if words else [])]

    def _go_on(self) -> None:
        """Lets the next part of what follows be made once the browser has the last one."""
        if not self._scheduled:
            self._scheduled = True
            self._document.add_timeout_callback(self._make_next, 1)

    def _make_next(self) -> None:
        self._scheduled = False
        for _ in self._later:
            self._go_on()
            return

    def _follow(self, report: Report) -> Iterator[None]:
        """Makes what follows the answer, part by part: figures, what the controls offer, the texts."""
        yield
        drawn = self._draw(memory.make_section(report))
        yield
        drawn += self._draw(timeline.make_section(report))
        self._figures.children, self._figures.styles, self._drawn = drawn, CURRENT, True
        yield
        refused: list[str] = []
        for control in self.explored.list_controls():
            refusals, now = {}, self.explored.get(control.field)
            for value in control.values:
                if value != now and (why := self.explored.find_refusal(control, value)):
                    refusals[_word(value)] = why
                yield
            self._offer(control, refusals)
            refused += [f"{control.label} {word}: {why}" for word, why in refusals.items()]
        self._reasons.text = details(f"Why not? {len(refused)} values", listing(refused)) if refused else ""
        yield
        self._file.value = to_yaml(self.explored.job.as_written)
        yield
        self._show_launch()

    def _offer(self, control: Control, refusals: dict[str, str]) -> None:
        """Shows the values of a control, those marked that the rules refuse."""
        if control.field not in self._selects:
            return
        select, words = self._selects[control.field], [_word(value) for value in control.values]
        select.options = [(word, word + (REFUSED if word in refusals else "")) for word in words]
        select.value = _word(self.explored.get(control.field))

    def _show_launch(self) -> None:
        load: Callable[[Fields, Path], Job] = lambda data, folder: load_job(data, base=folder)  # noqa: E731
        try:
            self._launch.value = export_job(self.explored.job, self._program.value, load, resolve_plan).text
        except MeshcastError as error:
            self._launch.value = f"# {error}"

    # ------------------------------------------------------------------------------------------- two settings

    def toggle_pin(self) -> None:
        """Keeps the answer beside those that follow, or drops the pinned one."""
        if self._pinned:
            self._pinned, self._pin.label = [], "Pin as A"
        else:
            while not self._drawn and next(self._later, END) is not END:
                pass
            self._pinned, self._pin.label = [self._wrap("A", [self._answer, self._figures])], "Unpin A"
        self._begin_answer()
        self.show()

    # ------------------------------------------------------------------------------------------- search

    def toggle_search(self) -> None:
        """Begins the search of the best plan, or ends it."""
        if self._search is not None:
            self.cancel_search()
            self._say("search cancelled")
            return
        self._search = BackgroundSearch(self.explored.write_open(), self.explored.job.folder)
        self._seek.label = "Cancel search"
        self._say(self._search.words)
        self._document.add_timeout_callback(self.look_at_search, POLL_MS)

    def look_at_search(self) -> None:
        """Shows how far the search is; takes its plan once it ended."""
        search = self._search
        if search is None:
            return
        runs = search.poll()
        self._say(search.words)
        if runs:
            self._document.add_timeout_callback(self.look_at_search, POLL_MS)
            return
        self.cancel_search()
        if search.best is not None:
            self.explored.take_job(search.best)
            self.show()

    def cancel_search(self) -> None:
        """Ends the search, if one runs."""
        if self._search is not None:
            self._search.cancel()
        self._search, self._seek.label = None, "Best plan"

    def _say(self, words: str) -> None:
        self._status.text = paragraph(words)


def _word(value: object) -> str:
    """Returns a value as a control shows it."""
    return UNSTATED if value is None else describe_value(value)
