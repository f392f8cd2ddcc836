"""Calibrations from tables of measured collectives: one for each family of links, and for each network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
    FEWEST,
    CalibrationResult,
    LibraryErrors,
    count_errors,
    sigmas_by_kind,
    sigmas_of_all,
)
from meshcast.validation.calibration.tables.rows import RowForecasts
from meshcast.validation.calibration.tables.table import Table
from meshcast.validation.calibration.write import make_section


def names(tables: Sequence[Table]) -> list[str]:
    """Families of links, then networks, with enough rows: InfiniBand first, whose coefficients others borrow."""
    counts: dict[str, int] = {}
    for sample, _ in _samples(tables):
        counts[_name(sample)] = counts.get(_name(sample), 0) + len(sample.index)
    links = {_name(sample) for sample, _ in _samples(tables) if sample.operation != NETWORK}
    return sorted((n for n in counts if counts[n] >= FEWEST), key=lambda n: (n not in links, n != "infiniband", n))


def title(name: str) -> str:
    """The title of the file of a family."""
    return f"{name}, as NCCL uses it"


def _samples(tables: Sequence[Table]) -> list[tuple[CollectiveSample, str]]:
    """Samples of collectives with their sources: within nodes those of a known library, between nodes all."""
    pairs = [(sample, table.source(sample)) for table in tables for sample in table.samples]
    kept = [(sample, source) for sample, source in pairs if isinstance(sample, CollectiveSample)]
    return [(sample, source) for sample, source in kept if sample.library or sample.operation == NETWORK]


def _name(sample: CollectiveSample) -> str:
    return family(sample.network if sample.operation == NETWORK else sample.link)


def calibrate(
    calibration: Calibration, tables: Sequence[Table], name: str, leave_out: bool = True
) -> CalibrationResult:
    """The calibration of one family. calibration: of other links. leave_out: also fit it without each of its GPUs."""
    data: dict[str, Any] = {}
    errors: list[LibraryErrors] = []
    for section in MODELS:
        pairs = [(s, source) for s, source in _samples(tables) if (_name(s), s.operation) == (name, section)]
        counts: dict[str, int] = {}
        for sample, _ in pairs:
            counts[sample.library] = counts.get(sample.library, 0) + len(sample.index)
        pairs = [(s, source) for s, source in pairs if section == NETWORK or counts[s.library] >= FEWEST]
        if not pairs:
            continue
        samples = [sample for sample, _ in pairs]
        found = _fit(calibration, name, section, samples)
        data[section] = _make_section(calibration, section, found, pairs)
        for library in sorted({sample.library for sample in samples}):
            own = [sample for sample in samples if sample.library == library]
            prices = [_price(calibration, sample, section, found) for sample in own]
            errors.append(LibraryErrors(section, library, *count_errors(own, prices), None, None))
        if leave_out:
            errors += _errors_without_gpus(calibration, name, section, samples, found)
    return CalibrationResult(name, data, errors)


def _fit(calibration: Calibration, name: str, section: str, samples: Sequence[CollectiveSample]) -> Fit:
    if section != NETWORK:
        return fit_links(section, samples)
    tier = samples[0].cluster.scale_out
    borrows = name != "infiniband" and calibration.sections("infiniband")
    like = calibration.network_model(tier, without=family(tier.kind)).model if borrows else None
    return fit_network(name, samples, lambda sample: node_models(calibration, sample)[0], like)


def _price(
    calibration: Calibration, sample: CollectiveSample, section: str, found: Fit, library: str | None = None
) -> RowForecasts:
    """The forecasts of a sample by a fit. library: whose coefficients, instead of the sample's ("": plain NCCL)."""
    own = found.libraries.get(sample.library if library is None else library) or neutral_values(section)
    start = {name: c.start for name, c in coefficients(MODELS[section]).items()}
    model = MODELS[section](**{**start, **found.values, **own}, sigma=0.0, sigma_short=0.0)
    if section == NETWORK:
        models = TierCostModels(*node_models(calibration, sample), model)
    else:
        link = start_links()._replace(**{section: model})
        models = TierCostModels(link, link, start_model(NETWORK))
    seconds, launch = predict(sample, models)
    return RowForecasts(seconds, launch, np.zeros(len(seconds)))


def _make_section(
    calibration: Calibration, section: str, found: Fit, pairs: Sequence[tuple[CollectiveSample, str]]
) -> dict[str, Any]:
    samples = [sample for sample, _ in pairs]
    libraries = sorted(found.libraries) if section != NETWORK else ["any"]
    # What passes through the memory of a host shows the spread of hosts.
    direct = [sample for sample in samples if not sample.cluster.staged] or samples
    of = {lib: [s for s in direct if lib in ("any", s.library)] for lib in libraries}
    own = {lib: sigmas_by_kind([(s, _price(calibration, s, section, found)) for s in some]) for lib, some in of.items()}
    rows = {lib: sum(len(s.index) for s in samples if lib in ("any", s.library)) for lib in libraries}
    sources = {lib: "; ".join(dict.fromkeys(o for s, o in pairs if lib in ("any", s.library))) for lib in libraries}
    prices = [(sample, _price(calibration, sample, section, found, "")) for sample in direct]
    unnamed = {"any": sigmas_of_all(prices)}
    return make_section(MODELS[section], found, own, unnamed, rows, dict.fromkeys(libraries, "any"), sources)


def _errors_without_gpus(
    calibration: Calibration, name: str, section: str, samples: Sequence[CollectiveSample], found: Fit
) -> list[LibraryErrors]:
    """Errors of the rows of each GPU when only those of the others are fitted."""
    errors = []
    for gpu in sorted({sample.gpu for sample in samples}):
        rest = [sample for sample in samples if sample.gpu != gpu]
        own = [sample for sample in samples if sample.gpu == gpu]
        if rest:
            blind = _fit(calibration, name, section, rest)
            seen, unseen = (
                count_errors(own, [_price(calibration, sample, section, one) for sample in own])
                for one in (found, blind)
            )
            errors.append(LibraryErrors(section, f"all on {gpu}", *seen, *unseen[1:]))
    return errors
