"""Numbers that claims read off the ops of a played step: bytes across nodes, parts of layers, contention for links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.units import GIB
from meshcast.simulator import simulate
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.costs.rank_places import RankPlaces
from meshcast.simulator.ir.ops import COMPUTE, Collective, Exchange, Op, Transfer
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import axis_of
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.device_ops import device_ops
from meshcast.simulator.report.figures import FIGURES
from meshcast.simulator.report.report import Report
from meshcast.validation.claims.relation import Quantity


def priced_ops(report: Report) -> Iterator[tuple[int, Op, float, int]]:
    """Yields every op of a step: its device, the op, its seconds, and how often it runs."""
    program = report.play.program
    turns = defaultdict[tuple[int, Any], int](int)
    for slot, (task, count) in enumerate(zip(program.tasks, program.timetable.turns, strict=True)):
        turns[program.device_of(slot), task] += count
    for device, task in enumerate(program.updates):
        turns[device, task] += 1
    for (device, task), count in turns.items():
        for part in task.parts:
            for op, seconds in zip(part.block.ops, part.seconds, strict=True):
                yield device, op, seconds, count * part.count
        for side in (*task.ahead, *task.behind):
            for op, seconds in zip(side.ops, side.seconds.tolist(), strict=True):
                yield device, op, seconds, count


RINGS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Times (n-1)/n of the buffer that a flat ring sends over the border of each of its nodes."""


def sum_across(report: Report, axis: str, operation: str = "") -> Quantity:
    """Sums the GiB that a rank of every device sends to other nodes, in the mean over the ranks of its node.

    Rings cross the border of a node once; messages of an all-to-all and of an exchange of tokens each for itself.
    """
    plan = report.play.plan
    sent = [0.0] * report.play.program.devices
    places = [RankPlaces(cluster, plan.on(device).mesh) for device, cluster in enumerate(plan.ranks.clusters)]
    for device, op, _, count in priced_ops(report):
        work = op.work
        if isinstance(work, Collective | Exchange) and axis_of(op) == axis and operation in ("", work.operation):
            sent[device] += count * _cross_nodes(work, places[device]) / GIB
    if axis == "pp":
        turns = report.play.program.timetable.turns
        for slot, send in report.play.program.sent:
            message = send.work
            assert isinstance(message, Transfer)
            sent[send.source] += turns[slot] * _message_across(message, plan) / GIB
    return sent


def _message_across(message: Transfer, plan: Plan) -> float:
    """Returns the bytes of a message between stages that leave a node; of a resharding those of its mean sender."""
    local = plan.job.cluster.local_gpus
    if message.pairs:
        across = sum(nbytes for source, target, nbytes in message.pairs if source // local != target // local)
        return across / len({source for source, *_ in message.pairs})
    reaches = RankPlaces(plan.job.cluster, plan.mesh).pair_reaches(message)
    return float(message.nbytes) if any(reach.nodes.number > 1 for reach in reaches) else 0.0


def _cross_nodes(work: Collective | Exchange, places: RankPlaces) -> float:
    """Returns the bytes that a rank sends to other nodes."""
    if isinstance(work, Collective) and work.operation == "shift":
        ranks = places.mesh.ranks(work.axes, work.members)
        targets = work.targets or tuple((i + work.by) % len(ranks) for i in range(len(ranks)))
        nodes = [rank // places.cluster.local_gpus for rank in ranks]
        crossing = sum(nodes[i] != nodes[to] for i, to in enumerate(targets))
        return work.nbytes * (1 + work.both_ways) * crossing / len(ranks)
    reach = places.group_reaches(work)[0]
    n, (nodes_met, fewest) = reach.members, reach.nodes
    if nodes_met == 1:
        return 0.0
    if isinstance(work, Exchange):
        return float(Dispatch.of(work, reach).network_bytes)
    if work.operation == "all_to_all":
        return work.nbytes * (n - fewest) / n
    return work.nbytes * (RINGS[work.operation] * (n - 1) / n if work.operation in RINGS else 1.0) / fewest


def measure_between(report: Report, *words: str) -> Quantity:
    """Returns the seconds from the end of a kernel until the next one of another name begins, on the first device; the
    mean over layers and micro-batches.

    So ``norm2.residual2`` is the MLP or the experts of a layer with their communication.
    words: the two names, divided at dots. Raises PlanError for a name that no kernel of the step has.
    """
    flat, times = device_ops(report.play.step, 0)
    kernels = flat.queues[0, COMPUTE]
    names = dict.fromkeys(flat.ops[kernel].name for kernel in kernels)
    pairs = [(".".join(words[:place]), ".".join(words[place:])) for place in range(1, len(words))]
    first, last = max(pairs, key=lambda pair: sum(name in names for name in pair))
    for name in (first, last):
        if name not in names:
            raise PlanError("measure", "no kernel of the step has this name", nearest(name, list(names)), name)
    spans, since = list[float](), None
    for kernel in kernels:
        if flat.ops[kernel].name == last and since is not None:
            spans.append(times.begin[kernel] - since)
            since = None
        if flat.ops[kernel].name == first:
            since = times.end[kernel]
    if not spans:
        raise PlanError("measure", f"no {last} follows a {first}", "Name them in the order in which they run", first)
    return sum(spans) / len(spans)


def measure_contended(report: Report) -> Quantity:
    """Returns the seconds of a step whose communication shares links and multiprocessors."""
    seconds = FIGURES["step_time_s"].compute(simulate(report.job, engine="shared"))
    assert seconds is not None
    return float(seconds)


def list_most(report: Report, category: str) -> Quantity:
    """Lists the GiB that tensors of a category take at most, whenever that is, on every stage."""
    column = CATEGORIES.index(category)
    return [
        float(report.play.memory(device)[1][:, column].max()) / GIB for device in range(report.play.program.devices)
    ]
