"""Routing: how many tokens are routed to each expert, and the load of the ranks that hold the experts.

The routing of a trained router cannot be forecast. The plan says it: ``balanced`` (equal tokens for every expert),
``{zipf: s}`` (expert j = 0, 1, ... gets tokens in proportion to 1/(j + 1)^s; rank r of P holds the experts from r E/P
on, so the first rank has the most popular ones), or ``{counts: FILE}`` (tokens counted in a run).

The *share* of an expert is its number of tokens (from one source rank) over that of even routing, k T/E, for T tokens
per rank, top k and E experts. The shares of a source rank add up to E.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import PlainValidator, WithJsonSchema

from hardware.documents.input_file import DATA, Unreadable, parse_json, read_text
from hardware.errors import PlanError, nearest
from simulator.ir.ops import Attention, Exchange, Gemm, Memory

MOST_UNEVEN = 10.0
"""Largest exponent of Zipf's law: the second expert then gets a thousandth of the tokens of the first."""

LARGEST_COUNT = 1e18
"""Largest count of tokens: sums of more could overflow."""

REMEDY = "Name a JSON or CSV file with a count for each expert, or a row of counts for each rank that holds experts"

ROUNDED = 1e-12
"""Relative rounding error of a share that still counts as a whole number of blocks."""

WORDS = ("balanced", "zipf", "counts")


@dataclass(frozen=True)
class Routing:
    """Routing of tokens to experts; by default even.

    zipf: exponent of Zipf's law; 0: even.
    counts: tokens of every expert, a row for each source rank or one row for all; each row is normalised.
    file: the file that the counts come from, for messages.
    """

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
        """Raises PlanError if the counts have another number of experts or of source ranks.

        where: the option, for the message.
        """
        if self.counts and (found := len(self.counts[0])) != experts:
            rule = f"{self.file or 'it'} counts tokens of {found} experts, and the model has {experts}"
            raise PlanError(where, rule, REMEDY)
        if (found := len(self.counts)) > 1 and found != ranks:
            rule = f"{self.file or 'it'} counts tokens from {found} ranks, and {ranks} hold the experts"
            raise PlanError(where, rule, "Give one row for all, or change the degree", found)

    def shares(self, experts: int) -> np.ndarray:
        """Shares [source ranks, experts]; one row where all source ranks have the same."""
        rows = np.array(self.counts or [np.arange(1.0, experts + 1) ** -self.zipf])
        return np.asarray(rows * experts / rows.sum(axis=1, keepdims=True))

    def limit_outgoing(self, ranks: int, experts: int, machine: int, most: float, topk: int) -> Routing:
        """The routing behind a gate that lets a share `most` of a rank's tokens leave their machine, with one copy.

        Where the first choice of more tokens is on another machine, all other copies choose among the experts of the
        own machine, of `machine` ranks.
        """
        shares, inside = self.shares(experts), _own_machine(ranks, experts, machine)
        near = np.where(inside, shares, 0.0)
        far = np.where(inside, 0.0, shares)
        outside = far.sum(axis=1, keepdims=True) / experts
        leaving = np.where(outside > most, most / topk, outside)
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = near * np.nan_to_num((1 - leaving) / (1 - outside)) + far * np.nan_to_num(leaving / outside)
        return replace(self, zipf=0.0, counts=tuple(map(tuple, rows.tolist())))

    def favour_machine(self, ranks: int, experts: int, machine: int, ratio: float) -> Routing:
        """The routing of a router that chooses an expert on the own machine, of `machine` ranks, `ratio` times as often
        as it otherwise would, in relation to the others."""
        near = self.shares(experts) * np.where(_own_machine(ranks, experts, machine), ratio, 1.0)
        return replace(self, zipf=0.0, counts=tuple(map(tuple, near.tolist())))

    def exceeding(self, limits: Routing, experts: int, capacity: float) -> float:
        """Part of all choices beyond capacities of `capacity` times the shares of `limits`."""
        shares = self.shares(experts)
        kept = np.minimum(shares, capacity * limits.shares(experts))
        return max(0.0, 1.0 - float(kept.sum() / np.broadcast_to(shares, kept.shape).sum()))

    def outgoing(self, ranks: int, experts: int, machine: int, replicated: tuple[int, ...] = ()) -> float:
        """Share of all copies that are sent to another machine. replicated: see `load`."""
        far = np.where(_own_machine(ranks, experts, machine), 0.0, self.shares(experts))
        far[:, list(replicated)] = 0.0
        return float(far.sum() / (ranks * experts))

    def load(
        self, ranks: int, experts: int, capacity: float | None = None, replicated: tuple[int, ...] = ()
    ) -> ExpertLoad:
        """The load of `ranks` that hold an equal number of `experts` each.

        capacity: capacity factor, the largest share of an expert from one source rank; None: dropless.
        replicated: experts whose weights all ranks hold, so that their tokens stay on their rank.
        """
        return _load(self, ranks, experts, capacity, replicated)

    def loads_by_place(self, ranks: int, experts: int) -> tuple[tuple[float, float], ...]:
        """For the first expert of all ranks, the second, ...: tokens that leave a rank for one of these experts over
        those of even routing, and the busiest rank's over this mean (`ExpertLoad.remote` and `.busiest_exchange`)."""
        return _loads_by_place(self, ranks, experts)


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the ranks that hold experts, relative to even routing.

    With a capacity factor all places are sent and computed, filled or not, so all ranks have the same load.

    kept: share of every expert, after drops.
    dropped: part of the routed tokens that exceeds the capacity.
    rank_loads: tokens on every rank over the mean of all ranks.
    most_loaded: tokens of the most loaded rank over the mean of all ranks.
    expert_loads: shares of the experts of the most loaded rank.
    remote: tokens that leave a rank, mean over ranks, over those of even routing.
    busiest_exchange: largest number of tokens that a rank sends or receives over the mean that ranks send.
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
        """Whether every rank and every expert has the load of even routing."""
        return {*self.rank_loads, self.most_loaded, *self.expert_loads, self.remote, self.busiest_exchange} <= {1.0}

    def pad_to_blocks(self, block: float) -> ExpertLoad:
        """The load where the rows of each expert are padded to multiples of `block` shares; padding is not sent."""
        own = len(self.kept) // len(self.rank_loads)
        filled = [block * math.ceil(share / block * (1 - ROUNDED)) for share in self.kept]
        ranks = [filled[at : at + own] for at in range(0, len(filled), own)]
        most = max(ranks, key=sum)
        return replace(self, most_loaded=sum(most) / own, expert_loads=tuple(most))


def _own_machine(ranks: int, experts: int, machine: int) -> np.ndarray:
    """Whether each expert is on the machine of each source rank [ranks, experts]."""
    return np.arange(experts) * ranks // experts // machine == np.arange(ranks)[:, None] // machine


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
    exchange = _exchange_of(flow, own)
    return ExpertLoad(kept, dropped, tuple(rank_loads.tolist()), float(rank_loads[most]), tuple(groups), *exchange)


def _exchange_of(flow: np.ndarray, own: int) -> tuple[float, float]:
    """Of shares from each rank to each (rows: senders), `own` experts a rank: what leaves a rank over that of even
    routing, mean over ranks; and what the busiest rank sends or receives, over the mean."""
    ranks, on_rank = len(flow), np.diagonal(flow)
    outgoing, incoming = flow.sum(axis=1) - on_rank, flow.sum(axis=0) - on_rank
    mean, even = float(outgoing.mean()), own * (ranks - 1)
    busiest = float(max(outgoing.max(), incoming.max()))
    return mean / even if even else 1.0, busiest / mean if mean else 1.0


@lru_cache(maxsize=256)
def _loads_by_place(routing: Routing, ranks: int, experts: int) -> tuple[tuple[float, float], ...]:
    sent = np.broadcast_to(routing.shares(experts), (ranks, experts))
    return tuple(_exchange_of(sent[:, place :: experts // ranks], 1) for place in range(experts // ranks))


def least_capacity(routing: Routing, experts: int) -> float:
    """The least capacity factor without dropped tokens: the largest share of an expert from one source rank."""
    return float(routing.shares(experts).max())


# --------------------------------------------------------------------------------------------------- options


def read_routing(given: Any) -> Routing:
    """The routing of an option: ``balanced``, ``{zipf: 1.1}`` or ``{counts: FILE}``.

    Raises ValueError for any other value, PlanError for a file without valid counts.
    """
    if isinstance(given, Routing):
        return given
    if given == "balanced":
        return Routing()
    if not isinstance(given, Mapping) or len(given) != 1:
        raise ValueError("must be balanced, {zipf: exponent} or {counts: file}")
    ((word, value),) = given.items()
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
"""The type of an option that says the routing."""


def read_counts(path: Path) -> tuple[tuple[float, ...], ...]:
    """Counts from a file: a JSON list of numbers or list of rows, or a CSV file without a header, one row or more.

    Raises PlanError for a file without valid counts.
    """
    try:
        text = read_text(path, DATA)
        rows = _of_json(path, text) if path.suffix == ".json" else _of_csv(path, text)
    except Unreadable as error:
        raise error.error(PlanError, str(path), REMEDY) from None
    if not rows:
        raise PlanError(str(path), "it holds no counts", REMEDY)
    return tuple(_row(f"{path} row {i}", row, len(rows[0])) for i, row in enumerate(rows, 1))


def _of_json(path: Path, text: str) -> list[Any]:
    found = parse_json(text)
    if not isinstance(found, list):
        raise PlanError(str(path), "it holds no list", REMEDY)
    return found if not found or isinstance(found[0], list) else [found]


def _of_csv(path: Path, text: str) -> list[Any]:
    reader = csv.reader(text.splitlines())
    try:
        return [[_number(cell) for cell in row] for row in reader if row]
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise PlanError(f"{path}:{reader.line_num}", f"it is not valid CSV ({error})", REMEDY) from None


def _row(where: str, row: Any, length: int) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != length:
        raise PlanError(where, f"every row has as many counts as the first one, {length}", REMEDY)
    found = tuple(_count(f"{where} count {place}", one) for place, one in enumerate(row, 1))
    if not any(found):
        raise PlanError(where, "at least one count of a row is positive", REMEDY)
    return found


def _count(where: str, given: Any) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 <= given <= LARGEST_COUNT:
        rule = f"a count is a number from 0 to {LARGEST_COUNT:g}, in JSON without quotes"
        raise PlanError(where, rule, REMEDY, given)
    return float(given)


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def slowest_rank(work: Any) -> Any:
    """The work of the slowest rank, for which the others wait.

    One device stands for all ranks that run the same ops. Where their amounts of work differ, `work` states the mean
    over ranks, and `pace` the work of the most loaded rank over that mean. `Gemm.groups` are those of that rank.
    """
    pace = getattr(work, "pace", 1.0)
    if pace == 1.0:
        return work
    if isinstance(work, Gemm):
        m, k = (work.m, pace * work.k) if work.layout == "nt" else (pace * work.m, work.k)
        return replace(work, m=m, k=k, pace=1.0)
    if isinstance(work, Attention):
        return replace(work, share=pace * work.share, pace=1.0)
    if isinstance(work, Memory):
        return replace(work, read=round(pace * work.read), write=round(pace * work.write), pace=1.0)
    if isinstance(work, Exchange):
        return replace(work, tokens=round(pace * work.tokens), pace=1.0)
    return replace(work, nbytes=round(pace * work.nbytes), pace=1.0)
