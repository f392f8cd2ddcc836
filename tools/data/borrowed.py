"""Prints what sigma borrowed cost models need, from tables of kernels and of collectives.

python -m tools.data.borrowed gemm_h100.csv.gz attention_h100.csv.gz ... collectives.csv.gz

Every row is priced as if its GPU had no file of coefficients, by others of its generation and by others alone; every
collective as if its family of links or its network had none. A section of a GPU (of a family) counts as much as any
other. The sigma is that of which, added in squares to that of the lender, nine of ten rows need no more. The constants
`BORROWED` of simulator/costs/calibration/calibration.py are these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.errors import CatalogError
from meshcast.hardware.gpu import GPU
from meshcast.hardware.load import load
from meshcast.simulator.costs.calibration.calibration import BORROWED, Calibration
from meshcast.simulator.costs.calibration.cost_models import family
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.calibration.collectives import sample as collectives
from meshcast.validation.calibration.collectives.sample import CollectiveSample
from meshcast.validation.calibration.collectives.tables import READERS as COLLECTIVES
from meshcast.validation.calibration.kernels import predict as kernels
from meshcast.validation.calibration.kernels.tables import READERS as KERNELS
from meshcast.validation.calibration.tables import table
from meshcast.validation.calibration.tables.rows import RowForecasts


class BorrowedSection(NamedTuple):
    """A section of a GPU, of a family of links or of a network, priced by others.

    distance: of the lender, a key of `BORROWED`.
    """

    distance: str
    section: str
    hardware: str


LEFT_OUT = {"generation": ("",), "other": ("", "generation")}
"""Distances of the files that a GPU does without, by the distance of those that lend then."""


class FarCalibration(Calibration):
    """The shipped calibration without the files that are nearer to a GPU than a distance."""

    def __init__(self, distance: str) -> None:
        super().__init__()
        self.distance = distance

    def lenders(self, gpu: GPU, without: str = "") -> tuple[tuple[str, str], ...]:
        """Returns the files whose coefficients a GPU may use, nearest first."""
        return tuple(lender for lender in super().lenders(gpu, without) if lender[1] not in LEFT_OUT[self.distance])

    def lends(self, sample: Any) -> bool:
        """Returns whether the file that lends a sample's section is at this distance."""
        lenders = self.lenders(load("gpus", sample.gpu))
        having = (distance for name, distance in lenders if "common" in self.sections(name).get(sample.operation, {}))
        return next(having, "") == self.distance


def price_borrowed(samples: Sequence[Any]) -> Iterator[tuple[BorrowedSection, Any, RowForecasts]]:
    """Yields samples with forecasts by coefficients of other hardware."""
    of_kernels = [FarCalibration(distance) for distance in LEFT_OUT]
    for sample in samples:
        try:
            if isinstance(sample, CollectiveSample):
                models = collectives.tier_models(Calibration.shipped(), sample, without=True)
                kind = "network" if sample.operation == "network" else "links"
                hardware = family(sample.network if kind == "network" else sample.link)
                yield BorrowedSection(kind, sample.operation, hardware), sample, collectives.price(sample, models)
                continue
            for calibration in of_kernels:
                if calibration.lends(sample):
                    cell = BorrowedSection(calibration.distance, sample.operation, sample.gpu)
                    yield cell, sample, kernels.price(calibration, sample)
        except CatalogError:  # nothing else has such a section
            continue


def needed_sigma(cells: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the sigma, beside that of the lender, of which nine of ten rows need no more; cells count alike.

    cells: of each the logarithms of measured over forecast, and the sigmas of the lender.
    """
    needed = [np.sqrt(np.maximum((far / Z90) ** 2 - sigma**2, 0.0)) for far, sigma in cells]
    weights = np.concatenate([np.full(len(cell), 1 / len(cell) / len(cells)) for cell in needed])
    values = np.concatenate(needed)
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), 0.9)])


def measure_borrowed(samples: Sequence[Any]) -> Iterator[tuple[str, int, int, float]]:
    """Yields every distance with its cells, rows, and the sigma that they need."""
    rows: dict[BorrowedSection, list[tuple[np.ndarray, np.ndarray]]] = {}
    for cell, sample, priced in price_borrowed(samples):
        sigma = np.sqrt(np.maximum(priced.sigma**2 - BORROWED[cell.distance] ** 2, 0.0))
        rows.setdefault(cell, []).append((np.log(sample.seconds / priced.seconds), sigma + 0 * sample.seconds))
    whole = {cell: [np.concatenate(column) for column in zip(*pairs, strict=True)] for cell, pairs in rows.items()}
    for distance in BORROWED:
        cells = [(far, sigma) for cell, (far, sigma) in whole.items() if cell.distance == distance]
        if cells:
            yield distance, len(cells), sum(len(far) for far, _ in cells), needed_sigma(cells)


def main(paths: Sequence[str]) -> None:
    """Reads tables and prints the sigma of every distance."""
    readers = tuple(dict.fromkeys((*KERNELS, *COLLECTIVES)))
    samples = [sample for path in paths for sample in table.read(Path(path), readers).samples]
    with np.errstate(all="ignore"):
        for distance, cells, rows, sigma in measure_borrowed(samples):
            print(f"{distance}: {sigma:.3f} of {rows:,} rows of {cells} sections; ships {BORROWED[distance]}")


if __name__ == "__main__":
    main(sys.argv[1:])
