"""Calibrations from tables of measured collectives: for each family of links, and for each network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.cost_models import family
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives.links import TierCostModels
from meshcast.validation.calibration.collectives.fit import (
    MODELS,
    NETWORK,
    fit_links,
    fit_network,
    neutral_values,
    start_links,
    start_model,
)
from meshcast.validation.calibration.collectives.sample import CollectiveSample, node_models, predict
from meshcast.validation.calibration.fit import Fit
from meshcast.validation.calibration.tables.calibrated import (
    MIN_ROWS,
    CalibrationResult,
    LibraryErrors,
    make_section,
    pair_sources,
    sigmas_by_library,
    sigmas_of_all,
)
from meshcast.validation.calibration.tables.rows import RowForecasts, count_rows
from meshcast.validation.calibration.tables.table import LibraryTable

Pairs = Sequence[tuple[CollectiveSample, str]]
"""Samples with their sources."""


def names(tables: Sequence[LibraryTable]) -> list[str]:
    """Families of links, then networks, with enough rows: InfiniBand first, whose coefficients others borrow."""
    counts = Counter[str]()
    for sample, _ in _samples(tables):
        counts[_name(sample)] += len(sample.index)
    links = {_name(sample) for sample, _ in _samples(tables) if sample.operation != NETWORK}
    return sorted((n for n in counts if counts[n] >= MIN_ROWS), key=lambda n: (n not in links, n != "infiniband", n))


def title(name: str) -> str:
    """Returns the title of the file of a family."""
    return f"{name}, as NCCL uses it"


def _samples(tables: Sequence[LibraryTable]) -> list[tuple[CollectiveSample, str]]:
    """Returns samples of collectives with their sources: within nodes those of a known library, between nodes all."""
    return [
        (sample, source)
        for sample, source in pair_sources(tables)
        if isinstance(sample, CollectiveSample) and (sample.library or sample.operation == NETWORK)
    ]


def _name(sample: CollectiveSample) -> str:
    return family(sample.network if sample.operation == NETWORK else sample.link)


def calibrate(
    calibration: Calibration, tables: Sequence[LibraryTable], name: str, leave_out: bool = True
) -> CalibrationResult:
    """Calibrates a family of links or networks.

    The sigmas are of rows whose machine was left out of the fit, where others have enough rows of their library.

    calibration: of other links. leave_out: also tell the errors of the rows of each machine without it.
    """
    data: dict[str, Any] = {}
    errors: list[LibraryErrors] = []
    for section in MODELS:
        pairs = [(s, source) for s, source in _samples(tables) if (_name(s), s.operation) == (name, section)]
        counts = count_rows(sample for sample, _ in pairs)
        pairs = [(s, source) for s, source in pairs if section == NETWORK or counts[s.library] >= MIN_ROWS]
        if not pairs:
            continue
        samples = [sample for sample, _ in pairs]
        whole = _fit(calibration, name, section, samples)
        blind = _fit_others(calibration, name, section, pairs)
        data[section] = _make_section(calibration, section, whole, blind, pairs)
        prices = [(sample, _price(calibration, sample, section, whole)) for sample in samples]
        for library in count_rows(samples):
            seen = [pair for pair in prices if pair[0].library == library]
            errors.append(LibraryErrors.of(section, library, seen))
        if leave_out:
            errors += _errors_without_machines(calibration, section, whole, blind, pairs)
    return CalibrationResult(name, data, errors)


def _machine(sample: CollectiveSample, source: str) -> str:
    """Returns what a sample shares with all rows of its machine: within nodes the GPU, of a network the source."""
    return source if sample.operation == NETWORK else sample.gpu


def _fit(calibration: Calibration, name: str, section: str, samples: Sequence[CollectiveSample]) -> Fit:
    if section != NETWORK:
        return fit_links(section, samples)
    tier = samples[0].cluster.scale_out
    borrows = name != "infiniband" and calibration.sections("infiniband")
    like = calibration.network_model(tier, without=family(tier.kind)).model if borrows else None
    return fit_network(name, samples, lambda sample: node_models(calibration, sample)[0], like)


def _price(
    calibration: Calibration, sample: CollectiveSample, section: str, fitted: Fit, library: str | None = None
) -> RowForecasts:
    """Returns the forecasts of a sample by a fit. library: whose coefficients, instead of the sample's ("": plain
    NCCL)."""
    shared = fitted.libraries.get(sample.library if library is None else library) or neutral_values(section)
    start = {name: c.start for name, c in coefficients(MODELS[section]).items()}
    model = MODELS[section](**{**start, **fitted.values, **shared}, sigma=0.0, sigma_short=0.0)
    if section == NETWORK:
        models = TierCostModels(*node_models(calibration, sample), model)
    else:
        link = start_links()._replace(**{section: model})
        models = TierCostModels(link, link, start_model(NETWORK))
    return RowForecasts.of(*predict(sample, models))


def _fit_others(calibration: Calibration, name: str, section: str, pairs: Pairs) -> dict[str, Fit]:
    """Returns, for every machine, the fit to the samples of all others, where there are any."""
    fits = {}
    for machine in sorted({_machine(*pair) for pair in pairs}):
        rest = [pair for pair in pairs if _machine(*pair) != machine]
        if rest:
            fits[machine] = _fit(calibration, name, section, [sample for sample, _ in rest])
    return fits


def _price_unseen(
    calibration: Calibration, section: str, whole: Fit, blind: Mapping[str, Fit], pairs: Pairs, library: str | None
) -> list[tuple[CollectiveSample, RowForecasts]]:
    """Returns samples priced by the fits `blind`, which have not seen their machine, or by `whole` where other machines
    have fewer than `MIN_ROWS` rows of their library. library: whose coefficients, see `_price`."""
    counts = {
        machine: count_rows(sample for sample, source in pairs if _machine(sample, source) != machine)
        for machine in blind
    }
    prices = []
    for sample, source in pairs:
        machine, name = _machine(sample, source), sample.library if library is None else library
        is_known = section == NETWORK or not name or counts.get(machine, {}).get(name, 0) >= MIN_ROWS
        used = blind.get(machine, whole) if is_known else whole
        prices.append((sample, _price(calibration, sample, section, used, library)))
    return prices


def _make_section(
    calibration: Calibration, section: str, whole: Fit, blind: Mapping[str, Fit], pairs: Pairs
) -> dict[str, Any]:
    # What passes through the memory of a host shows the spread of hosts.
    direct = [pair for pair in pairs if not pair[0].cluster.staged] or pairs
    named = _price_unseen(calibration, section, whole, blind, direct, None)
    if section == NETWORK:
        named, pairs = [(_as_any(sample), price) for sample, price in named], [(_as_any(s), o) for s, o in pairs]
    unnamed = {"any": sigmas_of_all(_price_unseen(calibration, section, whole, blind, direct, ""))}
    formats = dict.fromkeys((sample.library for sample, _ in pairs), "any")
    return make_section(MODELS[section], whole, sigmas_by_library(named), unnamed, pairs, formats)


def _as_any(sample: CollectiveSample) -> CollectiveSample:
    """Returns a sample of a network as that of any library: it is the network's time, whoever called the collective."""
    return replace(sample, library="any")


def _errors_without_machines(
    calibration: Calibration, section: str, whole: Fit, blind: Mapping[str, Fit], pairs: Pairs
) -> list[LibraryErrors]:
    """Counts the errors of the rows of each machine, also when only those of the others are fitted."""
    errors = []
    for machine, fit in blind.items():
        samples = [sample for sample, source in pairs if _machine(sample, source) == machine]
        seen, unseen = (
            [(sample, _price(calibration, sample, section, fitted)) for sample in samples] for fitted in (whole, fit)
        )
        errors.append(LibraryErrors.of(section, f"all on {machine}", seen, unseen))
    return errors
