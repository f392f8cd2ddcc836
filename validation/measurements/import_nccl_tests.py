"""Import of nccl-tests output: bandwidth tests of collectives become measurement files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.topology import message_reach, reach
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.formats import nccl_tests
from meshcast.simulator.ir.ops import Collective
from meshcast.validation.measurements.forecasts import Forecaster, forecasters, with_interval
from meshcast.validation.measurements.imported_file import Origin
from meshcast.validation.measurements.measurement import ForecastValue, Machine, Measurement, MeasurementRow


def import_nccl_tests(
    path: Path,
    job: Mapping[str, Any] | None = None,
    operation: str | None = None,
    members: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """Imports a run of nccl-tests.

    job: its cluster is that which is forecast; None: nothing is forecast.
    operation, members: collective and number of ranks, if the file does not record them.
    Raises PlanError for a file that cannot be read, for host times (-C), and for a cluster with fewer GPUs.
    """
    runs = nccl_tests.read(path, operation, members)
    if any(run.clock == "cpu" for run in runs):
        rule = "it holds times of the host's calls (-C), not of collectives"
        raise PlanError(str(path), rule, "Run nccl-tests without -C")
    sources = forecasters(job, calibration) if job is not None else []
    several = len({run.members for run in runs}) > 1
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows: dict[tuple[str, str], MeasurementRow] = {}
    notes: list[str] = []
    for run in runs:
        for size in run.sizes:
            for place, seconds in size.seconds.items():
                key = f"{run.operation} {size.nbytes}", f"{place}, {run.members} ranks" if several else place
                samples[key] += size.times.get(place, (seconds,))
                averaged = "every call" if place in size.times else "mean of the calls"
                rows[key] = MeasurementRow(
                    name=key[0],
                    group=key[1],
                    forecasts={source.by: _forecast(source, run, size.nbytes) for source in sources if size.nbytes},
                    instrument=f"nccl-tests, {averaged}",
                    shape={
                        "operation": run.operation, "bytes": size.nbytes, "members": run.members, "dtype": size.dtype
                    },
                )  # fmt: skip
        notes += _warnings(run)
    kept = [row.model_copy(update={"samples": tuple(samples[key])}) for key, row in rows.items() if row.shape["bytes"]]
    if not kept:
        raise PlanError(str(path), "every size in it is 0 bytes", "Run nccl-tests with larger sizes (-b, -e)")
    first = runs[0]
    gpus = max(len(first.devices), first.members * first.groups)
    return Origin(path, job, calibration, command).measurement(
        kind="collectives",
        title=f"nccl-tests: {', '.join(dict.fromkeys(run.operation for run in runs))}",
        machine=Machine(device="cuda", name=first.devices[0] if first.devices else "unknown", count=gpus),
        rows=kept,
        settings={"nccl-tests": "; ".join(dict.fromkeys(run.command for run in runs if run.command))},
        notes=notes,
        versions={"nccl": first.nccl} if first.nccl else {},
    )


def _warnings(run: nccl_tests.Run) -> list[str]:
    """Returns notes on a run that ended early, had wrong results, empty sizes or concurrent groups."""
    wrong = sum(sum(size.wrong.values()) for size in run.sizes)
    empty = sum(1 for size in run.sizes if not size.nbytes)
    warnings = [
        (not run.finished, "the run was stopped before its end"),
        (wrong, f"{wrong:,} elements had wrong results"),
        (empty, f"{empty} sizes of 0 bytes are left out"),
        (run.groups > 1, f"{run.groups} groups ran concurrently; each is forecast as if it ran alone"),
    ]
    return [f"{run.operation}: {text}" for holds, text in warnings if holds]


def _forecast(source: Forecaster, run: nccl_tests.Run, nbytes: int) -> ForecastValue:
    """Returns the forecast of a size. In send_recv every rank sends to the next, so the slowest pair sets the time."""
    cluster, links = source.plan.job.cluster, source.costs.communication.links
    ranks = _gpus_of(cluster, run)
    if run.operation == "send_recv":
        pairs = [(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) if a != b]
        sends_to, receives_from = dict(pairs).get, {b: a for a, b in pairs}.get
        reaches = dict.fromkeys(message_reach(cluster, *pair, sends_to, receives_from) for pair in pairs)
        prices = [p2p.price(nbytes, path, links) for path in reaches]
        price = max(prices, key=lambda price: price.seconds + price.latency)
    else:
        price = collective.price(Collective(run.operation, nbytes, ("all",)), reach(cluster, ranks), links)
    return with_interval(price.seconds + price.latency, price.sigma)


def _gpus_of(cluster: Cluster, run: nccl_tests.Run) -> list[int]:
    """Returns the ranks of the run as GPUs of the cluster, node by node."""
    per_node, members = cluster.gpus_per_node, len(run.places) or run.members
    places = run.places or [divmod(rank, per_node) for rank in range(min(members, cluster.gpus))]
    ranks = [machine * per_node + local for machine, local in places]
    if members > cluster.gpus or max(local for _, local in places) >= per_node or max(ranks) >= cluster.gpus:
        machines = len({machine for machine, _ in run.places}) or -(-members // per_node)
        rule = (
            f"the cluster has {cluster.gpus} GPUs, {per_node} per node; the run used {members} on {machines} machines"
        )
        raise PlanError("job cluster", rule, "Name the cluster on which nccl-tests ran", cluster.name)
    return ranks
