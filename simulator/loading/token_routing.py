"""Routing of tokens to experts that a plan leaves open: that of the model, and what a trained router sees at a time.

A trained router evens out the loads of experts over much data, less over the few documents whose tokens ranks exchange
at a time (`simulator.ir.routing.TrainedRouter`). So its load depends on the micro-batch and on the degrees of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from meshcast.simulator.ir.registry import find_scheme, is_scheme
from meshcast.simulator.ir.routing import DOCUMENT, TRAINED
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.job import LongPlan, SchemeEntry, StageMesh
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.models.model import Model


def fill_routing(plan: LongPlan, model: Model, batch: Batch) -> LongPlan:
    """Returns the plan whose expert schemes say their routing, if it is that of a trained router."""
    usual = _usual_routing(model)
    replicas = 1 if plan.has_stages else family_degree(plan, "data")

    def fill_stage(stage: StageMesh) -> tuple[SchemeEntry, ...]:
        return tuple(fill_entry(stage, entry) for entry in stage.schemes)

    def fill_entry(stage: StageMesh, entry: SchemeEntry) -> SchemeEntry:
        stated = (entry.model_extra or {}).get("routing", usual)
        is_expert = is_scheme(entry.use) and find_scheme(entry.use).family == "expert"
        if not is_expert or not isinstance(stated, str) or stated not in TRAINED:
            return entry
        documents = replicas * _count_documents(stage, entry, batch)
        return entry.model_copy(update={"routing": {"trained": stated, "documents": max(1.0, documents)}})

    return plan.with_schemes(fill_stage)


def _usual_routing(model: Model) -> str | None:
    """Returns the kind of trained router of a model that says it has one; None: its routing is even.

    A router with a bias, in a model whose experts have none, has that which follows their loads (DeepSeek-V3).
    """
    if model.moe is None or model.moe.routing not in TRAINED:
        return None
    return "loss-free" if model.moe.router_bias and not model.mlp_bias else model.moe.routing


def _count_documents(stage: StageMesh, entry: SchemeEntry, batch: Batch) -> float:
    """Counts the documents of a micro-batch of a replica, for each that the ranks of an expert scheme make of all of
    them."""
    pipelines = (entry.over for entry in stage.schemes if entry.use.startswith("pipeline/"))
    outside = {axis for over in pipelines for axis in over}
    inside = {axis: size for axis, size in stage.mesh.items() if axis not in outside}
    ranks = next((view for view in stage.views.values() if {*entry.over} & view.keys()), inside)
    share = prod(ranks.get(axis, 1) for axis in entry.over) / prod(ranks.values())
    assert batch.sequence is not None
    return share * batch.micro * batch.sequence / (batch.document or min(DOCUMENT, batch.sequence))


def has_trained_router(plan: LongPlan) -> bool:
    """Returns whether an expert scheme of the plan has the routing of a trained router."""
    meshes = (plan, *plan.stages, *(stage for replica in plan.replicas for stage in replica.stages))
    routings = ((entry.model_extra or {}).get("routing") for mesh in meshes for entry in mesh.schemes)
    return any(isinstance(routing, Mapping) and "trained" in routing for routing in routings)
