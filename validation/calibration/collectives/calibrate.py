"""Calibrations from tables of measured collectives: of each family of links, and of each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.costs.calibration.calibration import Calibration
from simulator.costs.calibration.cost_models import LINKS, family
from simulator.costs.collectives.links import Laws, LinkLaw, NetworkLaw
from validation.calibration.collectives.fit import LAWS, fit_links, fit_network, neutral, plain
from validation.calibration.collectives.predict import laws_inside
from validation.calibration.collectives.reader import STAGED
from validation.calibration.collectives.sample import Sample, predict
from validation.calibration.fit import Fit
from validation.calibration.tables.calibrated import FEWEST, Calibrated, Known, errors, plain_spreads, spreads_of
from validation.calibration.tables.rows import Priced
from validation.calibration.tables.table import Table
from validation.calibration.write import section

NETWORK = "network"


def names(tables: Sequence[Table]) -> list[str]:
    """The families of links, then the networks, that have rows enough: InfiniBand first, whose values others borrow."""
    counts: dict[str, int] = {}
    for sample, _ in _samples(tables):
        counts[_name(sample)] = counts.get(_name(sample), 0) + len(sample.index)
    links = {_name(sample) for sample, _ in _samples(tables) if sample.operation != NETWORK}
    return sorted((n for n in counts if counts[n] >= FEWEST), key=lambda n: (n not in links, n != "infiniband", n))


def title(name: str) -> str:
    """Of the file of a family."""
    return f"{name}, as NCCL uses it"


def _samples(tables: Sequence[Table]) -> list[tuple[Sample, str]]:
    """Those of collectives with their sources: inside islands of a library that is known, outside of anybody's."""
    pairs = [(sample, table.source(sample)) for table in tables for sample in table.samples]
    kept = [(sample, source) for sample, source in pairs if isinstance(sample, Sample)]
    return [(sample, source) for sample, source in kept if sample.library or sample.operation == NETWORK]


def _name(sample: Sample) -> str:
    return family(sample.network if sample.operation == NETWORK else sample.link)


def calibrate(calibration: Calibration, tables: Sequence[Table], name: str, leave_out: bool = True) -> Calibrated:
    """The calibration of one family. calibration: of other links. leave_out: also fit it without each of its GPUs."""
    data: dict[str, Any] = {}
    told: list[Known] = []
    for part in LAWS:
        pairs = [(s, source) for s, source in _samples(tables) if (_name(s), s.operation) == (name, part)]
        counts: dict[str, int] = {}
        for sample, _ in pairs:
            counts[sample.library] = counts.get(sample.library, 0) + len(sample.index)
        pairs = [(s, source) for s, source in pairs if part == NETWORK or counts[s.library] >= FEWEST]
        if not pairs:
            continue
        samples = [sample for sample, _ in pairs]
        found = _fit(calibration, name, part, samples)
        data[part] = _section(calibration, part, found, pairs)
        for library in sorted({sample.library for sample in samples}):
            own = [sample for sample in samples if sample.library == library]
            told.append(Known(part, library, *errors(own, [_by(calibration, s, part, found) for s in own]), None, None))
        if leave_out:
            told += _without_gpus(calibration, name, part, samples, found)
    return Calibrated(name, data, told)


def _fit(calibration: Calibration, name: str, part: str, samples: Sequence[Sample]) -> Fit:
    if part != NETWORK:
        return fit_links(part, samples)
    tier = samples[0].cluster.scale_out
    borrows = name != "infiniband" and calibration.sections("infiniband")
    like = calibration.network_model(tier, without=family(tier.kind)).model if borrows else None
    return fit_network(name, samples, lambda sample: laws_inside(calibration, sample)[0], like)


def _by(calibration: Calibration, sample: Sample, part: str, found: Fit, library: str | None = None) -> Priced:
    """A sample by what was fitted; as its own library's rows, or ("") as plain NCCL's."""
    own = found.libraries.get(sample.library if library is None else library) or neutral(part)
    law = LAWS[part](**{**plain_values(part), **found.values, **own}, spread=0.0, spread_short=0.0)
    if part == NETWORK:
        laws = Laws(*laws_inside(calibration, sample), law)
    else:
        link = LinkLaw(plain("ring"), plain("pair"), plain("message"))._replace(**{part: law})
        laws = Laws(link, link, plain(NETWORK))
    seconds, launch = predict(sample, laws)
    return Priced(seconds, launch, np.zeros(len(seconds)))


def plain_values(part: str) -> Mapping[str, float]:
    """Where a fit starts."""
    law = plain(part)
    return {name: getattr(law, name) for name in law.__dataclass_fields__ if not name.startswith("spread")}


def _section(calibration: Calibration, part: str, found: Fit, pairs: Sequence[tuple[Sample, str]]) -> dict[str, Any]:
    samples = [sample for sample, _ in pairs]
    libraries = sorted(found.libraries) if part != NETWORK else ["any"]
    of = {lib: [s for s in samples if lib in ("any", s.library)] for lib in libraries}
    own = {lib: spreads_of([(s, _by(calibration, s, part, found)) for s in some]) for lib, some in of.items()}
    rows = {lib: sum(len(s.index) for s in some) for lib, some in of.items()}
    sources = {lib: "; ".join(dict.fromkeys(o for s, o in pairs if lib in ("any", s.library))) for lib in libraries}
    # Nobody's in particular are plain NCCL's: copies that are staged in the host's memory are no measure of those.
    plainly = [sample for sample in samples if sample.library != STAGED]
    prices = [(sample, _by(calibration, sample, part, found, "")) for sample in plainly]
    unnamed = {"any": plain_spreads(prices or [(sample, _by(calibration, sample, part, found)) for sample in samples])}
    return section(LAWS[part], found, own, unnamed, rows, dict.fromkeys(libraries, "any"), sources)


def _without_gpus(calibration: Calibration, name: str, part: str, samples: Sequence[Sample], found: Fit) -> list[Known]:
    """How the rows of each GPU fare when the others' alone are fitted."""
    told = []
    for gpu in sorted({sample.gpu for sample in samples}):
        rest = [sample for sample in samples if sample.gpu != gpu]
        own = [sample for sample in samples if sample.gpu == gpu]
        if rest:
            blind = _fit(calibration, name, part, rest)
            seen = errors(own, [_by(calibration, s, part, found) for s in own])
            told.append(
                Known(part, f"all on {gpu}", *seen, *errors(own, [_by(calibration, s, part, blind) for s in own])[1:])
            )
    return told


assert set(LINKS) < set(LAWS) and LAWS[NETWORK] is NetworkLaw
