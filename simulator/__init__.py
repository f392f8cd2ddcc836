"""meshcast: forecasts of LLM training on a GPU cluster.

>>> from meshcast.simulator import simulate
>>> report = simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
>>> report.fits
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshcast.simulator.forecast.shared_work import SharedWork
    from meshcast.simulator.forecast.simulate import simulate
    from meshcast.simulator.job.job import Job
    from meshcast.simulator.loading.load import load_job
    from meshcast.simulator.report.report import Report

__all__ = ["Job", "Report", "SharedWork", "load_job", "simulate"]

_HOMES = {
    "Job": "meshcast.simulator.job.job",
    "Report": "meshcast.simulator.report.report",
    "SharedWork": "meshcast.simulator.forecast.shared_work",
    "load_job": "meshcast.simulator.loading.load",
    "simulate": "meshcast.simulator.forecast.simulate",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: whoever needs one room of the simulator does not pay for all of them.
    if name not in _HOMES:
        raise AttributeError(f"module 'meshcast.simulator' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
