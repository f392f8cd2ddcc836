"""What tables of kernels and collectives are evidence of: for each GPU and family of links its sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import BORROWED, Calibration
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS, LINK_MODELS, family
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives.links import NetworkCostModel, TierCostModels
from meshcast.validation.calibration.collectives.fit import FREE, NETWORK, start_links, start_model
from meshcast.validation.calibration.collectives.sample import CollectiveSample, node_models, predict
from meshcast.validation.calibration.fit import Fit, Name, fit, fit_further
from meshcast.validation.calibration.kernels.calibrate import ORDER, format_of_sample, known_values
from meshcast.validation.calibration.kernels.predict import price_by
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.calibrated import pair_sources
from meshcast.validation.calibration.tables.rows import RowForecasts
from meshcast.validation.learning.posterior import Evidence, Masks

Pairs = Sequence[tuple[Any, str]]
"""Samples with their sources."""

ANY = "any"
"""The library of rows whose time is the link's, whoever called the collective."""


def list_evidence(tables: Sequence[Any]) -> list[tuple[str, str, Pairs]]:
    """Returns file, section and samples of all that tables are evidence of, in the order in which it is learnt:
    links before networks, casts and copies before the kernels that contain them."""
    groups: dict[tuple[str, str], list[tuple[Any, str]]] = {}
    for sample, source in pair_sources(tables):
        if isinstance(sample, CollectiveSample):
            name = sample.network if sample.operation == NETWORK else sample.link
            groups.setdefault((family(name), sample.operation), []).append((sample, source))
        elif sample.library:
            groups.setdefault((sample.gpu, sample.operation), []).append((sample, source))
    order = (*ORDER, *LINK_MODELS, NETWORK)
    return [(*key, groups[key]) for key in sorted(groups, key=lambda key: (order.index(key[1]), key[0]))]


def make_evidence(calibration: Calibration, file: str, section: str, pairs: Pairs) -> Evidence:
    """Returns what the samples of a section are evidence of. calibration: in use, with what was learnt before."""
    if section in KERNEL_MODELS:
        return _of_kernels(calibration, file, section, pairs)
    if section == NETWORK:
        return _of_network(calibration, file, pairs)
    return _of_links(calibration, file, section, pairs)


def _of_kernels(calibration: Calibration, gpu: str, section: str, pairs: Pairs) -> Evidence:
    samples, model = [sample for sample, _ in pairs], KERNEL_MODELS[section]
    by = {sample: price_by(calibration, sample) for sample in samples}
    prior = known_values(calibration, gpu, section, samples)

    def fit_rows(seen: Masks) -> Fit:
        # Kernels that nobody tuned to their sizes say nothing of the GPU.
        tuned = [sample for sample in samples if sample.tuned] or samples
        first = fit(model, tuned, _seconds_by(by), prior=prior, seen=seen)
        return fit_further(first, model, samples, _seconds_by(by), prior, seen)

    def price(sample: KernelSample, at: Fit) -> RowForecasts:
        return by[sample](at.make_model(model, sample.library))

    formats = {sample.library: format_of_sample(sample) for sample in samples}
    return _make(calibration, gpu, section, model, pairs, _split(prior), fit_rows, price, formats, "generation")


def _seconds_by(by: Mapping[Any, Callable[[Any], RowForecasts]]) -> Callable[[Any, Any], np.ndarray]:
    return lambda sample, at: by[sample](at).seconds


def _of_links(calibration: Calibration, links: str, section: str, pairs: Pairs) -> Evidence:
    """Returns the evidence of collectives within a domain: of the link; what its programs add is known."""
    model, start = LINK_MODELS[section], start_links()
    in_use = {sample: getattr(_models_of(calibration, sample), section) for sample, _ in pairs}
    of_program = [name for name, c in coefficients(model).items() if c.of == "library"]
    # The rows of all programs are of one library here: the coefficients of the programs stay as they are known.
    as_any = [(replace(sample, library=ANY), source) for sample, source in pairs]
    programs = {
        any_sample: {name: getattr(in_use[sample], name) for name in of_program}
        for (sample, _), (any_sample, _) in zip(pairs, as_any, strict=True)
    }

    def seconds(sample: CollectiveSample, at: Any) -> tuple[np.ndarray, np.ndarray]:
        link = start._replace(**{section: replace(at, **programs[sample])})
        return predict(sample, TierCostModels(link, link, start_model(NETWORK)))

    first = in_use[pairs[0][0]]
    return _of_any(calibration, links, section, model, as_any, first, seconds, of_program)


def _models_of(calibration: Calibration, sample: CollectiveSample) -> Any:
    scale_up, host = node_models(calibration, sample)
    return host if sample.link == sample.cluster.host.kind else scale_up


def _of_network(calibration: Calibration, network: str, pairs: Pairs) -> Evidence:
    as_any = [(replace(sample, library=ANY), source) for sample, source in pairs]
    links = {sample: node_models(calibration, sample)[0] for sample, _ in as_any}
    first = calibration.network_model(as_any[0][0].cluster.scale_out).model
    held = [name for name in coefficients(NetworkCostModel) if name not in FREE.get(network, ("share",))]

    def seconds(sample: CollectiveSample, at: Any) -> tuple[np.ndarray, np.ndarray]:
        return predict(sample, TierCostModels(links[sample], links[sample], at))

    return _of_any(calibration, network, NETWORK, NetworkCostModel, as_any, first, seconds, held)


def _of_any(
    calibration: Calibration,
    file: str,
    section: str,
    model: type,
    pairs: Pairs,
    in_use: Any,
    seconds: Callable[[CollectiveSample, Any], tuple[np.ndarray, np.ndarray]],
    held: Sequence[str],
) -> Evidence:
    """Returns evidence of coefficients of a link. in_use: its cost model; held: coefficients that stay as they are."""
    samples = [sample for sample, _ in pairs]
    values = {name: float(getattr(in_use, name)) for name in coefficients(model)}
    fixed = {name: values[name] for name in held}
    prior: dict[Name, float] = {(name, None): value for name, value in values.items() if name not in fixed}

    def fit_rows(seen: Masks) -> Fit:
        fitted = fit(model, samples, lambda s, at: seconds(s, at)[0], held=fixed, prior=prior, seen=seen)
        return Fit({**fixed, **fitted.values}, fitted.errors, {}, {})

    def price(sample: CollectiveSample, at: Fit) -> RowForecasts:
        return RowForecasts.of(*seconds(sample, model(**{**values, **at.values}, sigma=0.0, sigma_short=0.0)))

    distance = "network" if section == NETWORK else "links"
    known = Fit(values, {}, {}, {})
    return _make(calibration, file, section, model, pairs, known, fit_rows, price, {ANY: ANY}, distance)


def _make(
    calibration: Calibration,
    file: str,
    section: str,
    model: type,
    pairs: Pairs,
    known: Fit,
    fit_rows: Callable[[Masks], Fit],
    price: Callable[[Any, Fit], RowForecasts],
    formats: Mapping[str, str],
    distance: str,
) -> Evidence:
    name = load("gpus", file).name if section in KERNEL_MODELS else file
    data = calibration.sections(name).get(section, {})
    borrowed = 0.0 if data else BORROWED[distance]
    return Evidence(name, section, model, pairs, known, fit_rows, price, data, formats, borrowed)


def _split(values: Mapping[Name, float]) -> Fit:
    """Returns values by whose they are, as a fit without errors."""
    libraries: dict[str, dict[str, float]] = {library: {} for _, library in values if library is not None}
    for (name, library), value in values.items():
        if library is not None:
            libraries[library][name] = value
    return Fit({name: value for (name, library), value in values.items() if library is None}, {}, libraries, {})
