"""``meshcast plan-module``: what planners of layer graphs propose for a torch module of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshcast.experiments.cli.console import AsJson, answering, emit

if TYPE_CHECKING:
    from rich.table import Table

    from meshcast.experiments.planning.graph import LayerGraph
    from meshcast.experiments.planning.imported.module_league import ModuleRow

MOST_ROWS = 40
"""Layers that a terminal shows; --json has all."""


def plan_module(
    module: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION", help="A function that returns a torch module and a tuple of its inputs."
        ),
    ],
    planners: Annotated[
        str, typer.Option("--with", metavar="NAMES", help="Planners of layer graphs, such as pipedream,piper; or all.")
    ] = "pipedream",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NODE:NUMBER", help="As in a job, e.g. dgx-h100:2, or a cluster file.")
    ] = "dgx-h100:1",
    depth: Annotated[
        int,
        typer.Option("--depth", metavar="N", min=0, help="Names of a submodule's path that make a layer; 0: all."),
    ] = 0,
    chain: Annotated[
        bool, typer.Option("--chain", help="Plan layers in the order of execution, as if there were no branches.")
    ] = False,
    microbatches: Annotated[
        int, typer.Option("--microbatches", metavar="M", min=1, help="Micro-batches of a step; inputs are one.")
    ] = 8,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.1, help="Limit of an integer program.")
    ] = 60.0,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of searches that draw random numbers.")
    ] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Ask planners of layer graphs about a torch module of your own."""
    with answering(as_json):
        from meshcast.experiments.pages.forecast import show
        from meshcast.experiments.planning.imported.module_league import ask_planners, choose_graph_planners, to_answer
        from meshcast.experiments.planning.imported.module_problem import ModuleProblem
        from meshcast.experiments.planning.problem import SearchBudget

        names = choose_graph_planners(planners)
        problem = ModuleProblem(module, cluster, depth, microbatches, chain)
        rows = ask_planners(problem, names, SearchBudget(seconds, steps))
        if as_json:
            emit(to_answer(problem, rows))
        else:
            show(_layer_table(problem.graph()))
            show(_plan_table(problem.graph(), rows))


def _layer_table(graph: LayerGraph) -> Table:
    """A row for every layer: time of both passes, FLOPs, weights, and what other layers read of it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer")
    for head in ("forward us", "backward us", "GFLOP", "weights MiB", "output MiB"):
        table.add_column(head, justify="right")
    figures = graph.figures
    flops = figures["forward_flops"] + figures["backward_flops"]
    rows = [
        (1e6 * figures["forward"][at], 1e6 * figures["backward"][at], flops[at] / 1e9)
        + (figures["parameters"][at] / 2**20, figures["activations"][at] / 2**20)
        for at in range(len(graph.names))
    ]
    for name, row in zip(graph.names[:MOST_ROWS], rows, strict=False):
        table.add_row(name, *(f"{value:.4g}" for value in row))
    totals = [sum(column) for column in zip(*rows, strict=True)]
    table.add_section()
    table.add_row(f"all {len(rows)} layers", *(f"{value:.4g}" for value in totals[:4]), "")
    return table


def _plan_table(graph: LayerGraph, rows: list[ModuleRow]) -> Table:
    """A row for every stage of every plan: its layers, its replicas, and the planner's own objective."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from meshcast.hardware.errors import escape_controls

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("planner", "objective", "stage", "layers"):
        table.add_column(head)
    refused = []
    for row in rows:
        if row.proposal is None:
            refused.append(escape_controls(f"{row.name}: {row.refused}"))
            continue
        first = (row.name, f"{row.proposal.value:.4g} {row.unit}")
        for number, stage in enumerate(row.stages):
            names = [graph.names[node] for node in stage.nodes]
            layers = f"{names[0]} to {names[-1]} ({len(names)})" if len(names) > 1 else names[0]
            table.add_row(*(first if number == 0 else ("", "")), f"{number} {stage.devices}", layers)
        table.add_section()
    if refused:
        table.caption = Text("\n".join(refused))
        table.caption_justify = "left"
    return table
