"""meshcast: forecasts of LLM training on a GPU cluster.

>>> import meshcast
>>> report = meshcast.simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
>>> report.fits
True

`load_job` reads a job, `simulate` forecasts it, `sweep` forecasts a grid, `search` finds the best plan. Errors are
`MeshcastError`. docs/python.md shows all of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not that of typing: `python -m meshcast` would look for it in the working directory

if TYPE_CHECKING:
    from typing import Any

    from experiments.notebook.report import ForecastReport as Report
    from experiments.notebook.simulate import simulate
    from experiments.notebook.sweep import SweepResult, sweep
    from experiments.search.find import search
    from experiments.search.result import SearchResult
    from hardware import load_cluster
    from hardware.errors import MeshcastError
    from simulator import Job, SharedWork, load_job

    __version__: str

__all__ = [
    "Job",
    "MeshcastError",
    "Report",
    "SearchResult",
    "SharedWork",
    "SweepResult",
    "__version__",
    "load_cluster",
    "load_job",
    "search",
    "simulate",
    "sweep",
]

_HOMES = {
    "Job": ("simulator.job.job", "Job"),
    "MeshcastError": ("hardware.errors", "MeshcastError"),
    "Report": ("experiments.notebook.report", "ForecastReport"),
    "SearchResult": ("experiments.search.result", "SearchResult"),
    "SharedWork": ("simulator.forecast.shared_work", "SharedWork"),
    "SweepResult": ("experiments.notebook.sweep", "SweepResult"),
    "load_cluster": ("hardware", "load_cluster"),
    "load_job": ("simulator.job.load", "load_job"),
    "search": ("experiments.search.find", "search"),
    "simulate": ("experiments.notebook.simulate", "simulate"),
    "sweep": ("experiments.notebook.sweep", "sweep"),
}
"""Module and name of everything public but the version."""

if not TYPE_CHECKING:  # otherwise every misspelt name would be one of unknown type

    def __getattr__(name: str) -> Any:
        # Looked up on first use, as in `simulator`: `import meshcast` is quick.
        if name not in __all__:
            raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
        from importlib import import_module

        from meshcast.packages import check_packages

        check_packages()
        if name == "__version__":
            from simulator.report.version import product_version

            return product_version()
        module, there = _HOMES[name]
        return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
