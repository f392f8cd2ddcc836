"""Messages that ranks send each other in a step, by axis of communication.

The collectives of every op are spread over pairs of ranks by their algorithms (`collective_messages`), which are those
that the forecast's prices chose for their size and group. Payloads are of the mean rank (without `Collective.pace`) and
without protocol overhead. A collective of some members of an axis (`Collective.members`) that begin at its first rank
and divide it evenly stands for all such groups, as two-level exchanges have; other members are those of a single group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.explain.collective_messages import (
    MemberMessages,
    collective_messages,
    exchange_messages,
    shift_messages,
)
from meshcast.experiments.explain.executed_ops import list_executed_ops
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.remembered import remembered
from meshcast.hardware.topology import Reach, reach
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives.collective import choose_algorithm, find_group
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Exchange, Transfer, Work
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import EXPOSED, axis_of
from meshcast.simulator.report.metrics import Metrics


class RankMessages(NamedTuple):
    """Messages of the ranks of a pipeline device in a step.

    axis: of communication, a key of `EXPOSED`.
    work: what is executed.
    times: executions in a step on every rank.
    seconds: of an execution [s].
    sources, targets: ranks.
    nbytes: bytes of an execution from each source to its target.
    """

    axis: str
    work: Work
    times: float
    seconds: float
    sources: np.ndarray
    targets: np.ndarray
    nbytes: np.ndarray


def list_rank_messages(
    metrics: Metrics, calibration: Calibration | None = None, device: int | None = None
) -> Iterator[RankMessages]:
    """Yields the messages of the ranks of every device, or of `device`, in a step; equal work of a device once."""
    plan, counts = metrics.play.plan, dict[tuple[int, str, Work, int], list[float]]()
    for executed in list_executed_ops(metrics, device):
        work, axis = executed.op.work, axis_of(executed.op)
        if isinstance(work, Collective | Exchange | Transfer):
            # The norm of all gradients is reduced on the stream of kernels.
            key = executed.device, axis if axis in EXPOSED else "dp", work, executed.target
            counts.setdefault(key, [0.0, executed.seconds])[0] += executed.count
    finder = MessagesOfPlan(plan, calibration)
    for (owner, axis, work, target), (times, seconds) in counts.items():
        sources, targets, nbytes = finder.find(owner, work, target)
        if len(sources):
            yield RankMessages(axis, work, times, seconds, sources, targets, nbytes)


class MessagesOfPlan:
    """Spreads the communication of a plan's devices over pairs of ranks."""

    def __init__(self, plan: Plan, calibration: Calibration | None = None) -> None:
        self.plan, self.cluster = plan, plan.job.cluster
        self.costs = SharedWork(calibration).device_costs(plan)
        self._shapes: dict[tuple[str, str, tuple[int, ...]], MemberMessages] = {}

    def find(self, device: int, work: Work, target: int = -1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns sources, targets and bytes of the messages that the ranks of a device send in an execution of `work`.

        target: of a message between devices the receiver.
        """
        if isinstance(work, Transfer):
            return self._transfer(device, work, target)
        of_device = np.zeros(self.cluster.gpus, bool)
        of_device[self.plan.ranks.of_device(device)] = True
        parts = []
        for ranks in self.groups(device, work):
            shape, nbytes = self._member_messages(device, work, ranks)
            sends = of_device[ranks[shape.sources]]
            parts.append((ranks[shape.sources[sends]], ranks[shape.targets[sends]], shape.shares[sends] * nbytes))
        if not parts:
            return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        sources, targets, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return sources, targets, sizes

    def algorithm(self, device: int, work: Collective, ranks: np.ndarray) -> str:
        """Returns the algorithm with its protocol that prices chose for a group; empty of shifts."""
        if work.operation == "shift":
            return ""
        costs = self.costs[device]
        return choose_algorithm(
            work.nbytes, find_group(work.operation, _reach(costs.cluster, ranks), costs.communication.links)
        )[1][0]

    def groups(self, device: int, work: Work) -> list[np.ndarray]:
        """Returns the groups of a collective with ranks of a device: their ranks in the order of positions."""
        assert isinstance(work, Collective | Exchange)
        if isinstance(work, Collective) and work.ranks is not None:
            return self._stated_groups(device, work.ranks)
        return self._groups_along(device, work.axes, work.members if isinstance(work, Collective) else None)

    @remembered
    def _groups_along(self, device: int, axes: tuple[str, ...], members: tuple[int, ...] | None) -> list[np.ndarray]:
        return groups_along(self.plan.on(device).mesh, axes, members, self.plan.ranks.of_device(device))

    def _stated_groups(self, device: int, ranks: Sequence[int]) -> list[np.ndarray]:
        """Returns the groups of a collective that states those of a single group: of devices with as many ranks, those
        at each place.

        The stated group has the first rank of its devices, or all ranks.
        """
        members, stated = self.plan.ranks.of_device(device), np.asarray(ranks, int)
        if np.isin(members, stated).sum() != 1 or len(members) == 1:
            return [stated]
        firsts = [self.plan.ranks.of_device(other) for other in range(self.plan.ranks.devices)]
        held = [group for first in stated for group in firsts if first in group]
        if len(held) != len(stated) or len({len(group) for group in held}) > 1:
            return [stated]
        return [np.array([group[place] for group in held]) for place in range(len(members))]

    def _member_messages(self, device: int, work: Work, ranks: np.ndarray) -> tuple[MemberMessages, float]:
        """Returns the messages between the members of a group, and the bytes that their shares are of."""
        nodes = tuple((ranks // self.cluster.local_gpus).tolist())
        if isinstance(work, Exchange):
            costs = self.costs[device]
            call = Dispatch.of(work, _reach(costs.cluster, ranks))
            return exchange_messages(nodes, float(call.scale_up_bytes), float(call.network_bytes)), 1.0
        assert isinstance(work, Collective)
        if work.operation == "shift":
            n = len(ranks)
            targets = work.targets or tuple((place + work.by) % n for place in range(n))
            return shift_messages(targets, work.both_ways), float(work.nbytes)
        name = self.algorithm(device, work, ranks) if len(ranks) > 1 else ""
        family = name.partition(" ")[0] if "SHARP" not in name else name
        starts = {node: place for place, node in reversed(list(enumerate(nodes)))}
        key = work.operation, family, tuple(starts[node] for node in nodes)
        if key not in self._shapes:
            self._shapes[key] = collective_messages(work.operation, name, nodes)
        return self._shapes[key], float(work.nbytes)

    def _transfer(self, device: int, work: Transfer, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a message from every rank of a device to that at its place of another, or the stated messages."""
        if work.pairs:
            sources, targets, nbytes = np.array(work.pairs, float).T
            return sources.astype(int), targets.astype(int), nbytes
        sources = self.plan.ranks.of_device(device)
        if target >= 0:
            targets = self.plan.ranks.of_device(target)
        else:
            mesh = self.plan.on(device).mesh
            targets = sources + mesh.offset(work.axis, work.target) - mesh.offset(work.axis, work.source)
        away = sources != targets
        return sources[away], targets[away], np.full(int(away.sum()), float(work.nbytes))


def groups_along(
    mesh: Mesh, axes: tuple[str, ...], members: tuple[int, ...] | None, device_ranks: np.ndarray
) -> list[np.ndarray]:
    """Returns the groups along axes that have ranks of a device, each with its ranks in the order of positions.

    members: positions that take part, see the head of this module; None: all.
    """
    parts = [(mesh.stride(part), mesh.size(part)) for part in mesh.parts(axes)]
    places = sum(((device_ranks - mesh.first) // stride % count * stride for stride, count in parts), 0)
    whole = np.array(mesh.ranks(axes))
    chosen = [np.arange(len(whole))] if members is None else split_positions(members, len(whole))
    bases = np.unique(device_ranks - places)
    groups = [base + whole[positions] for base in bases for positions in chosen]
    if members is None:
        return groups
    of_device = set(device_ranks.tolist())
    return [ranks for ranks in groups if not of_device.isdisjoint(ranks.tolist())]


def split_positions(members: Sequence[int], count: int) -> list[np.ndarray]:
    """Returns the groups of positions that `members` stand for, of `count` positions.

    >>> [group.tolist() for group in split_positions((0, 1), 4)]
    [[0, 1], [2, 3]]
    >>> [group.tolist() for group in split_positions((0, 2), 4)]
    [[0, 2], [1, 3]]
    >>> [group.tolist() for group in split_positions((0, 3), 4)]
    [[0, 3]]
    """
    positions = np.array(members)
    step = int(positions[1]) if len(positions) > 1 else 1
    span = step * len(positions)
    if not np.array_equal(positions, np.arange(len(positions)) * step) or count % span:
        return [positions]
    return [positions + block + place for block in range(0, count, span) for place in range(step)]


def split_by_tier(cluster: Cluster, messages: RankMessages) -> dict[str, float]:
    """Returns bytes of an execution by the links that they take, by the words of `TIERS`."""
    near = messages.sources // cluster.domain == messages.targets // cluster.domain
    inside = messages.sources // cluster.local_gpus == messages.targets // cluster.local_gpus
    if cluster.scale_up.kind == "none":
        near = np.zeros_like(near)
    tiers: dict[str, np.ndarray] = {"scale-up": near & inside, "host": inside & ~near, "network": ~inside}
    return {tier: float(messages.nbytes[held].sum()) for tier, held in tiers.items()}


def _reach(cluster: Cluster, ranks: np.ndarray) -> Reach:
    return reach(cluster, ranks.tolist())
