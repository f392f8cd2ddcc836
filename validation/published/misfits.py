"""Why a run whose forecast exceeds the memory of its GPUs may have fitted.

A published run did fit. Where its forecast does not, a field that was assumed, a stated one or the forecast of memory
is wrong. Each field that the run leaves open is given its other values, the others as they were: the first with which
the run fits is its likely reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.report import Report
from meshcast.validation.published.mapping import MappedJob
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun, Spec
from meshcast.validation.published.stacks import framework

LARGEST = 2
"""Contents of the memory that a reason names."""


def explain_misfit(run: PublishedRun, mapped: MappedJob, report: Report, shared_work: SharedWork | None = None) -> str:
    """The likely reason why the forecast of a run does not fit in memory, as a phrase without a full stop.

    mapped: its job, with the fields that were assumed; report: its forecast.
    """
    for field, value, spec in _alternatives(run.spec, mapped.assumed):
        other = run.model_copy(update={"spec": spec})
        try:
            _, found = forecast_run(other, shared_work)
        except MeshcastError:
            continue
        if found.fits:
            return f"{field} is assumed: with {value} it needs {found.peak_device / GIB:,.0f} GiB"
    program = run.spec.stack
    wrong = ["a stated field", "the memory model"]
    if (name := framework(program)) != program:
        wrong.insert(1, f"{name} in the place of {program}")
    peak = max(report.play.peaks, key=lambda one: one.total)
    largest = sorted(peak.by, key=lambda category: -peak.by[category])[:LARGEST]
    held = ", ".join(f"{category} {peak.by[category] / GIB:,.0f} GiB" for category in largest)
    return f"no assumed field explains it: {', '.join(wrong[:-1])} or {wrong[-1]} is wrong ({held})"


def _alternatives(spec: Spec, assumed: tuple[str, ...]) -> Iterator[tuple[str, str, Spec]]:
    """Other values of fields that were assumed and change memory, the least change of a plan first: the field, the
    value in words, the spec with it."""
    if "grad_dtype" in assumed:
        yield "grad_dtype", "bf16", spec.model_copy(update={"grad_dtype": "bf16"})
    if "shard_group" in assumed:
        ranks = spec.width("dp") * spec.width("cp")
        group = 2 * (spec.gpus_per_node or 1)
        while group <= ranks and ranks % group == 0:
            yield "shard_group", str(group), spec.model_copy(update={"shard_group": group})
            group *= 2
    if "recompute.kind" in assumed:
        for kind in ("selective", "full"):
            recompute = spec.recompute.model_copy(update={"kind": kind})
            yield "recompute.kind", kind, spec.model_copy(update={"recompute": recompute})
