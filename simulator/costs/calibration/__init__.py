"""Coefficients of the cost laws, one YAML file per GPU and per kind of link; a fit writes these files and nothing else.

Every coefficient is written as ``{value, spread, meaning, rows, source, kind}``: SI units, the relative spread, what it
means physically, the number of rows behind it (null: none), its public origin, and whether it is fitted, measured or
assumed. A law's first coefficient is its rate, and the spread of that one is the spread of the law's residuals.

A GPU without a file takes those of its generation, a link those of its family, with a wider spread (`BORROWED`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
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
"""Whose coefficients a GPU without a file borrows, by architecture; LATEST for one that is not listed."""
LATEST = "h100-sxm"

BORROWED = {"generation": 0.08, "other": 0.15}
"""Relative spread that is added (in squares) to borrowed rates: those of one generation miss the next by 3-10 %."""

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
    """The laws of a GPU: its own, else those of its generation, else the latest, the last two with a wider spread."""
    own = f"{gpu_name}.yaml"
    known = resources.files(__name__).joinpath(own).is_file()
    name = gpu_name if known else GENERATION.get(architecture, LATEST)
    wider = 0.0 if known else BORROWED["generation" if architecture in GENERATION else "other"]
    return Calibration(
        _law(name, "gemm", GemmLaw, wider),
        _law(name, "attention", AttentionLaw, wider),
        _law(name, "memory", MemoryLaw, wider),
        _law(name, "step", StepLaw, wider),
        "" if known else f"kernel rates of {gpu_name}: as shares of its peaks, those measured on {name}",
    )


@cache
def load_links(up: Tier, out: Tier) -> tuple[LinkLaw, NetworkLaw]:
    """The laws of the links in a domain and of the network between domains."""
    generation = "".join(c for c in up.kind if c.isdigit()) if up.kind.startswith("nvlink") else "0"
    name = "nvlink4" if int(generation or 0) >= 4 else "nvlink3"
    inner = _law(name, "links", LinkLaw, 0.0 if up.kind == name else BORROWED["generation"])
    fabric = 0.0 if out.kind.startswith("infiniband") else BORROWED["other"]
    return inner, _law("network", "network", NetworkLaw, fabric)


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
