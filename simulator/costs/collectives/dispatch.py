"""Token dispatch to the ranks that hold the chosen experts, and combine, as DeepEP and TensorRT-LLM do it.

    seconds  = latency + (copies^4 + scale_up^4 + network^4)^(1/4)
    latency  = call_latency + doubling_latency log2(ranks / nodes) + node_latency (1 - 1 / nodes)
    copies   = tokens (target ranks + source_copies + forward_copies target nodes) (token + copy_overhead)
               / (copy_rate clock multiprocessors)
    scale_up = tokens target ranks (1 - nodes / ranks) token / (nvlink_share link)
    network  = tokens target nodes (1 - 1 / nodes) token / (nic_share port)

- A token is sent once to each distinct rank that holds any of its k experts: k of E experts without replacement lie on
  n (1 - C(E - E/n, k) / C(E, k)) of n ranks. Over the network it is sent once to each distinct node, and forwarded from
  there over the scale-up links (DeepEP, README: NVLink and RDMA forwarding). Node-limited routing (DeepSeek-V3,
  arXiv 2412.19437, section 2.1.2) chooses among the experts of `max_nodes` nodes only.
- Low-latency kernels (`deduplicated` is false) send it k times, once to each expert, and wait for a count of each
  expert.
- The multiprocessors of the call (DeepEP: 20 to 24 of 132) copy a single token at a time: target, source and
  forwarding ranks handle it, each for its bytes and for bookkeeping that does not depend on its width.
- Links and copies work concurrently: the slowest determines the time, with some loss where two of them are alike.
- Ranks that do not know how many tokens will arrive exchange the counts first: operation `prepare`, of empty tokens.

Each operation has separate coefficients.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from meshcast.hardware.cluster import Tier
from meshcast.hardware.gpu import GPU
from meshcast.hardware.link import Link
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.coefficients import coefficient, estimate_sigma, maximum, minimum
from meshcast.simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from meshcast.simulator.costs.kernels.roofline import CLOCK
from meshcast.simulator.ir.ops import WIDTH, Exchange

Rated = Link | Tier
"""Whatever states the rate of a GPU's links of a kind."""


@dataclass(frozen=True)
class Dispatch:
    """A call that exchanges the tokens of all ranks of a group among the ranks of their experts.

    Attributes:
        operation: dispatch, combine or prepare.
        tokens: of a rank.
        hidden: width of a token.
        topk: experts of a token.
        experts: of the layer.
        ranks: in the group.
        nodes: that the ranks lie on, the same number on each.
        dtype: number format in which tokens travel.
        sms: multiprocessors that copy.
        deduplicated: a token is sent once to a rank or node, not once for each of its experts.
        max_nodes: most nodes that the experts of a token lie on.
        balanced: the experts of a token lie on as many ranks as they can (benchmarks that balance loads).
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
    deduplicated: bool = True
    max_nodes: int = 4
    balanced: bool = False

    flops = 0.0

    @cached_property
    def target_ranks(self) -> Any:
        """Expected number of ranks that receive a token."""
        if not self.deduplicated:
            return 1.0 * self.topk
        if self.balanced:
            return minimum(1.0 * self.topk, self.ranks)
        nodes = min(self.max_nodes, self.nodes)
        return expected_parts(self.ranks * nodes / self.nodes, self.experts * nodes / self.nodes, self.topk)

    @cached_property
    def target_nodes(self) -> Any:
        """Expected number of nodes that receive a token."""
        if not self.deduplicated:
            return 1.0 * self.topk
        nodes = min(self.max_nodes, self.nodes)
        return expected_parts(nodes, self.experts * nodes / self.nodes, self.topk)

    @property
    def token_bytes(self) -> Any:
        """Bytes of a token as it travels."""
        return self.hidden * WIDTH[self.dtype]

    @property
    def scale_up_bytes(self) -> Any:
        """Bytes that a rank sends over scale-up links."""
        near = 1.0 if self.deduplicated else 1.0 / self.nodes
        return self.tokens * self.token_bytes * self.target_ranks * near * (1.0 - self.nodes / self.ranks)

    @property
    def network_bytes(self) -> Any:
        """Bytes that a rank sends to other nodes."""
        return self.tokens * self.token_bytes * self.target_nodes * (1.0 - 1.0 / self.nodes)

    @classmethod
    def of(cls, work: Exchange, reach: Reach) -> Dispatch:
        """Returns the exchange of a step in a group placed as `reach` says."""
        group = reach.members, reach.nodes.number
        shape = work.hidden, work.topk, work.experts
        return cls(work.operation, work.tokens, *shape, *group, work.dtype, work.sms, max_nodes=work.most)


def expected_parts(parts: Any, experts: Any, topk: Any) -> Any:
    """Returns the expected number of `parts`, of equally many experts each, that hold any of the `topk` experts."""
    missed = 1.0
    for taken in range(int(topk if isinstance(topk, int | float) else topk.max())):
        missed = missed * maximum(1.0 - experts / parts / maximum(experts - taken, 1.0), 0.0) ** (taken < topk)
    return parts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class DispatchCostModel:
    """Dispatch, combine or prepare: coefficients of `seconds`, for each operation."""

    nvlink_share: float = coefficient("share of the scale-up links' nominal rate", 0.1, 0.95, 0.6)
    nic_share: float = coefficient("share of a network port's nominal rate", 0.1, 0.98, 0.85)
    doubling_latency: float = coefficient("each doubling of the ranks of a node [s]", 1e-8, 5e-6, 5e-7)
    node_latency: float = coefficient("latency of messages between nodes [s]", 1e-7, 5e-5, 1e-5)
    count_latency: float = coefficient("latency of the token count of one expert [s]", 1e-10, 1e-7, 1e-8)
    forward_copies: float = coefficient("copies of a token at each node that forwards it", 0.1, 20.0, 1.0)
    call_latency: float = coefficient("latency of a call [s]", 1e-6, 1e-4, 2e-5, "library")
    copy_rate: float = coefficient("rate of copies [bytes per clock and multiprocessor]", 0.2, 80.0, 15.0, "library")
    source_copies: float = coefficient("copies of a token at its source", 0.05, 50.0, 2.0, "library")
    copy_overhead: float = coefficient("bookkeeping of one copy, as bytes", 10.0, 1e5, 3e3, "library")
    sigma: float = 0.0
    sigma_short: float = 0.0


def seconds(work: Dispatch, gpu: GPU, link: Rated, port: Rated, model: DispatchCostModel) -> tuple[Any, Any]:
    """Computes the time [s] of a call or of many (arrays in `work`), and the part of it that moves no bytes.

    link: that joins the GPUs of a node; port: of a GPU to the network.
    """
    nodes = work.nodes
    latency = model.call_latency + model.doubling_latency * math.log2(work.ranks / nodes)
    latency = latency + model.node_latency * (1.0 - 1.0 / nodes)
    latency = latency + (0.0 if work.deduplicated else model.count_latency * work.experts)
    forwarded = model.forward_copies * work.target_nodes if nodes > 1 else 0.0
    copied = work.tokens * (work.target_ranks + model.source_copies + forwarded)
    copies = copied * (work.token_bytes + model.copy_overhead) / (model.copy_rate * (gpu.clock or CLOCK) * work.sms)
    scale_up = _moving(work.scale_up_bytes, link, model.nvlink_share)
    network = _moving(work.network_bytes, port, model.nic_share)
    return latency + (copies**4 + scale_up**4 + network**4) ** 0.25, latency


def _moving(nbytes: Any, link: Rated, share: float = 1.0) -> Any:
    """Seconds of bytes at a share of a link's rate; 0 over links that a cluster lacks, where no bytes go."""
    return nbytes / (share * link.bandwidth) if link.bandwidth else 0.0 * nbytes


def lower_bound(work: Dispatch, link: Rated, port: Rated) -> Any:
    """Returns the time [s] that no call can beat: the bytes at the nominal rates of links and ports."""
    return maximum(_moving(work.scale_up_bytes, link), _moving(work.network_bytes, port))


def price(work: Dispatch, gpu: GPU, link: Rated, port: Rated, model: DispatchCostModel) -> Estimate:
    """Estimates the time of a call."""
    if not work.tokens:
        return NOTHING
    taken, latency = seconds(work, gpu, link, port, model)
    return Estimate(max(taken, lower_bound(work, link, port)), estimate_sigma(model, taken, latency))


def use(work: Dispatch, gpu: GPU, link: Rated, port: Rated, model: DispatchCostModel) -> Use:
    """Returns what a call occupies: links for as long as tokens move, its multiprocessors for all of its time."""
    if not work.tokens:
        return ALONE
    taken, latency = seconds(work, gpu, link, port, model)
    moving = taken - latency
    scale_up = _moving(work.scale_up_bytes, link, model.nvlink_share) / moving
    network = _moving(work.network_bytes, port, model.nic_share) / moving
    return Use(moving, (min(1.0, scale_up), 0.0, min(1.0, network)), min(1.0, work.sms / gpu.multiprocessors))
