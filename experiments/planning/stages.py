"""Stage tables: what a range of layers costs on some GPUs, for every range and every way to use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class StageOption(NamedTuple):
    """A way to use some GPUs as a stage.

    gpus: their number.
    plan: keys of the stage in a job file (``tp``, ``dp``, ``recompute``), or what a profile says about it.
    """

    gpus: int
    plan: Mapping[str, Any]


class StageTable(NamedTuple):
    """Costs of the layers i to j, both included, as a stage: arrays [layers, layers, options], infinite for j < i.

    options: ways to use GPUs.
    seconds: of a micro-batch, forward and backward [s].
    forward: of these, of the forward pass [s].
    once: of a step, besides its micro-batches (gradient exchange, update) [s].
    behind: the most stages that may follow, so that the activations in flight fit into memory; -1: it does not fit.
    """

    options: tuple[StageOption, ...]
    seconds: np.ndarray
    forward: np.ndarray
    once: np.ndarray
    behind: np.ndarray

    @property
    def layers(self) -> int:
        return self.seconds.shape[0]

    def stage_seconds(self, stage: PlannedStage) -> float:
        return float(self.seconds[stage.layers[0], stage.layers[-1], stage.option])

    def select(self, keep: Callable[[StageOption], bool]) -> StageTable:
        """Returns the table of the options that `keep` admits."""
        return self.take([number for number, option in enumerate(self.options) if keep(option)])

    def join(self, more: StageTable | None) -> StageTable:
        """Returns the table with the options of another table of the same layers, too."""
        if more is None:
            return self
        arrays = (np.concatenate(pair, axis=-1) for pair in zip(self[1:], more[1:], strict=True))
        return StageTable((*self.options, *more.options), *arrays)

    def take(self, kept: Sequence[int]) -> StageTable:
        arrays = (array[:, :, list(kept)] for array in (self.seconds, self.forward, self.once, self.behind))
        return StageTable(tuple(self.options[place] for place in kept), *arrays)


class PlannedStage(NamedTuple):
    """A stage of a plan: its layers, and the number of its option."""

    layers: range
    option: int


class StageSequence(NamedTuple):
    """Stages in order, with the value of their objective [s] and the number of table entries computed.

    bound: no stages have a lower value [s]; nan: nothing is proven.
    """

    stages: tuple[PlannedStage, ...]
    value: float
    visited: int
    bound: float = math.nan
