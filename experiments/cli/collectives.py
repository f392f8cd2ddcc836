"""``meshcast collectives``: tables in the form of nccl-tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import AsJson, Changes, emit
from meshcast.experiments.cli.launch import LaunchFileOptions
from meshcast.experiments.options import argument, option
from meshcast.hardware.errors import PlanError, nearest

if TYPE_CHECKING:
    from meshcast.experiments.explain.collectives import CollectiveGroup

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Units of sizes in nccl-tests' options."""


class CollectivesOptions(LaunchFileOptions):
    """Options of ``meshcast collectives``."""

    job: Annotated[Path | None, argument("JOB", "A job file: the collectives of its step.")] = None
    cluster: Annotated[
        str | None, option("--cluster", "Those of a cluster instead, e.g. dgx-h100:2, or its file.", "CLUSTER")
    ] = None
    change: Changes = ()
    stage: Annotated[
        int | None, option("--stage", "Pipeline stage; the one that computes longest if not given.", "N")
    ] = None
    operation: Annotated[
        tuple[str, ...], option("--operation", "Only this one, e.g. all_reduce; may be repeated.", "NAME")
    ] = ()
    gpus: Annotated[int | None, option("--gpus", "GPUs of the cluster that take part; all if not given.", "N")] = None
    begin: Annotated[str, option("--begin", "Smallest size, e.g. 8 or 1M.", "SIZE", short="-b")] = "1M"
    end: Annotated[str, option("--end", "Largest size.", "SIZE", short="-e")] = "8G"
    factor: Annotated[int, option("--factor", "Factor between two sizes.", "N", short="-f")] = 2
    every_rank: Annotated[
        bool, option("--every-rank", "A line for each rank of large groups, too, where equal hosts share one.")
    ] = False
    as_json: AsJson = False


def collectives(options: CollectivesOptions) -> None:
    """Prints the collectives of a job or cluster as nccl-tests does."""
    from meshcast.experiments.explain.collectives import TESTS
    from meshcast.simulator.formats.nccl_tests import OPERATIONS

    known = list(OPERATIONS.values() if options.job is None else TESTS)
    for name in options.operation:
        if name not in known:
            raise PlanError("--operation", "no such operation", nearest(name, known), name)
    if (options.job is None) == (options.cluster is None):
        remedy = "Write meshcast collectives job.yaml, or meshcast collectives --cluster dgx-h100:2"
        raise PlanError("collectives", "it takes either a JOB or --cluster", remedy)
    tables = _tables_of_job(options) if options.job is not None else _tables_of_cluster(options, known)
    if options.as_json:
        emit({"tables": [table.to_dict() for table in tables]})
    else:
        print("\n".join(table.table.render() for table in tables) or "# no collective", end="", flush=True)


def _tables_of_job(options: CollectivesOptions) -> list[CollectiveGroup]:
    """Returns the tables of the collectives of a step."""
    from meshcast.experiments.explain.collectives import tables_of_job
    from meshcast.simulator import simulate

    assert options.job is not None
    tables = tables_of_job(simulate(load_with_plan(options.job, options.change)), options.stage, options.every_rank)
    return [table for table in tables if not options.operation or table.operation in options.operation]


def _tables_of_cluster(options: CollectivesOptions, operations: list[str]) -> list[CollectiveGroup]:
    """Returns the tables of all sizes on a cluster. operations: of which ones, where none is named."""
    from meshcast.experiments.explain.collectives import make_sizes, tables_of_cluster
    from meshcast.hardware import load_cluster
    from meshcast.hardware.load import read_yaml

    assert options.cluster is not None
    cluster = load_cluster(read_yaml(options.cluster, "--cluster", PlanError).data, "--cluster")
    sizes = make_sizes(_bytes(options.begin, "--begin"), _bytes(options.end, "--end"), options.factor)
    return tables_of_cluster(cluster, [*options.operation] or operations, options.gpus, sizes, options.every_rank)


def _bytes(word: str, place: str) -> int:
    """A size as nccl-tests reads it: ``8``, ``32M``, ``1G``."""
    read = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", word.strip().upper())
    if not read:
        raise PlanError(place, "a size is a number of bytes with K, M, G or T", "Write it like 8, 32M or 1G", word)
    return int(read[1]) * UNITS[read[2]]
