"""What others measured, as measurement files: output of nccl-tests, logs of training frameworks, profiler traces.

The forecast is made here, long after the measurement: such a file is no blind one, and says so in its notes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hardware.cluster import Cluster
from hardware.errors import PlanError
from hardware.topology import reach
from simulator.bridges import kineto, logs, nccl_tests
from simulator.costs.collectives import collective, p2p
from simulator.ir.ops import Collective
from simulator.report.metrics import Z90
from simulator.report.report import product_version
from validation.measurements.forecasts import Forecaster, forecasters
from validation.measurements.measurement import Kind, Machine, Measurement, Row, Value, now
from validation.traces.compare import Comparison, compare
from validation.traces.kernel_classes import class_of

Framework = Literal["megatron", "torchtitan"]

LOGS = {"megatron": ("Megatron-LM", logs.megatron), "torchtitan": ("torchtitan", logs.torchtitan)}
"""What the frameworks are called, and what reads their logs."""

SKIPPED = 3
"""Lines of a log that are left out as warm-up, if nobody says otherwise: compilation, allocation, first connections."""

NOT_BLIND = "imported: the forecast was made after the measurement"


# ----------------------------------------------------------------------------------------- nccl-tests


def collectives(
    path: Path,
    job: Mapping[str, Any] | None = None,
    operation: str | None = None,
    members: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """Collectives of nccl-tests. job: its cluster is what is forecast; without one there is no forecast.

    operation, members: what the file does not say. Raises PlanError for a file that cannot be read, times that are not
    a collective's, or a cluster with fewer GPUs.
    """
    runs = nccl_tests.read(path, operation, members)
    if any(run.clock == "cpu" for run in runs):
        rule = "it holds times of the host's calls (-C), not of collectives"
        raise PlanError(str(path), rule, "Run nccl-tests without -C")
    sources = forecasters(job, calibration) if job is not None else []
    several = len({run.members for run in runs}) > 1
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows: dict[tuple[str, str], Row] = {}
    notes = [NOT_BLIND]
    for run in runs:
        for size in run.sizes:
            for place, seconds in size.seconds.items():
                key = f"{run.operation} {size.nbytes}", f"{place}, {run.members} ranks" if several else place
                samples[key] += size.times.get(place, (seconds,))
                forecast = {one.by: _collective(one, run, size.nbytes) for one in sources if size.nbytes}
                told = {"operation": run.operation, "bytes": size.nbytes, "members": run.members, "dtype": size.dtype}
                how = "every call" if place in size.times else "mean of the calls"
                rows[key] = Row(
                    name=key[0], group=key[1], forecasts=forecast, instrument=f"nccl-tests, {how}", shape=told
                )
        notes += _warnings(run)
    finished = [row.model_copy(update={"samples": tuple(samples[key])}) for key, row in rows.items() if _moves(row)]
    if not finished:
        raise PlanError(str(path), "every size in it is 0 bytes", "Run nccl-tests with larger sizes (-b, -e)")
    first = runs[0]
    machine = Machine(device="cuda", name=first.devices[0] if first.devices else "unknown", count=_ranks(first))
    versions = {"nccl": first.nccl} if first.nccl else {}
    title = f"nccl-tests: {', '.join(dict.fromkeys(run.operation for run in runs))}"
    ran = "; ".join(dict.fromkeys(run.command for run in runs if run.command))
    settings = {"nccl-tests": ran}
    return _measurement(
        path, "collectives", title, machine, versions, command, job, settings, calibration, notes, finished
    )


def _moves(row: Row) -> bool:
    return bool(row.shape["bytes"])


def _ranks(run: nccl_tests.Run) -> int:
    return max(len(run.devices), run.members * run.groups)


def _warnings(run: nccl_tests.Run) -> list[str]:
    wrong = sum(sum(size.wrong.values()) for size in run.sizes)
    empty = sum(1 for size in run.sizes if not size.nbytes)
    told = [
        (not run.finished, "it was stopped before its end"),
        (wrong, f"{wrong:,} elements came out wrong"),
        (empty, f"{empty} sizes of 0 bytes are left out"),
        (run.groups > 1, f"{run.groups} groups ran at once, and were forecast as if alone"),
    ]
    return [f"{run.operation}: {words}" for holds, words in told if holds]


def _collective(source: Forecaster, run: nccl_tests.Run, nbytes: int) -> Value:
    """The forecast of one size. A message goes from every rank to the next: the slowest pair paces all."""
    cluster, links = source.plan.job.cluster, source.costs.links
    ranks = _on(cluster, run)
    if run.operation == "send_recv":
        pairs = [(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) if a != b]
        prices = [p2p.price(nbytes, reach(cluster, pair), links) for pair in dict.fromkeys(pairs)]
        price = max(prices, key=lambda one: one.seconds + one.latency)
    else:
        price = collective.price(Collective(run.operation, nbytes, ("all",)), reach(cluster, ranks), links)
    seconds, far = price.seconds + price.latency, Z90 * price.spread
    return Value(value=seconds, low=seconds * math.exp(-far), high=seconds * math.exp(far))


def _on(cluster: Cluster, run: nccl_tests.Run) -> list[int]:
    """The members of the run's group as GPUs of the cluster, machine by machine."""
    per = cluster.gpus_per_node
    places = run.places or [divmod(rank, per) for rank in range(run.members)]
    ranks = [machine * per + own for machine, own in places]
    if max(own for _, own in places) >= per or max(ranks) >= cluster.gpus:
        machines = len({machine for machine, _ in places})
        rule = f"the cluster has {cluster.gpus} GPUs, {per} a node; the run used {len(places)} on {machines} machines"
        raise PlanError("job cluster", rule, "Name the cluster that it ran on", cluster.name)
    return ranks


# --------------------------------------------------------------------------------------------- logs


def log(
    path: Path,
    framework: Framework,
    job: Mapping[str, Any] | None = None,
    skip: int = SKIPPED,
    tokens: int | None = None,
    gpus: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """The steps of a training run by its log. skip: lines that are left out, as warm-up.

    tokens, gpus: of a step, and of the run, where no job says them: torchtitan logs tokens/s of one GPU and no time.
    Raises PlanError for a log that cannot be read, is too short, or is of another global batch than the job.
    """
    if framework not in LOGS:
        raise PlanError("framework", f"logs of {', '.join(LOGS)} are read", "Name one of them", framework)
    named, read = LOGS[framework]
    iterations = read(path)
    if skip < 0 or skip >= len(iterations):
        rule = f"the log has {len(iterations)} lines of iterations, and one must be left"
        raise PlanError("--skip", rule, f"Write 0 to {len(iterations) - 1}", skip)
    kept = iterations[skip:]
    sources = forecasters(job, calibration) if job is not None else []
    if sources:
        report = sources[0].report
        tokens, gpus = tokens or report.tokens, gpus or report.job.cluster.gpus
        batch = report.job.batch.total
        if odd := next((one for one in kept if one.samples and one.samples != batch), None):
            rule = f"the job's global batch is {batch}, the log's {odd.samples}"
            raise PlanError(odd.where, rule, "Name the job of this run, or a --skip behind the ramp-up")
    samples = [_seconds(one, tokens, gpus) for one in kept]
    shape = {"lines": len(kept), "first": kept[0].number, "last": kept[-1].number}
    step = {one.by: one.step for one in sources}
    rows = [Row(name="step", forecasts=step, samples=tuple(samples), instrument=f"log of {named}", shape=shape)]
    held = [one.reserved for one in kept if one.reserved is not None]
    notes = [NOT_BLIND, f"the first {skip} of {len(iterations)} logged lines are left out as warm-up"]
    if held:
        peaks = {one.by: _certain(one.report.peak_reserved) for one in sources}
        reserved = Row(
            name="peak reserved", quantity="bytes", forecasts=peaks, samples=tuple(held), instrument=f"log of {named}"
        )
        rows.append(reserved)
        notes.append("peak reserved: of the rank that logged, forecast for the one that needs most")
    name = sources[0].plan.job.cluster.gpu.name if sources else "unknown"
    machine = Machine(device="cuda", name=name, count=gpus or 1)
    settings = {"skip": skip}
    title = f"a training run, by its log of {named}"
    return _measurement(path, "distributed", title, machine, {}, command, job, settings, calibration, notes, rows)


def _seconds(one: logs.Iteration, tokens: int | None, gpus: int | None) -> float:
    if one.seconds is not None:
        return one.seconds
    if not tokens or not gpus:
        rule = "this log has tokens/s of one GPU and no time; the tokens of a step and the GPUs are not known"
        raise PlanError(one.where, rule, "Name the job of the run, or add --tokens and --gpus")
    assert one.tokens_per_s is not None
    return tokens / gpus / one.tokens_per_s


def _certain(value: float) -> Value:
    """A forecast without an interval."""
    return Value(value=value, low=value, high=value)


# ------------------------------------------------------------------------------------------- traces


def kernels(
    path: Path,
    job: Mapping[str, Any],
    rank: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """Classes of kernels of a profiler trace: a row for each class of each stream, a sample for each marked step.

    Raises PlanError for a file that is no trace, or is of another job.
    """
    trace, sources = kineto.read(path), forecasters(job, calibration)
    steps: Sequence[int | None] = range(len(trace.steps())) or [None]
    compared = {one.by: [compare(trace, one.report, rank, step) for step in steps] for one in sources}
    first = compared[sources[0].by]
    keys = list(dict.fromkeys((line.stream, line.kind) for one in first for line in one.lines))
    spreads = {one.by: _spreads(one, first[0].device) for one in sources}
    rows = [
        Row(
            name="step",
            forecasts={one.by: one.step for one in sources},
            samples=tuple(one.real.span for one in first),
            instrument="torch.profiler",
            shape={"kernels": first[-1].real.calls},
        )
    ]
    for stream, kind in keys:
        rows.append(
            Row(
                name=kind,
                group=stream,
                forecasts={
                    by: _class(own[0], stream, kind, spreads[by].get(kind, 0.0)) for by, own in compared.items()
                },
                samples=tuple(one.real.sums.get((stream, kind), (0.0, 0))[0] for one in first),
                instrument="torch.profiler",
                shape={"kernels": first[-1].real.sums.get((stream, kind), (0.0, 0))[1]},
            )
        )
    device: Literal["cuda", "cpu"] = "cuda" if trace.on_gpu else "cpu"
    machine = Machine(device=device, name=first[0].on, count=trace.world or 1)
    title = f"classes of kernels: {first[0].title}"
    notes = [NOT_BLIND, *(first[0].notes if len(first) == 1 else ())]
    settings = {"steps": len(steps)}
    return _measurement(path, "kernels", title, machine, {}, command, job, settings, calibration, notes, rows)


def _class(compared: Comparison, stream: str, kind: str, spread: float) -> Value:
    seconds, far = compared.simulated.sums.get((stream, kind), (0.0, 0))[0], Z90 * spread
    return Value(value=seconds, low=seconds * math.exp(-far), high=seconds * math.exp(far))


def _spreads(source: Forecaster, device: int) -> dict[str, float]:
    """Relative spread of what a device spends on every class; errors of works of one class are taken to go together."""
    flat, sums = source.report.play.step.flat, defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for op, owner, seconds in zip(flat.ops, flat.device, flat.seconds, strict=True):
        if owner == device and op.work is not None:
            total = sums[class_of(op)]
            total[0] += seconds
            total[1] += seconds * source.costs.estimate(op.work).spread
    return {kind: weighted / seconds for kind, (seconds, weighted) in sums.items() if seconds}


# ------------------------------------------------------------------------------------------- the file


def _measurement(
    path: Path,
    kind: Kind,
    title: str,
    machine: Machine,
    versions: Mapping[str, str],
    command: str,
    job: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    calibration: Path | None,
    notes: Sequence[str],
    rows: Sequence[Row],
) -> Measurement:
    # When it was measured nobody says; the file was written behind that.
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return Measurement(
        kind=kind,
        title=title,
        machine=machine,
        versions={"meshcast": product_version(), **versions},
        command=command,
        job=dict(job or {}),
        settings={"file": path.name, **settings},
        calibration=str(calibration) if calibration else None,
        forecast_written=now(),
        measured=written,
        notes=tuple(notes),
        rows=tuple(rows),
    )
