"""Routing: how many tokens are routed to each expert, and the load of the ranks that hold the experts.

The plan says it: ``balanced`` (equal tokens for every expert, as a benchmark forces them to be), ``natural`` or
``loss-free`` (what a trained router does in the mean over layers and micro-batches, see `TrainedRouter`), ``{zipf: s}``
(expert j = 0, 1, ... gets tokens in proportion to 1/(j + 1)^s; rank r of P holds the experts from r E/P on, so the
first rank has the most popular ones), or ``{counts: FILE}`` (tokens counted in a run). It may change from step to step:
``{zipf: s, drift: d, steps: n}`` (before each step pairs of experts swap their popularity, a share d of all experts) or
``{trace: FILE}`` (counts of each step). Then n steps are forecast, in turn.

The *share* of an expert is its number of tokens (from a source rank) over that of even routing, k T/E, for T tokens
per rank, top k and E experts. The shares of a source rank add up to E.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import Attention, Exchange, Gemm, Memory

REMEDY = "Name a JSON or CSV file with a count for each expert, or a row of counts for each rank that holds experts"

ROUNDED = 1e-12
"""Relative rounding error of a share that still counts as a whole number of blocks."""

Rows = tuple[tuple[float, ...], ...]
"""Counts of every expert, a row for each source rank or a single row for all."""


@dataclass(frozen=True)
class TrainedRouter:
    """How far the loads of experts lie apart under a trained router.

    The share of an expert in the tokens that are exchanged together, those of D documents, has the variance
    lasting^2 + topical^2 / D over experts: some experts are popular in all data, and tokens of a document choose
    alike. The rank of E/P of them has that variance over E/P, and all wait for the busiest rank of each layer: in the
    mean that is the expected largest of P normal deviates. Which rank it is differs from layer to layer.

    lasting: standard deviation of the shares of experts in all data.
    topical: standard deviation of the share of an expert in a document around its share in all data.
    """

    lasting: float
    topical: float

    def deviation(self, documents: float) -> float:
        """Returns the standard deviation of the share of an expert in the tokens of so many documents."""
        return math.hypot(self.lasting, self.topical / math.sqrt(documents))


TRAINED = {"natural": TrainedRouter(0.22, 0.18), "loss-free": TrainedRouter(0.017, 0.18)}
"""Trained routers: kept even by an auxiliary loss (natural), or by a bias that follows the loads of experts.

lasting: the most popular expert of all data gets 1.32 of the mean share in Mixtral-8x7B (8 experts, mean of its 32
    layers; ajtejankar/mixtral-vis-moe @5c2f185d5, frac_vecs: the shares of experts in 14,042 questions of MMLU's 57
    subjects), 1.72 and 1.52 with 64 experts and an auxiliary loss, 1.04 and 1.04 with the bias (arXiv 2408.15664,
    table 2, MaxVio_global): over the expected largest of 8 and 64 normal deviates 0.22, 0.30, 0.22, and 0.017.
topical: in Mixtral-8x7B 0.18, a subject with its examples as a document. The largest share of 1, 4 and 16 of them is
    1.42, 1.34 and 1.32 of the mean, by this law 1.41, 1.34 and 1.32.
A stronger auxiliary loss evens out more: 0.05 with 8 experts at 38,350 steps (shawntan/scattermoe, issue 10).
"""

LOAD_SIGMA = 0.08
"""Standard deviation of log(step) for the load of trained routers, of the models above: the busiest of eight ranks, of
an expert each, has 1.08, 1.31, 1.31 and 1.43 of the mean, a deviation of 0.12, in two thirds of a step."""

DOCUMENT = 1024
"""Tokens of a document, where a job does not say them (assumed; pages of the web have some 500 to 1,500)."""


USUAL_DOCUMENTS = 16
"""Documents by which the load of a trained router is named, where a job does not ask for it."""


def normal_scores(count: int) -> np.ndarray:
    """Returns the expected values of `count` standard normal deviates, the largest first (Blom's approximation)."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((rank - 0.375) / (count + 0.25)) for rank in range(count, 0, -1)])


@dataclass(frozen=True)
class Routing:
    """Routing of tokens to experts; by default even.

    zipf: exponent of Zipf's law; 0: even.
    counts: tokens of every expert, a row for each source rank or a single row for all; each row is normalised.
    trace: counts of each step, where they change.
    file: the file that the counts come from, for messages.
    drift: share of the experts that swap their popularity with another before each step.
    seed: of the pairs that swap.
    warmup: steps before the first that is forecast, whose loads policies have seen.
    steps: number of steps that are forecast.
    step: the step that `shares` and `load` are of.
    trained: kind of trained router, a name of `TRAINED`; empty: none.
    documents: documents whose tokens a trained router spreads at a time.
    """

    zipf: float = 0.0
    counts: Rows = ()
    trace: tuple[Rows, ...] = ()
    file: str = ""
    drift: float = 0.0
    seed: int = 0
    warmup: int = 0
    steps: int = 1
    step: int = 0
    trained: str = ""
    documents: float = 1.0

    def __str__(self) -> str:
        over = f" of {self.steps} steps" if self.steps > 1 else ""
        if self.counts or self.trace:
            return f"tokens{over} are spread over the experts as {self.file or 'a run'} counts them"
        if self.trained:
            balance = "a bias that evens out loads" if self.trained == "loss-free" else "an auxiliary loss"
            return f"experts are chosen by a trained router with {balance}, {self.documents:,.0f} documents at a time"
        if self.zipf:
            words = f"experts are chosen by Zipf's law with exponent {self.zipf:g}, the most popular ones on one rank"
            drift = f"{self.drift:.1%} of all experts swap their popularity before each{over}"
            return f"{words}; {drift}" if self.drift else words
        return "tokens are spread over the experts evenly"

    @cached_property
    def _hash(self) -> int:
        """Of all fields, computed once: a trace may be long."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    def at_step(self, step: int) -> Routing:
        """Returns the routing of another step."""
        return replace(self, step=step)

    def check(self, ranks: int, experts: int, where: str) -> None:
        """Raises PlanError if the counts have another number of experts or of source ranks.

        where: the option, for the message.
        """
        for step, rows in enumerate(self.trace or ([self.counts] if self.counts else [])):
            of = f"{self.file or 'it'}{f', step {step},' if self.steps > 1 else ''}"
            if (counted := len(rows[0])) != experts:
                rule = f"{of} counts tokens of {counted} experts, and the model has {experts}"
                raise PlanError(where, rule, REMEDY)
            if (counted := len(rows)) > 1 and counted != ranks:
                rule = f"{of} counts tokens from {counted} ranks, and {ranks} hold the experts"
                raise PlanError(where, rule, "Give one row for all, or change the degree", counted)

    def shares(self, experts: int, ranks: int | None = None) -> np.ndarray:
        """Returns shares [source ranks, experts]; a single row where all source ranks have the same.

        ranks: that hold the experts, whose loads under a trained router are those expected; None: a rank for each.
        """
        counts = self.trace[self.step] if self.trace else self.counts
        popularity = self._trained_shares(experts, ranks or experts) if self.trained else self._popularity(experts)
        rows = np.array(counts or [popularity])
        return np.asarray(rows * experts / rows.sum(axis=1, keepdims=True))

    def _trained_shares(self, experts: int, ranks: int) -> np.ndarray:
        """Returns the expected shares of the experts of the busiest rank, the next rank, ..., the most popular first in
        each."""
        per_rank, deviation = experts // ranks, TRAINED[self.trained].deviation(self.documents)
        loads = 1 + deviation / math.sqrt(per_rank) * normal_scores(ranks)
        return np.maximum(loads[:, None] + deviation * normal_scores(per_rank), 0.0).ravel()

    def _popularity(self, experts: int) -> np.ndarray:
        """Returns the popularity of every expert by Zipf's law, after the swaps of all steps so far."""
        popularity = np.arange(1.0, experts + 1) ** -self.zipf
        swaps, random = math.floor(self.step * self.drift * experts / 2 + ROUNDED), np.random.default_rng(self.seed)
        for _ in range(swaps if experts > 1 else 0):
            first, second = random.choice(experts, 2, replace=False)
            popularity[[first, second]] = popularity[[second, first]]
        return popularity

    def limit_outgoing(self, ranks: int, experts: int, machine: int, most: float, topk: int) -> Routing:
        """Returns the routing behind a gate that lets a share `most` of a rank's tokens leave their machine, with a
        single copy.

        Where the first choice of more tokens is on another machine, all other copies choose among the experts of the
        rank's machine, of `machine` ranks.
        """
        shares, inside = self.shares(experts, ranks), _own_machine(ranks, experts, machine)
        near = np.where(inside, shares, 0.0)
        far = np.where(inside, 0.0, shares)
        outside = far.sum(axis=1, keepdims=True) / experts
        leaving = np.where(outside > most, most / topk, outside)
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = near * np.nan_to_num((1 - leaving) / (1 - outside)) + far * np.nan_to_num(leaving / outside)
        return Routing(counts=tuple(map(tuple, rows.tolist())), file=self.file)

    def favour_machine(self, ranks: int, experts: int, machine: int, ratio: float) -> Routing:
        """Returns the routing of a router that chooses an expert on the rank's machine, of `machine` ranks, `ratio`
        times as often as it otherwise would, in relation to the others."""
        near = self.shares(experts, ranks) * np.where(_own_machine(ranks, experts, machine), ratio, 1.0)
        return replace(self, trained="", zipf=0.0, counts=tuple(map(tuple, near.tolist())))

    def exceeding(self, limits: Routing, experts: int, capacity: float) -> float:
        """Returns the part of all choices beyond capacities of `capacity` times the shares of `limits`."""
        shares = self.shares(experts)
        kept = np.minimum(shares, capacity * limits.shares(experts))
        return max(0.0, 1.0 - float(kept.sum() / np.broadcast_to(shares, kept.shape).sum()))

    def outgoing(self, ranks: int, experts: int, machine: int, replicated: tuple[int, ...] = ()) -> float:
        """Returns the share of all copies that are sent to another machine. replicated: see `load`."""
        far = np.where(_own_machine(ranks, experts, machine), 0.0, self.shares(experts, ranks))
        far[:, list(replicated)] = 0.0
        return float(far.sum() / (ranks * experts))

    def load(
        self, ranks: int, experts: int, capacity: float | None = None, placement: Placement | None = None
    ) -> ExpertLoad:
        """Returns the load of `ranks` that hold an equal number of `experts` each.

        capacity: capacity factor, the largest share of an expert from a source rank; None: dropless.
        placement: of the experts; None: in their order.
        """
        key = self, ranks, experts, capacity, placement
        return remember(_loads, key, lambda: _load(*key), _most_kept(experts))

    def loads_by_place(self, ranks: int, experts: int) -> tuple[tuple[float, float], ...]:
        """Returns for the first expert of all ranks, the second, ...: tokens that leave a rank for any of these experts
        over those of even routing, and the busiest rank's over this mean (`ExpertLoad.remote` and
        `.busiest_exchange`)."""
        key = self, ranks, experts
        return remember(_loads_of_places, key, lambda: _loads_by_place(*key), _most_kept(experts))


@dataclass(frozen=True)
class Placement:
    """The ranks that hold the weights of each expert.

    hosts: ranks of each expert, its owner first.
    stays: whether the tokens of a rank stay there where it hosts their expert, and others go to its owner; otherwise
        those of an expert are spread evenly over its hosts.
    """

    hosts: tuple[tuple[int, ...], ...]
    stays: bool = False

    @classmethod
    def in_order(cls, ranks: int, experts: int) -> Placement:
        """Returns the placement in which rank r of P owns the experts from r E/P on; no other rank hosts them."""
        return cls(tuple((expert * ranks // experts,) for expert in range(experts)))

    @classmethod
    def with_shadows(cls, ranks: int, experts: int, shadows: Iterable[int]) -> Placement:
        """Returns the same, but all ranks host the `shadows`."""
        everywhere, owned = {*shadows}, cls.in_order(ranks, experts)
        others = (
            (owner, *(rank for rank in range(ranks) if rank != owner)) if expert in everywhere else (owner,)
            for expert, (owner,) in enumerate(owned.hosts)
        )
        return cls(tuple(others), stays=True)

    def distribute(self, shares: np.ndarray, ranks: int) -> np.ndarray:
        """Returns the shares that each rank sends to each [source ranks, ranks].

        shares: of every expert, a row for each source rank or a single row for all.
        """
        owners = np.array([hosts[0] for hosts in self.hosts])
        alone = np.array([len(hosts) == 1 for hosts in self.hosts])
        rows = [np.bincount(owners[alone], row[alone], minlength=ranks) for row in shares]
        flow = np.zeros((ranks, ranks)) + rows
        for expert in np.flatnonzero(~alone).tolist():
            flow += self._sent_to(expert, shares, ranks)
        return flow

    def arrivals(self, rank: int, shares: np.ndarray, ranks: int) -> tuple[float, ...]:
        """Shares of the experts that a rank hosts which arrive there, mean over source ranks."""
        alone = (rank,)
        means = shares.mean(axis=0).tolist()
        return tuple(
            means[expert] if hosts == alone else float(self._sent_to(expert, shares, ranks)[:, rank].mean())
            for expert, hosts in enumerate(self.hosts)
            if rank in hosts
        )

    def _sent_to(self, expert: int, shares: np.ndarray, ranks: int) -> np.ndarray:
        """Returns the share of an expert that each rank sends to each [source ranks, ranks]."""
        sent, copies = np.broadcast_to(shares[:, expert], ranks), list(self.hosts[expert])
        moved = np.zeros((ranks, ranks))
        if self.stays:
            moved[:, copies[0]] = sent
            moved[copies] = np.diag(sent)[copies]
        else:
            moved[:, copies] = sent[:, None] / len(copies)
        return moved

    def transfers(self, before: Placement, ranks: int) -> np.ndarray:
        """Counts the experts that each rank sends to each [ranks, ranks] to come here from another placement: an
        owner's to all that did not host it."""
        moves = np.zeros((ranks, ranks), dtype=int)
        for old, new in zip(before.hosts, self.hosts, strict=True):
            for rank in {*new} - {*old}:
                moves[old[0], rank] += 1
        return moves


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the ranks that hold experts, relative to even routing.

    With a capacity factor all places are sent and computed, filled or not, so all ranks have the same load.

    kept: share of every expert, after drops.
    dropped: part of the routed tokens that exceeds the capacity.
    rank_loads: tokens on every rank over the mean of all ranks.
    most_loaded: tokens of the most loaded rank over the mean of all ranks.
    most_stored: tokens of all layers on the rank that stores most of them, over the mean: of stated loads those of the
        most loaded rank. Under a trained router another rank is the most loaded in each layer, and they even out.
    expert_loads: shares of the experts of the most loaded rank.
    remote: tokens that leave a rank, mean over ranks, over those of even routing.
    busiest_exchange: largest number of tokens that a rank sends or receives over the mean that ranks send.
    """

    kept: tuple[float, ...]
    dropped: float
    rank_loads: tuple[float, ...]
    most_loaded: float
    most_stored: float
    expert_loads: tuple[float, ...]
    remote: float
    busiest_exchange: float

    @cached_property
    def even(self) -> bool:
        """Whether every rank and every expert has the load of even routing."""
        return {*self.rank_loads, self.most_loaded, *self.expert_loads, self.remote, self.busiest_exchange} <= {1.0}

    def pad_to_blocks(self, block: float) -> ExpertLoad:
        """Returns the load where the rows of each expert are padded to multiples of `block` shares; padding is not
        sent."""
        per_rank = len(self.kept) // len(self.rank_loads)
        filled = [block * math.ceil(share / block * (1 - ROUNDED)) for share in self.kept]
        ranks = [filled[at : at + per_rank] for at in range(0, len(filled), per_rank)]
        most = max(ranks, key=sum)
        load = sum(most) / per_rank
        stored = self.most_stored / self.most_loaded * load
        return replace(self, most_loaded=load, most_stored=stored, expert_loads=tuple(most))


def _own_machine(ranks: int, experts: int, machine: int) -> np.ndarray:
    """Returns whether each expert is on the machine of each source rank [ranks, experts]."""
    return np.arange(experts) * ranks // experts // machine == np.arange(ranks)[:, None] // machine


KEPT_LOADS, KEPT_EXPERTS = 256, 2_000_000
"""The most loads that are kept, and the most experts in them, some 100 bytes each."""


def _most_kept(experts: int) -> int:
    """Returns the most loads of so many experts that are kept."""
    return min(KEPT_LOADS, KEPT_EXPERTS // experts + 1)


_loads: dict[Hashable, ExpertLoad] = {}
_loads_of_places: dict[Hashable, tuple[tuple[float, float], ...]] = {}


def _load(routing: Routing, ranks: int, experts: int, capacity: float | None, stated: Placement | None) -> ExpertLoad:
    shares = routing.shares(experts, ranks)
    processed = np.minimum(shares, math.inf if capacity is None else capacity)
    dropped = 1.0 - float(processed.sum() / shares.sum())
    kept = tuple(processed.mean(axis=0).tolist())
    per_rank = experts // ranks
    if capacity is not None:
        return ExpertLoad(kept, dropped, (1.0,) * ranks, 1.0, 1.0, (1.0,) * per_rank, 1.0, 1.0)
    placement = stated or Placement.in_order(ranks, experts)
    flow = placement.distribute(processed, ranks)
    loads = flow.sum(axis=0)
    rank_loads = loads / loads.mean()
    most = int(np.argmax(rank_loads))
    on_most = placement.arrivals(most, processed, ranks)
    exchange, most_loaded = _exchange_of(flow, per_rank), float(rank_loads[most])
    most_stored = 1.0 if routing.trained else most_loaded
    return ExpertLoad(kept, dropped, tuple(rank_loads.tolist()), most_loaded, most_stored, on_most, *exchange)


def _exchange_of(flow: np.ndarray, per_rank: int) -> tuple[float, float]:
    """Returns, of shares from each rank to each (rows: senders), `per_rank` experts a rank: what leaves a rank over
    that of even routing, mean over ranks; and what the busiest rank sends or receives, over the mean."""
    ranks, on_rank = len(flow), np.diagonal(flow)
    outgoing, incoming = flow.sum(axis=1) - on_rank, flow.sum(axis=0) - on_rank
    mean, even = float(outgoing.mean()), per_rank * (ranks - 1)
    busiest = float(max(outgoing.max(), incoming.max()))
    return mean / even if even else 1.0, busiest / mean if mean else 1.0


def _loads_by_place(routing: Routing, ranks: int, experts: int) -> tuple[tuple[float, float], ...]:
    sent = np.broadcast_to(routing.shares(experts, ranks), (ranks, experts))
    return tuple(_exchange_of(sent[:, place :: experts // ranks], 1) for place in range(experts // ranks))


def least_capacity(routing: Routing, experts: int) -> float:
    """Returns the least capacity factor without dropped tokens: the largest share of an expert from a source rank."""
    return float(routing.shares(experts).max())


def slowest_rank(work: Any) -> Any:
    """Returns the work of the slowest rank, for which the others wait.

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
