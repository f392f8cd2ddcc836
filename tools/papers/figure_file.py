"""The files of figures: their schema, and how they are read and checked.

A point has a published number and the job that it is of. Both can be those of a claim; else the job is a copy of a
named job with some fields changed, or the relation says how the number follows from several::

    claim_file: megatron-weak-scaling          # validation/claims/megatron-weak-scaling.yaml: its jobs and claims
    series:
      - name: PTD-P
        points:
          - {x: 32, claim: ptd-p-01}
          - {x: 64, value: 138, relation: of_3_6b}
          - {x: 768, value: 149, from: gpt3_384, set: {cluster.gpus: 768, plan.mesh.dp: 8}}
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field, model_validator
from meshcast.validation.claims.claim_file import (
    CLAIMS,
    KINDS,
    Claim,
    ClaimFile,
    ClaimModel,
    NamedJobs,
    Number,
    Text,
    Values,
    check_claim,
    find_files,
    read_claim_file,
)

FIGURES = "tools.papers.figures"
"""Folder of the files, as a package."""

ONLY = "shown"
"""Name of the job of a point that names one with `from` or `set`."""

MAX_NAME = 34
"""Most characters of the name of a series or of a row, so that a legend has room for it."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class FigureAxis(ClaimModel):
    """An axis: its label with the unit, and whether it is logarithmic."""

    label: Text
    log: bool = False


class FigurePoint(ClaimModel):
    """One published number and the job that it is of.

    Attributes:
        x: place on the x axis, or the name of the row.
        claim: id of a claim of `claim_file` whose value, jobs and relation these are.
        value: the published number, where no claim has it.
        relation: how the number follows from the jobs of the file (validation/claims/relation.py); empty: that of the
            series.
        base, set: the job of the point, as a copy of another one; `shown` in relations.
        measure: the number that is read off the job; empty: that of the series.
    """

    x: Number | Name
    claim: str = ""
    value: Number | None = None
    relation: str = ""
    base: str = Field(default="", alias="from")
    set: dict[str, Any] = {}
    measure: str = ""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        keys = [key for key in ("value", "relation", "base", "set", "measure") if key in self.model_fields_set]
        if self.claim and keys:
            stated = ", ".join("from" if key == "base" else key for key in keys)
            raise ValueError(f"a point of a claim has its number and jobs. Remove claim, or {stated}")
        if not self.claim and self.value is None:
            raise ValueError("it has no published number. Write value, or the claim that has it")
        return self


class FigureSeries(ClaimModel):
    """Points of a colour.

    base: job that its points are copies of unless they say another.
    relation: how the numbers follow from the job `shown` of each point; empty: `shown` alone.
    measure: the number that is read off the jobs; empty: that of the figure.
    assumed: fields that the paper leaves open, with the ends of what is plausible.
    """

    name: Name
    base: str = Field(default="", alias="from")
    relation: str = ""
    measure: str = ""
    assumed: dict[str, Values] = {}
    points: Annotated[list[FigurePoint], Field(min_length=1, max_length=60)]


class PaperFigure(NamedJobs):
    """One figure or table of a paper.

    Attributes:
        title: what it shows.
        paper: authors and year, or the name of a page.
        link: where the paper is found.
        place: number of the figure or table in it.
        source: where the numbers were read.
        provenance: ``checked`` if they were read there, ``recalled`` otherwise.
        form: ``lines`` over numbers, ``rows`` with a bar for each point.
        x, y: the axes; rows have no x axis.
        measure: the number that is read off the jobs, in the words of claims.
        claim_file: file of claims, without its ending, whose jobs, cases, plans and claims are used.
        jobs, cases, plans: further named jobs, pipeline cases, or runs of planners.
        in_view: whether coefficients or profiles were made with these runs in view (docs/published-runs.md).
        image: whether docs/papers.md shows the image.
        note: why points are missed, or what is special.
    """

    title: Text
    paper: Text
    link: Text
    place: Text
    source: Text
    provenance: Literal["checked", "recalled"]
    form: Literal["lines", "rows"]
    x: FigureAxis | None = None
    y: FigureAxis
    measure: str = ""
    claim_file: str = ""
    series: Annotated[list[FigureSeries], Field(min_length=1, max_length=9)]
    in_view: bool = False
    image: bool = False
    note: str = ""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.form == "lines":
            if self.x is None:
                raise ValueError("lines need an x axis. Write x: {label: GPUs}, or form: rows")
            for series in self.series:
                for point in series.points:
                    if isinstance(point.x, str):
                        rule = f"series {series.name!r} has the point {point.x!r} on an axis of numbers"
                        raise ValueError(f"{rule}. Give a number, or write form: rows")
        elif self.x is not None:
            raise ValueError("rows have no x axis. Remove x, or write form: lines")
        return self


@dataclass(frozen=True)
class FigurePart:
    """A point with everything that its forecast needs.

    file: the named jobs and cases.
    claim: its relation and published value, in the form of a claim.
    """

    series: str
    x: float | str
    file: ClaimFile
    claim: Claim


@dataclass(frozen=True)
class FigureFile:
    """A figure, the name of its file, and its points with their jobs."""

    name: str
    figure: PaperFigure
    parts: Sequence[FigurePart]

    @cached_property
    def title(self) -> str:
        """Paper, place and title in one line."""
        return f"{self.figure.paper}, {self.figure.place}: {self.figure.title}"


def read_figures(names: Sequence[str] = ()) -> list[FigureFile]:
    """Reads figures of the project; without names all. Raises PlanError for a name that no file has."""
    return [read_figure(path) for path in find_files(FIGURES, names, "figure").values()]


def read_figure(path: Path | Traversable) -> FigureFile:
    """Reads a figure. Raises PlanError if it is malformed, or names jobs or claims that do not exist."""
    document = read_yaml(path, error=PlanError)
    figure = validate_data(PaperFigure, document.data, document.where, PlanError, document.text)
    try:
        return FigureFile(path.name.removesuffix(".yaml"), figure, tuple(_resolve_parts(figure)))
    except PlanError as error:
        raise error.at(document.where) from None


def _resolve_parts(figure: PaperFigure) -> Iterator[FigurePart]:
    by_id, shared = dict[str, Claim](), NamedJobs()
    if name := figure.claim_file:
        claim_file = read_claim_file(find_files(CLAIMS, [name], "claim_file")[name])
        by_id, shared = {claim.id: claim for claim in claim_file.entries}, claim_file
    jobs = {kind: shared.merge_jobs(figure, kind) for kind in KINDS}
    for row, series in enumerate(figure.series):
        for number, point in enumerate(series.points):
            where = f"series[{row}].points[{number}]"
            try:
                if point.claim:
                    claim = _find_claim(by_id, point.claim)
                else:
                    claim = _make_claim(figure, series, point, jobs["cases"])
                about: dict[str, Any] = {"system": figure.paper, "family": "hybrid", "paper": figure.link}
                file = ClaimFile.model_construct(**about | jobs, entries=[claim])
                check_claim(file, claim)
            except PlanError as error:
                raise error.at(where) from None
            yield FigurePart(series.name, point.x, file, claim)


def _find_claim(by_id: dict[str, Claim], name: str) -> Claim:
    if name not in by_id:
        remedy = nearest(name, list(by_id)) if by_id else "Name its file: claim_file"
        raise PlanError("claim", "claim_file has no such claim", remedy, name)
    if by_id[name].value is None:
        raise PlanError("claim", "it has bounds and no value, so there is no point to draw", "Name another claim", name)
    return by_id[name]


def _make_claim(figure: PaperFigure, series: FigureSeries, point: FigurePoint, cases: Container[str]) -> Claim:
    """Makes a claim of the number of a point that no claim of a file has. cases: names of the pipeline cases."""
    base, relation = point.base or series.base, point.relation or series.relation or ONLY
    if not base and relation == ONLY:
        raise PlanError("point", "it says no job", "Write from, relation or claim", point.x)
    derived = {ONLY: {"from": base, "set": point.set}} if base else {}
    data = {
        "id": "point",
        "says": figure.title,
        "source": figure.source,
        "provenance": figure.provenance,
        ("cases" if base in cases else "jobs"): derived,
        "measure": point.measure or series.measure or figure.measure,
        "relation": relation,
        "value": float(point.value if point.value is not None else 0.0),
        "tolerance": 1.0,
        "assumed": series.assumed,
    }
    return validate_data(Claim, data, "point", PlanError)
