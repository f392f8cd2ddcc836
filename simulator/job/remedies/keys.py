"""Which key of a job a bare word means: ``tp`` and ``tensor_parallel_size`` are ``plan.tp``."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.hardware.documents.explain import valid_keys
from meshcast.hardware.documents.other_words import find_meaning
from meshcast.hardware.errors import nearest
from meshcast.simulator.job.job import JobFile
from meshcast.simulator.job.plan_keys import ShortPlan

PARTS = ("plan", "batch", "precision", "train", "run")
"""Parts of a job whose keys people write without them."""

GPUS = frozenset({"gpus", "gpu", "nodes", "num_gpus", "num_nodes", "nnodes", "world_size", "ngpus", "n_gpus"})
"""Words for the size of the cluster."""


def suggest_key(word: str, valid: Sequence[str]) -> str:
    """What to write for a key that a job does not have at its top. valid: keys that it has there."""
    plain = word.strip().lower().lstrip("-").replace("-", "_")
    if plain in GPUS:
        return "The cluster says how many: cluster=dgx-h100:8 is 8 nodes of 8 GPUs"
    for part in PARTS:
        keys = [*ShortPlan.model_fields] if part == "plan" else valid_keys(JobFile, (part,))
        found = plain if plain in keys else find_meaning(word, keys)
        if found is not None and found not in valid:
            return f"Did you mean {part}.{found}?"
    return nearest(word, valid)
