"""meshcast: forecasts of LLM training on a GPU cluster.

>>> import meshcast
>>> report = meshcast.simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
>>> report.fits
True

`load_job` reads a job, `simulate` forecasts it, `compare` says how forecasts differ, `sweep` forecasts a grid, `search`
finds the best plan, `advise` says what to change, `size` how many nodes it takes, `explain` why a run is slower.
Errors are `MeshcastError`.
docs/python.md shows all of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not that of typing: `python -m meshcast` would look for it in the working directory

if TYPE_CHECKING:
    from typing import Any

    from meshcast.experiments.advice.advice import Advice
    from meshcast.experiments.advice.adviser import advise
    from meshcast.experiments.diagnosis.explain import explain
    from meshcast.experiments.diagnosis.explanation import Explanation
    from meshcast.experiments.explain.comparison import ForecastComparison, compare
    from meshcast.experiments.render.notebook.report import ForecastReport as Report
    from meshcast.experiments.render.notebook.report import simulate
    from meshcast.experiments.render.notebook.sweep import SweepResult, sweep
    from meshcast.experiments.search.certificate.result import SearchResult
    from meshcast.experiments.search.search_job import search
    from meshcast.experiments.sizing.answer import SizeAnswer
    from meshcast.experiments.sizing.size import size
    from meshcast.hardware import load_cluster
    from meshcast.hardware.errors import MeshcastError
    from meshcast.simulator import Job, SharedWork, load_job

    __version__: str

__all__ = [
    "Advice",
    "Explanation",
    "ForecastComparison",
    "Job",
    "MeshcastError",
    "Report",
    "SearchResult",
    "SharedWork",
    "SizeAnswer",
    "SweepResult",
    "__version__",
    "advise",
    "compare",
    "explain",
    "load_cluster",
    "load_job",
    "search",
    "simulate",
    "size",
    "sweep",
]

_HOMES = {
    "Advice": ("meshcast.experiments.advice.advice", "Advice"),
    "Explanation": ("meshcast.experiments.diagnosis.explanation", "Explanation"),
    "ForecastComparison": ("meshcast.experiments.explain.comparison", "ForecastComparison"),
    "Job": ("meshcast.simulator.job.job", "Job"),
    "MeshcastError": ("meshcast.hardware.errors", "MeshcastError"),
    "Report": ("meshcast.experiments.render.notebook.report", "ForecastReport"),
    "SearchResult": ("meshcast.experiments.search.certificate.result", "SearchResult"),
    "SharedWork": ("meshcast.simulator.forecast.shared_work", "SharedWork"),
    "SizeAnswer": ("meshcast.experiments.sizing.answer", "SizeAnswer"),
    "SweepResult": ("meshcast.experiments.render.notebook.sweep", "SweepResult"),
    "advise": ("meshcast.experiments.advice.adviser", "advise"),
    "compare": ("meshcast.experiments.explain.comparison", "compare"),
    "explain": ("meshcast.experiments.diagnosis.explain", "explain"),
    "load_cluster": ("meshcast.hardware", "load_cluster"),
    "load_job": ("meshcast.simulator.loading.load", "load_job"),
    "search": ("meshcast.experiments.search.search_job", "search"),
    "simulate": ("meshcast.experiments.render.notebook.report", "simulate"),
    "size": ("meshcast.experiments.sizing.size", "size"),
    "sweep": ("meshcast.experiments.render.notebook.sweep", "sweep"),
}
"""Module and name of everything public but the version."""

if not TYPE_CHECKING:  # otherwise every misspelt name would be one of unknown type

    def __getattr__(name: str) -> Any:
        # Looked up on first use, as in `meshcast.simulator`: `import meshcast` is quick.
        if name not in __all__:
            raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
        from importlib import import_module

        if name == "__version__":
            from meshcast.simulator.report.version import product_version

            return product_version()
        module, there = _HOMES[name]
        return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
