"""Lengths of the samples of a step: drawn from a distribution, or from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import csv_rows
from meshcast.simulator.job.batch import LogNormal, Quantiles, Samples, Uniform

REMEDY = "Name a CSV file with the tokens of a sample in every row"
HISTOGRAM_REMEDY = "Name a CSV file with the tokens of a sample and the number of such samples in every row"

MAX_WEIGHT = 1e15
"""Most samples of a length in a histogram."""


@dataclass(frozen=True)
class LengthSource:
    """Where the lengths of samples are drawn from.

    samples: that are drawn.
    sequence: the longest length, where a distribution states none [tokens].
    lengths: those in the file, if any [tokens].
    shares: of a histogram, the share of samples of each of them.
    """

    samples: Samples
    sequence: int
    lengths: np.ndarray
    shares: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Samples, sequence: int, base: Path) -> LengthSource:
        """Reads the file of some samples, if they have one. base: folder of relative paths.

        Raises PlanError for a file without lengths, and for lengths or samples that there are not.
        """
        law = samples.distribution
        if samples.file is None:
            if isinstance(law, LogNormal | Uniform) and law.min > (longest := law.max or sequence):
                rule = f"lengths are at most {longest:,}"
                raise PlanError("batch.samples.distribution.min", rule, "Lower it, or raise max", law.min)
            return cls(samples, sequence, np.empty(0, int))
        lengths, shares = _read_rows(base / samples.file, samples.histogram)
        if shares is None and samples.count is not None and samples.count > len(lengths):
            rule = f"{samples.file} has {len(lengths):,} samples"
            raise PlanError("batch.samples.count", rule, "Lower it, or leave it out for all", samples.count)
        return cls(samples, sequence, lengths, shares)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Returns the lengths of all samples of a step [tokens]."""
        law, count = self.samples.distribution, self.samples.count
        if law is None:
            if count is None:
                return self.lengths
            return rng.choice(self.lengths, count, replace=self.shares is not None, p=self.shares)
        assert count is not None
        if isinstance(law, Quantiles):
            return _draw_by_quantiles(law, self.sequence, count, rng)
        longest = law.max or self.sequence
        if isinstance(law, LogNormal):
            drawn = rng.lognormal(np.log(law.mean) - law.sigma**2 / 2, law.sigma, count)
            return np.clip(np.round(drawn), law.min, longest).astype(int)
        return rng.integers(law.min, longest, count, endpoint=True)


def _draw_by_quantiles(law: Quantiles, sequence: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns lengths that have the stated quantiles, drawn by the inverse of their distribution."""
    ends = {0.0: 1, 1.0: max(sequence, *law.at.values())}
    shares, lengths = zip(*sorted({**ends, **law.at}.items()), strict=True)
    return np.round(np.exp(np.interp(rng.random(count), shares, np.log(lengths)))).astype(int)


def _read_rows(path: Path, histogram: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the lengths in the first cells of the rows of a file; of a histogram also the share of each."""
    remedy = HISTOGRAM_REMEDY if histogram else REMEDY
    lengths, weights = list[int](), list[float]()
    for line, cells in csv_rows(path, remedy):
        cell = cells[0] if cells else ""
        if cell.isascii() and cell.isdigit() and 0 < int(cell[:10]) <= 1_000_000_000 and len(cell) <= 10:
            lengths.append(int(cell))
            if histogram:
                weights.append(_read_weight(cells[1] if len(cells) > 1 else "", f"{path}:{line}"))
        elif cell and line > 1:
            raise PlanError(f"{path}:{line}", "a length is a whole number of tokens, 1 to 1e9", remedy, cell)
    if not lengths or (histogram and not any(weights)):
        raise PlanError(str(path), "the file has no lengths", remedy)
    return np.array(lengths), np.array(weights) / sum(weights) if histogram else None


def _read_weight(cell: str, where: str) -> float:
    """Returns the number of samples in the second cell of a row of a histogram."""
    try:
        weight = float(cell)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= MAX_WEIGHT:
        rule = f"the second cell of a histogram is how many samples have the length, 0 to {MAX_WEIGHT:.0e}"
        raise PlanError(where, rule, HISTOGRAM_REMEDY, cell)
    return weight
