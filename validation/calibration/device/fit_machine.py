"""Fits the cost models to measurements of a machine, and writes them as a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware import load
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.inline import ByGPU, Inter
from meshcast.simulator.costs.calibration.calibration import DEVICE, Calibration
from meshcast.simulator.costs.calibration.cost_models import PROCESSES
from meshcast.simulator.costs.collectives.links import LinkCostModels, TierCostModels
from meshcast.simulator.costs.collectives.processes import ProcessCostModel
from meshcast.simulator.costs.kernels.eager import make_eager_kernels
from meshcast.simulator.costs.kernels.libraries import TRAINING_LIBRARIES, attention_library
from meshcast.simulator.costs.kernels.sections import section_of
from meshcast.simulator.ir.ops import Memory, Work
from meshcast.simulator.job.framework import load_framework
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.collectives.recorded import Recorded, make_samples
from meshcast.validation.calibration.collectives.sample import CollectiveSample, predict
from meshcast.validation.calibration.fit import fit
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.calibrated import LibraryErrors, make_section, sigmas_of_all
from meshcast.validation.calibration.tables.rows import RowForecasts
from meshcast.validation.calibration.write import write
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow


def fit_all(measured: Measurement, works: Sequence[Work], name: str, source: str, out: Path) -> dict[str, Any]:
    """Fits and writes all files into `out`. Returns their names, and the errors of the fits.

    works: of the first rows. name: of the device in the catalog, or the file that describes it. source: for the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables: Any = [Recorded(_make_samples(measured, works, name), source)]
    fitted = kernels.calibrate(Calibration.shipped(), tables, name, leave_out=False, prior=True)
    file = out / f"{load('gpus', name).name}.yaml"
    write(file, str(load("gpus", name).title), fitted.data)
    files, errors = [file], [vars(library) for library in fitted.libraries]
    links = [row for row in measured.rows if "operation" in row.shape and "members" in row.shape]
    if links:
        errors += _calibrate_links(links, name, source, measured.machine.device, out, files)
    return {"files": [str(file) for file in [*files, *sorted(out.glob(DEVICE))]], "libraries": errors}


def _make_samples(measured: Measurement, works: Sequence[Work], name: str) -> list[KernelSample]:
    """Makes samples of the kernels: works of a kind together, with arrays in their numeric fields."""
    gpu = load("gpus", name)
    reference = load_framework("reference")
    kinds = reference.eager if gpu.architecture != "cpu" else {}
    priced = [(make_eager_kernels(work, kinds) or work) if isinstance(work, Memory) else work for work in works]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, work in enumerate(priced):
        fields = ((k, getattr(work, k)) for k in work.__dataclass_fields__)
        words = ((k, value) for k, value in fields if isinstance(value, bool) or not isinstance(value, int | float))
        groups.setdefault((type(work), *words), []).append(at)
    samples = []
    for (kind, *plain), index in groups.items():
        numbers = [k for k in kind.__dataclass_fields__ if k not in dict(plain)]
        arrays = {k: np.array([float(getattr(priced[at], k)) for at in index]) for k in numbers}
        work = kind(**dict(plain), **arrays)
        seconds = np.array([measured.rows[at].median or 0.0 for at in index])
        part = section_of(priced[index[0]], gpu)  # type: ignore[arg-type]
        library = TRAINING_LIBRARIES.get((part, gpu.architecture), "torch")
        if part == "attention":
            library = attention_library(reference.attention_library, gpu.architecture).library
        samples.append(KernelSample(part, name, library, np.array(index), seconds, "measured", parts=(work,)))
    return samples


def _calibrate_links(
    rows: Sequence[MeasurementRow], name: str, source: str, kind: str, out: Path, files: list[Path]
) -> list[dict[str, Any]]:
    """Calibrates the links between the devices that took part, and returns the errors of the fits."""
    library, section = ("gloo", "processes") if kind == "cpu" else ("nccl-tests", "")
    samples = make_samples(rows, lambda count: _cluster(name, count), name, library, section)
    if kind == "cpu":
        file = out / f"{PROCESSES}.yaml"
        data, errors = _fit_processes(samples, source)
        write(file, "processes of one host, as gloo joins them", {"processes": data})
        files.append(file)
        return [vars(errors)]
    every: list[dict[str, Any]] = []
    tables: Any = [Recorded(samples, source)]
    for family in collectives.names(tables):
        fitted = collectives.calibrate(Calibration.shipped(), tables, family, leave_out=False)
        file = out / f"{family}.yaml"
        write(file, collectives.title(family), fitted.data)
        files.append(file)
        every += [vars(library) for library in fitted.libraries]
    return every


def _cluster(name: str, members: int) -> Cluster:
    gpu = load("gpus", name)
    domain = members if gpu.scale_up else 1
    return ByGPU(
        gpu=gpu, gpus=members, gpus_per_node=members, scale_up_domain=domain, inter=Inter(kind="none")
    ).cluster()


def _fit_processes(samples: Sequence[CollectiveSample], source: str) -> tuple[dict[str, Any], LibraryErrors]:
    """Fits the section of gloo's processes to all operations at once; returns it and its errors."""

    def price(sample: CollectiveSample, model: Any) -> RowForecasts:
        link = LinkCostModels(model, model, model)
        return RowForecasts.of(*predict(sample, TierCostModels(link, link, None)))  # type: ignore[arg-type]

    fitted = fit(ProcessCostModel, samples, lambda sample, model: price(sample, model).seconds)
    model = fitted.make_model(ProcessCostModel, "gloo")
    prices = [(sample, price(sample, model)) for sample in samples]
    sigmas, pairs = sigmas_of_all(prices), [(sample, source) for sample in samples]
    section = make_section(ProcessCostModel, fitted, {"gloo": sigmas}, {"any": sigmas}, pairs, {"gloo": "any"})
    return section, LibraryErrors.of("processes", "gloo", prices)
