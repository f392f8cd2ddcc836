"""``meshcast measure kernels``: forecasts the kernels of the modules of a rank, then times each module alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import Gemm, HostCopy, Work
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.kernels import fp8
from meshcast.validation.kernels.fp8_libraries import (
    LIBRARIES,
    Library,
    QuantisedLinear,
    in_recipe,
    make_passes,
    quantised_linears,
)
from meshcast.validation.kernels.modes import Bench, check_modes, sample
from meshcast.validation.kernels.operators import LocalOperator, local_operators, optimizer
from meshcast.validation.kernels.works import kernel_class, work_fields
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.forecasts import Forecaster, forecasters
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow, describe_error
from meshcast.validation.measurements.recording import Progress, check_counts, make_blind, record
from meshcast.validation.measurements.row_errors import CLASS, WORK
from meshcast.validation.reference.model import check
from meshcast.validation.reference.optimizer import Optimizer, gradient

INSTRUMENTS = {"cpu": "time.perf_counter", "cuda": "CUDA events"}
"""Timers by kind of device."""

PASSES = ("forward", "backward")

COPIES = (2**20, 2**24, 2**28)
"""Sizes of copies between a GPU and its host [bytes]."""

WARM_UP_SIZE, WARM_UP_GEMMS = 8192, 100
"""Rows and columns of the GEMMs before a measurement, and their number between two looks at the clock: about 0.2 s."""


@dataclass(frozen=True)
class Trial:
    """A measurement to be made.

    Attributes:
        row: its row, with forecasts and without samples.
        run: takes the samples.
    """

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
    """Forecasts the modules of a rank of `job`, writes the forecasts to `out`, measures, and writes `out` again.

    modes: eager, cuda-graph, compile.
    tps: degrees of tensor parallelism; by default the job's.
    dtypes: fp32, bf16, and fp8 for the GEMMs of linear layers as well; by default the job's.
    cold: the last-level cache is flushed before each sample.
    An interrupt leaves in the file what was measured until then.
    Raises PlanError for a job, a mode or a device that does not exist.
    """
    on = Device.of(device)
    check_counts(warmup=(warmup, 0), repeat=(repeat, 1))
    how = Setup(on, check_modes(modes, on), warmup, repeat, cold)
    formats = [dtype for dtype in dtypes if dtype != "fp8"]
    cases = list(_cases(job, tps, formats, calibration))
    notes = [why for case in cases for why in _missing_fp8(on, case.plan)] if "fp8" in dtypes else []
    trials = [(case, _trials(case, how, "fp8" in dtypes)) for case in cases]
    machine = on.machine()
    title = f"Kernels of one rank of {cases[0].plan.job.model.name} on {machine.name}"
    rows = (trial.row for _, some in trials for trial in some)
    settings = {"modes": list(how.modes), "warmup": warmup, "repeat": repeat, "cold": cold}
    blind = make_blind("kernels", title, machine, job, rows, settings, calibration, command, notes)
    with record(blind, out, on) as recording:
        warm_up_with_gemms(on)
        for case, some in trials:
            for row in _measure_case(case, some, on, recording.notes, progress):
                recording.rows.append(row)  # singly: an interrupt leaves those before it
    return recording.measurement


def _missing_fp8(device: Device, plan: Plan) -> list[str]:
    """Returns why fp8 is not measured, as a whole or by a library."""
    if why := fp8.why_missing(device, plan):
        return [why]
    return [why for library in LIBRARIES if (why := library.why_missing())]


def warm_up_with_gemms(device: Device) -> None:
    """Computes GEMMs until the clock of a GPU is steady; nothing on a CPU."""
    if device.cuda:
        x = torch.ones(WARM_UP_SIZE, WARM_UP_SIZE, dtype=torch.bfloat16, device=device.torch)
        for _ in device.warm_up(1):
            for _ in range(WARM_UP_GEMMS):
                x @ x
            device.sync()


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class ModuleCase:
    """A rank of a job at a degree of tensor parallelism and in a number format.

    Attributes:
        forecasters: with the costs of the catalog, and of the calibration if any.
        label: prefix of the groups of its rows.
    """

    forecasters: Sequence[Forecaster]
    label: str

    @property
    def plan(self) -> Plan:
        return self.forecasters[0].plan

    def row(
        self, name: str, mode: str, works: Iterable[Work], shape: Mapping[str, Any], instrument: str
    ) -> MeasurementRow:
        """Makes a row with its forecasts, not measured yet."""
        works = list(works)
        forecasts = {forecaster.by: forecaster.estimate_works(works) for forecaster in self.forecasters}
        return MeasurementRow(
            name=name,
            group=f"{self.label}{mode}",
            forecasts=forecasts,
            instrument=instrument,
            shape={CLASS: kernel_class(works), **shape, **({WORK: work_fields(works[0])} if len(works) == 1 else {})},
        )


def _cases(
    job: Mapping[str, Any], tps: Sequence[int], dtypes: Sequence[str], calibration: Path | None
) -> Iterator[ModuleCase]:
    """Yields the cases of a job. Raises PlanError for a job that the reference model does not support."""
    plan = resolve_plan(load_job(job))
    check_alike(plan, "a measurement of kernels")
    tensor = plan.family("tensor")
    degree = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
    sequence = any(scheme.use == "tensor/megatron-sp" for scheme in tensor)
    cluster, formats = job["cluster"], job.get("precision")
    for tp in tps or (degree,):
        for dtype in dtypes or (plan.job.framework.weights,):
            case = {**job, "batch": plan.job.batch.model_dump(include={"micro", "sequence"})}
            case["plan"] = {"tp": tp, "zero": 0, "sequence_parallel": sequence}
            if isinstance(cluster, Mapping) and "gpus" in cluster:
                case["cluster"] = {**cluster, "gpus": tp}  # further GPUs would only add replicas
            if dtypes:
                case["precision"] = {**(formats if isinstance(formats, Mapping) else {}), "compute": dtype}
            sources = forecasters(case, calibration)
            check(sources[0].plan)
            yield ModuleCase(sources, f"tp {tp} {f'{dtype} ' if len(dtypes) > 1 else ''}")


# --------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Setup:
    """How kernels are measured.

    Attributes:
        device: where they run.
        modes: see `validation.kernels.modes.MODES`.
        warmup: runs before the samples.
        repeat: samples of each kernel.
        cold: whether the last-level cache is flushed before each sample.
    """

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


def _trials(case: ModuleCase, how: Setup, with_fp8: bool) -> list[Trial]:
    """Makes the trials of a case."""
    operators, stated = local_operators(case.plan), {"dtype": case.plan.job.framework.weights}
    trials = []
    for local, mode in product(operators, how.modes):
        for name, works in zip(PASSES, (local.forward, local.backward), strict=True):
            if works:
                row = case.row(f"{local.name} {name}", mode, works, {**stated, **local.shape}, how.instrument)
                trials.append(Trial(row, partial(_measure_module, how, local, mode, name == "backward")))
    if "eager" in how.modes:
        elements, update = optimizer(case.plan)
        row = case.row("optimizer step", "eager", update, {**stated, "elements": elements}, how.instrument)
        trials.append(Trial(row, partial(_measure_optimizer, how)))
    if how.device.cuda and "eager" in how.modes:
        for (what, back), nbytes in product({"to the GPU": True, "to the host": False}.items(), COPIES):
            row = case.row(f"copy {what}", "eager", [HostCopy(nbytes, back)], {"bytes": nbytes}, how.instrument)
            trials.append(Trial(row, partial(_measure_copy, how, nbytes, back)))
    if with_fp8 and not fp8.why_missing(how.device, case.plan):
        for local in operators:
            for name in PASSES:
                if gemms := fp8.fp8_gemms(local, name == "backward"):
                    shape = {"dtype": "fp8", **local.shape}
                    row = case.row(f"{local.name} {name}", "fp8", gemms, shape, how.instrument)
                    trials.append(Trial(row, partial(_measure_fp8, how, gemms)))
        trials += _library_trials(case, how)
    return trials


def _library_trials(case: ModuleCase, how: Setup) -> Iterator[Trial]:
    """Yields the trials of linear layers in fp8 by each library that is installed."""
    for library in LIBRARIES:
        if library.why_missing():
            continue
        quantised = ModuleCase(in_recipe(case.forecasters, library.recipe), case.label)
        for linear in quantised_linears(quantised.forecasters[0]):
            for name, works in zip(PASSES, (linear.forward, linear.backward), strict=True):
                shape = {"dtype": library.recipe, **linear.shape}
                row = quantised.row(f"{linear.name} {name}", f"fp8 {library.name}", works, shape, how.instrument)
                yield Trial(row, partial(_measure_library, how, library, linear, name == "backward"))


def _measure_module(how: Setup, local: LocalOperator, mode: str, backward: bool, bench: Bench) -> list[float]:
    passes = bench.passes(local, mode)
    return sample(how.device, passes, backward, how.warmup, how.repeat, how.cold)


def _measure_optimizer(how: Setup, bench: Bench) -> list[float]:
    """Times optimizer steps on the weights of a layer, with normally distributed gradients [s]."""
    params = list(bench.layer.parameters())
    step = Optimizer(params, bench.plan)
    with torch.no_grad():
        for param in params:
            gradient(param).normal_(std=0.1)
    return how.seconds(step.step)


def _measure_copy(how: Setup, nbytes: int, back: bool, bench: Bench) -> list[float]:
    """Times copies between the memory of the GPU and pinned memory of the host [s]."""
    host = how.device.pin_memory(torch.empty(nbytes, dtype=torch.int8))
    there = torch.empty(nbytes, dtype=torch.int8, device=how.device.torch)
    return how.seconds(lambda: there.copy_(host, True) if back else host.copy_(there, True))


def _measure_fp8(how: Setup, works: Sequence[Gemm], bench: Bench) -> list[float]:
    return how.seconds(fp8.make_runner(works, how.device))


def _measure_library(
    how: Setup, library: Library, linear: QuantisedLinear, backward: bool, bench: Bench
) -> list[float]:
    passes = make_passes(library, linear, how.device)
    return sample(how.device, passes, backward, how.warmup, how.repeat, how.cold)


def _measure_case(
    case: ModuleCase, trials: Sequence[Trial], device: Device, notes: list[str], progress: Progress
) -> Iterator[MeasurementRow]:
    """Yields the rows of the trials with their samples; those that PyTorch could not run get a note and no samples."""
    bench = Bench(case.plan, device)
    for trial in trials:
        progress(f"{trial.row.group}: {trial.row.name}")
        try:
            samples = trial.run(bench)
        except torch.OutOfMemoryError:
            notes.append(f"{trial.row.group}, {trial.row.name}: not measured, the device has too little memory")
            samples = []
        except Exception as error:
            # Compilation and graph capture may fail; eager kernels must run.
            if trial.row.group.endswith("eager"):
                raise
            notes.append(f"{trial.row.group}, {trial.row.name}: not measured, {describe_error(error)}")
            samples = []
        yield trial.row.model_copy(update={"samples": tuple(samples)})
