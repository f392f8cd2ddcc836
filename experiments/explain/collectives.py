"""Tables in the form of nccl-tests: the collectives of a job's step, or those of a cluster over a range of sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import message_reach, reach
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.formats.nccl_tests import OPERATIONS
from meshcast.simulator.formats.nccl_tests_table import NcclTable, TableLine
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Exchange, Op, Transfer
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.tracing.names import group_ranks
from meshcast.simulator.report.version import product_version

TESTS = {operation: test for test, operation in OPERATIONS.items()} | {"shift": "sendrecv", "reduce": "reduce"}
"""Names of tests by operation of a collective. In a shift every rank sends to another, as in the test sendrecv."""

SIZES = 200
"""Largest number of sizes of a table of a cluster."""


@dataclass(frozen=True)
class CollectiveGroup:
    """A table with the operation, mesh axes and global ranks behind it; no axes for a cluster."""

    operation: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    table: NcclTable

    def to_dict(self) -> dict[str, Any]:
        """Returns the table in the answer of ``--json``."""
        rows = []
        for line in self.table.lines:
            algbw, busbw = self.table.rates(line)
            row = {
                "bytes": line.nbytes,
                "time_us": line.seconds * 1e6,
                "algbw_gb_per_s": algbw,
                "busbw_gb_per_s": busbw,
            }
            rows.append(row | ({"calls": line.calls, "step_s": line.calls * line.seconds} if line.calls else {}))
        return {
            "operation": self.operation,
            "test": f"{self.table.test}_perf",
            **({"axes": list(self.axes)} if self.axes else {}),
            "ranks": list(self.ranks),
            "rows": rows,
        }


def tables_of_job(report: Report, stage: int | None = None, every_rank: bool = False) -> list[CollectiveGroup]:
    """Returns the collectives and sent messages of a pipeline device in a step, each timed as if it ran alone.

    stage: the device; None: that which computes longest. every_rank: whether large groups list every rank.
    Raises PlanError for a stage that the plan does not have.
    """
    plan = report.play.plan
    device = report.device if stage is None else stage
    if not 0 <= device < plan.ranks.devices:
        raise PlanError("--stage", f"the plan has stages 0 to {plan.ranks.devices - 1}", "Name one of them", stage)
    where = name_device(plan, device)
    tables = []
    for (operation, axes, ranks, library), lines in sorted(_count_calls(report, device).items(), key=str):
        calls = sum(lines.values())
        comments = [
            f"forecast by meshcast {product_version()}: {report.job.model.name} on {report.job.cluster.name}, {where}",
            f"group of {len(ranks)} ranks along {', '.join(axes)}; {calls:,} calls a step, by size: "
            + ", ".join(f"{nbytes} B x {count}" for (nbytes, _), count in sorted(lines.items())),
            *([f"kernels of {library}, not NCCL; sizes are those of an all-to-all of the same tokens"] * bool(library)),
        ]
        rows = [TableLine(nbytes, seconds, count) for (nbytes, seconds), count in sorted(lines.items())]
        tables.append(_group(report.job.cluster, operation, axes, ranks, rows, "uint8", comments, every_rank))
    return tables


def _count_calls(report: Report, device: int) -> dict[tuple[Any, ...], dict[tuple[int, float], int]]:
    """Returns the calls of a device in a step, by `_key`, and by their bytes and seconds."""
    counts: dict[tuple[Any, ...], dict[tuple[int, float], int]] = defaultdict(lambda: defaultdict(int))
    flat = report.play.step.flat
    for number, op in enumerate(flat.ops):
        if flat.device[number] == device and (key := _key(report, device, op)):
            nbytes = int(getattr(op.work, "nbytes", 0))
            counts[key][nbytes, flat.seconds[number] + flat.latency[number]] += 1
    return counts


def _key(report: Report, device: int, op: Op) -> tuple[str, tuple[str, ...], tuple[int, ...], str] | None:
    """Returns operation, axes, global ranks and library of an op that communicates between ranks; else None."""
    work, plan = op.work, report.play.plan
    if isinstance(work, Transfer):
        ends = (work.source, work.target)
        ranks = tuple(int(plan.ranks.of_device(end).min()) for end in ends) if max(ends) < plan.ranks.devices else ()
        return ("send_recv", (work.axis,), ranks, "") if work.nbytes and len(set(ranks)) == 2 else None
    if not isinstance(work, Collective | Exchange) or not work.nbytes:
        return None
    operation = work.operation if isinstance(work, Collective) else "all_to_all"
    members = tuple(group_ranks(work, plan.on(device), device))
    library = work.library if isinstance(work, Exchange) else ""
    return (operation, work.axes, members, library) if operation in TESTS and len(members) > 1 else None


def tables_of_cluster(
    cluster: Cluster, operations: Iterable[str], gpus: int | None, sizes: Sequence[int], every_rank: bool = False
) -> list[CollectiveGroup]:
    """Returns the collectives of the first `gpus` GPUs of a cluster (None: of all) over a range of sizes [bytes].
    Raises PlanError for an unknown operation, or for more GPUs than there are."""
    count = cluster.gpus if gpus is None else gpus
    if not 2 <= count <= cluster.gpus:
        rule = f"a collective has at least 2 ranks, and {cluster.name} has {cluster.gpus:,} GPUs"
        raise PlanError("--gpus", rule, f"Write 2 to {cluster.gpus}", gpus)
    costs = Costs(cluster, Mesh({"all": cluster.gpus}))
    ranks = tuple(range(count))
    tables = []
    for operation in operations:
        lines = []
        for nbytes in sizes:
            price = _price(cluster, costs, operation, ranks, nbytes)
            lines.append(TableLine(nbytes, price.seconds + price.latency))
        comments = [f"forecast by meshcast {product_version()} for {cluster.name}", *costs.assumed]
        tables.append(_group(cluster, operation, (), ranks, lines, "float", comments, every_rank))
    return tables


def _price(cluster: Cluster, costs: Costs, operation: str, ranks: tuple[int, ...], nbytes: int) -> Estimate:
    if operation != "send_recv":
        return collective.price(
            Collective(operation, nbytes, ("all",)), reach(cluster, ranks), costs.communication.links
        )
    # Every rank sends to the next: the slowest pair sets the time.
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    sends_to, receives_from = dict(pairs).get, {b: a for a, b in pairs}.get
    reaches = dict.fromkeys(message_reach(cluster, *pair, sends_to, receives_from) for pair in pairs)
    prices = [p2p.price(nbytes, distance, costs.communication.links) for distance in reaches]
    return max(prices, key=lambda distance: distance.seconds + distance.latency)


def _group(
    cluster: Cluster,
    operation: str,
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    lines: Sequence[TableLine],
    dtype: str,
    comments: Sequence[str],
    every_rank: bool,
) -> CollectiveGroup:
    places = [(f"node-{rank // cluster.gpus_per_node}", rank % cluster.gpus_per_node) for rank in ranks]
    table = NcclTable(TESTS[operation], places, cluster.gpu.name, lines, dtype, comments, every_rank)
    return CollectiveGroup(operation, axes, ranks, table)


def make_sizes(begin: int, end: int, factor: int) -> list[int]:
    """Returns sizes from `begin` on, by powers of `factor`, up to `end` [bytes]. Raises PlanError without sizes."""
    if begin < 1 or end < begin:
        rule = f"a range of sizes goes up, from at least 1 byte; this one goes from {begin:,} to {end:,}"
        raise PlanError("--begin", rule, "Write --begin 8 --end 8G", begin)
    if factor < 2:
        raise PlanError("--factor", "sizes grow by a factor of 2 or more", "Write --factor 2", factor)
    sizes = [begin]
    while sizes[-1] * factor <= end and len(sizes) < SIZES:
        sizes.append(sizes[-1] * factor)
    return sizes
