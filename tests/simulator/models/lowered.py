"""Small models as they are lowered: jobs that are played, and the ops of their units."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.ir.ops import Op
from meshcast.validation.contract.played import Played, play_job


def describe_job(model: Any, plan: Any = None, gpus: int = 1, batch: int = 1, **more: Any) -> dict[str, Any]:
    """Returns the job of a model on some H100."""
    cluster = {"gpu": "h100-sxm", "gpus": gpus}
    fields = {"model": model, "cluster": cluster, "batch": {"global": batch}, "precision": "bf16", "plan": plan or {}}
    return fields | more


def play(
    model: Any, plan: Any = None, gpus: int = 1, batch: int = 1, engine: Engine = "matrices", **more: Any
) -> Played:
    """Plays the job of a model."""
    return play_job(describe_job(model, plan, gpus, batch, **more), engine=engine)


def forward_ops(played: Played, at: int = 1) -> list[Op]:
    """Returns the forward ops of the unit run at a position of the first stage: by default of the first layer."""
    return played.stages[0].unit_runs[at].fragment.forward


def backward_ops(played: Played, at: int = 1) -> list[Op]:
    """Returns its backward ops."""
    return played.stages[0].unit_runs[at].fragment.backward


PLANS: dict[str, dict[str, Any]] = {
    "tensor and pipeline": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
    "fsdp": {"mesh": {"dp": 8}, "schemes": [{"use": "data/fsdp", "over": "dp"}]},
}
"""Two plans on 8 GPUs that shard all that there is."""
