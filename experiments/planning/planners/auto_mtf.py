"""Auto-MTF: the map from named dims to mesh axes of least peak memory of a processor.

Minimises (named dims + 1) x peak bytes - sharded dims, so that of equal peaks the map with most sharded dims wins
(tensorflow/mesh, `mesh_tensorflow/auto_mtf/layout_optimizer.py`; Shazeer et al. 2018, arXiv 1811.02084). A tensor is
live from the operation that writes it to the last reader, in the order of the graph. The authors solve it by
CP-SAT, here all maps are enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

MAX_MAPS = 2_000_000


class AutoMTF(Planner):
    paper = Paper("arXiv:1811.02084", "Mesh-TensorFlow: Deep Learning for Supercomputers", 2018)
    restrictions = ("shard a dim of two tensors over different axes", "cut a pipeline", "look at time")
    modes = ("paper",)
    unit = "(dims + 1) x bytes - sharded dims"

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        settings = settings_of(problem)
        if missing := [key for key in ("dims", "mesh", "writes", "element_bytes") if key not in settings]:
            rule = f"Auto-MTF needs named dims, a mesh and tensors, and there is no `{missing[0]}`"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Auto-MTF")
        graph = problem.graph()
        writes: list[list[str]] = settings["writes"]
        dims = {name: size for name, size in settings["dims"].items() if name not in settings.get("undivided", ())}
        reads = graph.predecessors
        together = [{*writes[node], *(dim for source in reads[node] for dim in writes[source])} for node in graph.order]

        def value_of(layout: Mapping[str, str]) -> float:
            sizes = [self._bytes(settings, dims, layout) for dims in writes]
            return (len(settings["dims"]) + 1) * peak_of(graph, sizes) - len(layout)

        layout, value, visited = find_map(dims, settings["mesh"], together, value_of)
        proof = PlanProof(value, value, "enumeration")
        reason = "its dims are those of a graph, and no model of a job"
        return Proposal({"layout": dict(sorted(layout.items()))}, value, visited, proof, reason)

    def _bytes(self, settings: Mapping[str, Any], dims: list[str], layout: Mapping[str, str]) -> float:
        shards = math.prod(settings["mesh"][layout[dim]] for dim in dims if dim in layout)
        return math.prod(settings["dims"][dim] for dim in dims) * float(settings["element_bytes"]) / shards


def peak_of(graph: LayerGraph, sizes: Sequence[float]) -> float:
    """Returns the most that the tensors of nodes take together [bytes]. sizes: of the tensor of every node [bytes]."""
    position = {node: place for place, node in enumerate(graph.order)}
    last = dict(position)
    for writer, reader in graph.edges:
        last[writer] = max(last[writer], position[reader])
    steps = range(len(position))
    return max(sum(sizes[node] for node, begin in position.items() if begin <= step <= last[node]) for step in steps)


def every_map(
    dims: Mapping[str, int], mesh: Mapping[str, int], together: Sequence[Collection[str]]
) -> Iterator[dict[str, str]]:
    """Yields every map of some dims to axes.

    dims, mesh: dims and axes with their sizes; a dim is sharded over axes that divide it. together: dims that meet.
    """
    names = list(dims)

    def extend(place: int, layout: dict[str, str]) -> Iterator[dict[str, str]]:
        if place == len(names):
            yield dict(layout)
            return
        name = names[place]
        yield from extend(place + 1, layout)
        for axis, size in mesh.items():
            taken = any(name in dims and any(layout.get(other) == axis for other in dims) for dims in together)
            if dims[name] % size == 0 and not taken:
                yield from extend(place + 1, {**layout, name: axis})

    return extend(0, {})


def find_map(
    dims: Mapping[str, int],
    mesh: Mapping[str, int],
    together: Sequence[Collection[str]],
    value_of: Callable[[Mapping[str, str]], float],
) -> tuple[dict[str, str], float, int]:
    """Returns the map of the least value, that value, and the number of maps; ValueError beyond `MAX_MAPS`."""
    if (len(mesh) + 1) ** len(dims) > MAX_MAPS:
        raise ValueError(f"{len(dims)} dims over {len(mesh)} axes have over {MAX_MAPS} maps: fix some of them")
    priced = [(layout, value_of(layout)) for layout in every_map(dims, mesh, together)]
    return *min(priced, key=lambda pair: pair[1]), len(priced)
