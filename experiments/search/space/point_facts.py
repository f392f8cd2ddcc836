"""What the rules of programs ask of a point, and the point with some values of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.experiments.search.space.fields import MESH_ORDERS
from meshcast.experiments.search.space.points import DEGREES, LayerGroup, Pipeline, StepChoice
from meshcast.experiments.search.space.scheme_keys import accompanies_others, plain_name
from meshcast.experiments.search.space.space import Space
from meshcast.simulator.job.program_rules import Facts, name_padding

FACT_OF_FIELD: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "cp", "ep", "overlap_tp", "overlap_pp", "schedule", "data")},
    **{"mesh_order": "rank_order", "chunks": "virtual_stages", "offload": "offloaded", "recompute": "recomputation"},
}
"""Facts of rules of programs (`simulator.job.program_rules`) that are fields of a point."""

FIELDS_OF_FACTS: Mapping[str, tuple[str, ...]] = {
    **{fact: (field,) for field, fact in FACT_OF_FIELD.items()},
    **{FACT_OF_FIELD[field]: ("pp", field) for field in ("schedule", "chunks", "mesh_order")},
    "dp": DEGREES,
    "etp": ("tp", "ep", "etp"),
    "copies": (*DEGREES, "mesh_order", "shard"),
    "microbatches": (*DEGREES, "micro"),
    "group": ("pp",),
    "data": ("tp", "pp", "data"),
    "sequence": ("cp", "sequence"),
    "tensor": ("tp", "tensor", "sequence_parallel"),
    "tensor_overlap": ("tp", "tensor", "overlap_tp"),
    "expert": ("ep", "expert"),
    "padding": ("tp",),
    "modules": ("recompute",),
    "recomputed_layers": ("recompute", "recomputed"),
}
"""Fields of a point that facts of rules of programs follow from; of other facts none: the job has them."""


def facts_of_point(space: Space, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Facts:
    """Returns the facts of a point that a plan changes, as `simulator.job.program_rules.facts_of_job` does of a job."""
    (dp, _), pp, loaded = space.data_ranks(group, pipeline.place), pipeline.pp, space.loaded
    assert loaded.batch.total is not None
    words = isinstance(group.recompute, str)
    core = ("core_attn",) if group.recompute == "selective" else ()
    return {
        **{"tp": group.tp, "cp": group.cp, "ep": group.ep, "pp": pp, "dp": dp, "etp": group.expert_tensor_ranks},
        **_tensor_facts(space, group),
        "padding": name_padding(loaded.model, group.tp),
        "copies": dp // (step.shard or dp),
        "microbatches": loaded.batch.total // (group.micro * dp),
        "schedule": pipeline.schedule if pp > 1 else None,
        "virtual_stages": pipeline.chunks if pp > 1 else 1,
        "group": pp,
        "overlap_passes": False,
        "rank_order": pipeline.mesh_order if pp > 1 else MESH_ORDERS[0],
        "data": step.data if dp * group.cp > 1 else None,
        "sequence": plain_name(group.sequence) if group.cp > 1 else None,
        "expert": plain_name(group.expert) if group.ep > 1 else None,
        "recomputation": group.recompute if words else "selective",
        "modules": core if words else group.recompute,
        "recomputed_layers": pipeline.recomputed if group.recompute == "full" else None,
        "offloaded": group.offload,
        "offloaded_layers": None,
        "overlap_pp": step.overlap_pp,
    }


def make_point(space: Space, fields: Mapping[str, Any]) -> tuple[LayerGroup, Pipeline, StepChoice] | None:
    """Returns the point with some values of its fields; None if no ranks share a copy of the states as they say."""
    group = LayerGroup(**{name: fields[name] for name in LayerGroup._fields})
    pipeline = Pipeline(**{name: fields[name] for name in Pipeline._fields})
    step = StepChoice(**{name: fields[name] for name in StepChoice._fields if name != "options"})
    shard = space.shard_ranks(step.shard, *space.data_ranks(group, pipeline.place))
    return (group, pipeline, step._replace(shard=shard)) if shard else None


def _tensor_facts(space: Space, group: LayerGroup) -> Facts:
    """Returns the tensor scheme of a group, and what overlaps its communication; None for a single rank."""
    if group.tp == 1:
        return {"tensor": None, "tensor_overlap": None, "overlap_tp": False}
    domain = space.loaded.cluster.domain
    reaches = space.loaded.cluster.gpus <= domain or domain % group.tp == 0  # tensor ranks are the innermost axis
    overlap = space.loaded.framework.tensor_overlap.rpartition("/")[2] if group.overlap_tp and reaches else None
    tensor = "megatron-sp" if group.sequence_parallel else "megatron"
    if accompanies_others(group.tensor):
        overlap = plain_name(group.tensor or "")
    elif group.tensor is not None:
        tensor = plain_name(group.tensor)
    return {"tensor": tensor, "tensor_overlap": overlap, "overlap_tp": group.overlap_tp}
