"""Regimes of a forecast: how well its framework and its GPU are known, and how far real steps then lie from it.

    known    published steps of this framework set coefficients of its profile, and the GPU has a calibration of its own
    family   the profile is that of a related framework, or the GPU's calibration that of another of its architecture
    unknown  neither

The residual of a regime is log(measured / forecast) of whole steps. It holds what the profile, the kernels and the
links leave unexplained; only what is particular to a job widens its interval further (see `KERNELS_OF_A_STEP`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Regime = Literal["known", "family", "unknown"]
StepClass = Literal["dense", "experts", "adapters"]

REGIMES: tuple[Regime, ...] = ("known", "family", "unknown")
"""All regimes, the best known first."""

GPU_REGIMES: dict[str, Regime] = {"": "known", "generation": "family"}
"""Regime of a GPU by the distance of its calibration (`Calibration.lenders`); any other is unknown."""

KERNELS_OF_A_STEP = 16
"""Independent shapes of kernels of one kind in a step. The sigma of a cost model is that of single kernels; over the
shapes of a step their errors average out to sigma / sqrt(16). Of 852 published runs a likelihood of Student's t is
largest without any kernel errors, 4 below that at 16 shapes and 54 below it at one."""


@dataclass(frozen=True)
class StepResidual:
    """Distribution of log(measured / forecast) of steps.

    below, above: standard deviations of its two sides: nine of ten lie from -1.645 below to 1.645 above, which need not
        leave as many outside on one side as on the other.
    rows: published runs behind them.
    """

    below: float
    above: float
    rows: int

    @property
    def sigma(self) -> float:
        """Standard deviation, of both sides together."""
        return ((self.below**2 + self.above**2) / 2) ** 0.5


RESIDUALS: dict[tuple[StepClass, Regime], StepResidual] = {
    ("dense", "known"): StepResidual(0.047, 0.080, 446),
    ("dense", "family"): StepResidual(0.064, 0.156, 527),
    ("dense", "unknown"): StepResidual(0.183, 0.183, 380),
    ("experts", "known"): StepResidual(0.047, 0.080, 20),
    ("experts", "family"): StepResidual(0.089, 0.181, 102),
    ("experts", "unknown"): StepResidual(0.183, 0.183, 1),
    ("adapters", "known"): StepResidual(0.047, 0.080, 10),
    ("adapters", "family"): StepResidual(0.084, 0.080, 84),
    ("adapters", "unknown"): StepResidual(0.183, 0.183, 10),
}
"""Residuals of every class and regime, without assumptions and kernels, measured by ``meshcast validate fit``: the two
sides of the shortest interval that holds 90 % of the runs; equal ones for unknown programs.

source: 878 published runs of 14 sources (docs/published-runs.md), each weighted by the root of its source's runs. Runs
    of other regimes than `known` are forecast without their own profile; dense runs of known programs count as such,
    too, forecast by the profile of a relative and by that of unknown programs. A class with fewer than 50 runs has the
    larger of dense models' sigma and of its own in the better known regime; no regime is narrower than that one.
checked: 2026-11-26
"""


def least_known(*regimes: Regime) -> Regime:
    """The least known of some regimes."""
    return max(regimes, key=REGIMES.index)


def step_class(has_experts: bool, has_adapters: bool) -> StepClass:
    """Class of a job."""
    return "adapters" if has_adapters else "experts" if has_experts else "dense"
