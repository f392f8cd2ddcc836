"""The only place that knows seconds: every piece of work gets an `Estimate`.

`Costs` prices work on one cluster; `IdealCosts` prices it by one rate each for FLOPs and for bytes, so that closed
forms hold exactly.

    kernels/      GEMM, attention, memory-bound kernels
    collectives/  collectives and messages over links
    calibration/  the coefficients of both, one YAML file per GPU and kind of link
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from hardware.cluster import Cluster, Tier
from hardware.errors import PlanError, nearest
from hardware.gpu import GPU
from hardware.topology import Reach, reach
from simulator.costs import host
from simulator.costs.calibration.calibration import Calibration
from simulator.costs.collectives import collective, dispatch, fabric, p2p
from simulator.costs.collectives.links import Laws, Links
from simulator.costs.estimate import ALONE, FULL, NOTHING, Estimate, Use
from simulator.costs.kernels.sections import SECTIONS, of_gpu, section_of
from simulator.ir.mesh import Mesh
from simulator.ir.ops import (
    Attention,
    Collective,
    Communication,
    Exchange,
    Gemm,
    Host,
    HostCopy,
    HostUpdate,
    Memory,
    Transfer,
    Work,
    slowest_rank,
)

__all__ = ["RATES", "Costs", "Estimate", "IdealCosts", "Use"]

RATES = {
    "kernel": "rate of GEMMs and attention against the calibrated one (power, sustained clocks, launch gaps)",
    "attention": "rate of attention besides (an older generation of kernels)",
    "memory_bound": "time of memory-bound kernels against the calibrated one (less fused than the work says)",
    "communication": "rate of all links against the calibrated one",
}
"""What a framework may say about its kernels. All are 1 if not given, and none lets work beat the hardware's peaks."""


TRAINING = {
    ("attention", "volta"): "flash-2",
    ("attention", "ampere"): "flash-2",
    ("attention", "ada"): "flash-2",
    ("attention", "hopper"): "flash-3",
    ("attention", "blackwell"): "transformer-engine",
    ("grouped", "ampere"): "cutlass",
    ("grouped", "hopper"): "cutlass",
    ("grouped", "blackwell"): "transformer-engine",
}
"""Whose kernels training programs run, by section and architecture, as far as tables have them; nobody's in particular
where nothing is named. Most tables are of serving programs."""

DISPATCHES = "deepep"
"""Whose kernels exchange the tokens of experts."""


class Costs:
    """Prices of work on the GPUs of `cluster`, laid out as `mesh`; equal work is priced once.

    rates: factors of a framework, by the names of `RATES`. alone: kernels as measured one by one, without what a
    long step takes off their rate. kernels: known prices of kernels on this cluster at these rates by this calibration;
    new ones are added. calibration: the coefficients; None: those that ship with meshcast.
    assumed: what the calibration had to borrow; of_experts: the same of the products of experts, where there are any.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: Mesh,
        rates: Mapping[str, float] | None = None,
        alone: bool = False,
        kernels: dict[Work, Estimate] | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.calibration = known = calibration or Calibration.shipped()
        self.cluster, self.mesh = cluster, mesh
        self.rates = dict.fromkeys(RATES, 1.0) | _checked(rates or {})
        self._speed = self.rates["kernel"] * (1.0 if alone else known.sustained_rate(cluster.gpu.architecture))
        inner = known.link_models(cluster.scale_up if cluster.node.scale_up else cluster.host)
        middle, outer = known.link_models(cluster.host), known.network_model(cluster.scale_out)
        self.links = Links(cluster, Laws(inner.model, middle.model, outer.model), self.rates["communication"])
        self.assumed = (
            *dict.fromkeys(self._borrowed("gemm", "attention", "memory")),
            *(inner.assumed if cluster.scale_up_domain > 1 else ()),
            *(middle.assumed if cluster.over_host else ()),
            *(outer.assumed if cluster.gpus > cluster.island else ()),
        )
        self.of_experts = self._borrowed("grouped")
        self._known: dict[Work, Estimate] = {}
        self._uses: dict[Work, Use] = {}
        self._kernels = kernels if kernels is not None else {}
        self._reach: dict[tuple[Any, ...], tuple[Reach, ...]] = {}
        self._first: dict[tuple[str, ...], list[int]] = {}
        self._price: dict[type, Callable[[Any], Estimate]] = {
            Gemm: self._kernel(self._speed),
            Attention: self._kernel(self._speed * self.rates["attention"]),
            Memory: self._kernel(self.rates["memory_bound"]),
            Collective: self._collective,
            Exchange: self._exchange,
            Transfer: self._transfer,
            HostCopy: lambda work: host.copy(work, self._share),
            HostUpdate: lambda work: host.update(work, self._share),
        }

    def estimate(self, work: Work) -> Estimate:
        """How long `work` takes."""
        # Communication takes another time on another mesh.
        prices = self._known if isinstance(work, Communication) else self._kernels
        known = prices.get(work)
        if known is None:
            known = prices[work] = self._price[type(work)](slowest_rank(work))
        return known

    @property
    def of_exchanges(self) -> tuple[str, ...]:
        """What the calibration had to borrow for exchanges of tokens."""
        known, gpu = self.calibration, self.cluster.gpu
        found = (known.kernel_model(gpu, section, DISPATCHES) for section in ("dispatch", "combine"))
        return tuple(text for one in found for text in one.assumed)

    def of_host(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """What had to be assumed of the host for some work, where it comes there."""
        found = [work for work in works if isinstance(work, Host)]
        disks = any(work.to == "nvme" if isinstance(work, HostCopy) else work.loaded for work in found)
        return (*(self._share.assumed if found else ()), *(self._share.of_disks if disks else ()))

    @cached_property
    def _share(self) -> host.Share:
        return host.Share.of(self.cluster, self.rates["communication"])

    def use(self, work: Work) -> Use:
        """What else `work` occupies, alone, as long as `estimate` says.

        GEMMs and attention need all multiprocessors. Other kernels wait for memory, which a part of them keeps busy.
        """
        known = self._uses.get(work)
        if known is None:
            known = self._uses[work] = self._use(work)
        return known

    def _use(self, work: Work) -> Use:
        match work:
            case Gemm() | Attention():
                return FULL
            case Collective(operation="shift"):
                price, nbytes = self.estimate(work), slowest_rank(work).nbytes
                slowest = next(one for one in self._steps(work) if p2p.price(nbytes, one, self.links) == price)
                return p2p.use(nbytes, slowest, self.links)
            case Collective():
                price, most = self.estimate(work), slowest_rank(work)
                slowest = next(one for one in self._reaches(most) if collective.price(most, one, self.links) == price)
                return collective.use(most, slowest, self.links)
            case Exchange():
                most = slowest_rank(work)
                return max((dispatch.use(*one) for one in self._exchanges(most)), key=lambda use: use.moving)
            case Transfer() if paths := self._paths(work):
                price = self.estimate(work)
                slowest = next(one for one in paths if p2p.price(work.nbytes, one, self.links) == price)
                return p2p.use(work.nbytes, slowest, self.links)
        return ALONE

    def _kernel(self, factor: float) -> Callable[[Any], Estimate]:
        """What prices kernels at a rate (those bound by memory: a traffic) of `factor` against the calibrated one."""
        gpu = self.cluster.gpu

        def price(work: Any) -> Estimate:
            name = section_of(work, gpu)
            section, whose = SECTIONS[name], TRAINING.get((name, gpu.architecture), "")
            law = section.training(
                self.calibration.kernel_model(gpu, name, whose, getattr(work, "dtype", "bf16")).model
            )
            return section.price(work, gpu, law, factor)

        return price

    def _borrowed(self, *sections: str) -> tuple[str, ...]:
        """What the calibration had to borrow for these sections."""
        gpu = self.cluster.gpu
        found = (self.calibration.kernel_model(gpu, of_gpu(section, gpu)) for section in sections)
        return tuple(text for one in found for text in one.assumed)

    def _collective(self, work: Collective) -> Estimate:
        if work.operation == "shift":
            return _slowest(p2p.price(work.nbytes, spread, self.links) for spread in self._steps(work))
        return max(collective.price(work, spread, self.links) for spread in self._reaches(work))

    def _exchange(self, work: Exchange) -> Estimate:
        return max(dispatch.price(*one) for one in self._exchanges(work))

    def _exchanges(self, work: Exchange) -> Iterator[tuple[dispatch.Dispatch, GPU, Tier, Tier, dispatch.DispatchLaw]]:
        """An exchange in the groups that may be the slowest, and what it takes to price it there."""
        cluster, speed = self.cluster, self.rates["communication"]
        near = cluster.scale_up if cluster.node.scale_up else cluster.host
        law = self.calibration.kernel_model(cluster.gpu, work.operation, DISPATCHES).model
        nvlink, nic = min(1.0, law.nvlink * speed), min(1.0, law.nic * speed)
        for spread in self._reaches(work):
            law = replace(law, nvlink=nvlink, nic=nic / fabric.all_to_all(spread))
            yield dispatch.Dispatch.of(work, spread), cluster.gpu, near, cluster.scale_out, law

    def _transfer(self, work: Transfer) -> Estimate:
        return _slowest(p2p.price(work.nbytes, spread, self.links) for spread in self._paths(work))

    def _reaches(self, work: Collective | Exchange) -> tuple[Reach, ...]:
        """How the groups of a collective are spread that may be the slowest."""
        group = work.axes, work.members if isinstance(work, Collective) else None
        if group not in self._reach:
            self._reach[group] = self._spread(work.axes, self.mesh.ranks(*group))
        return self._reach[group]

    def _paths(self, work: Transfer) -> tuple[Reach, ...]:
        """The same of the pairs of a message; none where it does not move."""
        if work.source == work.target:
            return ()
        pair = work.axis, work.source, work.target
        if pair not in self._reach:
            stride = self.mesh.stride(work.axis)
            self._reach[pair] = self._spread((work.axis,), (work.source * stride, work.target * stride))
        return self._reach[pair]

    def _steps(self, work: Collective) -> tuple[Reach, ...]:
        """How far apart the ranks are that send to each other in a shift; none where each keeps what it has."""
        ranks = self.mesh.ranks(work.axes, work.members)
        by = work.by % len(ranks)
        key = "shift", work.axes, work.members, by
        if key not in self._reach:
            pairs = {(rank, ranks[(i + by) % len(ranks)]) for i, rank in enumerate(ranks) if by}
            self._reach[key] = tuple({one: None for pair in pairs for one in self._spread(work.axes, pair)})
        return self._reach[key]

    def _spread(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> tuple[Reach, ...]:
        """How those groups like that of `ranks` are spread that touch most islands; the slowest of them paces all."""
        found = dict.fromkeys(reach(self.cluster, [at + rank for rank in ranks]) for at in self._offsets(axes))
        far = [(one.islands.number, -one.islands.fewest) for one in found]
        return tuple(one for one, its in zip(found, far, strict=True) if its == max(far))

    def _offsets(self, axes: tuple[str, ...]) -> list[int]:
        """First ranks of the groups over `axes`, one for each place that differs from the others'."""
        if axes not in self._first:
            pattern, first = self.cluster.pattern, {0: 0}
            for axis in self.mesh.axes:
                if axis not in axes:
                    stride = self.mesh.stride(axis)
                    # Further along the axis the same places come again.
                    steps = min(self.mesh.size(axis), pattern // math.gcd(stride, pattern))
                    ranks = [rank + i * stride for i in range(steps) for rank in first.values()]
                    first = {rank % pattern: rank for rank in reversed(ranks)}
            self._first[axes] = list(first.values())
        return self._first[axes]


def _slowest(prices: Iterable[Estimate]) -> Estimate:
    """Of messages that are sent at the same time, the last to arrive."""
    return max(prices, key=lambda one: one.seconds + one.latency, default=NOTHING)


def _checked(rates: Mapping[str, float]) -> dict[str, float]:
    for name, value in rates.items():
        if name not in RATES:
            raise PlanError(f"framework.set.rates.{name}", "no such rate", nearest(name, RATES), value)
        if not 1e-3 <= value <= 1e3:
            rule = "a rate lies between 0.001 and 1000"
            raise PlanError(f"framework.set.rates.{name}", rule, "Write 1 for the calibrated one", value)
    return {name: float(value) for name, value in rates.items()}


class IdealCosts:
    """FLOPs at one rate, memory traffic for nothing, communication for nothing or at one rate without latency.

    flops: FLOP/s. communication: bytes/s; 0 makes it free. An all-reduce moves its buffer twice (it is a
    reduce-scatter and an all-gather), everything else once.
    """

    def __init__(self, flops: float = 1.0, communication: float = 0.0) -> None:
        self.flops, self.communication = flops, communication

    def estimate(self, work: Work) -> Estimate:
        """How long `work` takes, for certain."""
        work = slowest_rank(work)
        moved = getattr(work, "nbytes", 0) * (2 if getattr(work, "operation", "") == "all_reduce" else 1)
        seconds = work.flops / self.flops + (moved / self.communication if self.communication else 0.0)
        return Estimate(seconds, 0.0)
