"""Regimes of a forecast: how well its program, its source and its GPU are known, and how far real steps lie from it.

    source   published steps of this very source, with its program, settings and machine, set coefficients
    program  published steps of this program set coefficients of its profile, and this GPU was calibrated
    family   the profile is that of a related program, or the GPU's calibration that of another of its architecture
    unknown  neither

A job of somebody whose runs nobody here has seen is of the regime `program` at best. `source` is that of published runs
with all their settings; a job may state it, where its forecast was held against a run of the same machine.

The residual of a regime is log(measured / forecast) of whole steps. It holds what the profile, the kernels and the
links leave unexplained; only what is particular to a job widens its interval further (see `KERNELS_OF_A_STEP`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.records import dataclass

Regime = Literal["source", "program", "family", "unknown"]
StepClass = Literal["dense", "experts", "adapters"]

REGIMES: tuple[Regime, ...] = ("source", "program", "family", "unknown")
"""All regimes, the best known first."""

CLASSES: tuple[StepClass, ...] = ("dense", "experts", "adapters")
"""All classes of jobs."""

GPU_REGIMES: dict[str, Regime] = {"": "source", "generation": "family"}
"""Best regime of a GPU by the distance of its calibration (`Calibration.lenders`); any other is unknown."""

KERNELS_OF_A_STEP = 16
"""Independent shapes of kernels of a kind in a step. The sigma of a cost model is that of single kernels; over the
shapes of a step their errors average out to sigma / sqrt(16). Of 852 published runs a likelihood of Student's t is
largest without any kernel errors, 4 below that at 16 shapes and 54 below it at 1."""

FILE = "regimes.yaml"
"""Residuals of every regime, written by ``make docs-regimes`` (`validation.published.fit.residuals`)."""

ROOM = Path(__file__).parent


@dataclass(frozen=True)
class StepResidual:
    """Distribution of log(measured / forecast) of steps.

    bias: its middle, which is not that of the forecast where the profile of another program stands for the job's.
    sigma: standard deviation of a normal distribution around it that has nine of ten runs inside as many sigmas.
    rows: published runs behind them.
    """

    bias: float
    sigma: float
    rows: int


@cache
def residuals() -> dict[Regime, StepResidual]:
    """Returns the residuals of every regime, without assumptions and kernels."""
    table = read_shipped(ROOM / FILE).data
    return {regime: StepResidual(**table[regime]) for regime in REGIMES}


def least_known(*regimes: Regime) -> Regime:
    """Returns the least known of some regimes."""
    return max(regimes, key=REGIMES.index)


def step_class(has_experts: bool, has_adapters: bool) -> StepClass:
    """Returns the class of a job."""
    return "adapters" if has_adapters else "experts" if has_experts else "dense"
