"""Prices work: how long a kernel, collective or message takes, with its sigma and latency (`Estimate`).

Only this room turns work into seconds. `Costs` prices work on a cluster. `IdealCosts` has a rate for FLOPs and a rate
for bytes, so that closed forms hold exactly.

    kernel_prices.py         kernels on a GPU, by the cost models of kernels/
    communication_prices.py  collectives and messages over links, by the cost models of collectives/
    rank_places.py           which links ranks have between them
    calibration/             the coefficients of all cost models, a YAML file per GPU and kind of link
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from functools import cached_property

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs import host
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.communication_prices import CommunicationPrices, slowest
from meshcast.simulator.costs.estimate import ALONE, Estimate, Use
from meshcast.simulator.costs.kernel_prices import KernelPrices, KernelTraits
from meshcast.simulator.costs.rank_places import KnownReaches, RankPlaces
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
    Work,
)
from meshcast.simulator.ir.routing import slowest_rank

NOT_ON_GPU = Communication | Host | HostLaunch
"""Work that takes as long whatever the GPU of a cluster computes and how."""


@dataclass
class KnownPrices:
    """Prices of earlier costs on a cluster; new ones are added.

    Attributes:
        kernels: on a GPU, of equal traits, calibration and launch time; clusters and meshes have them in common.
        reaches: of messages and groups; clusters that differ in rates alone have them in common.
        communication: on a mesh, and of work on hosts.
        uses: on a mesh.
    """

    kernels: dict[Work, Estimate] = field(default_factory=dict)
    reaches: KnownReaches = field(default_factory=lambda: KnownReaches({}, {}))
    communication: dict[Work, Estimate] = field(default_factory=dict)
    uses: dict[Work, Use] = field(default_factory=dict)


class Costs:
    """Prices of work on the GPUs of a cluster whose ranks form a mesh; equal work is priced once.

    Attributes:
        cluster: whose GPUs and links the work runs on.
        places: of the ranks in the topology of the cluster.
        kernels: prices of kernels.
        communication: prices of communication.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: Mesh,
        traits: KernelTraits | None = None,
        calibration: Calibration | None = None,
        launch: float = 0.0,
        hidden_launch: float = 0.0,
        joint: tuple[str, tuple[Costs, ...]] | None = None,
        known: KnownPrices | None = None,
    ) -> None:
        """Makes the prices on `cluster`.

        calibration: by default what ships with meshcast.
        launch: time of the host that is added to every piece of work, where the host waits for each [s].
        hidden_launch: time of the host to launch an op of the framework while the GPU works [s].
        joint: an axis along which other kinds of nodes follow, and the costs on each kind: what ranks on all of them do
            together takes as long as on the slowest.
        known: prices of earlier costs on this cluster.
        """
        self.cluster, self._calibration = cluster, calibration or Calibration.shipped()
        self._launch, self._hidden_launch, self._joint = launch, hidden_launch, joint
        traits, known = traits or KernelTraits(), known or KnownPrices()
        self._link_speed = traits.all_rates()["communication"]
        self.kernels = KernelPrices(cluster.gpu, traits, self._calibration)
        self.places = RankPlaces(cluster, mesh, known.reaches)
        self.communication = CommunicationPrices(self.places, self._calibration, self._link_speed, traits.rings_alone)
        self._kernel_prices, self._communication_prices, self._uses = known.kernels, known.communication, known.uses

    def estimate(self, work: Work) -> Estimate:
        """Returns how long `work` takes."""
        # Communication takes another time on another mesh, work of a host on another host.
        prices = self._communication_prices if isinstance(work, NOT_ON_GPU) else self._kernel_prices
        price = prices.get(work)
        if price is None:
            price = prices[work] = self._price(work)
        return price

    def use(self, work: Work) -> Use:
        """Returns the shares of links and multiprocessors that `work` occupies when nothing runs beside it.

        GEMMs and attention need all multiprocessors. Other kernels are limited by memory bandwidth, which some of the
        multiprocessors saturate.
        """
        use = self._uses.get(work)
        if use is None:
            if isinstance(work, Communication):
                use = self.communication.use(slowest_rank(work))
            else:
                use = self.kernels.use(work) if isinstance(work, Gemm | Attention) else ALONE
            self._uses[work] = use
        return use

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the calibration had to borrow from other hardware, a sentence each."""
        return self.kernels.assumed + self.communication.assumed

    @property
    def regime(self) -> Regime:
        """How well the GPU is known: by a calibration of this GPU, of its architecture, or of another."""
        distance = self._calibration.find_distance(self.cluster.gpu)
        return "unknown" if distance is None else GPU_REGIMES.get(distance, "unknown")

    def assumed_hosts(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """Returns what had to be assumed of hosts and disks, if any of `works` uses them."""
        on_hosts = [work for work in works if isinstance(work, Host)]
        disks = any(work.to == "nvme" if isinstance(work, HostCopy) else work.loaded for work in on_hosts)
        return (*(self._host.assumed if on_hosts else ()), *(self._host.assumed_disks if disks else ()))

    @cached_property
    def _host(self) -> host.HostShare:
        return host.HostShare.of(self.cluster, self._link_speed)

    def _price(self, work: Work) -> Estimate:
        """Returns the price of work that was not priced before."""
        if self._joint and isinstance(work, Collective | Exchange) and self._joint[0] in work.axes:
            return slowest(costs.estimate(work) for costs in self._joint[1])
        price = self._price_on_gpu(slowest_rank(work))
        launch = self._launch * getattr(work, "part", 1.0)
        return price._replace(seconds=price.seconds + launch) if launch else price

    def _price_on_gpu(self, work: Work) -> Estimate:
        """Returns the price without the launch that is added to every piece of work."""
        if isinstance(work, Communication):
            return self.communication.price(work)
        if isinstance(work, HostCopy):
            return host.copy(work, self._host)
        if isinstance(work, HostUpdate):
            return host.update(work, self._host)
        if isinstance(work, HostLaunch):
            return Estimate(work.number * self._hidden_launch, 0.0)
        return self.kernels.price(work)
