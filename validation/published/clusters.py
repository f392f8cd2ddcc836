"""Clusters of the catalog by the words of published runs, and how programs had to run there."""

from __future__ import annotations

import re

from meshcast.hardware.records import dataclass
from meshcast.validation.published.rows import PublishedRun


@dataclass(frozen=True)
class KnownCluster:
    """A cluster whose properties the catalog holds.

    Attributes:
        node: of the catalog.
        words: what runs call the cluster, a regular expression.
        launch_blocking_from: GPUs from which programs were run with CUDA_LAUNCH_BLOCKING=1; None: never.
    """

    node: str
    words: str
    launch_blocking_from: int | None = None


KNOWN_CLUSTERS = (
    # Larger jobs hung without it: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md ("dealing
    # with JZ hanging on the large model"), tr11-176B-ml.slurm. Jobs of 160 GPUs "may hang", those of 320 "always hang".
    KnownCluster("jean-zay-a100", "Jean.Zay", 160),
)


def known_cluster(run: PublishedRun) -> KnownCluster | None:
    """Returns the cluster of a run, if the catalog has its properties."""
    text = run.hardware.inter or ""
    return next((cluster for cluster in KNOWN_CLUSTERS if re.search(cluster.words, text)), None)


def blocks_launches(run: PublishedRun) -> bool:
    """Returns whether the host waited for every kernel of the run."""
    cluster = known_cluster(run)
    least = cluster.launch_blocking_from if cluster else None
    return least is not None and (run.spec.gpus or 0) >= least


def forget_cluster(run: PublishedRun) -> PublishedRun:
    """Returns the same run on a cluster that nothing is known of but its GPUs and its network."""
    return run.model_copy(update={"hardware": run.hardware.model_copy(update={"inter": None})})
