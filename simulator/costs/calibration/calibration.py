"""Coefficients of the cost laws, one YAML file per GPU and per kind of link; a fit writes these files and nothing else.

A file holds a section for each law, and a section holds what was measured there and nothing else::

    gemm:
      common: {rows, source, coefficients: {depth: {value, spread, meaning}, ...}}
      libraries:
        sglang: {format, rows, source, spread, spread_short, coefficients: {rate: {...}, ...}}
      unnamed: {bf16: {spread, spread_short}, ...}

Values are in SI; the spread of a coefficient is relative, those of a library are of log(measured / predicted)
(`simulator.costs.coefficients.spread`). Kernels whose library nobody names are priced by the middle of those that were measured
in their number format, with the spread of them all around that middle; collectives as by plain NCCL.

What is missing is borrowed, coefficient by coefficient: from the nearest GPU of the same architecture or the next kind
of links, then from ones near it, with a wider spread (`BORROWED`), and a sentence says so. `steps.yaml` alone is
written by hand: what no table of kernels measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hardware.cluster import Tier
from hardware.errors import CatalogError
from hardware.gpu import GPU
from hardware.load import catalog, load, read_yaml
from simulator.costs.calibration.check import DEVICE, STEPS, check, sound
from simulator.costs.calibration.cost_models import EVERY, LAWS, LINKS, PROCESSES, family
from simulator.costs.coefficients import coefficients
from simulator.costs.collectives.links import LinkLaw, NetworkLaw
from simulator.ir.ops import BYTES

__all__ = [
    "DEVICE", "LAWS", "LINKS", "StepLaw", "calibrations_in", "check", "family", "forget", "format_of", "law_of",
    "lenders", "link_law", "names", "network_law", "sections", "step_law",
]  # fmt: skip

ARCHITECTURES = {
    "volta": ("ampere", "hopper"),
    "ampere": ("hopper", "ada"),
    "ada": ("ampere", "hopper"),
    "hopper": ("ampere", "blackwell"),
    "blackwell": ("hopper",),
    "cdna3": ("hopper",),
    "cdna4": ("blackwell", "hopper"),
    "cpu": (),
}
"""Whose coefficients come next where no GPU of an architecture has them, the nearest first."""
LATEST = ("hopper", "blackwell", "ampere")
"""The same for an architecture that is not listed."""

FAMILIES = {
    "nvlink2": ("nvlink3", "nvlink4"),
    "nvlink3": ("nvlink4",),
    "nvlink4": ("nvlink3", "nvlink5"),
    "nvlink5": ("nvlink4",),
    "pcie": ("nvlink3",),
}
"""Whose coefficients come next where links of a family have none, the nearest first."""
PLAIN = ("nvlink3", "nvlink4")
"""The same for links that are not listed: rings alone, no sums in a switch."""

BORROWED = {"generation": 0.08, "other": 0.15, "maker": 0.25}
"""Relative spread that is added (in squares) to borrowed laws. Large GEMMs of one generation miss the next by 3-10 %;
the best one of the MI300X reaches 0.51 of its peak, of the H100 0.80 (stas00/ml-engineering @744d01e, accelerator)."""

_FOLDERS: list[Path] = []


@contextmanager
def calibrations_in(folder: Path | None) -> Iterator[None]:
    """While it lasts, the files of `folder` come before those that ship with meshcast; None: only those."""
    if folder is None:
        yield
        return
    _FOLDERS.insert(0, folder)
    forget()
    try:
        yield
    finally:
        _FOLDERS.remove(folder)
        forget()


def forget() -> None:
    """Files have changed: they are read anew."""
    for known in (names, sections, shipped, lenders, law_of, link_law, network_law):
        known.cache_clear()


@cache
def names() -> tuple[str, ...]:
    """Of all files, sorted."""
    places: list[Any] = [resources.files("simulator.costs.calibration"), *_FOLDERS]
    return tuple(
        sorted(
            {file.name[:-5] for place in places for file in place.iterdir() if file.name.endswith(".yaml")}
            - {DEVICE[:-5]}
        )
    )


@cache
def sections(name: str) -> dict[str, Any]:
    """The file `name` as data, {} without one; read once."""
    for folder in _FOLDERS:
        if (folder / f"{name}.yaml").is_file():
            return sound(folder / f"{name}.yaml")
    return shipped(name)


@cache
def shipped(name: str) -> dict[str, Any]:
    """The file `name` that ships with meshcast as data, {} without one."""
    file: Traversable = resources.files("simulator.costs.calibration") / f"{name}.yaml"
    return dict(read_yaml(file, f"calibration/{name}.yaml").data) if file.is_file() else {}


@cache
def lenders(gpu: GPU, without: str = "") -> tuple[tuple[str, str], ...]:
    """Whose coefficients a GPU uses, the nearest first: names of files, and how far they are from it ("": its own).

    Of one architecture that GPU is nearest whose rates (of FLOPs and memory) and number of multiprocessors are most
    alike. without: a file that is passed over.
    """
    order = (gpu.architecture, *ARCHITECTURES.get(gpu.architecture, LATEST))
    maker = "maker" if gpu.architecture.startswith("cdna") else "other"
    found = []
    for name in names():
        if name == without:
            continue
        if name == gpu.name:  # which may be in no catalog
            found.append((False, 0, 0.0, name, ""))
        elif name in catalog("gpus") and load("gpus", name).architecture in order:
            other = load("gpus", name)
            place = order.index(other.architecture)
            far = "generation" if place == 0 else maker
            found.append((bool(far), place, _apart(gpu, other), name, far))
    return tuple((name, far) for *_, name, far in sorted(found))


def _apart(one: GPU, other: GPU) -> float:
    pairs = [(one.memory_bandwidth, other.memory_bandwidth), (one.multiprocessors, other.multiprocessors)]
    pairs += [(one.peak[dtype], other.peak[dtype]) for dtype in ("bf16",) if dtype in one.peak and dtype in other.peak]
    return sum(abs(math.log(a / b)) for a, b in pairs)


def format_of(dtype: str) -> str:
    """The number formats that kernels are measured in: 8 bits and fewer are one, all others another."""
    return "fp8" if BYTES[dtype] <= 1 else "bf16"


@cache
def law_of(
    gpu: GPU, section: str, library: str = "", dtype: str = "bf16", kind: str = "", without: str = ""
) -> tuple[Any, str]:
    """The law of one section on `gpu`, and a sentence where it is another GPU's, else "".

    library: whose kernels; "" or one that was never measured: the middle of all in the format of `dtype`. kind: of the
    rows of a table, which may have a spread of their own. without: a file that is passed over.
    """
    law, lender, far = _composed(LAWS[section], section, lenders(gpu, without), library, format_of(dtype), kind)
    return law, f"rates of {section} kernels of {gpu.name}: as shares of its peaks, those of {lender}" if far else ""


def _composed(
    law: type, section: str, given: Sequence[tuple[str, str]], library: str, form: str = "", kind: str = ""
) -> tuple[Any, str, str]:
    """A law from the files `given`, the first first; the file that most of it is of, and how far that is.

    form: number format of the libraries whose middle stands for an unnamed one; "": none does. Files are read only as
    far as they are needed.
    """
    of = sections
    if not any("common" in sections(name).get(section, {}) for name, _ in given):
        of = shipped  # files of a folder may hold but one section, and hide those that meshcast has
    lender, far = next(((name, far) for name, far in given if "common" in of(name).get(section, {})), ("", ""))
    if not lender:
        rule = f"no calibration has a section {section}"
        raise CatalogError("calibration", rule, "Calibrate hardware of its generation", section)
    known = (of(name).get(section, {}).get("libraries", {}) for name, _ in given if library)
    own = next((libraries[library] for libraries in known if library in libraries), None)
    values: dict[str, float] = {}
    for name, wanted in coefficients(law).items():
        entry = own["coefficients"].get(name) if own and wanted.of == "library" else None
        told = (_value(of(f)[section], name, wanted.of, form) for f, _ in given if section in of(f))
        found = [float(entry["value"])] if entry else told
        values[name] = next((one for one in found if one is not None), wanted.start)
    unnamed = of(lender)[section]["unnamed"]
    spreads = own or unnamed.get(form) or next(iter(unnamed.values()))
    spreads = spreads.get("kinds", {}).get(kind, spreads)
    wider = BORROWED[far] if far else 0.0
    widened = {key: math.hypot(float(spreads[key]), wider) for key in ("spread", "spread_short")}
    return law(**values, **widened), lender, far


def _value(data: dict[str, Any], name: str, of: str, form: str) -> float | None:
    """A coefficient as one file knows it: the GPU's, or the middle of its libraries'; None if it does not.

    The middle is the geometric mean, the arithmetic one where some are zero.
    """
    if "common" not in data:
        return None
    if of == "gpu":
        entry = data["common"]["coefficients"].get(name)
        return float(entry["value"]) if entry else None
    tuned = [each for each in data["libraries"].values() if form and each.get("tuned", True)]
    every = [each for each in tuned if name in each["coefficients"]]
    alike = [each for each in every if each["format"] == form] or every
    values = [float(each["coefficients"][name]["value"]) for each in alike]
    if not values:
        return None
    return sum(values) / len(values) if min(values) <= 0 else math.exp(sum(map(math.log, values)) / len(values))


@cache
def link_law(tier: Tier, library: str = "", kind: str = "", without: str = "") -> tuple[LinkLaw, str]:
    """The laws of the links of a domain or to the host, and a sentence where they are those of other links.

    library: who calls them; "": plain NCCL. without: a file that is passed over.
    """
    own = family(tier.kind)
    far = "generation" if own in FAMILIES else "other"
    first = own, "" if tier.kind == own or own == "pcie" else far
    given = [first, *((name, far) for name in FAMILIES.get(own, PLAIN))]
    given = [(name, far) for name, far in given if name != without]
    if own == PROCESSES:
        law = _composed(EVERY["processes"], "processes", [(own, "")], library, kind=kind)[0]
        return LinkLaw(law, law, law), ""
    laws = {section: _composed(law, section, given, library, kind=kind) for section, law in LINKS.items()}
    lender, far = laws["ring"][1:]
    said = f"rates of {tier.kind}: as shares of its nominal rate, those measured on {lender}" if far else ""
    return LinkLaw(*(law for law, _, _ in laws.values())), said


@cache
def network_law(tier: Tier, kind: str = "", without: str = "") -> tuple[NetworkLaw, str]:
    """The law of the network between islands, and a sentence where it is that of another network."""
    own = family(tier.kind)
    given = [(own, ""), ("infiniband", "other"), ("efa", "other")]
    given = [(name, far) for name, far in given if name != without]
    law, _, far = _composed(NetworkLaw, "network", given, "", kind=kind)
    return law, f"rates of {tier.kind}: as shares of its ports' rate, those measured on InfiniBand" if far else ""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """What a long step adds to kernels that were measured alone.

    sustained: rate of GEMMs and attention in a training step against the same kernel alone.
    """

    sustained: float
    spread: float


def step_law(architecture: str) -> StepLaw:
    """Of the GPUs of an architecture, or of the nearest one that was observed."""
    known = shipped(STEPS) | sections(STEPS)
    nearest = next(one for one in (architecture, *ARCHITECTURES.get(architecture, LATEST), *LATEST) if one in known)
    entry = known[nearest]["sustained"]
    return StepLaw(float(entry["value"]), float(entry["spread"]))
