"""Of a search in which no plan fits: the plan that is closest to the memory of a GPU, and what else could be opened."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.plan_search import PlanSearch
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.formatting import describe_changes

SAVES_MEMORY = ("plan.recompute", "batch.micro", "plan.sequence_parallel", "plan.zero", "plan.offload")
"""Fields that may lower the need and that a search may open."""


class SmallestNeed(NamedTuple):
    """The plan of a space with the smallest need that is known.

    changes: values of the open fields.
    need: of the fullest GPU but for cached blocks [bytes].
    capacity: that a plan may take [bytes].
    closed: fields that the search did not open.
    """

    changes: dict[str, Any]
    need: float
    capacity: float
    closed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.need / GIB:,.1f} GiB of {self.capacity / GIB:.4g} GiB: {describe_changes(self.changes)}"

    @property
    def remedy(self) -> str:
        opened = f"Open {', '.join(self.closed)}, such as --set {self.closed[0]}=auto; " if self.closed else ""
        return f"{opened}{'or all' if opened else 'Open all'} with --set plan=auto; or take more GPUs"


def find_smallest(search: PlanSearch) -> SmallestNeed | None:
    """Returns the smallest need that a search has forecast, else that of the plan with the smallest bound, or None."""
    job = search.jobs[0]
    closed = tuple(field for field in SAVES_MEMORY if field not in job.open)
    if search.forecasts:
        smallest_plan = min(search.forecasts, key=lambda plan: plan.forecast.held)
        return SmallestNeed(smallest_plan.changes, smallest_plan.forecast.held, job.capacity, closed)
    if not isinstance(search, Search):
        return None
    smallest = []
    for number, (cluster, group) in enumerate(search.list_groups()):
        opened = cluster.groups.open(group)[0]
        nbytes = cluster.groups.bound_memory(opened) if opened is not None else None
        if nbytes is not None and len(nbytes):
            smallest.append((float(nbytes.min()), number, int(nbytes.argmin())))
    for _, number, j in sorted(smallest):
        cluster, group = search.list_groups()[number]
        opened = cluster.groups.open(group)[0]
        assert opened is not None
        space, step = cluster.space, cluster.groups.steps(opened, j)[0]
        changes = space.changes(group, opened.pipeline(j), step)
        try:
            job_of = load_job(space.job_of(group, opened.pipeline(j), step), base=space.base)
            need = forecast_step(job_of, search.shared).held
        except MeshcastError:
            continue
        return SmallestNeed(changes, need, space.capacity, closed)
    return None
