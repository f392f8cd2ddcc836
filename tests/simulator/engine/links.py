"""Shares of links that an op occupies."""

from __future__ import annotations

NETWORK, UP = (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)
"""All of the network, and all of the scale-up links; see `simulator.costs.estimate.TIERS`."""
