"""Prices of communication: collectives, token exchanges and messages between the ranks of a mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware.cluster import Cluster, Tier
from meshcast.hardware.gpu import GPU
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives import collective, dispatch, fabric, p2p
from meshcast.simulator.costs.collectives.links import Links, TierCostModels
from meshcast.simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from meshcast.simulator.costs.rank_places import RankPlaces
from meshcast.simulator.ir.ops import Collective, Communication, Exchange, Transfer, Work


class CommunicationPrices:
    """Prices of communication between ranks, and what it occupies.

    Attributes:
        links: the tiers of the cluster with their cost models.
        assumed: what the calibration had to borrow from other hardware, a sentence each.
    """

    def __init__(self, places: RankPlaces, calibration: Calibration, speed: float = 1.0, rings: bool = False) -> None:
        """speed: factor on the rate of all links. rings: all-reduces run over rings alone."""
        self._places, self._calibration, self._speed = places, calibration, speed
        cluster = places.cluster
        self._near = cluster.scale_up if cluster.node.scale_up else cluster.host
        scale_up, to_host = (calibration.link_models(tier) for tier in (self._near, cluster.host))
        network = calibration.network_model(cluster.scale_out)
        self.links = Links(cluster, TierCostModels(scale_up.model, to_host.model, network.model), speed, rings=rings)
        self.assumed = (
            *(scale_up.assumed if cluster.scale_up_domain > 1 else ()),
            *(to_host.assumed if cluster.over_host else ()),
            *_assumed_staging(cluster),
            *(network.assumed if cluster.gpus > cluster.local_gpus else ()),
        )
        self._message_prices: dict[tuple[int, tuple[Reach, ...]], Estimate] = {}
        self._copies = self
        if (peers := cluster.of_peer_copies) is not cluster:
            self._copies = CommunicationPrices(RankPlaces(peers, places.mesh), calibration, speed, rings)

    def price(self, work: Communication) -> Estimate:
        """Returns how long a collective, exchange or message takes."""
        if self._copies is not self and _copies_itself(work):
            return self._copies.price(work)
        match work:
            case Collective(operation="shift"):
                return slowest(self._price_shift(work, reach) for reach in self._places.shift_reaches(work))
            case Collective():
                return max(collective.price(work, reach, self.links) for reach in self._places.group_reaches(work))
            case Exchange():
                return max(dispatch.price(*exchange) for exchange in self._exchanges(work))
        return self._price_resharding(work) if work.pairs else self._price_message(work)

    def use(self, work: Communication) -> Use:
        """Returns the shares of links and multiprocessors that communication occupies when it runs alone."""
        if self._copies is not self and _copies_itself(work):
            return self._copies.use(work)
        match work:
            case Collective(operation="shift"):
                reach = max(self._places.shift_reaches(work), key=lambda pair: sum(self._price_shift(work, pair)[::2]))
                return self._on_stated(p2p.use(*p2p.shift_messages(work, reach, self.links), self.links), work)
            case Collective():
                reaches = self._places.group_reaches(work)
                reach = max(reaches, key=lambda group: collective.price(work, group, self.links))
                return self._on_stated(collective.use(work, reach, self.links), work)
            case Exchange():
                uses = (dispatch.use(*exchange) for exchange in self._exchanges(work))
                return max(uses, key=lambda use: use.moving)
            case Transfer() if work.pairs:
                return self._use_of_resharding(work)
            case Transfer() if reaches := self._places.pair_reaches(work):
                reach = max(reaches, key=lambda pair: sum(p2p.price(work.nbytes, pair, self.links)[::2]))
                return p2p.use(work.nbytes, reach, self.links)
        return ALONE

    def assumed_exchanges(self, works: Iterable[Work | None]) -> tuple[str, ...]:
        """Returns what the calibration had to borrow for the exchanges of tokens among `works`."""
        kinds = dict.fromkeys((work.operation, work.library) for work in works if isinstance(work, Exchange))
        models = (self._calibration.kernel_model(self._places.cluster.gpu, *kind) for kind in kinds)
        return tuple(text for model in models for text in model.assumed)

    def _price_shift(self, work: Collective, reach: Reach) -> Estimate:
        return p2p.price(*p2p.shift_messages(work, reach, self.links), self.links)

    def _price_message(self, work: Transfer) -> Estimate:
        reaches = self._places.pair_reaches(work)
        if (key := (work.nbytes, reaches)) not in self._message_prices:
            self._message_prices[key] = slowest(p2p.price(work.nbytes, reach, self.links) for reach in reaches)
        return self._message_prices[key]

    def _price_resharding(self, work: Transfer) -> Estimate:
        """Returns the price of the rank that sends or receives longest, its messages in turn."""
        by_rank: dict[tuple[str, int], list[Estimate]] = defaultdict(list)
        for (source, target, nbytes), reach in self._places.message_reaches(work.pairs):
            price = p2p.price(nbytes, reach, self.links)
            by_rank["sends", source].append(price)
            by_rank["receives", target].append(price)
        return slowest(_in_a_row(prices) for prices in by_rank.values())

    def _use_of_resharding(self, work: Transfer) -> Use:
        """Returns the use of the links of the busiest rank of either end, whose messages go in turn."""
        sums: tuple[dict[int, np.ndarray], ...] = (defaultdict(lambda: np.zeros(3)), defaultdict(lambda: np.zeros(3)))
        moving: dict[tuple[int, int], float] = defaultdict(float)
        multiprocessors = 0.0
        for (*ends, nbytes), reach in self._places.message_reaches(work.pairs):
            use = p2p.use(nbytes, reach, self.links)
            multiprocessors = max(multiprocessors, use.multiprocessors)
            for end, rank in enumerate(ends):
                sums[end][rank] += use.moving * np.array(use.links)
                moving[end, rank] += use.moving
        longest = max(moving.values())
        sent, received = (tuple((np.max(list(end.values()), axis=0) / longest).tolist()) for end in sums)
        return Use(longest, sent, multiprocessors, received)

    def _exchanges(self, work: Exchange) -> Iterator[tuple[dispatch.Dispatch, GPU, Tier, Tier, Any]]:
        """Yields the arguments that price an exchange in each of the groups that may be the slowest."""
        cluster = self._places.cluster
        model = self._calibration.kernel_model(cluster.gpu, work.operation, work.library).model
        nvlink = min(1.0, model.nvlink_share * self._speed * self._near.rate)
        nic = min(1.0, model.nic_share * self._speed)
        for reach in self._places.group_reaches(work):
            latency = model.node_latency + fabric.message_delay(reach)
            rates = {"nvlink_share": nvlink, "nic_share": nic / fabric.all_to_all(reach), "node_latency": latency}
            yield dispatch.Dispatch.of(work, reach), cluster.gpu, self._near, cluster.scale_out, replace(model, **rates)

    def _on_stated(self, use: Use, work: Collective) -> Use:
        """Returns `use` with the multiprocessors that the work states, if it does."""
        multiprocessors = self._places.cluster.gpu.multiprocessors
        return use if work.sms is None else replace(use, multiprocessors=work.sms / multiprocessors)


def _copies_itself(work: Communication) -> bool:
    """Returns whether a program writes to other GPUs itself, by copy engines or its own kernels, without NCCL."""
    return isinstance(work, Collective) and work.sms is not None


def slowest(prices: Iterable[Estimate]) -> Estimate:
    """Returns the price of the message that arrives last of those sent at the same time."""
    return max(prices, key=lambda price: price.seconds + price.latency, default=NOTHING)


def _in_a_row(prices: list[Estimate]) -> Estimate:
    """Returns the price of messages that follow each other, whose errors count as fully correlated."""
    seconds = sum(price.seconds for price in prices)
    sigma = sum(price.seconds * price.sigma for price in prices) / seconds if seconds else 0.0
    return Estimate(seconds, sigma, max(price.latency for price in prices))


def _assumed_staging(cluster: Cluster) -> tuple[str, ...]:
    """Returns what was assumed of copies through the memory of hosts."""
    if not cluster.staged or cluster.node.staging is not None:
        return ()
    rate = f"{cluster.staging / 1e9:g} GB/s for all GPUs of a node together"
    return (f"GPUs without peer access: copies through the memory of their host at {rate}",)
