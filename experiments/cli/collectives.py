"""``meshcast collectives``: tables in the form of nccl-tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli.console import AsJson, Changes, answering, emit
from meshcast.experiments.cli.launch import takes_launch_files
from meshcast.hardware.errors import PlanError, nearest

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Units of sizes in nccl-tests' options."""


@takes_launch_files
def collectives(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="A job file: the collectives of its step.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="CLUSTER", help="Those of a cluster instead, e.g. dgx-h100:2, or its file."),
    ] = None,
    change: Changes = None,
    stage: Annotated[
        int | None,
        typer.Option("--stage", metavar="N", help="Pipeline stage; the one that computes longest if not given."),
    ] = None,
    operation: Annotated[
        list[str] | None,
        typer.Option("--operation", metavar="NAME", help="Only this one, e.g. all_reduce; may be repeated."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="GPUs of the cluster that take part; all if not given.")
    ] = None,
    begin: Annotated[str, typer.Option("--begin", "-b", metavar="SIZE", help="Smallest size, e.g. 8 or 1M.")] = "1M",
    end: Annotated[str, typer.Option("--end", "-e", metavar="SIZE", help="Largest size.")] = "8G",
    factor: Annotated[int, typer.Option("--factor", "-f", metavar="N", help="Factor between two sizes.")] = 2,
    every_rank: Annotated[
        bool,
        typer.Option("--every-rank", help="A line for each rank of large groups, too, where equal hosts share one."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the collectives of a job or cluster as nccl-tests does."""
    with answering(as_json):
        from meshcast.experiments.explain.collectives import TESTS, make_sizes, tables_of_cluster, tables_of_job
        from meshcast.simulator.formats.nccl_tests import OPERATIONS

        known = OPERATIONS.values() if job is None else TESTS
        for name in operation or ():
            if name not in known:
                raise PlanError("--operation", "no such operation", nearest(name, known), name)
        if (job is None) == (cluster is None):
            remedy = "Write meshcast collectives job.yaml, or meshcast collectives --cluster dgx-h100:2"
            raise PlanError("collectives", "it takes either a JOB or --cluster", remedy)
        if job is not None:
            from meshcast.simulator import load_job, simulate

            found = tables_of_job(simulate(load_job(job, change or ())), stage, every_rank)
            found = [one for one in found if not operation or one.operation in operation]
        else:
            from meshcast.hardware import load_cluster
            from meshcast.hardware.load import read_yaml

            assert cluster is not None
            given = read_yaml(cluster, "--cluster", PlanError).data
            sizes = make_sizes(_bytes(begin, "--begin"), _bytes(end, "--end"), factor)
            found = tables_of_cluster(
                load_cluster(given, "--cluster"), operation or list(known), gpus, sizes, every_rank
            )
        if as_json:
            emit({"tables": [one.to_dict() for one in found]})
        else:
            typer.echo("\n".join(one.table.render() for one in found) or "# no collective", nl=False)


def _bytes(word: str, option: str) -> int:
    """A size as nccl-tests reads it: ``8``, ``32M``, ``1G``."""
    read = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", word.strip().upper())
    if not read:
        raise PlanError(option, "a size is a number of bytes with K, M, G or T", "Write it like 8, 32M or 1G", word)
    return int(read[1]) * UNITS[read[2]]
