"""Numbers of parameters as publications print them."""

from __future__ import annotations

from meshcast.simulator.models.model import Model


def count_without_mtp(model: Model) -> int:
    """Counts the parameters of a model without those of multi-token prediction."""
    return model.parameters - model.parameter_parts["mtp"]
