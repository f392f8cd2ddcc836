"""``meshcast measure kernels``: the modules of one rank, each by itself, beside what was forecast for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from simulator.forecast.planning import resolve_plan
from simulator.ir.ops import Gemm, Work
from simulator.job.load import load_job
from simulator.plan.plan import Plan
from validation.kernels import fp8
from validation.kernels.modes import Bench, check_modes, check_times, sample
from validation.kernels.operators import OperatorOfRank, optimizer, parts
from validation.measurements.device import Device, versions
from validation.measurements.forecasts import Forecaster, forecasters
from validation.measurements.measurement import Measurement, MeasurementRow, utc_now
from validation.reference.model import check
from validation.reference.optimizer import Optimizer, gradient

INSTRUMENTS = {"cpu": "time.perf_counter", "cuda": "CUDA events"}
"""What a device's seconds are measured with."""

PASSES = ("forward", "backward")

Progress = Callable[[str], None]
"""Is told what is being measured."""


@dataclass(frozen=True)
class Trial:
    """A row with its forecast, and what fills it with samples."""

    row: MeasurementRow
    run: Callable[[Bench], list[float]]


def measure(
    job: Mapping[str, Any],
    device: str,
    out: Path,
    modes: Sequence[str] = ("eager",),
    tps: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    repeat: int = 20,
    warmup: int = 3,
    cold: bool = True,
    calibration: Path | None = None,
    command: str = "",
    progress: Progress = lambda text: None,
) -> Measurement:
    """Forecasts the modules of one rank of `job`, writes that to `out`, measures them, and writes the file again.

    modes: eager, cuda-graph, compile. tps: degrees of tensor parallelism, the job's own if none is given. dtypes: fp32,
    bf16, and fp8 for the products of linears besides; the job's own if none is given. cold: the last-level cache is
    driven out before each sample. An interrupt leaves in the file what was measured until then.
    Raises PlanError for a job, a mode or a device that there is not.
    """
    on = Device.of(device)
    check_times(warmup, repeat)
    how = Manner(on, check_modes(modes, on), warmup, repeat, cold)
    formats = [one for one in dtypes if one != "fp8"]
    cases = list(_cases(job, tps, formats, calibration))
    notes = list(dict.fromkeys(fp8.lacking(on, case.plan) for case in cases)) if "fp8" in dtypes else []
    trials = [(case, _trials(case, how, "fp8" in dtypes)) for case in cases]
    machine = on.machine()
    machine = machine.model_copy(update={"clocks": on.clocks("before")})
    measurement = Measurement(
        kind="kernels",
        title=f"Kernels of one rank of {cases[0].plan.job.model.name} on {machine.name}",
        machine=machine,
        versions=versions(),
        command=command,
        job=dict(job),
        settings={"modes": list(how.modes), "warmup": warmup, "repeat": repeat, "cold": cold},
        calibration=str(calibration) if calibration is not None else None,
        forecast_written=utc_now(),
        rows=tuple(trial.row for _, some in trials for trial in some),
        notes=tuple(filter(None, notes)),
    )
    measurement.write(out)
    more: list[str] = []
    rows: list[MeasurementRow] = []
    try:
        for case, some in trials:
            for row in _measure_case(case, some, on, more, progress):
                rows.append(row)
    except KeyboardInterrupt:
        more.append("interrupted: rows without samples were not measured")
        raise
    finally:
        clocks = {**machine.clocks, **on.clocks("after")}
        rows += measurement.rows[len(rows) :]
        measurement = measurement.with_samples(rows, tuple(more), machine.model_copy(update={"clocks": clocks}))
        measurement.write(out)
    return measurement


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class ModuleCase:
    """One rank of a job at one degree of tensor parallelism and in one number format.

    label: what the names of its groups begin with.
    """

    forecasters: Sequence[Forecaster]
    label: str

    @property
    def plan(self) -> Plan:
        return self.forecasters[0].plan

    def row(
        self, name: str, mode: str, works: Iterable[Work], shape: Mapping[str, Any], instrument: str
    ) -> MeasurementRow:
        """What is forecast and not measured yet."""
        works = list(works)
        found = {one.by: one.estimate_works(works) for one in self.forecasters}
        return MeasurementRow(
            name=name, group=f"{self.label}{mode}", forecasts=found, instrument=instrument, shape=dict(shape)
        )


def _cases(
    job: Mapping[str, Any], tps: Sequence[int], dtypes: Sequence[str], calibration: Path | None
) -> Iterator[ModuleCase]:
    """Raises PlanError for a job that the reference trainer does not run."""
    plan = resolve_plan(load_job(job))
    tensor = plan.family("tensor")
    own = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
    sequence = any(scheme.use == "tensor/megatron-sp" for scheme in tensor)
    for tp in tps or (own,):
        for dtype in dtypes or (plan.job.framework.weights,):
            case = {**job, "batch": plan.job.batch.model_dump(include={"micro", "sequence"})}
            case["plan"] = {"tp": tp, "zero": 0, "sequence_parallel": sequence}
            case["cluster"] = _of_gpus(job["cluster"], tp)
            if dtypes:
                case["precision"] = {**_formats(job.get("precision")), "compute": dtype}
            found = forecasters(case, calibration)
            check(found[0].plan)
            yield ModuleCase(found, f"tp {tp} {f'{dtype} ' if len(dtypes) > 1 else ''}")


def _of_gpus(cluster: Any, tp: int) -> Any:
    """The cluster with as many GPUs as share a layer, where it is told by its GPUs; others are replicas."""
    return {**cluster, "gpus": tp} if isinstance(cluster, Mapping) and "gpus" in cluster else cluster


def _formats(precision: Any) -> dict[str, Any]:
    """The formats beside that of the products, as a job gives them."""
    return dict(precision) if isinstance(precision, Mapping) else {}


# --------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Manner:
    """How kernels are measured."""

    device: Device
    modes: Sequence[str]
    warmup: int
    repeat: int
    cold: bool

    @property
    def instrument(self) -> str:
        return INSTRUMENTS[self.device.kind]

    def seconds(self, work: Callable[[], Any]) -> list[float]:
        return self.device.seconds(work, self.warmup, self.repeat, self.cold)


def _trials(case: ModuleCase, how: Manner, with_fp8: bool) -> list[Trial]:
    """All rows of a case."""
    found, stated = parts(case.plan), {"dtype": case.plan.job.framework.weights}
    trials = []
    for part, mode in product(found, how.modes):
        for name, works in zip(PASSES, (part.forward, part.backward), strict=True):
            if works:
                row = case.row(f"{part.name} {name}", mode, works, {**stated, **part.shape}, how.instrument)
                trials.append(Trial(row, partial(_of_module, how, part, mode, name == "backward")))
    if "eager" in how.modes:
        elements, update = optimizer(case.plan)
        row = case.row("optimizer step", "eager", update, {**stated, "elements": elements}, how.instrument)
        trials.append(Trial(row, partial(_of_optimizer, how)))
    if with_fp8 and not fp8.lacking(how.device, case.plan):
        for part in found:
            for name in PASSES:
                if products := fp8.products(part, name == "backward"):
                    shape = {"dtype": "fp8", **part.shape}
                    row = case.row(f"{part.name} {name}", "fp8", products, shape, how.instrument)
                    trials.append(Trial(row, partial(_of_fp8, how, products)))
    return trials


def _of_module(how: Manner, part: OperatorOfRank, mode: str, backward: bool, bench: Bench) -> list[float]:
    passes = bench.passes(part, mode)
    return sample(how.device, passes, backward, how.warmup, how.repeat, how.cold)


def _of_optimizer(how: Manner, bench: Bench) -> list[float]:
    """One step over the weights of a layer, with gradients of ordinary size."""
    params = list(bench.layer.parameters())
    step = Optimizer(params, bench.plan)
    with torch.no_grad():
        for param in params:
            gradient(param).normal_(std=0.1)
    return how.seconds(step.step)


def _of_fp8(how: Manner, works: Sequence[Gemm], bench: Bench) -> list[float]:
    return how.seconds(fp8.run_products(works, how.device))


def _measure_case(
    case: ModuleCase, trials: Sequence[Trial], device: Device, notes: list[str], progress: Progress
) -> Iterator[MeasurementRow]:
    """The rows of the trials with their samples; without any, and with a note, where PyTorch could not run them."""
    bench = Bench(case.plan, device)
    for trial in trials:
        progress(f"{trial.row.group}: {trial.row.name}")
        try:
            samples = trial.run(bench)
        except torch.OutOfMemoryError:
            notes.append(f"{trial.row.group}, {trial.row.name}: not measured, the device has too little memory")
            samples = []
        except Exception as error:
            # Compilers and the capture of graphs fail in ways of their own; what runs eagerly must run.
            if trial.row.group.endswith("eager"):
                raise
            notes.append(f"{trial.row.group}, {trial.row.name}: not measured, {type(error).__name__}: {_line(error)}")
            samples = []
        yield trial.row.model_copy(update={"samples": tuple(samples)})


def _line(error: Exception) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "")
