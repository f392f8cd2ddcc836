"""Which laws there are, by the sections of calibrations, and which links share one file."""

from __future__ import annotations

from simulator.costs.collectives.dispatch import DispatchLaw
from simulator.costs.collectives.links import MessageLaw, NetworkLaw, PairLaw, RingLaw
from simulator.costs.collectives.processes import ProcessLaw
from simulator.costs.kernels.attention import AttentionLaw
from simulator.costs.kernels.cpu import CoreAttentionLaw, CoreGemmLaw, CoreMemoryLaw
from simulator.costs.kernels.gemm import Fp8GemmLaw, GemmLaw
from simulator.costs.kernels.grouped import GroupedLaw
from simulator.costs.kernels.memory import MemoryLaw

LAWS: dict[str, type] = {
    "memory": MemoryLaw,
    "gemm": GemmLaw,
    "gemm-fp8": Fp8GemmLaw,
    "grouped": GroupedLaw,
    "attention": AttentionLaw,
    "dispatch": DispatchLaw,
    "combine": DispatchLaw,
    "prepare": DispatchLaw,
    "cpu-gemm": CoreGemmLaw,
    "cpu-attention": CoreAttentionLaw,
    "cpu-memory": CoreMemoryLaw,
}
"""The laws of a GPU's kernels, by their sections."""

LINKS: dict[str, type] = {"ring": RingLaw, "pair": PairLaw, "message": MessageLaw}
"""The laws of links inside an island; that of a network has the section `network`."""

PROCESSES = "loopback"
"""The family of links that join processes of one host, whose law has the section `processes`."""

EVERY: dict[str, type] = {**LAWS, **LINKS, "network": NetworkLaw, "processes": ProcessLaw}


def family(kind: str) -> str:
    """Links of the catalog that share coefficients: nvlink4-h800 and nvlink4, all of PCIe, all of InfiniBand."""
    word = kind.partition("-")[0]
    return "pcie" if word.startswith("pcie") else word
