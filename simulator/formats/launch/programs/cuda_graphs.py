"""Reads and writes which modules are CUDA graphs, as Megatron-Core and what stands on it name them.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core/transformer/transformer_config.py (`cuda_graph_impl`,
`cuda_graph_modules`, once `cuda_graph_scope`, and what `__post_init__` makes of their older values).
"""

from __future__ import annotations

from typing import Any, get_args

from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import is_null, read_words
from meshcast.simulator.ir.graph_parts import CudaGraphs, GraphModule

SWITCHES = ("enable_cuda_graph", "external_cuda_graph")
MODULES = ("cuda_graph_modules", "cuda_graph_scope")
NAMES = ("cuda_graph_impl", *SWITCHES, *MODULES)
WHOLE_STEP = "full_iteration"


def read_graphs(reading: Reading) -> CudaGraphs:
    """Reads the CUDA graphs of a run: of the whole step, of modules of its layers, or none.

    Without a list of modules a graph holds a whole layer; of experts that drop no tokens, what a graph can hold.
    """
    kind = reading.take_word("cuda_graph_impl")
    switched = [reading.take_switch(name) for name in SWITCHES]
    stated = reading.take(*MODULES)
    words = () if stated is None or is_null(stated.value) else read_words(stated)
    if kind in ("", "none") and not any(switched):
        return False
    if WHOLE_STEP in (kind, *words):
        return True
    named = [str(word).rpartition(".")[2] for word in words]
    listed = {module for module in get_args(GraphModule) if module in named}
    if kind == "local" and listed & {"moe_router", "moe_preprocess"}:
        listed |= {"moe_router", "moe_preprocess"}
    return tuple(module for module in get_args(GraphModule) if module in (listed or _whole_layers(reading)))


def _whole_layers(reading: Reading) -> frozenset[str]:
    """Returns the modules of all layers of a model."""
    modules = {"attn", *({"mamba"} if any(key.startswith("model.ssm.") for key in reading.keys) else ())}
    if reading.keys.get("model.moe.experts") is None:
        return frozenset(modules | {"mlp"})
    padded = reading.keys.get("model.moe.capacity") is not None
    return frozenset(modules | ({"mlp", "moe"} if padded else {"mlp", "moe_router", "moe_preprocess"}))


def write_graphs(graphs: CudaGraphs) -> dict[str, Any]:
    """Returns the settings of CUDA graphs; empty of a run without them."""
    if isinstance(graphs, bool):
        return {"cuda_graph_impl": WHOLE_STEP} if graphs else {}
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": list(graphs)}
