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

import torch

from meshcast.hardware import load
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.costs.calibration.calibration import DEVICE
from meshcast.simulator.costs.calibration.check import STEPS
from meshcast.simulator.ir.ops import Gemm, Work
from meshcast.validation.calibration.device import describe
from meshcast.validation.calibration.device.fit_machine import fit_all
from meshcast.validation.calibration.device.kernels import make_cases
from meshcast.validation.calibration.device.neighbours import run_neighbours
from meshcast.validation.calibration.device.sustained_rate import measure_sustained_rate
from meshcast.validation.calibration.write import write
from meshcast.validation.distributed.measure import measure_collectives
from meshcast.validation.kernels.measure import INSTRUMENTS, warm_up_with_gemms
from meshcast.validation.kernels.works import work_fields
from meshcast.validation.measurements.cuda import Cuda
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow, utc_now
from meshcast.validation.measurements.recording import make_blind

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
    with run_neighbours(company), device.monitor() as add_states:
        warm_up_with_gemms(device)
        measured, works = measure(device, progress, collective_rows)
        machine = add_states(device.machine(max(1, min(processes, most))))
    measured = measured.model_copy(update={"machine": machine})
    out.mkdir(parents=True, exist_ok=True)
    measured.write(out / MEASURED)
    name = _name_device(measured, works, device, out)
    source = f"meshcast calibrate --device {kind} on {measured.machine.name}, torch {measured.versions['torch']}"
    written = fit_all(measured, works, name, source, out)
    written["files"].insert(1, str(refresh(kind, out, processes)))
    return written | {"title": measured.title, "device": str(out / DEVICE) if (out / DEVICE).is_file() else ""}


def refresh(kind: str, out: Path, processes: int) -> Path:
    """Measures again what a training step takes off the rate of kernels, and writes it into `out`: the speed of a
    machine that others use too changes from minute to minute."""
    name = gpu_name(kind, out)
    architecture = load("gpus", name).architecture
    file = out / f"{STEPS}.yaml"
    with run_neighbours(processes - 1 if kind == "cpu" else 0):
        write(file, "steps", {architecture: measure_sustained_rate(kind, name, out)})
    return file


def gpu_name(kind: str, folder: Path) -> str:
    """Returns the catalog's name of this machine's device, or the file of a calibration's folder that describes it."""
    described = folder / DEVICE
    return str(described) if described.is_file() else describe.catalog_name(Device.of(kind, select=False).machine())


def collectives_among(kind: str, members: int) -> Sequence[MeasurementRow]:
    """Returns measured collectives of a few sizes among processes of this machine."""
    machine = Device.of(kind, select=False).machine()
    name = describe.catalog_name(machine) or ("cpu-core" if kind == "cpu" else "h100-sxm")
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
                shape=work_fields(case.work),
            )
        )
    stream = describe.measure_stream(device)
    rows.append(MeasurementRow(name="stream", samples=(stream,), quantity="bytes", instrument="bytes/s"))
    launches = _measure_launch(device)
    rows.append(MeasurementRow(name="host launch", samples=tuple(launches), instrument="time.perf_counter"))
    machine, settings = device.machine(), {"dtype": dtype, "repeat": REPEAT, "cold": True}
    command = " ".join(["meshcast", *sys.argv[1:]])
    blind = make_blind("calibration", f"calibration of {machine.name}", machine, {}, (), settings, None, command)
    blind = blind.model_copy(update={"forecast_written": begun})
    return blind.with_samples([*rows, *collective_rows]), [case.work for case in every]


def _measure_launch(device: Device) -> list[float]:
    """Returns the time of the host to launch a small operation [s]."""
    x = torch.zeros(8, device=device.torch)
    launches = []
    for _ in range(20):
        device.sync()
        begin = time.perf_counter()
        for _ in range(100):
            x.add_(1.0)
        launches.append((time.perf_counter() - begin) / 100)
    return launches


def _name(work: Work) -> str:
    if isinstance(work, Gemm):
        return f"gemm {work.layout}"
    return str(getattr(work, "what", "attention backward" if getattr(work, "backward", False) else "attention"))


def _name_device(measured: Measurement, works: Sequence[Work], device: Device, out: Path) -> str:
    """Returns the device's name in the catalog; if it has none, the file that describes it, which is written."""
    catalogued = describe.catalog_name(measured.machine)
    if catalogued:
        return catalogued
    products = [(w, r) for w, r in zip(works, measured.rows, strict=False) if isinstance(w, Gemm)]
    flops = max(work.flops / min(row.samples) for work, row in products)
    stream = next(row.samples[0] for row in measured.rows if row.name == "stream")
    is_cpu = device.kind == "cpu"
    described = describe.core(measured.machine, flops, stream) if is_cpu else describe.gpu(device, flops, stream)
    text = "# Measured; in the form of hardware/catalog/gpus.\n" + to_yaml(described)
    write_file(out / DEVICE, text)
    return str(out / DEVICE)
