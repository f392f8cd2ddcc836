"""Settings at which the closed forms of tensor, memory and sequence schemes are stated.

The settings of other families are defined with their base classes: `DataSetting`, `ExpertSetting`, `OverlapSetting`,
`PipelineSetting`. The contract suite lowers a layer at each setting and measures what the closed forms predict.
"""

from __future__ import annotations

from typing import Any

from meshcast.hardware.records import dataclass

OptionValues = tuple[tuple[str, Any], ...]
"""Options of a scheme: names and values."""


@dataclass(frozen=True)
class LayerSetting:
    """A GPT layer (multi-head attention, f = 4h, GELU, dropout, unfused attention) on tensor-parallel ranks.

    t: tensor-parallel ranks.
    b: sequences of a micro-batch.
    s: tokens of a sequence.
    h: hidden size.
    a: attention heads.
    regather: all-gathered inputs are all-gathered again in the backward pass.
    grid: ranks along each axis of a scheme of several axes, t in all.
    """

    t: int = 1
    b: int = 1
    s: int = 64
    h: int = 128
    a: int = 8
    regather: bool = True
    grid: tuple[int, ...] = ()

    @property
    def q(self) -> int:
        """Ranks along each side of the square or cube."""
        return self.grid[-1]

    @property
    def d(self) -> int:
        """Depth of the grid: its number of squares."""
        return self.t // self.q**2


@dataclass(frozen=True)
class SequenceSetting:
    """A layer on context-parallel ranks.

    cp: context-parallel ranks, which share every sequence.
    b: sequences of a micro-batch.
    s: tokens of a sequence, over all ranks.
    kv_heads: heads of keys and values.
    h: hidden size, the width of all query heads.
    regather: all-gathered keys and values are all-gathered again in the backward pass.
    heads: heads of queries.
    options: of the scheme.
    grid: ranks along each axis of a scheme of several axes, cp in all.
    frames: of a video, whose layers are a pair; 1: a layer of a model with a single axis of positions.
    """

    cp: int = 1
    b: int = 1
    s: int = 48
    kv_heads: int = 24
    h: int = 192
    regather: bool = True
    heads: int = 24
    options: OptionValues = ()
    grid: tuple[int, ...] = ()
    frames: int = 1

    @property
    def kv_width(self) -> int:
        """Width of all heads of keys, and of values, in elements."""
        return self.h * self.kv_heads // self.heads
