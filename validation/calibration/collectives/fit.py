"""Coefficients of links and networks from samples of collectives.

Rows differ by the program that called and timed them. The coefficients of the link are fitted to the rows of the
program that has most of them: plain NCCL where it is there, whose library coefficients are neutral. Those of other
programs are fitted to their rows on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.simulator.costs.calibration.cost_models import LINK_MODELS
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives.links import LinkCostModels, NetworkCostModel, TierCostModels
from meshcast.validation.calibration.collectives.sample import CollectiveSample, predict
from meshcast.validation.calibration.fit import Fit, fit, fit_further
from meshcast.validation.calibration.tables.rows import count_rows, of_library

NETWORK = "network"
MODELS: dict[str, type] = {**LINK_MODELS, NETWORK: NetworkCostModel}
"""Cost models by section; all but the last make a `LinkCostModels`."""

PLAIN = "nccl-tests"
"""The program that stands for plain NCCL."""

FREE = {
    "infiniband": ("ll_level", "simple_level", "chunk_bytes", "share", "exposed_fill"),
    "efa": ("ll_level", "simple_level", "chunk_bytes", "share"),
}
"""Coefficients that the rows of a network determine; of other networks only the share. The rest is InfiniBand's."""


def neutral_values(section: str) -> dict[str, float]:
    """Returns the library coefficients of plain NCCL."""
    return {name: c.neutral for name, c in coefficients(MODELS[section]).items() if c.neutral is not None}


def start_model(section: str) -> Any:
    """Returns the cost model from which fits start."""
    return MODELS[section](**{name: c.start for name, c in coefficients(MODELS[section]).items()})


def start_links() -> LinkCostModels:
    """Returns the cost models of links from which fits start."""
    return LinkCostModels(*map(start_model, LINK_MODELS))


def fit_links(section: str, samples: Sequence[CollectiveSample]) -> Fit:
    """Fits a section of a family of links to its samples."""
    model, start = MODELS[section], start_links()

    def seconds(sample: CollectiveSample, at: Any) -> np.ndarray:
        link = start._replace(**{section: at})
        return predict(sample, TierCostModels(link, link, start_model(NETWORK)))[0]

    rows, neutral = count_rows(samples), neutral_values(section)
    most = PLAIN if PLAIN in rows else max(rows, key=lambda name: rows[name])
    first = fit(model, of_library(samples, most), seconds, held=neutral)
    named = [sample for sample in samples if sample.library] if neutral else []
    fitted = fit_further(first, model, named, seconds)
    # A file states all coefficients of a program, also those that its rows do not depend on.
    errors = {
        library: dict.fromkeys(values, 0.0) | fitted.library_errors[library]
        for library, values in fitted.libraries.items()
    }
    return replace(fitted, library_errors=errors)


def fit_network(
    kind: str,
    samples: Sequence[CollectiveSample],
    node_models: Callable[[CollectiveSample], LinkCostModels],
    like: NetworkCostModel | None = None,
) -> Fit:
    """Fits a family of networks to its samples.

    node_models: of the links within nodes. like: the cost model of InfiniBand, for other networks.
    """
    free, base = FREE.get(kind, ("share",)), like or start_model(NETWORK)
    held = {name: getattr(base, name) for name in coefficients(NetworkCostModel) if name not in free}
    links: Mapping[int, LinkCostModels] = {int(sample.index[0]): node_models(sample) for sample in samples}

    def seconds(sample: CollectiveSample, at: Any) -> np.ndarray:
        link = links[int(sample.index[0])]
        return predict(sample, TierCostModels(link, link, at))[0]

    # The time is that of the network, whoever called the collective.
    return fit(NetworkCostModel, [replace(sample, library="any") for sample in samples], seconds, held=held)
