"""``meshcast calibrate --device``: measures a fixed set of kernels, fits the cost models, writes a calibration.

The folder holds ``measured.json`` (raw samples), the calibrations of the device and of its links under their names, and
``device.yaml`` if the device is in no catalog. ``predict --calibration FOLDER`` uses it, with ``gpu:
FOLDER/device.yaml`` in the job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

from hardware import load
from hardware.cluster import Cluster
from hardware.inline import ByGPU, Inter
from simulator.costs.calibration.calibration import DEVICE, Calibration
from simulator.costs.calibration.check import STEPS
from simulator.costs.calibration.cost_models import PROCESSES
from simulator.costs.collectives.links import LinkCostModels, TierCostModels
from simulator.costs.collectives.processes import ProcessCostModel
from simulator.costs.costs import TRAINING_LIBRARIES
from simulator.costs.kernels.sections import section_of
from simulator.ir.ops import Gemm, Work
from validation.calibration.collectives import tables as collectives
from validation.calibration.collectives.recorded import Recorded, make_samples
from validation.calibration.collectives.sample import CollectiveSample, predict
from validation.calibration.device import describe
from validation.calibration.device.kernels import make_cases
from validation.calibration.device.neighbours import run_neighbours
from validation.calibration.device.sustained_rate import measure_sustained_rate
from validation.calibration.fit import fit
from validation.calibration.kernels import tables as kernels
from validation.calibration.kernels.sample import KernelSample
from validation.calibration.write import find_sigmas, make_section, write
from validation.distributed.measure import measure_collectives
from validation.kernels.measure import INSTRUMENTS
from validation.measurements.cuda import Cuda
from validation.measurements.device import Device, versions
from validation.measurements.measurement import Measurement, MeasurementRow, utc_now

MEASURED = "measured.json"

SENT = tuple(int(1000 * 3.7**i) for i in range(9))
"""Sizes of collectives [bytes]: 1 kB to 35 MB, none of them a power of two."""

ROUNDS = 3
"""Times that the whole set is measured: a machine is not equally fast all the time."""

REPEAT = 5
"""Samples of each kernel in a round, of which the median counts."""

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


def calibrate(kind: str, out: Path, processes: int, progress: Progress) -> dict[str, Any]:
    """Measures, fits and writes into `out`. Returns what was written, and the errors of the fits.

    processes: devices that collectives are measured among. Raises PlanError where there is no such device.
    """
    device = Device.of(kind)
    most = Cuda.count() if kind == "cuda" else processes
    collective_rows = collectives_among(kind, min(processes, most)) if min(processes, most) > 1 else ()
    company = processes - 1 if kind == "cpu" else 0
    with run_neighbours(company):
        measured, works = measure(device, progress, collective_rows)
    measured = measured.model_copy(update={"machine": device.machine(max(1, min(processes, most)))})
    out.mkdir(parents=True, exist_ok=True)
    measured.write(out / MEASURED)
    catalog_model = out / DEVICE
    found = fit_all(measured, works, device, out)
    found["files"].insert(1, str(refresh(kind, out, processes)))
    return found | {
        "title": measured.title,
        "device": str(catalog_model) if catalog_model.is_file() else "",
    }


def refresh(kind: str, out: Path, processes: int) -> Path:
    """Measures again what a training step takes off the rate of kernels, and writes it into `out`: the speed of a
    machine that others use too changes from minute to minute."""
    name = gpu_name(kind, out)
    architecture = load("gpus", name).architecture
    file = out / f"{STEPS}.yaml"
    with run_neighbours(processes - 1 if kind == "cpu" else 0):
        write(file, "steps", {architecture: measure_sustained_rate(kind, name, architecture, out)})
    return file


def gpu_name(kind: str, folder: Path) -> str:
    """Name of this machine's device in the catalog, or the file in the folder of a calibration that describes it."""
    described = folder / DEVICE
    return str(described) if described.is_file() else describe.catalog_name(Device.of(kind).machine())


def collectives_among(kind: str, members: int) -> Sequence[MeasurementRow]:
    """Measured collectives of a few sizes among processes of this machine."""
    name = describe.catalog_name(Device.of(kind).machine()) or ("cpu-core" if kind == "cpu" else "h100-sxm")
    job = {
        "model": "llama3-8b",  # any: nothing of it is run
        "cluster": {"gpu": name, "gpus": members, "gpus_per_node": members},
        "framework": {"name": "reference"},
        "precision": "fp32" if kind == "cpu" else "bf16",
    }
    with TemporaryDirectory() as place:
        return measure_collectives(
            job, kind, Path(place) / MEASURED, SENT, repeat=12, warmup=4, busy=kind == "cpu"
        ).rows


def measure(
    device: Device, progress: Progress, collective_rows: Sequence[MeasurementRow] = ()
) -> tuple[Measurement, list[Work]]:
    """Measures the set, in fp32 on a CPU core and in bf16 on a GPU. Also returns the works of the first rows."""
    dtype = "fp32" if device.kind == "cpu" else "bf16"
    every = list(make_cases(device, dtype))
    begun = utc_now()
    rows = []
    torch.manual_seed(0)
    turns = [case for _ in range(ROUNDS) for case in every]
    taken: list[list[float]] = [[] for _ in every]
    for number, case in enumerate(progress(turns, len(turns), "kernels")):
        taken[number % len(every)] += device.seconds(case.make(), 2, REPEAT, cold=True)
    for case, samples in zip(every, taken, strict=True):
        rows.append(
            MeasurementRow(
                name=_name(case.work),
                samples=tuple(samples),
                instrument=INSTRUMENTS[device.kind],
                shape=_shape(case.work),
            )
        )
    stream = describe.measure_stream(device)
    rows.append(MeasurementRow(name="stream", samples=(stream,), quantity="bytes", instrument="bytes/s"))
    launches = tuple(_measure_launch(device))
    rows.append(MeasurementRow(name="host launch", samples=launches, instrument="time.perf_counter"))
    made = Measurement(
        kind="calibration",
        title=f"calibration of {device.machine().name}",
        machine=device.machine(),
        versions=versions(),
        command=" ".join(["meshcast", *sys.argv[1:]]),
        settings={"dtype": dtype, "repeat": REPEAT, "cold": True},
        forecast_written=begun,
    )
    return made.with_samples([*rows, *collective_rows]), [case.work for case in every]


def _measure_launch(device: Device) -> list[float]:
    """Time of the host to launch a small operation [s]."""
    x = torch.zeros(8, device=device.torch)
    found = []
    for _ in range(20):
        device.sync()
        begin = time.perf_counter()
        for _ in range(100):
            x.add_(1.0)
        found.append((time.perf_counter() - begin) / 100)
    return found


def _name(work: Work) -> str:
    if isinstance(work, Gemm):
        return f"gemm {work.layout}"
    what = getattr(work, "what", "attention backward" if getattr(work, "backward", False) else "attention")
    return str(what)


def _shape(work: Work) -> dict[str, Any]:
    return {key: getattr(work, key) for key in work.__dataclass_fields__ if getattr(work, key) not in ("", ())}


# ------------------------------------------------------------------------------------------------ fits


def fit_all(measured: Measurement, works: Sequence[Work], device: Device, out: Path) -> dict[str, Any]:
    """Fits and writes all files into `out`. Returns their names, and the errors of the fits."""
    out.mkdir(parents=True, exist_ok=True)
    name = _name_device(measured, works, device, out)
    source = f"meshcast calibrate --device {device.kind} on {measured.machine.name}, torch {measured.versions['torch']}"
    samples = _make_samples(measured, works, name)
    tables: Any = [Recorded(samples, source)]
    found = kernels.calibrate(Calibration.shipped(), tables, name, leave_out=False)
    file = out / f"{load('gpus', name).name}.yaml"
    write(file, str(load("gpus", name).title), found.data)
    files, errors = [file], [vars(one) for one in found.libraries]
    links = [row for row in measured.rows if "operation" in row.shape and "members" in row.shape]
    if links:
        errors += _calibrate_links(links, name, measured.machine.count, source, device, out, files)
    return {"files": [str(one) for one in [*files, *sorted(out.glob(DEVICE))]], "libraries": errors}


def _name_device(measured: Measurement, works: Sequence[Work], device: Device, out: Path) -> str:
    """The device's name in the catalog; if it has none, the file that describes it, which is written."""
    catalogued = describe.catalog_name(measured.machine)
    if catalogued:
        return catalogued
    products = [(w, r) for w, r in zip(works, measured.rows, strict=False) if isinstance(w, Gemm)]
    flops = max(work.flops / min(row.samples) for work, row in products)
    stream = next(row.samples[0] for row in measured.rows if row.name == "stream")
    is_cpu = device.kind == "cpu"
    found = describe.core(measured.machine, flops, stream) if is_cpu else describe.gpu(device, flops, stream)
    file = out / DEVICE
    file.write_text(
        "# Measured; in the form of hardware/catalog/gpus.\n" + yaml.safe_dump(found, sort_keys=False), "utf-8"
    )
    load.cache_clear()
    return str(file)


def _make_samples(measured: Measurement, works: Sequence[Work], name: str) -> list[KernelSample]:
    """Samples of the kernels: works of one kind together, with arrays in their numeric fields."""
    gpu = load("gpus", name)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, work in enumerate(works):
        words = ((k, getattr(work, k)) for k in work.__dataclass_fields__ if not _number(getattr(work, k)))
        groups.setdefault((type(work), *words), []).append(at)
    found = []
    for (kind, *plain), index in groups.items():
        numbers = [k for k in kind.__dataclass_fields__ if k not in dict(plain)]
        arrays = {k: np.array([float(getattr(works[at], k)) for at in index]) for k in numbers}
        work = kind(**dict(plain), **arrays)
        seconds = np.array([measured.rows[at].median or 0.0 for at in index])
        part = section_of(works[index[0]], gpu)  # type: ignore[arg-type]
        library = TRAINING_LIBRARIES.get((part, gpu.architecture), "torch")
        found.append(KernelSample(part, name, library, (work,), np.array(index), seconds, "measured"))
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _calibrate_links(
    rows: Sequence[MeasurementRow], name: str, members: int, source: str, device: Device, out: Path, files: list[Path]
) -> list[dict[str, Any]]:
    """Calibrates the links between the devices that took part, and returns the errors of the fits."""
    library, section = ("gloo", "processes") if device.kind == "cpu" else ("nccl-tests", "")
    samples = make_samples(rows, lambda count: _cluster(name, count), name, library, section)
    if device.kind == "cpu":
        file = out / f"{PROCESSES}.yaml"
        data, errors = _fit_processes(samples, source)
        write(file, "processes of one host, as gloo joins them", {"processes": data})
        files.append(file)
        return [errors]
    every: list[dict[str, Any]] = []
    tables: Any = [Recorded(samples, source)]
    for family in collectives.names(tables):
        found = collectives.calibrate(Calibration.shipped(), tables, family, leave_out=False)
        file = out / f"{family}.yaml"
        write(file, collectives.title(family), found.data)
        files.append(file)
        every += [vars(one) for one in found.libraries]
    return every


def _cluster(name: str, members: int) -> Cluster:
    gpu = load("gpus", name)
    domain = members if gpu.scale_up else 1
    return ByGPU(
        gpu=gpu, gpus=members, gpus_per_node=members, scale_up_domain=domain, inter=Inter(kind="none")
    ).cluster()


def _fit_processes(samples: Sequence[CollectiveSample], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section of gloo's processes, fitted to all operations at once, and its errors."""

    def seconds_by(sample: CollectiveSample, model: Any) -> tuple[np.ndarray, np.ndarray]:
        link = LinkCostModels(model, model, model)
        return predict(sample, TierCostModels(link, link, None))  # type: ignore[arg-type]

    found = fit(ProcessCostModel, samples, lambda sample, model: seconds_by(sample, model)[0])
    prices = [seconds_by(sample, found.make_model(ProcessCostModel, "gloo")) for sample in samples]
    predicted, launch = (np.concatenate(column) for column in zip(*prices, strict=True))
    seconds = np.concatenate([sample.seconds for sample in samples])
    own = find_sigmas(predicted, seconds, launch)
    rows = len(seconds)
    by_library: tuple[Any, ...] = ({"gloo": rows}, {"gloo": "any"}, {"gloo": source})
    made = make_section(ProcessCostModel, found, {"gloo": own}, {"any": own}, *by_library)
    far = np.abs(predicted / seconds - 1)
    errors = {
        "section": "processes",
        "library": "gloo",
        "rows": rows,
        "median": float(np.median(far)),
        "p90": float(np.quantile(far, 0.9)),
    }
    return made, errors
