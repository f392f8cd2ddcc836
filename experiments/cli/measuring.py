"""The functions that measure torch work on this machine, by the kind of what they measure."""

from __future__ import annotations

from functools import wraps
from typing import Any

from meshcast.experiments.render.terminal.say import say


def find_measuring(kind: str) -> Any:
    """Returns the function that measures kernels, stages, steps or collectives."""
    if kind == "kernels":
        from meshcast.validation.kernels.measure import measure as kernels

        return _with_progress(kernels)
    if kind == "stages":
        from meshcast.validation.stages.measure import measure as stages

        return _with_progress(stages)
    from meshcast.validation.distributed.measure import measure as steps
    from meshcast.validation.distributed.measure import measure_collectives

    return steps if kind == "distributed" else measure_collectives


def _with_progress(measuring: Any) -> Any:
    """Returns a measuring function that prints its progress to stderr."""

    @wraps(measuring)
    def run(*arguments: Any, **options: Any) -> Any:
        return measuring(*arguments, progress=lambda line: say(line, err=True), **options)

    return run
