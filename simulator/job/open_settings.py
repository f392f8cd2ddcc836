"""Settings that a job leaves open, and those of a launch file that are not followed: each widens the interval.

A setting that nobody states has the default of its program, which is wrong with probability `WRONG`. It is an
independent error of the step by its effect: by what the forecast says of it where it does (communication that could
hide or appear, `simulator.report.open_effects`), else by what it is worth in published runs (`SIGMA`).

A setting that something else is forecast for, or that no table has, counts as usual (`USUAL`), until a second
forecast says what it is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PLAN_KEYS

WRONG = 0.25
"""Probability that a run differs from the default of its program where it states nothing, so that its variance is a
quarter of that between the values of a field. With it 852 published runs are as likely as without any assumptions; at
probability 1 the logarithm of a likelihood of Student's t is 26 lower."""

SIGMA: dict[str, float] = {
    "framework.name": 0.16,  # another program's profile in its place: 0.27 of strangers against 0.21, as sigmas
    "framework.release": 0.03,  # releases within a year: 5 to 15 % from the oldest to the newest of dense models
    "framework.set.compile": 0.01,
    "framework.set.cuda_graphs": 0.01,  # dense layers are long enough to hide the host
    "precision.main_weights": 0.005,
    "cluster.scale_up_domain": 0.02,
    "cluster.gpus_per_node": 0.01,
    "cluster.inter.kind": 0.01,
    "cluster.inter.gbps_per_gpu": 0.02,  # 400 against 200 Gb/s is 2 % (0 to 5)
    "batch.micro": 0.05,  # neighbouring micro-batches of tuned runs differ by 2 to 8 %
    **{f"plan.{name}": key.sigma for name, key in PLAN_KEYS.items() if key.sigma},
}
"""Standard deviation of log(step time) between the values of a setting that a job leaves open, by its key.

The comments give how the forecasts of some 600 published dense runs change when only this setting changes, 10th to 90th
percentile in parentheses; half of such a range is 1.3 standard deviations.
"""

HOST_BOUND_SIGMA = {"framework.set.cuda_graphs": 0.15, "framework.set.compile": 0.05}
"""`SIGMA` of models with experts, whose many small kernels wait for the host without CUDA graphs."""

_OF_SETTINGS = [sigma for key, sigma in SIGMA.items() if key != "framework.name"]
USUAL = math.sqrt(WRONG * sum(sigma**2 for sigma in _OF_SETTINGS) / len(_OF_SETTINGS))
"""Standard deviation that a setting adds which is approximated or unknown: that of an open setting, root mean
square."""

OVERLAPS = tuple(f"framework.set.overlap.{axis}" for axis in ("dp", "tp", "pp", "ep"))
"""Overlaps that a job may leave open."""

GRADIENTS = "precision.gradients"

OF_PROGRAMS = (
    *OVERLAPS, "framework.set.compile", "framework.set.cuda_graphs", GRADIENTS, "precision.main_weights"
)  # fmt: skip
"""Settings that a job leaves to its program."""


def list_open_settings(job: Job) -> tuple[str, ...]:
    """Returns the keys of the settings that a job leaves to its program, its plan and its cluster to the catalog.

    Of a launch file only its release and its cluster may be open: what it does not name its program has by default.
    """
    written, keys = job.as_written, []
    if "name" not in written["framework"]:
        keys.append("framework.name")
    elif written["framework"].get("release") is None and "framework.name" not in job.framework.sigmas:
        keys.append("framework.release")
    if not job.origin.places:
        keys += [key for key in OF_PROGRAMS if not _states(written, key)]
        keys += _list_open_plan_keys(written.get("plan", {}))
        if "global" in written.get("batch", {}) and not _states(written, "batch.micro"):
            keys.append("batch.micro")
    cluster = written["cluster"]
    if isinstance(cluster, Mapping) and "gpu" in cluster:
        networked = job.cluster.gpus > job.cluster.local_gpus
        names = ("scale_up_domain", "gpus_per_node", *(("inter.kind", "inter.gbps_per_gpu") if networked else ()))
        keys += [key for key in (f"cluster.{name}" for name in names) if not _states(written, key)]
    return tuple(keys)


def _list_open_plan_keys(plan: Mapping[str, object]) -> list[str]:
    """Returns the keys that a plan in short form leaves open; a plan in long form states all of them."""
    if {"mesh", "schemes"} & plan.keys():
        return []
    return [
        f"plan.{name}"
        for name, key in PLAN_KEYS.items()
        if key.sigma and name not in plan and (not key.degree or plan.get(key.degree, 1) != 1)
    ]


def sigma_of_open(job: Job, key: str) -> float:
    """Returns the standard deviation that an open setting adds by its worth in published runs; 0 where none shows
    it."""
    sigmas = SIGMA | (HOST_BOUND_SIGMA if job.model.moe is not None else {})
    return math.sqrt(WRONG) * sigmas.get(key, 0.0)


def widen(job: Job, causes: Mapping[str, float]) -> Job:
    """Returns a job whose interval is wider by these standard deviations, which replace others of the same names."""
    sigmas = {**job.framework.sigmas, **causes}
    framework = job.framework.model_copy(update={"sigmas": {cause: sigma for cause, sigma in sigmas.items() if sigma}})
    return job.model_copy(update={"framework": framework})


def sigmas_of_import(job: Job, assumed: Iterable[str], unfollowed: Iterable[str]) -> dict[str, float]:
    """Returns what a launch file's keys that nobody states, and its settings that are not followed, add to an interval.

    The program that stands for another is no such key: the regime of the job says it.
    """
    assumed_sigmas = {key: sigma_of_open(job, key) for key in assumed if key != "framework.name"}
    return {key: sigma for key, sigma in assumed_sigmas.items() if sigma} | dict.fromkeys(unfollowed, USUAL)


def _states(written: Mapping[str, object], key: str) -> bool:
    """Returns whether a job as written states the value of a key."""
    value: object = written
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value is not None
