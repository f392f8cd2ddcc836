"""Completeness of the data that ships with meshcast: catalog, calibration, models, frameworks, schemes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources

from meshcast import hardware
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.load import catalog, load
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Transfer, Work
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.simulator.models.hub import hub_files, hub_models
from meshcast.simulator.models.load import load_model, presets


def catalog_loads() -> Iterator[str]:
    """Every file of the catalog is valid, and the usual node of every GPU is in it."""
    for kind in ("gpus", "links", "nodes", "clusters"):
        for name in catalog(kind):
            yield from _explain(f"{kind}/{name}", partial(load, kind, name))
    for name in hardware.gpus():
        usual = load("gpus", name).usual_node
        if usual and usual not in hardware.nodes():
            yield f"gpus/{name}: its usual node {usual} is not in the catalog"


def every_gpu_has_prices() -> Iterator[str]:
    """Kernels, collectives and messages have positive, finite prices on every node, alone and beside another."""
    for name in hardware.nodes():
        yield from _explain(f"nodes/{name}", partial(price_node, name))


def price_node(name: str) -> None:
    """Prices kernels, collectives and messages of a node. Raises ValueError for a price that cannot be."""
    cluster = hardware.load_cluster(f"{name}:{2 if load('nodes', name).nics else 1}")
    costs = Costs(cluster, Mesh({"dp": cluster.gpus}))
    dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in cluster.gpu.peak)
    works: list[Work] = [Gemm(4096, 4096, 4096, dtype=dtype), Memory("add", 1 << 24, 1 << 24)]
    works.append(Attention(1, 2048, 2048, 16, 16, 128, 128, dtype=dtype))
    works += [Gemm(4096, 4096, 4096, dtype=dtype) for dtype in ("fp8", "fp4") if dtype in cluster.gpu.peak]
    if cluster.gpus > 1:
        operations = ("all_reduce", "all_gather", "reduce_scatter")
        works += [Collective(operation, 1 << 26, ("dp",)) for operation in operations]
        works.append(Transfer(1 << 24, "dp", 0, cluster.gpus - 1))
    for work in works:
        seconds = costs.estimate(work).seconds
        if not 0 < seconds < 3600:
            raise ValueError(f"{work} takes {seconds!r} s")


def models_load() -> Iterator[str]:
    """Every preset and every id is a valid model."""
    for name in (*presets(), *(name for maker in hub_files() for name in hub_models(maker))):
        yield from _explain(f"models/{name}", partial(load_model, name))


def frameworks_load() -> Iterator[str]:
    """Every framework profile is valid in every generation and names its source."""
    for name in framework_names():
        yield from _explain(f"frameworks/{name}", partial(load_framework, name))
        yield from _explain(f"frameworks/{name}, oldest", partial(load_framework, name, release="2000-01"))
        if len(load_framework(name).source) < 10:
            yield f"frameworks/{name}: it names no source"


def schemes_load() -> Iterator[str]:
    """Every scheme file is found and says what it is."""
    for use in scheme_names():
        yield from _explain(f"schemes/{use}", partial(find_scheme, use))
        if not (sys.modules[find_scheme(use).__module__].__doc__ or "").strip():
            yield f"schemes/{use}: it has no description"


def package_is_typed() -> Iterator[str]:
    """The package says to type checkers that it is typed."""
    if not (resources.files("meshcast") / "py.typed").is_file():
        yield "meshcast: py.typed is missing"


COMPLETE: dict[str, Callable[[], Iterator[str]]] = {
    "the catalog loads": catalog_loads,
    "every node has prices": every_gpu_has_prices,
    "model presets load": models_load,
    "framework profiles load": frameworks_load,
    "schemes load": schemes_load,
    "the package is typed": package_is_typed,
}


def _explain(what: str, call: Callable[[], object]) -> Iterator[str]:
    """Calls something that must not fail; yields what went wrong."""
    try:
        call()
    except (MeshcastError, ValueError, KeyError) as error:
        yield f"{what}: {error}"
