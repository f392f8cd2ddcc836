"""What tables of kernels and collectives are evidence of: for each GPU and family of links its sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import BORROWED, Calibration
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS, LINK_MODELS, family
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives.links import LinkCostModels, NetworkCostModel, TierCostModels
from meshcast.validation.calibration.collectives.fit import FREE, NETWORK, start_links, start_model
from meshcast.validation.calibration.collectives.recorded import Recorded
from meshcast.validation.calibration.collectives.sample import CollectiveSample, node_models, predict
from meshcast.validation.calibration.fit import Fit, Name, fit, fit_further
from meshcast.validation.calibration.kernels.calibrate import ORDER, format_of_sample, known_values
from meshcast.validation.calibration.kernels.predict import price_by
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.calibrated import pair_sources
from meshcast.validation.calibration.tables.rows import RowForecasts, Rows
from meshcast.validation.calibration.tables.table import LibraryTable
from meshcast.validation.learning.posterior import Masks, SectionEvidence

S = TypeVar("S", bound=Rows)

Pairs = Sequence[tuple[S, str]]
"""Samples with their sources."""

Model = Any
"""An instance of a cost model."""

Seconds = Callable[[CollectiveSample, Model], tuple[np.ndarray, np.ndarray]]
"""Returns the seconds of the rows of a sample by a cost model, and the part of them that moves no bytes."""

ANY = "any"
"""The library of rows whose time is the link's, whoever called the collective."""


def list_evidence(tables: Sequence[LibraryTable | Recorded]) -> list[tuple[str, str, Pairs[Rows]]]:
    """Returns file, section and samples of all that tables are evidence of, in the order in which it is learnt:
    casts and copies before the kernels that contain them, links before networks."""
    groups: dict[tuple[str, str], list[tuple[Rows, str]]] = {}
    for sample, source in pair_sources(tables):  # type: ignore[arg-type]  # a Recorded has samples and sources, too
        if isinstance(sample, CollectiveSample):
            name = sample.network if sample.operation == NETWORK else sample.link
            groups.setdefault((family(name), sample.operation), []).append((sample, source))
        elif sample.library:
            groups.setdefault((sample.gpu, sample.operation), []).append((sample, source))
    order = (*ORDER, *LINK_MODELS, NETWORK)
    return [(*key, groups[key]) for key in sorted(groups, key=lambda key: (order.index(key[1]), key[0]))]


def make_evidence(calibration: Calibration, file: str, section: str, pairs: Pairs[Rows]) -> SectionEvidence[Rows]:
    """Returns what the samples of a section are evidence of. calibration: in use, with what was learnt before."""
    of: Callable[..., Model] = _of_kernels if section in KERNEL_MODELS else _of_links
    evidence: SectionEvidence[Rows] = of(calibration, file, section, pairs)
    return evidence


def _of_kernels(
    calibration: Calibration, gpu: str, section: str, pairs: Pairs[KernelSample]
) -> SectionEvidence[KernelSample]:
    samples, model = [sample for sample, _ in pairs], KERNEL_MODELS[section]
    by = {sample: price_by(calibration, sample) for sample in samples}
    prior = known_values(calibration, gpu, section, samples)

    def seconds(sample: KernelSample, at: Model) -> np.ndarray:
        return by[sample](at).seconds

    def fit_rows(seen: Masks[KernelSample]) -> Fit:
        # Kernels that nobody tuned to their sizes say nothing of the GPU.
        tuned = [sample for sample in samples if sample.tuned] or samples
        return fit_further(fit(model, tuned, seconds, prior=prior, seen=seen), model, samples, seconds, prior, seen)

    def price(sample: KernelSample, at: Fit) -> RowForecasts:
        return by[sample](at.make_model(model, sample.library))

    formats = {sample.library: format_of_sample(sample) for sample in samples}
    name = load("gpus", gpu).name
    data = calibration.sections(name).get(section, {})
    borrowed = 0.0 if data else BORROWED["generation"]
    return SectionEvidence(name, section, model, pairs, _split(prior), fit_rows, price, data, formats, borrowed)


def _split(values: Mapping[Name, float]) -> Fit:
    """Returns values by whose they are, as a fit without errors."""
    libraries: dict[str, dict[str, float]] = {library: {} for _, library in values if library is not None}
    for (name, library), value in values.items():
        if library is not None:
            libraries[library][name] = value
    return Fit({name: value for (name, library), value in values.items() if library is None}, {}, libraries, {})


def _of_links(
    calibration: Calibration, links: str, section: str, pairs: Pairs[CollectiveSample]
) -> SectionEvidence[CollectiveSample]:
    """Returns the evidence of collectives: of a link or network. What programs add to its time stays as it is."""
    as_any = [(replace(sample, library=ANY), source) for sample, source in pairs]
    if section == NETWORK:
        in_use, seconds, held = _in_network(calibration, links, as_any)
    else:
        in_use, seconds, held = _in_node(calibration, section, pairs, as_any)
    pairs = as_any
    model, samples = type(in_use), [sample for sample, _ in pairs]
    values = {name: float(getattr(in_use, name)) for name in coefficients(model)}
    fixed = {name: values[name] for name in held}
    prior: dict[Name, float] = {(name, None): value for name, value in values.items() if name not in fixed}

    def fit_rows(seen: Masks[CollectiveSample]) -> Fit:
        fitted = fit(model, samples, lambda s, at: seconds(s, at)[0], held=fixed, prior=prior, seen=seen)
        return Fit({**fixed, **fitted.values}, fitted.errors, {}, {})

    def price(sample: CollectiveSample, at: Fit) -> RowForecasts:
        return RowForecasts.of(*seconds(sample, model(**{**values, **at.values}, sigma=0.0, sigma_short=0.0)))

    known, data = Fit(values, {}, {}, {}), calibration.sections(links).get(section, {})
    borrowed = 0.0 if data else BORROWED["network" if section == NETWORK else "links"]
    return SectionEvidence(links, section, model, pairs, known, fit_rows, price, data, {ANY: ANY}, borrowed)


def _in_node(
    calibration: Calibration, section: str, pairs: Pairs[CollectiveSample], as_any: Pairs[CollectiveSample]
) -> tuple[Model, Seconds, list[str]]:
    """Returns the cost model in use within a node, the times by one, and the coefficients that are not learnt: those
    that the program of a sample has of its own. as_any: the same samples without their program."""
    start, programs = start_links(), {}
    held = [name for name, coefficient in coefficients(LINK_MODELS[section]).items() if coefficient.of == "library"]
    for (sample, _), (any_sample, _) in zip(pairs, as_any, strict=True):
        in_use = getattr(_find_models(calibration, sample), section)
        programs[any_sample] = {name: getattr(in_use, name) for name in held}

    def seconds(sample: CollectiveSample, at: Model) -> tuple[np.ndarray, np.ndarray]:
        link = start._replace(**{section: replace(at, **programs[sample])})
        return predict(sample, TierCostModels(link, link, start_model(NETWORK)))

    return getattr(_find_models(calibration, pairs[0][0]), section), seconds, held


def _find_models(calibration: Calibration, sample: CollectiveSample) -> LinkCostModels:
    scale_up, host = node_models(calibration, sample)
    return host if sample.link == sample.cluster.host.kind else scale_up


def _in_network(
    calibration: Calibration, network: str, pairs: Pairs[CollectiveSample]
) -> tuple[Model, Seconds, list[str]]:
    """Returns the same between nodes."""
    links = {sample: node_models(calibration, sample)[0] for sample, _ in pairs}

    def seconds(sample: CollectiveSample, at: Model) -> tuple[np.ndarray, np.ndarray]:
        return predict(sample, TierCostModels(links[sample], links[sample], at))

    in_use = calibration.network_model(pairs[0][0].cluster.scale_out).model
    held = [name for name in coefficients(NetworkCostModel) if name not in FREE.get(network, ("share",))]
    return in_use, seconds, held
