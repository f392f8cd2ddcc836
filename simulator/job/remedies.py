"""What messages about wrong jobs suggest: degrees and nodes that would work, and the key that a bare word means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshcast.hardware.documents.explain import valid_keys
from meshcast.hardware.documents.other_words import find_meaning
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.job.job import Batch, JobFile
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.models.model import Model

PARTS = ("plan", "batch", "precision", "train", "run")
"""Parts of a job whose keys people write without them."""

GPUS = frozenset({"gpus", "gpu", "nodes", "num_gpus", "num_nodes", "nnodes", "world_size", "ngpus", "n_gpus"})
"""Words for the size of the cluster."""


def suggest_key(word: str, valid: Sequence[str]) -> str:
    """Returns what to write for a key that a job does not have at its top. valid: keys that it has there."""
    plain = word.strip().lower().lstrip("-").replace("-", "_")
    if plain in GPUS:
        return "The cluster says how many: cluster=dgx-h100:8 is 8 nodes of 8 GPUs"
    for part in PARTS:
        keys = [*ShortPlan.model_fields] if part == "plan" else valid_keys(JobFile, (part,))
        key = plain if plain in keys else find_meaning(word, keys)
        if key is not None and key not in valid:
            return f"Did you mean {part}.{key}?"
    return nearest(word, valid)


def refuse_degrees(
    degrees: Mapping[str, int], gpus: int, model: Model, node: int, batch: Batch | None, experts: int
) -> PlanError:
    """Returns the error for degrees whose product does not divide the GPUs.

    node: GPUs of a node.
    experts: ranks of a pipeline stage that hold all experts once, which the ranks of a stage must be a multiple of.
    """
    product = math.prod(degrees.values())
    culprit = next((name for name, n in degrees.items() if gpus % (product // n) == 0 and n > 1), "tp")
    others = product // degrees[culprit]
    rule = f"{' x '.join(degrees)} = {' x '.join(map(str, degrees.values()))} = {product} must divide the {gpus} GPUs"
    kept = " and ".join(f"{name} = {n}" for name, n in degrees.items() if name != culprit)

    def works(degree: int, world: int) -> bool:
        ranks = degree * others
        stage = world // degrees["pp"] if culprit != "pp" else world // degree
        if world % ranks or stage % experts:
            return False
        return _divides_model(culprit, degree, model, node) and _divides_batch(batch, world // ranks)

    fits = [n for n in list_divisors(gpus) if n < 2 * degrees[culprit] and works(n, gpus)]
    near = min(fits, key=lambda n: abs(n - degrees[culprit]), default=None)
    remedies = [f"with {kept}, {culprit} = {near} would work"] if near else []
    remedies += _list_nodes(gpus, node, lambda world: works(degrees[culprit], world))
    remedies = remedies or ["Choose degrees that divide it"]
    remedies[0] = remedies[0][0].upper() + remedies[0][1:]
    return PlanError(f"plan.{culprit}", rule, "; ".join(remedies), degrees[culprit])


def refuse_expert_degrees(
    ep: int, etp: int, ranks: int, experts: int, node: int, stages: int, model_ranks: int, batch: Batch | None
) -> tuple[str, str, str, int]:
    """Returns field, rule, remedy and value of expert degrees that do not divide the ranks of a stage.

    experts: greatest common divisor of the numbers of experts.
    node: GPUs of a node; 0 where the cluster is not all of equal stages.
    stages: of the pipeline.
    model_ranks: of a replica.
    """
    name, degree = ("ep", ep) if ranks % ep else ("etp", etp)
    rest = etp if name == "ep" else ep
    fits = [n for n in list_divisors(ranks) if ranks % (n * rest) == 0 and (name == "etp" or experts % n == 0)]
    near = min((n for n in fits if _is_power_of_two(n) and n > 1), key=lambda n: abs(n - degree), default=None)
    gpus = ranks * stages
    # Where the batch is not known, other nodes are named alone: the degree of data parallelism may not divide it.
    alone = node == 0 or (batch is not None and _divides_batch(batch, gpus // model_ranks))
    remedies = [f"{name} = {near} would work"] if near and alone else []

    def works(world: int) -> bool:
        if world % model_ranks or world // stages % (ep * etp):
            return False
        return _divides_batch(batch, world // model_ranks)

    remedies += _list_nodes(gpus, node, works) if node else []
    rule = f"ep x etp = {ep} x {etp} must divide dp x cp x tp = {ranks}"
    return name, rule, "; ".join(remedies) or "Lower the other one", degree


def _divides_model(name: str, degree: int, model: Model, node: int) -> bool:
    """Returns whether people use such a degree: a power of two that divides the heads and stays in a node, or stages
    that divide the layers."""
    if name == "pp":
        return model.layers % degree == 0
    if not _is_power_of_two(degree):
        return False
    return name != "tp" or (degree <= max(node, 1) and model.heads % degree == 0)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _divides_batch(batch: Batch | None, replicas: int) -> bool:
    """Returns whether replicas share a global batch evenly; also if none is stated."""
    if batch is None or batch.total is None:
        return True
    return replicas > 0 and batch.total % (replicas * batch.micro) == 0


def _list_nodes(gpus: int, node: int, works: Callable[[int], bool]) -> list[str]:
    """Returns the next numbers of nodes below and above those of a cluster that would work, as a sentence; [] without
    any."""
    count = gpus // node

    def first(counts: Iterable[int]) -> list[int]:
        return [next((n for n in counts if works(n * node)), 0)]

    near = [n for n in first(range(count - 1, 0, -1)) + first(range(count + 1, 2 * count + 1)) if n]
    unit = f"{'node' if near == [1] else 'nodes'}" if node > 1 else "GPUs"
    return [f"{' or '.join(map(str, near))} {unit} would work"] if near else []
