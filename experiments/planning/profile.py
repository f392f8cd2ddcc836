"""Public profiles of papers as problems: files of figures with their sources in ``profiles/``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.problem import UnknownPart
from meshcast.hardware.errors import PlanError, nearest

PROFILES = Path(__file__).parent / "profiles"

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "bytes": 1.0, "MB": 1e6, "MiB": 2.0**20}
"""Units of the figures of a profile, in seconds and bytes."""


class NetworkLevel(NamedTuple):
    """A level of the network, the innermost first.

    width: parts of the level below that it joins.
    bandwidth: of a link between two parts [bytes/s].
    """

    width: int
    bandwidth: float


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


class ProfileProblem(UnknownPart):
    """The profile of a paper, on devices that the paper assumes.

    name: of the file.
    levels: of the network, where the planner's formula has a network.
    settings: what the file says besides its nodes and edges, and what the caller adds; ``edge_order`` has the edges as
        the file lists them.
    Raises PlanError for a name without a file.
    """

    mode = "paper"

    def __init__(
        self, name: str, levels: Sequence[NetworkLevel] = (), gpus: int = 0, memory: float = 0.0, **settings: Any
    ) -> None:
        if name not in profile_names():
            raise PlanError("profile", "no such profile", nearest(name, profile_names()), name)
        self.name, self.levels = name, tuple(levels)
        self.settings: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text("utf-8"))
        self._nodes, self._edges = self.settings.pop("nodes"), self.settings.pop("edges")
        devices = self.settings.get("devices", {})
        self.gpus = gpus or int(devices.get("accelerators", 0))
        for level in self.levels:
            self.gpus = max(1, self.gpus) * level.width
        self.memory = memory or float(devices.get("memory", self.memory))
        self.settings |= {"edge_order": self._edges, **settings}

    def graph(self) -> LayerGraph:
        """Returns the graph, with every column of numbers as a figure in seconds or bytes."""
        columns, units = self.settings["columns"], self.settings["units"]
        figures = {
            column: [float(row[place]) * UNITS[units.get(column, "s")] for row in self._nodes]
            for place, column in enumerate(columns)
            if not isinstance(self._nodes[0][place], str)
        }
        return LayerGraph([row[0] for row in self._nodes], [tuple(edge) for edge in self._edges], figures)
