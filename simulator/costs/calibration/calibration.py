"""Coefficients of the cost laws, one YAML file per GPU and per kind of link; a fit writes these files and nothing else.

A file holds a section for each law, and a section holds what was measured there and nothing else::

    gemm:
      common: {rows, source, coefficients: {depth: {value, spread, meaning}, ...}}
      libraries:
        sglang: {format, rows, source, spread, spread_short, coefficients: {rate: {...}, ...}}
      unnamed: {bf16: {spread, spread_short}, ...}

Values are in SI; the spread of a coefficient is relative, those of a library are of log(measured / predicted)
(`simulator.costs.coefficients.spread`). Kernels whose library nobody names are priced by the middle of those that were
measured in their number format, with the spread of them all around that middle; collectives as by plain NCCL.

What is missing is borrowed, coefficient by coefficient: from the nearest GPU of the same architecture or the next kind
of links, then from ones near it, with a wider spread (`BORROWED`), and a sentence says so. Two files are written by
hand: `steps.yaml` has what no table of kernels measures, `assumed.yaml` the coefficients that no table tells at all. A
coefficient that no file has is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, wraps
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from hardware.cluster import Tier
from hardware.errors import CatalogError
from hardware.gpu import GPU
from hardware.load import catalog, load, read_yaml
from simulator.costs.calibration.check import ASSUMED, DEVICE, STEPS, read_checked
from simulator.costs.calibration.cost_models import EVERY, LAWS, LINKS, PROCESSES, family
from simulator.costs.coefficients import Coefficient, coefficients
from simulator.costs.collectives.links import LinkLaw, NetworkLaw
from simulator.ir.ops import BYTES

P = ParamSpec("P")
T = TypeVar("T")

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
    "pcie": ("nvlink3", "nvlink4"),
}
"""Whose coefficients come next where links of a family have none, the nearest first."""
PLAIN = ("nvlink3", "nvlink4")
"""The same for links that are not listed: rings alone, no sums in a switch."""

BORROWED = {"generation": 0.08, "other": 0.15, "maker": 0.25}
"""Relative spread that is added (in squares) to borrowed laws. Large GEMMs of one generation miss the next by 3-10 %;
the best one of the MI300X reaches 0.51 of its peak, of the H100 0.80 (stas00/ml-engineering @744d01e, accelerator)."""

SHIPPED: Traversable = resources.files("simulator.costs.calibration")


def _keep_answers(method: Callable[Concatenate[Calibration, P], T]) -> Callable[Concatenate[Calibration, P], T]:
    """Each question is answered once for each Calibration."""

    @wraps(method)
    def answer(self: Calibration, *args: P.args, **kwargs: P.kwargs) -> T:
        key = method.__name__, args, tuple(sorted(kwargs.items()))
        if key not in self._answers:
            self._answers[key] = method(self, *args, **kwargs)
        known: T = self._answers[key]
        return known

    return answer


class Found(NamedTuple):
    """A cost model with its coefficients.

    Attributes:
        model: an instance of a class of `simulator.costs.calibration.cost_models`, or of several (`LinkLaw`).
        assumed: what was borrowed from other hardware, one sentence each; () if all was measured on this one.
    """

    model: Any
    assumed: tuple[str, ...] = ()


class _Composed(NamedTuple):
    """A cost model from one or more files.

    Attributes:
        model: with its coefficients.
        lender: the file that most of it is from.
        far: how far that one's hardware is from what was asked for, by the keys of `BORROWED`; "": it is its own.
        hidden: coefficients of shipped files, with their values, where the files in use lack them.
        unmeasured: coefficients of `assumed.yaml`, with their values.
    """

    model: Any
    lender: str
    far: str
    hidden: tuple[str, ...]
    unmeasured: tuple[str, ...]

    def gaps(self, what: str) -> tuple[str, ...]:
        """What the files in use lack, in sentences. what: the model in words."""
        told = {"as shipped: the calibration in use lacks it": self.hidden, "in no table": self.unmeasured}
        return tuple(f"{what}: {', '.join(found)} ({why})" for why, found in told.items() if found)


class Calibration:
    """The coefficients of all cost models: from a folder of files, if there is one, and from those that ship.

    Files are read once, when first needed: after a file has changed, make a new Calibration.

    Attributes:
        folder: its files come before those that ship with meshcast; None: only those.
        written: files as data, by their names; they come before those of the folder.
    """

    def __init__(self, folder: Path | None = None, written: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.folder = folder
        self.written = dict(written or {})
        self._answers: dict[Hashable, Any] = {}

    @classmethod
    @cache
    def shipped(cls) -> Calibration:
        """The files that ship with meshcast, and no others."""
        return cls()

    @classmethod
    def from_folder(cls, folder: Path | None) -> Calibration:
        """The files of a folder before the shipped ones; None: the shipped ones."""
        return cls(folder) if folder is not None else cls.shipped()

    def with_file(self, name: str, data: Mapping[str, Any]) -> Calibration:
        """The same with `data` as the file `name`."""
        return Calibration(self.folder, {**self.written, name: data})

    # --------------------------------------------------------------------------------------------- files

    @_keep_answers
    def names(self) -> tuple[str, ...]:
        """Of all files, sorted."""
        places: list[Any] = [SHIPPED, *([self.folder] if self.folder else [])]
        found = {file.name[:-5] for place in places for file in place.iterdir() if file.name.endswith(".yaml")}
        return tuple(sorted(found - {DEVICE[:-5]} | self.written.keys()))

    @_keep_answers
    def sections(self, name: str) -> Mapping[str, Any]:
        """The file `name` as data, {} without one."""
        if name in self.written:
            return self.written[name]
        if self.folder and (self.folder / f"{name}.yaml").is_file():
            return read_checked(self.folder / f"{name}.yaml")
        if self is not Calibration.shipped():
            return Calibration.shipped().sections(name)
        file = SHIPPED / f"{name}.yaml"
        return dict(read_yaml(file, f"calibration/{name}.yaml").data) if file.is_file() else {}

    @_keep_answers
    def lenders(self, gpu: GPU, without: str = "") -> tuple[tuple[str, str], ...]:
        """Whose coefficients a GPU uses, the nearest first: names of files, and how far they are from it ("": its own).

        Of one architecture that GPU is nearest whose rates (of FLOPs and memory) and number of multiprocessors are most
        alike. without: a file that is passed over.
        """
        order = (gpu.architecture, *ARCHITECTURES.get(gpu.architecture, LATEST))
        maker = "maker" if gpu.architecture.startswith("cdna") else "other"
        found = []
        for name in self.names():
            if name == without:
                continue
            if name == gpu.name:  # which may be in no catalog
                found.append((False, 0, 0.0, name, ""))
            elif name in catalog("gpus") and load("gpus", name).architecture in order:
                other = load("gpus", name)
                place = order.index(other.architecture)
                far = "generation" if place == 0 else maker
                found.append((bool(far), place, _distance(gpu, other), name, far))
        return tuple((name, far) for *_, name, far in sorted(found))

    # ------------------------------------------------------------------------------------------- models

    @_keep_answers
    def kernel_model(
        self, gpu: GPU, section: str, library: str = "", dtype: str = "bf16", kind: str = "", without: str = ""
    ) -> Found:
        """The cost model of one section on `gpu`.

        library: whose kernels; "" or one that was never measured: the middle of all in the format of `dtype`. kind: of
        the rows of a table, which may have a spread of their own. without: a file that is passed over.
        """
        given = self.lenders(gpu, without)
        made = self._compose(LAWS[section], section, given, library, format_of(dtype), kind)
        told = f"rates of {section} kernels of {gpu.name}: as shares of its peaks, those of {made.lender}"
        return Found(made.model, (*((told,) if made.far else ()), *made.gaps(f"{section} kernels of {gpu.name}")))

    @_keep_answers
    def link_models(self, tier: Tier, library: str = "", kind: str = "", without: str = "") -> Found:
        """The cost models of the links of a scale-up domain or to the host: a `LinkLaw`.

        library: who calls them; "": plain NCCL. without: a file that is passed over.
        """
        own = family(tier.kind)
        far = "generation" if own in FAMILIES else "other"
        first = own, "" if tier.kind == own or own == "pcie" else far
        given = [first, *((name, far) for name in FAMILIES.get(own, PLAIN))]
        given = [(name, far) for name, far in given if name != without]
        if own == PROCESSES:
            made = self._compose(EVERY["processes"], "processes", [(own, "")], library, kind=kind)
            return Found(LinkLaw(made.model, made.model, made.model), made.gaps(tier.kind))
        each = {section: self._compose(law, section, given, library, kind=kind) for section, law in LINKS.items()}
        told = f"rates of {tier.kind}: as shares of its nominal rate, those measured on {each['ring'].lender}"
        more = (text for section, one in each.items() for text in one.gaps(f"{section} over {tier.kind}"))
        return Found(LinkLaw(*(one.model for one in each.values())), (*((told,) if each["ring"].far else ()), *more))

    @_keep_answers
    def network_model(self, tier: Tier, kind: str = "", without: str = "") -> Found:
        """The cost model of the network between islands: a `NetworkLaw`.

        What no table tells of any network is not said: it would be said of every job on several nodes.
        """
        own = family(tier.kind)
        given = [(own, ""), ("infiniband", "other"), ("efa", "other")]
        given = [(name, far) for name, far in given if name != without]
        made = self._compose(NetworkLaw, "network", given, "", kind=kind)
        told = f"rates of {tier.kind}: as shares of its ports' rate, those measured on InfiniBand"
        return Found(made.model, (*((told,) if made.far else ()), *made._replace(unmeasured=()).gaps(tier.kind)))

    def sustained_rate(self, architecture: str) -> float:
        """Rate of GEMMs and attention in a long training step against the same kernel alone.

        Of the GPUs of an architecture, or of the nearest one that was observed.
        """
        known = {**Calibration.shipped().sections(STEPS), **self.sections(STEPS)}
        order = (architecture, *ARCHITECTURES.get(architecture, LATEST), *LATEST)
        return float(next(known[one] for one in order if one in known)["sustained"]["value"])

    def _compose(
        self,
        law: type,
        section: str,
        given: Sequence[tuple[str, str]],
        library: str,
        form: str = "",
        kind: str = "",
    ) -> _Composed:
        """A law from the files `given`, the first first.

        form: number format of the libraries whose middle stands for an unnamed one; "": none does. Files are read only
        as far as they are needed.
        """
        of = self.sections
        if not any("common" in of(name).get(section, {}) for name, _ in given):
            of = Calibration.shipped().sections  # files of a folder may hold but one section, and hide those that ship
        lender, far = next(((name, far) for name, far in given if "common" in of(name).get(section, {})), ("", ""))
        if not lender:
            rule = f"no calibration has a section {section}"
            raise CatalogError("calibration", rule, "Calibrate hardware of its generation", section)
        known = (of(name).get(section, {}).get("libraries", {}) for name, _ in given if library)
        own = next((libraries[library] for libraries in known if library in libraries), None)
        values, hidden, unmeasured = dict[str, float](), list[str](), list[str]()
        for name, wanted in coefficients(law).items():
            if own and wanted.of == "library" and name in own["coefficients"]:
                values[name] = float(own["coefficients"][name]["value"])
                continue
            told = (_value(of(f).get(section, {}), name, wanted.of, form) for f, _ in given)
            found = next((one for one in told if one is not None), wanted.neutral)
            if found is None:
                found, measured = _fill_gap(section, name, wanted, [f for f, _ in given], form)
                (hidden if measured else unmeasured).append(f"{name} {found:g}")
            values[name] = found
        unnamed = of(lender)[section]["unnamed"]
        spreads = own or unnamed.get(form) or next(iter(unnamed.values()))
        spreads = spreads.get("kinds", {}).get(kind, spreads)
        wider = BORROWED[far] if far else 0.0
        widened = {key: math.hypot(float(spreads[key]), wider) for key in ("spread", "spread_short")}
        return _Composed(law(**values, **widened), lender, far, tuple(hidden), tuple(unmeasured))


def _fill_gap(section: str, name: str, wanted: Coefficient, files: Sequence[str], form: str) -> tuple[float, bool]:
    """A coefficient that no file of a calibration has, and whether it was measured: as in the shipped file that one of
    a folder hides, not as in `assumed.yaml`. Raises CatalogError where neither has it."""
    shipped = Calibration.shipped()
    for file in files:
        found = _value(shipped.sections(file).get(section, {}), name, wanted.of, form)
        if found is not None:
            return found, True
    entry = shipped.sections(ASSUMED).get(section, {}).get(name)
    if entry is None:
        rule = f"no file has this coefficient ({wanted.meaning}); looked at {', '.join(files)} and {ASSUMED}"
        remedy = "Calibrate hardware that shows it, or write it into a file of --calibration"
        raise CatalogError(f"calibration {section}.{name}", rule, remedy)
    return float(entry["value"]), False


def _distance(one: GPU, other: GPU) -> float:
    """How unlike two GPUs are: the sum of |log| of ratios of their rates and sizes."""
    pairs = [(one.memory_bandwidth, other.memory_bandwidth), (one.multiprocessors, other.multiprocessors)]
    pairs += [(one.peak[dtype], other.peak[dtype]) for dtype in ("bf16",) if dtype in one.peak and dtype in other.peak]
    return sum(abs(math.log(a / b)) for a, b in pairs)


def format_of(dtype: str) -> str:
    """The number formats that kernels are measured in: 8 bits and fewer are one, all others another."""
    return "fp8" if BYTES[dtype] <= 1 else "bf16"


def _value(data: Mapping[str, Any], name: str, of: str, form: str) -> float | None:
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
