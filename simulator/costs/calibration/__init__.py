"""Coefficients of the cost laws, one YAML file per GPU and per kind of link; a fit writes these files and nothing else.

Every coefficient is written as ``{value, spread, meaning, rows, source, kind}``: SI units, the relative spread, what it
means physically, the number of rows behind it (null: none), its public origin, and whether it is fitted, measured or
assumed. A law's first coefficient is its rate, and the spread of that one is the spread of the law's residuals.

A GPU without a file takes those of its generation or a near one, a link those of its family or plain ones, with a wider
spread (`BORROWED`), and a sentence says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from hardware.cluster import Tier
from hardware.errors import CatalogError
from hardware.load import read_yaml
from simulator.costs.collectives.links import LinkLaw, NetworkLaw
from simulator.costs.kernels.attention import AttentionLaw
from simulator.costs.kernels.gemm import GemmLaw
from simulator.costs.kernels.memory import MemoryLaw

GENERATION = {"ampere": "a100-sxm-80", "hopper": "h100-sxm"}
"""Whose coefficients a GPU without a file borrows, by architecture."""
NEIGHBOUR = {
    "volta": "a100-sxm-80",
    "ada": "a100-sxm-80",
    "blackwell": "h100-sxm",
    "cdna3": "h100-sxm",
    "cdna4": "h100-sxm",
}
"""The same for architectures of which no GPU has a file; LATEST for one that is not listed."""
LATEST = "h100-sxm"

LINKS = {"nvlink2": "nvlink3", "nvlink3": "nvlink3", "nvlink4": "nvlink4", "nvlink5": "nvlink4"}
"""Whose coefficients a link without a file borrows, by the first word of its name (nvlink4-bridge: nvlink4)."""
PLAIN = "nvlink3"
"""The same for links that are not listed: rings alone, no sums in a switch."""

BORROWED = {"generation": 0.08, "other": 0.15, "maker": 0.25}
"""Relative spread that is added (in squares) to borrowed rates. Those of one generation miss the next by 3-10 %; the
best GEMM of the MI300X reaches 0.51 of its peak, of the H100 0.80 (stas00/ml-engineering @744d01e, accelerator)."""

KEYS = {"value", "spread", "meaning", "rows", "source", "kind"}
KINDS = ("fitted", "measured", "assumed")


@dataclass(frozen=True, slots=True)
class StepLaw:
    """What a long step adds to kernels that were measured alone."""

    sustained: float
    """Rate of GEMMs and attention in a training step against the same kernel alone: power, clocks, caches, gaps."""
    spread: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The laws of one GPU. assumed: a sentence where they are another GPU's, else empty."""

    gemm: GemmLaw
    attention: AttentionLaw
    memory: MemoryLaw
    step: StepLaw
    assumed: str = ""


Law = TypeVar("Law", GemmLaw, AttentionLaw, MemoryLaw, StepLaw, LinkLaw, NetworkLaw)


@cache
def load_calibration(gpu_name: str, architecture: str) -> Calibration:
    """The laws of a GPU: its own, else those of its generation or of a near one, with a wider spread."""
    known = resources.files(__name__).joinpath(f"{gpu_name}.yaml").is_file()
    name = gpu_name if known else GENERATION.get(architecture) or NEIGHBOUR.get(architecture, LATEST)
    near = "generation" if architecture in GENERATION else "maker" if architecture.startswith("cdna") else "other"
    wider = 0.0 if known else BORROWED[near]
    return Calibration(
        _law(name, "gemm", GemmLaw, wider),
        _law(name, "attention", AttentionLaw, wider),
        _law(name, "memory", MemoryLaw, wider),
        _law(name, "step", StepLaw, wider),
        "" if known else f"kernel rates of {gpu_name}: as shares of its peaks, those measured on {name}",
    )


@cache
def link_law(tier: Tier) -> tuple[LinkLaw, str]:
    """The law of the links of a domain or to the host, and a sentence where it is that of other links."""
    generation = tier.kind.partition("-")[0]
    name = LINKS.get(generation, PLAIN)
    if tier.kind == name:
        return _law(name, "links", LinkLaw, 0.0), ""
    law = _law(name, "links", LinkLaw, BORROWED["generation" if generation in LINKS else "other"])
    if not tier.switched:
        law = replace(law, in_switch=0.0)
    return law, f"rates of {tier.kind}: as shares of its nominal rate, those measured on {name}"


@cache
def network_law(tier: Tier) -> tuple[NetworkLaw, str]:
    """The law of the network between islands, and a sentence where it is that of another network."""
    if tier.kind.startswith("infiniband"):
        return _law("network", "network", NetworkLaw, 0.0), ""
    said = f"rates of {tier.kind}: as shares of its ports' rate, those measured on InfiniBand"
    return _law("network", "network", NetworkLaw, BORROWED["other"]), said


@cache
def coefficients(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The file `name` as data: section -> coefficient -> {value, spread, ...}, checked; read once."""
    data = read_yaml(resources.files(__name__) / f"{name}.yaml", f"calibration/{name}.yaml").data
    for section, entries in data.items():
        for key, entry in entries.items():
            if set(entry) != KEYS or entry["kind"] not in KINDS:
                rule = f"a coefficient has the keys {', '.join(sorted(KEYS))}, and a kind of {', '.join(KINDS)}"
                raise CatalogError(f"calibration/{name}.yaml {section}.{key}", rule, "Complete it", entry)
    return dict(data)


def _law(name: str, section: str, law: type[Law], wider: float) -> Law:
    """The coefficients of one section, by the fields of `law`."""
    entries = coefficients(name)[section]
    wanted = [f.name for f in fields(law) if f.name != "spread"]
    if set(entries) != set(wanted):
        odd = sorted(set(entries) ^ set(wanted))
        raise CatalogError(f"calibration/{name}.yaml {section}", f"its coefficients are {wanted}", "Correct it", odd)
    spread = math.hypot(next(iter(entries.values()))["spread"], wider)
    return law(**{key: float(entries[key]["value"]) for key in wanted}, spread=spread)
