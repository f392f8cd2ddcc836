"""Dispatch of tokens to the ranks that hold their experts, and their combination afterwards.

    seconds = latency + step log2(ranks / nodes) + hop (1 - 1/nodes) + (copied^4 + up^4 + out^4)^(1/4)
    copied  = tokens (targets + source + forward reached) (token + handling) / (rate clock sms)
    up      = tokens targets (1 - nodes/ranks) token / (nvlink link)
    out     = tokens reached (1 - 1/nodes) token / (nic port)

- A token goes once to each distinct rank that holds one of its k experts (`targets`): k of E without replacement lie on
  n (1 - C(E - E/n, k) / C(E, k)) of n ranks. Over the network it goes once to each distinct node (`reached`), and from
  there over the scale-up links (DeepEP, README: NVLink and RDMA forwarding). Routing limited to `most` nodes
  (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) chooses among their experts only.
- Low-latency kernels (`once` is false) send it k times, to each expert, and wait for a count of each expert (`flag`).
- Copies are made by the multiprocessors that are given to them (DeepEP: 20 to 24 of 132), one token at a time: targets,
  source and forwarding nodes handle a token, each for its bytes and for bookkeeping that does not depend on its width.
- Links and copies work at once, so the slowest tells, with some loss where two of them are alike.
- Ranks that do not know how many tokens come exchange that first: operation `prepare`, of tokens without bytes.

Each operation has coefficients of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hardware.cluster import Tier
from hardware.gpu import GPU
from hardware.link import Link
from hardware.topology import Reach
from simulator.costs.coefficients import coefficient, higher, lower, spread
from simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from simulator.ir.ops import WIDTH, Exchange

Way = Link | Tier
"""What tells the rate of a GPU's links of one kind."""

CLOCK = 1.9e9
"""Of a GPU that does not tell it [Hz]."""


@dataclass(frozen=True)
class Dispatch:
    """Exchange of the tokens of all `ranks` among the ranks of their experts.

    operation: dispatch, combine or prepare. tokens: of one rank. hidden, topk, experts: of the model. nodes: over which
    the ranks are spread evenly. dtype: in which tokens travel. sms: multiprocessors that copy. once: a token goes once
    to a rank or node, not once for each of its experts. most: nodes that the experts of a token lie on at most. even:
    they lie on as many ranks as they can (benchmarks that balance loads).
    """

    operation: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    ranks: int
    nodes: int = 1
    dtype: str = "bf16"
    sms: int = 24
    once: bool = True
    most: int = 4
    even: bool = False

    flops = 0.0

    @cached_property
    def targets(self) -> Any:
        """Copies of a token that its ranks receive."""
        if not self.once:
            return 1.0 * self.topk
        if self.even:
            return lower(1.0 * self.topk, self.ranks)
        reached = min(self.most, self.nodes)
        return distinct(self.ranks * reached / self.nodes, self.experts * reached / self.nodes, self.topk)

    @cached_property
    def reached(self) -> Any:
        """Copies of a token that its nodes receive."""
        if not self.once:
            return 1.0 * self.topk
        reached = min(self.most, self.nodes)
        return distinct(reached, self.experts * reached / self.nodes, self.topk)

    @property
    def token(self) -> Any:
        """Bytes of a token as it travels."""
        return self.hidden * WIDTH[self.dtype]

    @property
    def up(self) -> Any:
        """Bytes that a rank sends over scale-up links."""
        near = 1.0 if self.once else 1.0 / self.nodes
        return self.tokens * self.token * self.targets * near * (1.0 - self.nodes / self.ranks)

    @property
    def out(self) -> Any:
        """Bytes that a rank sends to other nodes."""
        return self.tokens * self.token * self.reached * (1.0 - 1.0 / self.nodes)

    @classmethod
    def of(cls, work: Exchange, reach: Reach) -> Dispatch:
        """A step's exchange in a group that spreads like `reach`."""
        group = reach.members, reach.islands.number
        shape = work.hidden, work.topk, work.experts
        return cls(work.operation, work.tokens, *shape, *group, work.dtype, work.sms, most=work.most)


def distinct(parts: Any, experts: Any, topk: Any) -> Any:
    """Expected number of `parts`, each with as many of the experts, that hold one of a token's `topk`."""
    missed = 1.0
    for taken in range(int(topk if isinstance(topk, int | float) else topk.max())):
        missed = missed * higher(1.0 - experts / parts / higher(experts - taken, 1.0), 0.0) ** (taken < topk)
    return parts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class DispatchLaw:
    """Coefficients of `seconds`, for each operation."""

    nvlink: float = coefficient("share of the scale-up links' rate", 0.1, 0.95, 0.6)
    nic: float = coefficient("share of a network port's rate", 0.1, 0.98, 0.85)
    step: float = coefficient("latency of doubling the ranks of a node [s]", 1e-8, 5e-6, 5e-7)
    hop: float = coefficient("latency of messages between nodes [s]", 1e-7, 5e-5, 1e-5)
    flag: float = coefficient("latency of the count of one expert [s]", 1e-10, 1e-7, 1e-8)
    forward: float = coefficient("handlings of a token at each of its nodes", 0.1, 20.0, 1.0)
    latency: float = coefficient("of a call [s]", 1e-6, 1e-4, 2e-5, "library")
    rate: float = coefficient("bytes that a multiprocessor copies in a clock", 0.2, 80.0, 15.0, "library")
    source: float = coefficient("handlings of a token at its source", 0.05, 50.0, 2.0, "library")
    handling: float = coefficient("bytes that the bookkeeping of one handling is worth", 10.0, 1e5, 3e3, "library")
    spread: float = 0.0
    spread_short: float = 0.0


def seconds(work: Dispatch, gpu: GPU, link: Way, port: Way, law: DispatchLaw) -> tuple[Any, Any]:
    """Of a call or of many (arrays in `work`), and the part of them that is no work.

    link: that joins the GPUs of a node; port: of one GPU to the network.
    """
    nodes = work.nodes
    latency = law.latency + law.step * math.log2(work.ranks / nodes) + law.hop * (1.0 - 1.0 / nodes)
    latency = latency + (0.0 if work.once else law.flag * work.experts)
    forwarded = law.forward * work.reached if nodes > 1 else 0.0
    copied = work.tokens * (work.targets + law.source + forwarded) * (work.token + law.handling)
    copied = copied / (law.rate * (gpu.clock or CLOCK) * work.sms)
    up, out = (_over(*one) for one in ((work.up, link, law.nvlink), (work.out, port, law.nic)))
    return latency + (copied**4 + up**4 + out**4) ** 0.25, latency


def _over(nbytes: Any, way: Way, share: float = 1.0) -> Any:
    """Seconds of bytes over a part of the rate of links; a cluster may lack those over which nothing goes."""
    return nbytes / (share * way.bandwidth) if way.bandwidth else 0.0 * nbytes


def least(work: Dispatch, link: Way, port: Way) -> Any:
    """What nothing beats: the bytes at the nominal rates of links and ports."""
    return higher(_over(work.up, link), _over(work.out, port))


def price(work: Dispatch, gpu: GPU, link: Way, port: Way, law: DispatchLaw) -> Estimate:
    """One call."""
    if not work.tokens:
        return NOTHING
    taken, latency = seconds(work, gpu, link, port, law)
    return Estimate(max(taken, least(work, link, port)), spread(law, taken, latency))


def use(work: Dispatch, gpu: GPU, link: Way, port: Way, law: DispatchLaw) -> Use:
    """What a call occupies: links for as long as tokens move, its multiprocessors all the time."""
    if not work.tokens:
        return ALONE
    taken, latency = seconds(work, gpu, link, port, law)
    moving = taken - latency
    busy = [_over(*one) / moving for one in ((work.up, link, law.nvlink), (work.out, port, law.nic))]
    return Use(moving, (min(1.0, busy[0]), 0.0, min(1.0, busy[1])), min(1.0, work.sms / gpu.multiprocessors))
