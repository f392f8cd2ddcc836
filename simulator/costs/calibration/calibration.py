"""Coefficients of the cost models, from a YAML file per GPU and per family of links; fits write these files.

A file has a section for each cost model, and a section holds only what was measured on that hardware::

    gemm:
      common: {rows, source, coefficients: {pipeline_depth: {value, sigma, meaning}, ...}}
      libraries:
        sglang: {format, rows, source, sigma, sigma_short, coefficients: {peak_share: {...}, ...}}
      unnamed: {bf16: {sigma, sigma_short}, ...}

Values are in SI. The sigma of a coefficient is its relative standard error; those of a library are standard deviations
of log(measured / forecast), see `simulator.costs.coefficients.estimate_sigma`. A kernel whose library nobody names has
the mean coefficients of the libraries that were measured in its number format, with the sigma of all their rows around
it; a collective is priced as by plain NCCL.

A section that no file of a GPU or of a family of links has is borrowed: from the nearest GPU of the same architecture
or the next family, then from others close to it, with a larger sigma (`BORROWED`) and a sentence in the report. What a
user's file lacks is that of the shipped file of the same name. What is still missing comes from the nearest other file
that has half of it or more, together: coefficients of the same fit belong together. A report names both.

Two files are written by hand: `steps.yaml` has what no table of kernels measures, `assumed.yaml` the coefficients that
no table shows. A coefficient that no file has is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshcast.hardware.cluster import Tier
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import CatalogError
from meshcast.hardware.gpu import GPU
from meshcast.hardware.load import catalog, load, read_fields
from meshcast.hardware.remembered import remembered
from meshcast.simulator.costs.calibration.check import ASSUMED, DEVICE, LEARNT_STEPS, STEPS, read_checked
from meshcast.simulator.costs.calibration.cost_models import COST_MODELS, KERNEL_MODELS, LINK_MODELS, PROCESSES, family
from meshcast.simulator.costs.coefficients import Coefficient, coefficients
from meshcast.simulator.costs.collectives.links import LinkCostModels, NetworkCostModel
from meshcast.simulator.costs.step_posterior import StepPosterior, read_posterior
from meshcast.simulator.ir.ops import BYTES

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

ARCHITECTURES = {
    "pascal": ("volta", "ampere", "hopper"),
    "volta": ("ampere", "hopper"),
    "turing": ("volta", "ampere", "hopper"),
    "ampere": ("hopper", "ada"),
    "ada": ("ampere", "hopper"),
    "hopper": ("ampere", "blackwell"),
    "blackwell": ("hopper",),
    "cdna3": ("cdna4", "hopper"),
    "cdna4": ("blackwell", "hopper"),
    "cpu": (),
}
"""Architectures that lend coefficients where no GPU of an architecture has them, nearest first."""
LATEST = ("hopper", "blackwell", "ampere")
"""The same for an architecture that is not listed."""

CLOCK_EXPONENT = 1 / 3
"""Exponent of the clock in the power of a GPU whose voltage follows its clock: dynamic power is C V^2 f (Weste and
Harris, "CMOS VLSI Design", 4th ed., section 5.2), so the clock grows with its cube root."""

FAMILIES = {
    "nvlink1": ("nvlink2", "nvlink3", "nvlink4"),
    "nvlink2": ("nvlink3", "nvlink4"),
    "nvlink3": ("nvlink4",),
    "nvlink4": ("nvlink3", "nvlink5"),
    "nvlink5": ("nvlink4",),
    "pcie": ("nvlink3", "nvlink4"),
}
"""Families of links that lend coefficients where a family lacks them, nearest first."""
PLAIN = ("nvlink3", "nvlink4")
"""The same for links that are not listed: rings without NVLS."""

Section = Mapping[str, Any]
"""Data of a file of coefficients, or of a section of it."""

BORROWED = {"generation": 0.12, "other": 0.24, "links": 0.34, "network": 0.43}
"""Sigma that is added (in squares) to cost models that are borrowed from another GPU of the generation, from another
generation, from another family of links, and from another network. It is what nine of ten measured rows need that are
priced so, each hardware and section counting alike (`python -m tools.data.borrowed`): 136,045 rows of 47 sections of
GPUs priced by another of their architecture (0.05 for memory-bound kernels to 0.18 for those of experts), 148,406 of 52
without any of their architecture (0.17 for GEMMs to 0.34 for those in 8 bits), 7,510 of 11 sections of links and 239 of
3 networks."""

WHOLE = frozenset(("gemm", "attention", "memory"))
"""Sections that the kernels of any step need."""

SHIPPED_VALUE = "as shipped: the calibration in use lacks it"
SHIPPED_WHOLE = "as shipped: the calibration in use has no such section"
"""Where coefficients are from that a user's file lacks."""

SHIPPED: Traversable = Path(__file__).parent
"""Where the files lie that ship with meshcast."""


class Found(NamedTuple):
    """A cost model with its coefficients.

    Attributes:
        model: an instance of a class of `simulator.costs.calibration.cost_models`, or a `LinkCostModels`.
        assumed: what was borrowed from other hardware, a sentence each; () if all was measured on this GPU.
    """

    model: Any
    assumed: tuple[str, ...] = ()


class _Source(NamedTuple):
    """A section of a file, or the same section of the shipped file that a user's file takes the place of.

    Attributes:
        file: its name.
        distance: of its hardware from what was asked for, a key of `BORROWED`; "": it is the same.
        section: its data; {} where the file lacks it.
        of_user: whether a user's file has this name.
        replaced: whether this is the section of the shipped file beneath it.
    """

    file: str
    distance: str
    section: Section
    of_user: bool
    replaced: bool


class _Composed(NamedTuple):
    """A cost model from a file or several.

    Attributes:
        model: with its coefficients.
        lender: the file that most of it is from.
        distance: of that file's hardware from what was asked for, a key of `BORROWED`; "": it is the same.
        gaps: what a user's files lack, with the values that stand for it, by where these are from.
    """

    model: Any
    lender: str
    distance: str
    gaps: Mapping[str, Sequence[str]]

    def tell_gaps(self, what: str) -> tuple[str, ...]:
        """Returns what the files in use lack, in sentences. what: the cost model in words."""
        return tuple(f"{what}: {', '.join(values)} ({origin})" for origin, values in self.gaps.items() if values)


class Calibration:
    """The coefficients of all cost models, from the files of a folder, if any, and from those that ship.

    Each file is read once, when it is first needed: after a file has changed, make a new Calibration.

    Attributes:
        folder: its files take the place of those that ship with meshcast; None: only the latter.
        written: files as data, by their names; they take the place of those of the folder.
    """

    def __init__(self, folder: Path | None = None, written: Mapping[str, Section] | None = None) -> None:
        self.folder = folder
        self.written = dict(written or {})

    @classmethod
    @cache
    def shipped(cls) -> Calibration:
        """Returns the calibration of the files that ship with meshcast, and no others."""
        return cls()

    @classmethod
    def from_folder(cls, folder: Path | None) -> Calibration:
        """Returns the calibration of the files of a folder before the shipped ones; None: the shipped ones."""
        return cls(folder) if folder is not None else cls.shipped()

    def with_file(self, name: str, data: Section) -> Calibration:
        """Returns the same with `data` as the file `name`."""
        return Calibration(self.folder, {**self.written, name: data})

    # --------------------------------------------------------------------------------------------- files

    @remembered
    def names(self) -> tuple[str, ...]:
        """Names of all files, sorted."""
        listed = {*_list_files(SHIPPED), *(_list_files(self.folder) if self.folder else ())}
        return tuple(sorted(listed - {DEVICE[:-5]} | self.written.keys()))

    @remembered
    def sections(self, name: str) -> Section:
        """Returns the data of the file `name`; {} where no such file ships."""
        if name in self.written:
            return self.written[name]
        # Listed files alone: names of GPUs may have any letters and lengths, those of paths among them.
        if self.folder and name in _list_files(self.folder):
            return read_checked(self.folder / f"{name}.yaml")
        if self is not Calibration.shipped():
            return Calibration.shipped().sections(name)
        listed = name in _list_files(SHIPPED)
        return dict(read_shipped(SHIPPED / f"{name}.yaml", f"calibration/{name}.yaml").data) if listed else {}

    @remembered
    def lenders(self, gpu: GPU, without: str = "") -> tuple[tuple[str, str], ...]:
        """Lists files whose coefficients a GPU uses, nearest first, each with its distance ("": the GPU itself).

        Within an architecture, nearest are GPUs of the same compute capability (the multiprocessors of a B300 compute
        exponentials twice as fast as those of a B200); then nearness is that of rates (of FLOPs and memory) and numbers
        of multiprocessors. without: a file that is left out.
        """
        order = (gpu.architecture, *ARCHITECTURES.get(gpu.architecture, LATEST))
        candidates = []
        for name in self.names():
            if name == without:
                continue
            if name == gpu.name:  # which may be in no catalog
                candidates.append((False, 0, False, 0.0, name, ""))
            elif name in catalog("gpus") and read_fields("gpus", name).data["architecture"] in order:
                other = load("gpus", name)
                place = order.index(other.architecture)
                distance = "generation" if place == 0 else "other"
                differs = _capability(gpu) != _capability(other)
                candidates.append((bool(distance), place, differs, _rate_difference(gpu, other), name, distance))
        return tuple((name, distance) for *_, name, distance in sorted(candidates))

    def find_distance(self, gpu: GPU) -> str | None:
        """Returns how far the hardware is whose coefficients a GPU uses, a key of `BORROWED` or "" for its own; None
        where no file lends any. A GPU of no shipped file is not known by what was learnt of some of its kernels alone.
        """
        lenders, own = self.lenders(gpu), self.sections(gpu.name)
        learnt = any("learnt" in section.get("common", {}) for section in own.values())
        if learnt and gpu.name not in Calibration.shipped().names() and not own.keys() >= WHOLE:
            lenders = lenders[1:]
        return lenders[0][1] if lenders else None

    # ------------------------------------------------------------------------------------------- models

    @remembered
    def kernel_model(
        self, gpu: GPU, section: str, library: str = "", dtype: str = "bf16", kind: str = "", without: str = ""
    ) -> Found:
        """Returns the cost model of a section on `gpu`.

        library: whose kernels; "" or an unmeasured library: the mean of all libraries in the format of `dtype`.
        kind: of the rows of a table, which may have a separate sigma. without: a file that is left out.
        """
        lenders, form = self.lenders(gpu, without), format_of(dtype)
        composed = self._compose(KERNEL_MODELS[section], section, lenders, library, form, kind)
        assumption = f"rates of {section} kernels of {gpu.name}: as shares of its peaks, those of {composed.lender}"
        model = composed.model
        if composed.distance == "generation" and hasattr(model, "peak_share"):
            more = _power_ratio(gpu, load("gpus", composed.lender))
            others = self._least_limited(section, lenders)
            if more > 1 and others:
                most = self._compose(KERNEL_MODELS[section], section, others, library, form, kind).model.peak_share
                model = _raise_shares(model, more, most)
                assumption += f", up to {more:.3g} times higher for its power"
        borrowed = (assumption,) if composed.distance else ()
        return Found(model, (*borrowed, *composed.tell_gaps(f"{section} kernels of {gpu.name}")))

    @remembered
    def link_models(self, tier: Tier, library: str = "", kind: str = "", without: str = "") -> Found:
        """Returns the cost models of the links of a scale-up domain or to the host: a `LinkCostModels`.

        library: program that calls the collectives; "": plain NCCL. without: a file that is left out.
        """
        links = family(tier.kind)
        if links == PROCESSES:
            composed = self._compose(COST_MODELS["processes"], "processes", [(links, "")], library, kind=kind)
            return Found(LinkCostModels(composed.model, composed.model, composed.model), composed.tell_gaps(tier.kind))
        first = links, "" if tier.kind == links or links == "pcie" else "generation"
        lenders = [first, *((name, "links") for name in FAMILIES.get(links, PLAIN))]
        lenders = [(name, distance) for name, distance in lenders if name != without]
        each = {
            section: self._compose(model, section, lenders, library, kind=kind)
            for section, model in LINK_MODELS.items()
        }
        assumption = f"rates of {tier.kind}: as shares of its nominal rate, those measured on {each['ring'].lender}"
        borrowed = (assumption,) if each["ring"].distance else ()
        gaps = (
            text for section, composed in each.items() for text in composed.tell_gaps(f"{section} over {tier.kind}")
        )
        return Found(LinkCostModels(*(composed.model for composed in each.values())), (*borrowed, *gaps))

    @remembered
    def network_model(self, tier: Tier, kind: str = "", without: str = "") -> Found:
        """Returns the cost model of the network between nodes: a `NetworkCostModel`."""
        links = family(tier.kind)
        lenders = [(links, ""), *((name, "network") for name in ("infiniband", "efa") if name != links)]
        lenders = [(name, distance) for name, distance in lenders if name != without]
        composed = self._compose(NetworkCostModel, "network", lenders, "", kind=kind)
        assumption = f"rates of {tier.kind}: as shares of its ports' rate, those measured on InfiniBand"
        borrowed = (assumption,) if composed.distance else ()
        return Found(composed.model, (*borrowed, *composed.tell_gaps(tier.kind)))

    @property
    def step_posterior(self) -> StepPosterior | None:
        """What measured steps of a user say of others; None: none were learnt from."""
        steps = self.sections(LEARNT_STEPS).get("steps")
        return read_posterior(steps) if steps else None

    @property
    def measures_steps(self) -> bool:
        """Whether the sustained rate of a training step was measured for this calibration, on the machine itself."""
        return STEPS in self.written or (self.folder is not None and (self.folder / f"{STEPS}.yaml").is_file())

    def sustained_rate(self, gpu: GPU, dtype: str = "bf16") -> float:
        """Returns the rate of GEMMs and attention in a long training step against the same kernels alone.

        That of the GPU's architecture, or of the nearest that was observed, at the power that a GPU has for each
        multiprocessor against the modules that were observed. dtype: number format of the operands; what 8 bits and
        fewer lose more, nearer to the power limit, is that of the architecture alone, on modules of all powers.
        """
        known = {**Calibration.shipped().sections(STEPS), **self.sections(STEPS)}
        architecture = gpu.architecture
        order = (architecture, *ARCHITECTURES.get(architecture, LATEST), *LATEST)
        sustained = next(known[name] for name in order if name in known)["sustained"]
        observed = known.get(architecture, {}).get("power_per_multiprocessor")
        share = gpu.power / gpu.multiprocessors / observed["value"] if observed else 1.0
        if format_of(dtype) == "fp8" and "sustained_fp8" in known.get(architecture, {}):
            return float(known[architecture]["sustained_fp8"]["value"]) * min(share, 1.0) ** CLOCK_EXPONENT
        return min(float(sustained["value"]) * share**CLOCK_EXPONENT, 1.0)

    def _compose(
        self,
        model: type,
        section: str,
        lenders: Sequence[tuple[str, str]],
        library: str,
        form: str = "",
        kind: str = "",
    ) -> _Composed:
        """Composes a cost model from the files `lenders`, in their order.

        form: number format of libraries whose mean stands for an unnamed library; "": none does. Files are read only as
        far as they are needed.
        """
        sources = partial(self._sources, section, lenders)
        first = next((source for source in sources() if "common" in source.section), None)
        if not first:
            rule = f"no calibration has a section {section}"
            raise CatalogError("calibration", rule, "Calibrate hardware of its generation", section)
        of_lenders = (source.section.get("libraries", {}) for source in sources() if library)
        named: Section = next((libraries[library] for libraries in of_lenders if library in libraries), {})
        values = _values(first.section, coefficients(model), form)
        values |= {name: float(entry["value"]) for name, entry in named.get("coefficients", {}).items()}
        gaps: dict[str, Sequence[str]] = {SHIPPED_WHOLE: ("every coefficient",)} if first.replaced else {}
        for origin, more in _fill_gaps(section, sources, first, coefficients(model), values, form):
            gaps |= {origin: [f"{name} {value:g}" for name, value in more.items()]} if origin else {}
            values |= more
        sigmas = _sigmas(named, first.section["unnamed"], form, kind, BORROWED.get(first.distance, 0.0))
        return _Composed(model(**values, **sigmas), first.file, first.distance, gaps)

    def _least_limited(self, section: str, lenders: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Returns the lenders of other generations that have a section: of the nearest generation first the GPU with
        the most power for each FLOP/s, since the share of one that is limited by its power is no bound for others."""
        others = [
            (name, distance)
            for name, distance in lenders
            if distance not in ("", "generation") and "common" in self.sections(name).get(section, {})
        ]
        gpus = {name: load("gpus", name) for name, _ in others}
        nearest = [other for other in others if gpus[other[0]].architecture == gpus[others[0][0]].architecture]
        by_power = sorted(nearest, key=lambda other: -_power_ratio(gpus[other[0]], gpus[others[0][0]]))
        return by_power + others[len(nearest) :]

    def _sources(self, section: str, lenders: Sequence[tuple[str, str]]) -> Iterator[_Source]:
        """Yields a section of the files `lenders`, each followed by that of the shipped file that it replaces."""
        for name, distance in lenders:
            in_use, shipped = self.sections(name), Calibration.shipped().sections(name)
            yield _Source(name, distance, in_use.get(section, {}), in_use is not shipped, False)
            if in_use is not shipped:
                yield _Source(name, distance, shipped.get(section, {}), True, True)


def _list_files(folder: Path | Traversable) -> set[str]:
    """Returns the names of the files of coefficients in a folder, without their ending."""
    return {file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml")}


def _sigmas(named: Section, unnamed: Section, form: str, kind: str, borrowed: float) -> dict[str, float]:
    """Returns both sigmas of a cost model: of a named library, or of the mean of the others; borrowed: of a lender."""
    sigmas = named or unnamed.get(form) or next(iter(unnamed.values()))
    sigmas = sigmas.get("kinds", {}).get(kind, sigmas)
    return {key: math.hypot(float(sigmas[key]), borrowed) for key in ("sigma", "sigma_short")}


def _fill_gaps(
    section: str,
    sources: Callable[[], Iterator[_Source]],
    first: _Source,
    wanted: Mapping[str, Coefficient],
    values: Mapping[str, float],
    form: str,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the coefficients that `values` lacks, and where they are from if a report should name it, else "".

    sources: of all files that lend. first: that of most of `values`. form: number format, see `Calibration._compose`.

    Raises CatalogError where no file has a coefficient.
    """
    missing = {name: coefficient for name, coefficient in wanted.items() if name not in values}
    for beneath in (source for source in sources() if missing and source.file == first.file and source.replaced):
        more = _values(beneath.section, missing, form)
        yield SHIPPED_VALUE, more
        missing = {name: coefficient for name, coefficient in missing.items() if name not in more}
    while lent := next(_lend(sources, first, missing, form), None):
        yield (f"as on {lent[0]}: the calibration in use lacks it" if first.of_user else ""), lent[1]
        missing = {name: coefficient for name, coefficient in missing.items() if name not in lent[1]}
    yield "", {name: coefficient.neutral for name, coefficient in missing.items() if coefficient.neutral is not None}
    unmeasured = {name: coefficient for name, coefficient in missing.items() if coefficient.neutral is None}
    files = dict.fromkeys(source.file for source in sources()) if unmeasured else {}
    yield (
        "not measured",
        {name: _read_assumed(section, name, coefficient, files) for name, coefficient in unmeasured.items()},
    )


def _lend(
    sources: Callable[[], Iterator[_Source]], first: _Source, missing: Mapping[str, Coefficient], form: str
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields files that have some of the coefficients `missing`, with these: at least half of them, then fewer."""
    others = (source for source in sources() if missing and source.file != first.file)
    lent = []
    for other in others:
        more = _values(other.section, missing, form)
        if 2 * len(more) >= len(missing):
            yield other.file, more
        elif more:
            lent.append((other.file, more))
    yield from lent


def _read_assumed(section: str, name: str, wanted: Coefficient, files: Iterable[str]) -> float:
    """Returns a coefficient of `assumed.yaml`. Raises CatalogError where it lacks it, as `files` do."""
    entry = Calibration.shipped().sections(ASSUMED).get(section, {}).get(name)
    if entry is None:
        rule = f"no file has this coefficient ({wanted.meaning}); looked at {', '.join(files)} and {ASSUMED}"
        remedy = "Calibrate hardware that shows it, or write it into a file of --calibration"
        raise CatalogError(f"calibration {section}.{name}", rule, remedy)
    return float(entry["value"])


def _power_ratio(gpu: GPU, other: GPU) -> float:
    """Returns the power of `gpu` for each FLOP/s of its peak in 16 bits over that of `other`; 1 if not known."""
    if "bf16" not in gpu.peak or "bf16" not in other.peak:
        return 1.0
    return float(gpu.power / gpu.peak["bf16"] / (other.power / other.peak["bf16"]))


def _raise_shares(model: Any, more: float, most: float) -> Any:
    """Returns the cost model of a power-limited GPU for a GPU of its generation with `more` power for each FLOP/s.

    What power leaves of the peak grows with it: GEMMs reach 0.5 of the peak of an L40S (362 TFLOP/s at 350 W) and 0.90
    of that of an L20 (119.5 at 275 W; bytedance/flux @19831ca, docs/performance.md), which have the same chip. most:
    the share that the GPU of another generation reaches that its power limits least.
    """
    shares = {"peak_share": max(model.peak_share, min(most, model.peak_share * more))}
    if hasattr(model, "power_limited_rate"):
        shares["power_limited_rate"] = min(1.0, model.power_limited_rate * more)
    return replace(model, **shares)


def _capability(gpu: GPU) -> float | None:
    return gpu.compute_capability.value if gpu.compute_capability else None


def _rate_difference(gpu: GPU, other: GPU) -> float:
    """Sums |log| of the ratios of memory bandwidths, multiprocessors and peaks of two GPUs."""
    pairs = [(gpu.memory_bandwidth, other.memory_bandwidth), (gpu.multiprocessors, other.multiprocessors)]
    pairs += [(gpu.peak[dtype], other.peak[dtype]) for dtype in ("bf16",) if dtype in gpu.peak and dtype in other.peak]
    return sum(abs(math.log(a / b)) for a, b in pairs)


def format_of(dtype: str) -> str:
    """Returns the number format in which kernels of `dtype` are measured: fp8 for 8 bits and fewer, else bf16."""
    return "fp8" if BYTES[dtype] <= 1 else "bf16"


def _values(data: Section, wanted: Mapping[str, Coefficient], form: str) -> dict[str, float]:
    """Returns those of the coefficients `wanted` that a section of a file has."""
    known = ((name, _value(data, name, coefficient.of, form)) for name, coefficient in wanted.items())
    return {name: value for name, value in known if value is not None}


def _value(data: Section, name: str, of: str, form: str) -> float | None:
    """Returns a coefficient in a section of a file: the GPU's, or the mean of its libraries'; None where it is absent.

    The mean is geometric, or arithmetic where some values are zero.
    """
    if "common" not in data:
        return None
    if of == "gpu":
        entry = data["common"]["coefficients"].get(name)
        return float(entry["value"]) if entry else None
    tuned = [each for each in data["libraries"].values() if form and each.get("tuned", True)]
    every = [each for each in tuned if name in each["coefficients"]]
    similar = [each for each in every if each["format"] == form] or every
    values = [float(each["coefficients"][name]["value"]) for each in similar]
    if not values:
        return None
    return sum(values) / len(values) if min(values) <= 0 else math.exp(sum(map(math.log, values)) / len(values))
