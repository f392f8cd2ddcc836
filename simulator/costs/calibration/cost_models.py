"""The cost models, by the sections of calibration files, and the families of links that share a file."""

from __future__ import annotations

from meshcast.simulator.costs.collectives.dispatch import DispatchCostModel
from meshcast.simulator.costs.collectives.links import AllToAllCostModel, NetworkCostModel, P2PCostModel, RingCostModel
from meshcast.simulator.costs.collectives.processes import ProcessCostModel
from meshcast.simulator.costs.kernels.attention import AttentionCostModel
from meshcast.simulator.costs.kernels.cpu import CpuAttentionCostModel, CpuGemmCostModel, CpuMemoryBoundCostModel
from meshcast.simulator.costs.kernels.eager import EagerCostModel
from meshcast.simulator.costs.kernels.gemm import Fp8GemmCostModel, GemmCostModel
from meshcast.simulator.costs.kernels.grouped import GroupedGemmCostModel
from meshcast.simulator.costs.kernels.memory import MemoryBoundCostModel

KERNEL_MODELS: dict[str, type] = {
    "memory": MemoryBoundCostModel,
    "eager": EagerCostModel,
    "gemm": GemmCostModel,
    "gemm-fp8": Fp8GemmCostModel,
    "grouped": GroupedGemmCostModel,
    "attention": AttentionCostModel,
    "dispatch": DispatchCostModel,
    "combine": DispatchCostModel,
    "prepare": DispatchCostModel,
    "cpu-gemm": CpuGemmCostModel,
    "cpu-attention": CpuAttentionCostModel,
    "cpu-memory": CpuMemoryBoundCostModel,
}
"""Sections of a GPU's file."""

LINK_MODELS: dict[str, type] = {"ring": RingCostModel, "all_to_all": AllToAllCostModel, "p2p": P2PCostModel}
"""Sections of the file of links within a node; each is the field of `LinkCostModels` of its name."""

COST_MODELS: dict[str, type] = {
    **KERNEL_MODELS,
    **LINK_MODELS,
    "network": NetworkCostModel,
    "processes": ProcessCostModel,
}
"""All sections: also that of a network's file, and that of `PROCESSES`."""

PROCESSES = "loopback"
"""The family of links that join processes of a host."""


def family(kind: str) -> str:
    """Returns the family of a link of the catalog: nvlink4 for nvlink4-h800, pcie and infiniband for all of theirs."""
    word = kind.partition("-")[0]
    return "pcie" if word.startswith("pcie") else word
