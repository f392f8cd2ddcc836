"""The points of a space: groups of layers, pipelines, and choices between the passes."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshcast.experiments.search.space.fields import MESH_ORDERS
from meshcast.experiments.search.space.scheme_keys import DATA_OPTIONS, DEFAULTS, NamedScheme

WORDS = ("schedule", "recompute", "data", "offload", "mesh_order", *DEFAULTS)
"""Fields of a point whose values are words, or numbers with a meaning each."""

OVERLAPS = ("overlap_tp", "overlap_dp", "updated_weights", "overlap_pp")
"""Fields of a point that say what overlaps, which a framework may rule out."""

OF_OTHER_VALUES = ("recomputed", "shard")
"""Fields of a point whose values depend on those of others."""


class LayerGroup(NamedTuple):
    """Values of the fields that change the ops of a layer."""

    tp: int
    cp: int
    ep: int
    micro: int
    recompute: str | tuple[str, ...]
    sequence_parallel: bool
    overlap_tp: bool
    offload: tuple[str, ...]
    etp: int | None = None
    """Expert tensor parallel; None: the default of a plan."""
    tensor: NamedScheme | None = None
    """Tensor scheme that the plan names; None: Megatron's."""
    sequence: NamedScheme = DEFAULTS["sequence"]
    expert: NamedScheme = DEFAULTS["expert"]

    @property
    def schemes(self) -> tuple[NamedScheme | None, ...]:
        """The schemes of its tensor, sequence and expert parallelism."""
        return self.tensor, self.sequence, self.expert

    @property
    def degrees(self) -> tuple[Any, ...]:
        """Its degrees, with the schemes of each."""
        return self.tp, self.cp, self.ep, self.etp, self.schemes

    @property
    def names_schemes(self) -> bool:
        """Whether a plan has to name one of them. Its micro-batches are lowered as they are: chunks and tiles are not
        affine in their size."""
        return self.schemes != tuple(DEFAULTS.values())

    @property
    def least_micro(self) -> int:
        """The smallest micro-batch with which its plans may exist."""
        return self.micro if self.names_schemes else 1

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share the matrices of an expert."""
        return self.etp or (1 if self.ep > 1 else self.tp)


class Place(NamedTuple):
    """Number of stages of a pipeline, and axes of the mesh, outermost first."""

    pp: int
    mesh_order: str = MESH_ORDERS[0]


class Stages(NamedTuple):
    """Number of stages, and orders of the mesh, of pipelines that may, or may not, recompute some of their layers."""

    pp: int
    mesh_orders: tuple[str, ...]
    recomputes: bool


class Pipeline(NamedTuple):
    """Values of the fields of the pipeline."""

    pp: int
    schedule: str
    chunks: int
    partition: str | tuple[int, ...]
    recomputed: int | None = None
    """Layers of every stage that are recomputed with full recompute; None: all."""
    mesh_order: str = MESH_ORDERS[0]
    """Axes of the mesh, outermost first."""

    @property
    def order(self) -> Pipeline:
        """The pipeline without what its order of passes does not depend on."""
        return self._replace(recomputed=None, mesh_order=MESH_ORDERS[0])

    @property
    def place(self) -> Place:
        """Where the ranks of the pipeline are."""
        return Place(self.pp, self.mesh_order)


class StepChoice(NamedTuple):
    """Values of the fields that act between the passes."""

    data: str
    overlap_dp: bool
    updated_weights: bool
    overlap_pp: bool
    shard: int | None = None
    """Data-parallel ranks that share one copy of the states; None: all."""
    options: tuple[Any, ...] = (*DATA_OPTIONS.values(),)
    """Values of the options of the data scheme that keys of a plan state, in the order of `DATA_OPTIONS`."""

    def option(self, key: str) -> Any:
        """Returns the value of an option of the data scheme by its key."""
        return self.options[OPTION_NUMBERS[key]]


OPTION_NUMBERS = {key: number for number, key in enumerate(DATA_OPTIONS)}


def values_of_point(group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> dict[str, Any]:
    """Returns the values of a point by the names of its fields."""
    parts = group._asdict() | pipeline._asdict() | step._asdict()
    return parts | dict(zip(DATA_OPTIONS, parts.pop("options"), strict=True))


DEGREES = ("tp", "cp", "pp")
"""Fields of a point that divide the GPUs."""
