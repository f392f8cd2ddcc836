"""Prices work: how long a kernel, collective or message takes, with its sigma and latency (`Estimate`).

Only this room turns work into seconds. `Costs` prices work on one cluster. `IdealCosts` has one rate for FLOPs and one
for bytes, so that closed forms hold exactly.

    kernels/      GEMM, attention, memory-bound kernels
    collectives/  collectives and messages over links
    calibration/  the coefficients of both, one YAML file per GPU and kind of link
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.hardware.cluster import Cluster, Tier
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.gpu import GPU
from meshcast.hardware.topology import Reach, message_reach, reach
from meshcast.simulator.costs import host
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives import collective, dispatch, fabric, p2p
from meshcast.simulator.costs.collectives.links import Links, TierCostModels
from meshcast.simulator.costs.estimate import ALONE, FULL, NOTHING, Estimate, Use
from meshcast.simulator.costs.kernels.decomposition import Decomposition
from meshcast.simulator.costs.kernels.eager import EagerPasses, make_eager_kernels
from meshcast.simulator.costs.kernels.gemm import uses_tensor_cores
from meshcast.simulator.costs.kernels.grouped import price_group_by_group
from meshcast.simulator.costs.kernels.libraries import (
    Relative,
    attention_format,
    attention_library,
    launches_each_group,
    training_library,
)
from meshcast.simulator.costs.kernels.sections import DENSE, SECTIONS, section_of, section_on
from meshcast.simulator.costs.regimes import GPU_REGIMES, Regime
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import (
    Attention,
    Collective,
    Communication,
    Exchange,
    Gemm,
    Host,
    HostCopy,
    HostLaunch,
    HostUpdate,
    Memory,
    Message,
    Transfer,
    Work,
)
from meshcast.simulator.ir.routing import slowest_rank

__all__ = ["RATES", "Costs", "Estimate", "Use"]

RATES = {
    "kernel": "rate of GEMMs and attention against the calibrated one (power, sustained clocks, launch gaps)",
    "unaligned": "further factor on the rate of GEMMs whose rows are too unaligned for tensor cores",
    "attention": "further factor on the rate of attention (an older generation of kernels)",
    "memory_bound": "time of memory-bound kernels against the calibrated one (less fused than the work says)",
    "communication": "rate of all links against the calibrated one",
}
"""Factors that a framework may set for its kernels, 1 by default; none makes work faster than the hardware's peak."""


class Costs:
    """Prices of work on the GPUs of a cluster whose ranks form a mesh; equal work is priced once.

    Attributes:
        calibration: the coefficients.
        rates: factors of the framework, by the names of `RATES`.
        links: the tiers of the cluster with their cost models.
        assumed: what the calibration had to borrow from other hardware, one sentence each.
        assumed_experts: what it had to borrow for the GEMMs of experts.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: Mesh,
        rates: Mapping[str, float] | None = None,
        alone: bool = False,
        kernels: dict[Work, Estimate] | None = None,
        calibration: Calibration | None = None,
        attention: str = "",
        launch: float = 0.0,
        hidden_launch: float = 0.0,
        pace: float = 1.0,
        joint: tuple[str, tuple[Costs, ...]] | None = None,
        decomposition: Decomposition | None = None,
        pairs: dict[tuple[int, int], Reach] | None = None,
        eager: Mapping[str, EagerPasses] | None = None,
        sustained: float | None = None,
    ) -> None:
        """Makes the prices on `cluster`.

        alone: price kernels as measured one by one, not at the lower sustained rate of a long training step.
        kernels: prices of kernels on this cluster at these rates by this calibration; new ones are added.
        calibration: by default the one that ships with meshcast.
        attention: library of fused attention; empty: that of today's training programs.
        launch: time of the host that is added to every piece of work, where the host waits for each [s].
        hidden_launch: time of the host to launch one op of the framework while the GPU works [s].
        pace: time of kernels on the slowest GPU over the calibrated time, see `simulator.costs.stragglers`.
        joint: an axis along which other kinds of nodes follow, and the costs on each kind: what ranks on all of them do
            together takes as long as on the slowest.
        decomposition: of the output tiles of dense GEMMs; None: that of the measured library.
        pairs: reaches of messages between two ranks of this cluster, on any mesh; new ones are added.
        eager: memory-bound operations that are several kernels on a GPU. sustained: see both in `Framework`.
        """
        self._joint, self._decomposition = joint, decomposition
        self._eager = eager if eager and cluster.gpu.architecture != "cpu" else {}
        self.calibration = calibration or Calibration.shipped()
        self._attention = attention_library(attention, cluster.gpu.architecture)
        self._attention_format = attention_format(attention)
        self.cluster, self.mesh = cluster, mesh
        self.rates = dict.fromkeys(RATES, 1.0) | _check_rates(rates or {})
        self._alone, self._launch, self._pace = alone, launch, pace
        own = self.calibration.measures_steps or cluster.gpu.architecture == "cpu"
        self._sustained = None if own else sustained
        near = cluster.scale_up if cluster.node.scale_up else cluster.host
        scale_up, to_host = (self.calibration.link_models(tier) for tier in (near, cluster.host))
        network = self.calibration.network_model(cluster.scale_out)
        models = TierCostModels(scale_up.model, to_host.model, network.model)
        self.links = Links(cluster, models, self.rates["communication"])
        self.assumed = (
            *dict.fromkeys(self._assumed_kernels("gemm", "attention", "memory", *(["eager"] if self._eager else []))),
            *(scale_up.assumed if cluster.scale_up_domain > 1 else ()),
            *(to_host.assumed if cluster.over_host else ()),
            *self._assumed_staging(),
            *(network.assumed if cluster.gpus > cluster.local_gpus else ()),
        )
        self.assumed_experts = self._assumed_kernels("grouped")
        self._communication: dict[Work, Estimate] = {}
        self._kernels, self._pairs = kernels if kernels is not None else {}, pairs if pairs is not None else {}
        self._uses: dict[Work, Use] = {}
        self._reaches: dict[tuple[Any, ...], tuple[Reach, ...]] = {}
        self._offsets: dict[tuple[str, ...], list[int]] = {}
        self._message_prices: dict[tuple[int, tuple[Reach, ...]], Estimate] = {}
        self._price: dict[type, Callable[[Any], Estimate]] = {
            Gemm: self._gemm_price(self._kernel_price(self._gemm_rate)),
            Attention: self._attention_price(
                self._kernel_price(lambda work: self._sustained_rate(work) * self.rates["attention"])
            ),
            Memory: self._memory_price(),
            Collective: self._price_collective,
            Exchange: self._price_exchange,
            Transfer: self._price_transfer,
            HostCopy: lambda work: host.copy(work, self._host),
            HostUpdate: lambda work: host.update(work, self._host),
            HostLaunch: lambda work: Estimate(work.number * hidden_launch, 0.0),
        }

    def estimate(self, work: Work) -> Estimate:
        """Returns how long `work` takes."""
        # Communication takes another time on another mesh.
        prices = self._communication if isinstance(work, Communication) else self._kernels
        known = prices.get(work)
        if known is None:
            if self._joint and isinstance(work, Collective | Exchange) and self._joint[0] in work.axes:
                known = _slowest(one.estimate(work) for one in self._joint[1])
            else:
                known = self._price[type(work)](slowest_rank(work))
                launch = self._launch * getattr(work, "part", 1.0)
                known = known._replace(seconds=known.seconds + launch) if launch else known
            prices[work] = known
        return known

    def use(self, work: Work) -> Use:
        """Returns the shares of links and multiprocessors that `work` occupies when nothing runs beside it.

        GEMMs and attention need all multiprocessors. Other kernels are limited by memory bandwidth, which some of the
        multiprocessors saturate.
        """
        known = self._uses.get(work)
        if known is None:
            known = self._uses[work] = self._find_use(work)
        return known

    # ------------------------------------------------------------------------------------ assumptions

    @property
    def regime(self) -> Regime:
        """How well the GPU is known: by a calibration of its own, of its architecture, or of another."""
        lenders = self.calibration.lenders(self.cluster.gpu)
        return GPU_REGIMES.get(lenders[0][1], "unknown") if lenders else "unknown"

    def assumed_exchanges(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """Returns what the calibration had to borrow for the exchanges of tokens among `works`."""
        found = dict.fromkeys((one.operation, one.library) for one in works if isinstance(one, Exchange))
        models = (self.calibration.kernel_model(self.cluster.gpu, *one) for one in found)
        return tuple(text for model in models for text in model.assumed)

    def assumed_hosts(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """Returns what had to be assumed of hosts and disks, if any of `works` uses them."""
        found = [work for work in works if isinstance(work, Host)]
        disks = any(work.to == "nvme" if isinstance(work, HostCopy) else work.loaded for work in found)
        return (*(self._host.assumed if found else ()), *(self._host.assumed_disks if disks else ()))

    def _assumed_staging(self) -> tuple[str, ...]:
        """Returns what was assumed of copies through the memory of hosts."""
        if not self.cluster.staged or self.cluster.node.staging is not None:
            return ()
        rate = f"{self.cluster.staging / 1e9:g} GB/s for all GPUs of a node together"
        return (f"GPUs without peer access: copies through the memory of their host at {rate}",)

    def _assumed_kernels(self, *sections: str) -> tuple[str, ...]:
        """Returns what the calibration had to borrow for these sections."""
        gpu = self.cluster.gpu
        found = (self.calibration.kernel_model(gpu, section_on(section, gpu)) for section in sections)
        return tuple(text for one in found for text in one.assumed)

    # ----------------------------------------------------------------------------------------- prices

    @cached_property
    def _host(self) -> host.HostShare:
        return host.HostShare.of(self.cluster, self.rates["communication"])

    def sustained_rate(self, dtype: str = "bf16") -> float:
        """Returns the rate of GEMMs and attention in a step against the same kernel alone.

        That measured on the machine itself, else that of the framework, else that of the GPU's architecture.
        """
        sustained = 1.0 if self._alone else self._sustained
        return self.calibration.sustained_rate(self.cluster.gpu, dtype) if sustained is None else sustained

    def _sustained_rate(self, work: Gemm | Attention) -> float:
        """Returns the rate of a kernel in a step against the calibrated one."""
        return self.rates["kernel"] * self.sustained_rate(work.dtype) / self._pace

    def _gemm_rate(self, work: Gemm) -> float:
        """Returns the same of a GEMM, with the factor on those that tensor cores cannot do."""
        return self._sustained_rate(work) * (1.0 if uses_tensor_cores(work) else self.rates["unaligned"])

    def _kernel_price(self, rate: Callable[[Any], float]) -> Callable[[Any], Estimate]:
        """Returns a function that prices kernels. rate: factor on that of one (memory-bound ones: on its traffic)."""
        gpu = self.cluster.gpu

        def price(work: Any) -> Estimate:
            name = section_of(work, gpu)
            known = Relative(training_library(name, gpu.architecture, getattr(work, "scaling", "")), 1.0, 0.0)
            library = self._attention if name == "attention" else known
            section, dtype = SECTIONS[name], getattr(work, "dtype", "bf16")
            model = section.in_training(self.calibration.kernel_model(gpu, name, library.library, dtype).model)
            stated = (self._decomposition,) if name in DENSE else ()
            made = section.price(work, gpu, model, rate(work) * library.rate, *stated)
            return made._replace(sigma=math.hypot(made.sigma, library.sigma))

        return price

    def _memory_price(self) -> Callable[[Memory], Estimate]:
        """Returns a function that prices memory-bound operations, of one kernel or of several, which are counted."""
        price = self._kernel_price(lambda _: self.rates["memory_bound"] * self._pace)
        counted = self._kernel_price(lambda _: self._pace)
        if not self._eager:
            return price
        return lambda work: counted(made) if (made := make_eager_kernels(work, self._eager)) else price(work)

    def _attention_price(self, price: Callable[[Any], Estimate]) -> Callable[[Attention], Estimate]:
        """Returns a function that prices attention in the number format of its library."""
        dtype = self._attention_format

        def price_in_format(work: Attention) -> Estimate:
            return self._on_fewer(price(replace(work, dtype=dtype) if dtype else work), work.reserved)

        return price_in_format

    def _gemm_price(self, price: Callable[[Any], Estimate]) -> Callable[[Gemm], Estimate]:
        """Returns a function that prices GEMMs, some of whose multiprocessors may communicate."""
        architecture = self.cluster.gpu.architecture

        def price_rest(work: Gemm) -> Estimate:
            part = work.part
            if part < 1:
                groups = tuple((number, tokens / part) for number, tokens in work.groups)
                work = replace(work, m=work.m / part, groups=groups, part=1.0)
            apart = work.groups and launches_each_group(work.dtype, architecture)
            whole = price_group_by_group(work, price) if apart else price(work)
            whole = whole._replace(seconds=whole.seconds * part)
            return self._on_fewer(whole, work.sms + work.reserved)

        return price_rest

    def _on_fewer(self, whole: Estimate, taken: int) -> Estimate:
        """Returns the price of a kernel from whose multiprocessors some are taken."""
        number = self.cluster.gpu.multiprocessors
        return whole._replace(seconds=whole.seconds * number / (number - taken)) if taken else whole

    def _price_collective(self, work: Collective) -> Estimate:
        if work.operation == "shift":
            return _slowest(self._price_shift(work, one) for one in self._shift_reaches(work))
        return max(collective.price(work, one, self.links) for one in self._group_reaches(work))

    def _price_shift(self, work: Collective, reach: Reach) -> Estimate:
        return p2p.price(*p2p.shift_messages(work, reach, self.links), self.links)

    def _price_exchange(self, work: Exchange) -> Estimate:
        return max(dispatch.price(*one) for one in self._exchanges(work))

    def _price_transfer(self, work: Transfer) -> Estimate:
        if work.pairs:
            return self._price_resharding(work)
        reaches = self._pair_reaches(work)
        if (key := (work.nbytes, reaches)) not in self._message_prices:
            self._message_prices[key] = _slowest(p2p.price(work.nbytes, one, self.links) for one in reaches)
        return self._message_prices[key]

    def _price_resharding(self, work: Transfer) -> Estimate:
        """Returns the price of the rank that sends or receives longest, its messages one after another."""
        prices = [p2p.price(nbytes, one, self.links) for (_, _, nbytes), one in self._message_reaches(work.pairs)]
        by_rank: dict[tuple[int, int], list[Estimate]] = defaultdict(list)
        for (source, target, _), price in zip(work.pairs, prices, strict=True):
            by_rank[0, source].append(price)
            by_rank[1, target].append(price)
        sums = []
        for own in by_rank.values():
            seconds = sum(one.seconds for one in own)
            sigma = sum(one.seconds * one.sigma for one in own) / seconds if seconds else 0.0
            sums.append(Estimate(seconds, sigma, max(one.latency for one in own)))
        return _slowest(sums)

    def _message_reaches(self, pairs: Sequence[Message]) -> Iterator[tuple[Message, Reach]]:
        """Yields every message of a cross-mesh resharding with its reach; of several messages of a rank, one that
        leaves the node counts for the ports that it shares with its neighbours."""
        local = self.cluster.local_gpus
        to, back = dict[int, int](), dict[int, int]()
        for source, target, _ in pairs:
            for ends, one, other in ((to, source, target), (back, target, source)):
                if one not in ends or ends[one] // local == one // local:
                    ends[one] = other
        for source, target, nbytes in pairs:
            yield (source, target, nbytes), message_reach(self.cluster, source, target, to.get, back.get)

    def _exchanges(self, work: Exchange) -> Iterator[tuple[dispatch.Dispatch, GPU, Tier, Tier, Any]]:
        """Yields the arguments that price an exchange in each of the groups that may be the slowest."""
        cluster, speed = self.cluster, self.rates["communication"]
        near = cluster.scale_up if cluster.node.scale_up else cluster.host
        model = self.calibration.kernel_model(cluster.gpu, work.operation, work.library).model
        nvlink, nic = min(1.0, model.nvlink_share * speed * near.rate), min(1.0, model.nic_share * speed)
        for one in self._group_reaches(work):
            latency = model.node_latency + fabric.message_delay(one)
            rates = {"nvlink_share": nvlink, "nic_share": nic / fabric.all_to_all(one), "node_latency": latency}
            yield dispatch.Dispatch.of(work, one), cluster.gpu, near, cluster.scale_out, replace(model, **rates)

    def _find_use(self, work: Work) -> Use:
        match work:
            case Gemm() | Attention():
                number = self.cluster.gpu.multiprocessors
                return Use(multiprocessors=1 - work.reserved / number) if work.reserved else FULL
            case Collective(operation="shift"):
                price, most = self.estimate(work), slowest_rank(work)
                reaches = self._shift_reaches(work)
                slowest = next(one for one in reaches if self._price_shift(most, one) == price)
                return self._with_multiprocessors(
                    p2p.use(*p2p.shift_messages(most, slowest, self.links), self.links), work
                )
            case Collective():
                price, most = self.estimate(work), slowest_rank(work)
                reaches = self._group_reaches(most)
                slowest = next(one for one in reaches if collective.price(most, one, self.links) == price)
                return self._with_multiprocessors(collective.use(most, slowest, self.links), work)
            case Exchange():
                most = slowest_rank(work)
                return max((dispatch.use(*one) for one in self._exchanges(most)), key=lambda use: use.moving)
            case Transfer() if work.pairs:
                return self._resharding_use(work)
            case Transfer() if reaches := self._pair_reaches(work):
                price = self.estimate(work)
                slowest = next(one for one in reaches if p2p.price(work.nbytes, one, self.links) == price)
                return p2p.use(work.nbytes, slowest, self.links)
        return ALONE

    def _resharding_use(self, work: Transfer) -> Use:
        """Returns the use of the links of the busiest rank of either end, whose messages are one after another."""
        sums: tuple[dict[int, np.ndarray], ...] = (defaultdict(lambda: np.zeros(3)), defaultdict(lambda: np.zeros(3)))
        moving: dict[tuple[int, int], float] = defaultdict(float)
        most = 0.0
        for (*ends, nbytes), one in self._message_reaches(work.pairs):
            use = p2p.use(nbytes, one, self.links)
            most = max(most, use.multiprocessors)
            for end, rank in enumerate(ends):
                sums[end][rank] += use.moving * np.array(use.links)
                moving[end, rank] += use.moving
        longest = max(moving.values())
        out, into = (tuple((np.max(list(end.values()), axis=0) / longest).tolist()) for end in sums)
        return Use(longest, out, most, into)

    def _with_multiprocessors(self, use: Use, work: Collective) -> Use:
        """Returns `use` with the multiprocessors that the work states, if it does."""
        return use if work.sms is None else replace(use, multiprocessors=work.sms / self.cluster.gpu.multiprocessors)

    # --------------------------------------------------------------------------------- places of ranks

    def _group_reaches(self, work: Collective | Exchange) -> tuple[Reach, ...]:
        """Returns the reaches of the groups of a collective that may be the slowest."""
        group = work.axes, work.members if isinstance(work, Collective) else None
        if isinstance(work, Collective) and work.ranks is not None:
            return (reach(self.cluster, work.ranks),)
        if group not in self._reaches:
            self._reaches[group] = self._slowest_reaches(work.axes, self.mesh.ranks(*group))
        return self._reaches[group]

    def _pair_reaches(self, work: Transfer) -> tuple[Reach, ...]:
        """Returns those of the pairs of a message that may be the slowest; () if source and target are one rank."""
        if work.source == work.target:
            return ()
        pair = work.axis, work.source, work.target
        if pair not in self._reaches:
            source, target = (self.mesh.offset(work.axis, end) for end in (work.source, work.target))
            self._reaches[pair] = self._hop_reaches((work.axis,), {source: target})
        return self._reaches[pair]

    def _shift_reaches(self, work: Collective) -> tuple[Reach, ...]:
        """Returns the reaches of the pairs in a shift that may be the slowest; () if each rank keeps its data."""
        ranks = self.mesh.ranks(work.axes, work.members)
        targets = work.targets or tuple((i + work.by) % len(ranks) for i in range(len(ranks)))
        key = "shift", work.axes, work.members, targets
        if key not in self._reaches:
            hops = {rank: ranks[to] for i, (rank, to) in enumerate(zip(ranks, targets, strict=True)) if i != to}
            self._reaches[key] = self._hop_reaches(work.axes, hops)
        return self._reaches[key]

    def _hop_reaches(self, axes: tuple[str, ...], hops: Mapping[int, int]) -> tuple[Reach, ...]:
        """Returns the reaches of messages that are sent at the same time and may be the slowest.

        hops: receiver by sender, in the group of rank 0 along `axes`; all groups along them send at the same time.
        """
        sends_to = self._peers(axes, hops)
        receives_from = self._peers(axes, {target: source for source, target in hops.items()})
        found: dict[Reach, None] = {}
        known = self._pairs if self.cluster.messages_alone else {}
        for hop in hops.items():
            pairs = [(offset + hop[0], offset + hop[1]) for offset in self._group_offsets(axes)]
            for pair in pairs:
                if pair not in known:
                    known[pair] = message_reach(self.cluster, *pair, sends_to, receives_from)
            reaches = [known[pair] for pair in pairs]
            most = max(one.nodes.number for one in reaches)
            found |= dict.fromkeys(one for one in reaches if one.nodes.number == most)
        return tuple(found)

    def _peers(self, axes: tuple[str, ...], hops: Mapping[int, int]) -> Callable[[int], int | None]:
        """Returns a function that finds the other end of the message of a rank, if it has one among `hops`."""
        parts = [(self.mesh.stride(part), self.mesh.size(part)) for part in self.mesh.parts(axes)]
        first = self.mesh.first

        def peer(rank: int) -> int | None:
            place = sum((rank - first) // stride % count * stride for stride, count in parts)
            return rank - place + hops[place] if place in hops else None

        return peer

    def _slowest_reaches(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> tuple[Reach, ...]:
        """Returns the reaches of those groups along `axes`, shifted copies of `ranks`, that cross most links between
        blocks of nodes and are in most nodes.

        One of them is the slowest.
        """
        offsets = self._group_offsets(axes)
        found = dict.fromkeys(reach(self.cluster, [offset + rank for rank in ranks]) for offset in offsets)
        far = [(sum(1 for level in one.levels if level.blocks), one.nodes.number, -one.nodes.fewest) for one in found]
        return tuple(one for one, its in zip(found, far, strict=True) if its == max(far))

    def _group_offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Returns first ranks of groups along `axes`, one for each distinct position in the nodes of the cluster."""
        if axes not in self._offsets:
            pattern, start = self.cluster.pattern, self.mesh.first
            first = {start % pattern: start}
            for axis in self.mesh.inner:
                if axis not in axes:
                    stride = self.mesh.stride(axis)
                    # Further along the axis the positions repeat.
                    steps = min(self.mesh.size(axis), pattern // math.gcd(stride, pattern))
                    ranks = [rank + i * stride for i in range(steps) for rank in first.values()]
                    first = {rank % pattern: rank for rank in reversed(ranks)}
            self._offsets[axes] = list(first.values())
        return self._offsets[axes]


def _slowest(prices: Iterable[Estimate]) -> Estimate:
    """Returns the price of the message that arrives last of those sent at the same time."""
    return max(prices, key=lambda one: one.seconds + one.latency, default=NOTHING)


def _check_rates(rates: Mapping[str, float]) -> dict[str, float]:
    """Returns the rates as floats. Raises PlanError for an unknown name or a value out of range."""
    for name, value in rates.items():
        if name not in RATES:
            raise PlanError(f"framework.set.rates.{name}", "no such rate", nearest(name, RATES), value)
        if not 1e-3 <= value <= 1e3:
            rule = "a rate lies between 0.001 and 1000"
            raise PlanError(f"framework.set.rates.{name}", rule, "Write 1 for the calibrated one", value)
    return {name: float(value) for name, value in rates.items()}
