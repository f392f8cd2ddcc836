"""Coefficients of links and networks from samples of collectives.

Rows differ by the program that called and timed them. Coefficients of the link are those of the program with most
rows, which is plain NCCL where it is there, its own ones being neutral; those of other programs are fitted to their
rows on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.costs.coefficients import coefficients
from simulator.costs.collectives.links import Laws, LinkLaw, MessageLaw, NetworkLaw, PairLaw, RingLaw
from validation.calibration.collectives.reader import STAGED
from validation.calibration.collectives.sample import Sample, predict
from validation.calibration.fit import Fit, fit

LAWS = {"ring": RingLaw, "pair": PairLaw, "message": MessageLaw, "network": NetworkLaw}
"""Of sections of a calibration; the first three make a LinkLaw."""

PLAIN = "nccl-tests"

FREE = {
    "infiniband": ("quick_step", "step", "chunk", "share", "pipe"),
    "efa": ("quick_step", "step", "chunk", "share"),
}
"""What the rows of a network can tell; of others only the share. The rest is that of InfiniBand, or as it starts."""


def family(kind: str) -> str:
    """What links of the catalog share coefficients: nvlink4-h800 and nvlink4, all of PCIe, all of InfiniBand."""
    word = kind.partition("-")[0]
    return "pcie" if word.startswith("pcie") else word


def neutral(section: str) -> dict[str, float]:
    """Coefficients of plain NCCL's own."""
    return {name: c.neutral for name, c in coefficients(LAWS[section]).items() if c.neutral is not None}


def plain(section: str) -> Any:
    """A law as fits start from it."""
    return LAWS[section](**{name: c.start for name, c in coefficients(LAWS[section]).items()})


def fit_links(section: str, samples: Sequence[Sample]) -> Fit:
    """Of the samples of one section on one family of links."""
    law, start = LAWS[section], LinkLaw(plain("ring"), plain("pair"), plain("message"))

    def priced(sample: Sample, at: Any) -> np.ndarray:
        link = start._replace(**{section: at})
        return predict(sample, Laws(link, link, plain("network")))[0]

    rows: dict[str, int] = {}
    for sample in samples:
        rows[sample.library] = rows.get(sample.library, 0) + len(sample.index)
    most = PLAIN if PLAIN in rows else max(rows, key=lambda name: rows[name])
    own = neutral(section)
    found = _fit(law, [s for s in samples if s.library == most], priced, own)
    for library in sorted(set(rows) - {most, ""}):
        more = _fit(law, [s for s in samples if s.library == library], priced, found.values) if own else found
        found.libraries.update(more.libraries)
        found.library_errors.update(more.library_errors)
    return found


def _fit(
    law: type, samples: Sequence[Sample], priced: Callable[[Sample, Any], np.ndarray], held: Mapping[str, float]
) -> Fit:
    """Of one program. What holds of staged copies alone is free for them alone."""
    library, held = samples[0].library, dict(held)
    if library == STAGED:
        held.pop("crowd", None)
    elif "crowd" in coefficients(law):
        held["crowd"] = 0.0
    found = fit(law, samples, priced, held=held)
    return replace(
        found, library_errors={library: dict.fromkeys(found.libraries[library], 0.0) | found.library_errors[library]}
    )


def fit_network(
    kind: str, samples: Sequence[Sample], inner: Callable[[Sample], LinkLaw], like: NetworkLaw | None = None
) -> Fit:
    """Of the samples of one family of networks. inner: laws inside islands. like: InfiniBand's, for others."""
    free, base = FREE.get(kind, ("share",)), like or plain("network")
    held = {name: getattr(base, name) for name in coefficients(NetworkLaw) if name not in free}
    links: Mapping[int, LinkLaw] = {int(sample.index[0]): inner(sample) for sample in samples}

    def priced(sample: Sample, at: Any) -> np.ndarray:
        link = links[int(sample.index[0])]
        return predict(sample, Laws(link, link, at))[0]

    # Whoever called them, the time is that of the network.
    return fit(NetworkLaw, [replace(sample, library="any") for sample in samples], priced, held=held)
