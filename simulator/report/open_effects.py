"""What settings that a job leaves open are worth in its forecast, as errors of the step.

Communication that overlaps by the default of the program would appear without, and communication that does not would
hide, in whole or (where chunks of it run beside chunks of GEMMs) in part, and no more of it than there is computation
to hide under. Gradients of half the size halve what of
their reduction is exposed. Without CUDA graphs, a graph would take the time that the step waits for its host.
"""

from __future__ import annotations

import math

from meshcast.simulator.job.job import Job
from meshcast.simulator.job.open_settings import GRADIENTS, OVERLAPS, WRONG, list_open_settings, sigma_of_open
from meshcast.simulator.program.categories import COMPUTING, HOST
from meshcast.simulator.report.breakdown import Breakdown

MOVED = {"dp": 1.0, "pp": 1.0, "tp": 0.5, "ep": 0.5}
"""Share of the communication of an axis that its overlap hides. Of tensor ranks the first and the last chunk stay: the
overlap is worth 5 to 9 % of steps of which this communication is 10 to 18 % (torchtitan, docs/performance of 2024)."""

LEAST = 1e-6
"""Standard deviations that are no more than a rounding error."""


def open_effects(job: Job, breakdown: Breakdown, step: float) -> dict[str, float]:
    """Returns the standard deviations of log(measured / forecast) by the key of each setting that a job leaves open.

    breakdown: of the step.
    step: its duration [s].
    """
    sigmas = {}
    for key in list_open_settings(job):
        seconds = _moving_seconds(job, key, breakdown)
        effect = sigma_of_open(job, key) if seconds is None else math.sqrt(WRONG) * abs(math.log1p(seconds / step))
        if effect > LEAST:
            sigmas[key] = effect
    return sigmas


def _moving_seconds(job: Job, key: str, breakdown: Breakdown) -> float | None:
    """Returns by how much a step would be longer with another value of a setting [s]; None where it is not known."""
    parts, framework = breakdown.parts, job.framework
    if key in OVERLAPS:
        axis = key.rpartition(".")[2]
        overlapped = getattr(framework.overlap, axis)
        computing = sum(parts[kind] for kind in COMPUTING)
        return MOVED[axis] * (breakdown.hidden.get(axis, 0.0) if overlapped else -min(parts[axis], computing))
    if key == GRADIENTS:
        return -parts["dp"] / 2 if framework.gradients == "fp32" else parts["dp"]
    if key == "framework.set.cuda_graphs" and not framework.cuda_graphs:
        return -parts[HOST]
    return None
