"""Routing: how many tokens choose each expert, and what that makes of the ranks that hold them.

Routers learn, so no forecast knows their choices. A plan says them instead: ``balanced`` (every expert as many), one
law of popularity ``{zipf: s}`` (expert j of 0, 1, ... is chosen in proportion to 1/(j + 1)^s; rank r holds the experts
from r E/P on, so the first rank has the most popular ones), or ``{counts: FILE}``, what a run has counted.

A *share* is measured against even routing: 1 is what an expert (from one source rank) gets where all get as many, k T/E
tokens of the T that a rank has. Shares of a source add up to E.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import PlainValidator, WithJsonSchema

from hardware.errors import PlanError, nearest

MOST_UNEVEN = 10.0
"""Largest exponent of Zipf's law: the second expert is then chosen once in a thousand times."""

REMEDY = "Name a JSON or CSV file with a number for each expert, or a row of such for each rank that holds experts"

ROUNDED = 1e-12
"""What a share may be above a whole number of blocks from rounding alone."""

WORDS = ("balanced", "zipf", "counts")


@dataclass(frozen=True)
class Routing:
    """zipf: exponent, 0 where experts are chosen evenly. counts: tokens of every expert, a row for each rank that they
    come from, or one row for all of these. Of a row only the shares count."""

    zipf: float = 0.0
    counts: tuple[tuple[float, ...], ...] = ()
    file: str = ""

    def __str__(self) -> str:
        if self.counts:
            return f"tokens are spread over the experts as {self.file or 'a run'} counts them"
        if self.zipf:
            return f"experts are chosen by Zipf's law with exponent {self.zipf:g}, the most popular ones on one rank"
        return "tokens are spread over the experts evenly"

    def check(self, ranks: int, experts: int, where: str) -> None:
        """Raises PlanError where counts are of other experts, or of other ranks."""
        if self.counts and (found := len(self.counts[0])) != experts:
            rule = f"{self.file or 'it'} counts tokens of {found} experts, and the model has {experts}"
            raise PlanError(where, rule, REMEDY, found)
        if (found := len(self.counts)) > 1 and found != ranks:
            rule = f"{self.file or 'it'} counts tokens from {found} ranks, and {ranks} hold the experts"
            raise PlanError(where, rule, "Give one row for all, or change the degree", found)

    def shares(self, experts: int) -> np.ndarray:
        """Shares [sources, experts]; one row where all sources choose alike."""
        rows = np.array(self.counts or [np.arange(1.0, experts + 1) ** -self.zipf])
        return np.asarray(rows * experts / rows.sum(axis=1, keepdims=True))

    def load(
        self, ranks: int, experts: int, capacity: float | None = None, replicated: tuple[int, ...] = ()
    ) -> ExpertLoad:
        """What `ranks` that hold E/P experts each have to do.

        capacity: places of an expert for each source, in shares; None: as many as come. stay: experts whose weights all
        ranks have, so that their tokens stay where they are.
        """
        return _load(self, ranks, experts, capacity, replicated)


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens on the ranks that hold experts, all against even routing of all tokens.

    kept: share of every expert, behind its capacity. dropped: part of the tokens' choices that finds no place.
    of_ranks: tokens on every rank, against the mean of all. remote: what leaves a rank, mean over ranks.

    Of the rank with most to do: laden, its rows against the mean of all; groups, the shares of its experts. exchange:
    the most that a rank sends or receives against the mean that ranks send. Where capacity is fixed every place is
    sent and computed, filled or not: so all ranks are alike.
    """

    kept: tuple[float, ...]
    dropped: float
    rank_loads: tuple[float, ...]
    most_loaded: float
    expert_loads: tuple[float, ...]
    remote: float
    busiest_exchange: float

    @cached_property
    def even(self) -> bool:
        """Whether every rank, and every expert on it, does what it would under even routing."""
        return {*self.rank_loads, self.most_loaded, *self.expert_loads, self.remote, self.busiest_exchange} <= {1.0}

    def pad_to_blocks(self, block: float) -> ExpertLoad:
        """The same where experts compute whole blocks of `block` shares of rows; tokens are as many as they are."""
        own = len(self.kept) // len(self.rank_loads)
        filled = [block * math.ceil(share / block * (1 - ROUNDED)) for share in self.kept]
        ranks = [filled[at : at + own] for at in range(0, len(filled), own)]
        most = max(ranks, key=sum)
        return replace(self, most_loaded=sum(most) / own, expert_loads=tuple(most))


@lru_cache(maxsize=256)
def _load(
    routing: Routing, ranks: int, experts: int, capacity: float | None, replicated: tuple[int, ...]
) -> ExpertLoad:
    shares = routing.shares(experts)
    found = np.minimum(shares, math.inf if capacity is None else capacity)
    dropped = 1.0 - float(found.sum() / shares.sum())
    kept = tuple(found.mean(axis=0).tolist())
    own = experts // ranks
    if capacity is not None:
        return ExpertLoad(kept, dropped, (1.0,) * ranks, 1.0, (1.0,) * own, 1.0, 1.0)
    sent = np.broadcast_to(found, (ranks, experts))
    moving = sent.copy()
    moving[:, list(replicated)] = 0.0
    flow = moving.reshape(ranks, ranks, own).sum(axis=2)
    staying = sent[:, list(replicated)].sum(axis=1)
    loads = flow.sum(axis=0) + staying
    rank_loads = loads / loads.mean()
    most = int(np.argmax(rank_loads))
    mine = [j for j in range(most * own, (most + 1) * own) if j not in replicated]
    groups = [*(kept[j] for j in mine), *(float(sent[most, j]) / ranks for j in replicated)]
    passing = np.diagonal(flow)
    leaving, arriving = flow.sum(axis=1) - passing, flow.sum(axis=0) - passing
    mean, all_alike = float(leaving.mean()), experts * (ranks - 1) / ranks
    busiest = float(max(leaving.max(), arriving.max()))
    return ExpertLoad(
        kept,
        dropped,
        tuple(rank_loads.tolist()),
        float(rank_loads[most]),
        tuple(groups),
        mean / all_alike if ranks > 1 else 1.0,
        busiest / mean if mean else 1.0,
    )


def least_capacity(routing: Routing, experts: int) -> float:
    """The least capacity at which nothing is dropped: the largest share of an expert in what one source sends."""
    return float(routing.shares(experts).max())


# ----------------------------------------------------------------------------------------------- as options


def read_routing(told: Any) -> Routing:
    """The routing that an option says: ``balanced``, ``{zipf: 1.1}`` or ``{counts: FILE}``.

    Raises ValueError for what is none of these, PlanError for a file that cannot be used.
    """
    if isinstance(told, Routing):
        return told
    if told == "balanced":
        return Routing()
    if not isinstance(told, Mapping) or len(told) != 1:
        raise ValueError("must be balanced, {zipf: exponent} or {counts: file}")
    ((word, value),) = told.items()
    if word == "zipf":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_UNEVEN:
            raise ValueError(f"the exponent of zipf must be between 0 (even) and {MOST_UNEVEN:g}")
        return Routing(zipf=float(value))
    if word == "counts":
        if not isinstance(value, str):
            raise ValueError("counts must be the path of a file")
        return Routing(counts=read_counts(Path(value)), file=value)
    raise ValueError(f"no such routing as {word!r}. {nearest(str(word), WORDS)}")


RoutingOption = Annotated[
    Routing,
    PlainValidator(read_routing),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "balanced"},
                {
                    "type": "object",
                    "properties": {"zipf": {"type": "number", "minimum": 0, "maximum": MOST_UNEVEN}},
                    "required": ["zipf"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"counts": {"type": "string"}},
                    "required": ["counts"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""The type of an option that says it."""


def read_counts(path: Path) -> tuple[tuple[float, ...], ...]:
    """Counts from a file: JSON, a list of numbers or a list of such rows; or CSV without a head line, one row or more.

    Raises PlanError, with what is wrong, for a file that holds none.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise PlanError(str(path), f"it cannot be read ({error.strerror})", REMEDY) from None
    except ValueError:
        raise PlanError(str(path), "it is not UTF-8 text", REMEDY) from None
    rows = _of_json(path, text) if path.suffix == ".json" else [row for row in csv.reader(text.splitlines()) if row]
    if not rows:
        raise PlanError(str(path), "it holds no counts", REMEDY)
    return tuple(_row(path, i, row, len(rows[0])) for i, row in enumerate(rows, 1))


def _of_json(path: Path, text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(str(path), f"it is not valid JSON ({error})", REMEDY) from None
    if not isinstance(found, list):
        raise PlanError(str(path), "it holds no list", REMEDY)
    return found if not found or isinstance(found[0], list) else [found]


def _row(path: Path, number: int, row: Any, length: int) -> tuple[float, ...]:
    where = f"{path} row {number}"
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != length:
        raise PlanError(where, f"rows are all as long as the first one, of {length} experts", REMEDY)
    try:
        # Whole numbers stay such, so that even counts are even to the last bit.
        found = tuple(float(one) for one in row)
    except (TypeError, ValueError, OverflowError):
        raise PlanError(where, "counts are numbers", REMEDY) from None
    if not all(0 <= one < math.inf for one in found) or not sum(found):
        raise PlanError(where, "counts are not below zero, and some are above it", REMEDY)
    return found
