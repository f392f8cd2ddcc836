"""meshcast: forecasts of LLM training on a GPU cluster.

>>> import meshcast
>>> report = meshcast.simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
>>> report.fits
True
"""

from __future__ import annotations

TYPE_CHECKING = False  # not that of typing: `python -m meshcast` would look for it in the working directory

if TYPE_CHECKING:
    from typing import Any

    from experiments.search.find import search
    from experiments.search.result import SearchResult
    from hardware import load_cluster
    from hardware.errors import MeshcastError
    from simulator import Job, Report, SharedWork, load_job, simulate

__all__ = [
    "Job",
    "MeshcastError",
    "Report",
    "SearchResult",
    "SharedWork",
    "__version__",
    "load_cluster",
    "load_job",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # Looked up on first use, as in `simulator`: `import meshcast` is quick.
    if name not in __all__:
        raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
    from meshcast.packages import check_packages

    check_packages()
    if name == "__version__":
        from simulator.report.report import product_version

        return product_version()
    if name == "load_cluster":
        from hardware import load_cluster

        return load_cluster
    if name == "MeshcastError":
        from hardware.errors import MeshcastError

        return MeshcastError
    if name == "search":
        from experiments.search.find import search

        return search
    if name == "SearchResult":
        from experiments.search.result import SearchResult

        return SearchResult
    import simulator

    return getattr(simulator, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
