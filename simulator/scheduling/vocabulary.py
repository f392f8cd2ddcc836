"""Shards of the vocabulary on all devices of a pipeline, beside the stages that have the layers.

The first and the last stage of a pipeline have the embedding and the output layer, and the last is the slowest. Here
every device holds 1/p of the rows of both (vocabulary parallelism, arXiv 2411.05288), as two stages more. What enters
and leaves them are collectives among all devices, on a stream of their own, while other passes run:

    embedding     F on all devices | JOIN: all-reduce | F of the first layers .. their backward | SPREAD | BW on all
    output layer  F of the last layers | SPREAD: broadcast | F (and B) on all devices | JOIN | backward of the layers
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshcast.simulator.scheduling.schedule import Action, ActionKind, PipelineShape, Schedule

STAGES = 3
"""Of a device: layers, and shards of the embedding and of the output layer."""

BACKWARD = ("BW", "B")
"""Kinds of the passes that compute gradients of inputs."""


class VocabularyShards(NamedTuple):
    """The stages of a pipeline whose devices all hold shards of the vocabulary.

    layers: those with the layers of the model.
    inputs: those with shards of the embedding.
    outputs: those with shards of the output layer.
    early: backward passes of the layers need no gradients that the shards compute behind the JOIN: the shards compute
        those of their input before it, of exponentials of which the sum is not known yet.
    """

    layers: range
    inputs: range
    outputs: range
    early: bool

    def role(self, stage: int) -> str:
        """Returns what a stage holds: ``layers``, ``input`` or ``output``."""
        return "input" if stage in self.inputs else "output" if stage in self.outputs else "layers"

    def needs(self, action: Action) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields the stages and kinds of the actions of a micro-batch that `action` needs beside those of its
        neighbours."""
        first, last, stage, kind = self.layers[0], self.layers[-1], action.stage, action.kind
        role = self.role(stage)
        if role == "layers":
            # The shards on the device of a stage of layers have the same place among theirs.
            if kind == "F" and stage == first:
                yield self.inputs[0], (ActionKind.JOIN,)
            if kind in BACKWARD and stage == last:
                yield self.outputs[-1], (ActionKind.JOIN if self.early else ActionKind.JOIN_GRADIENTS,)
        elif kind == ActionKind.SPREAD:
            yield (first, BACKWARD) if role == "input" else (last, ("F",))
        elif kind == ActionKind.JOIN:
            kinds = ("B", "F") if role == "output" and self.early else ("F",)
            yield from ((other, kinds) for other in (self.inputs if role == "input" else self.outputs))
        elif kind == ActionKind.JOIN_GRADIENTS:
            yield from ((other, BACKWARD) for other in self.outputs)
        elif (kind == "F") == (role == "output"):
            yield stage, (ActionKind.SPREAD,)
        elif kind in ("BW", "W"):
            yield stage, (ActionKind.JOIN,)


class ShardsVocabulary(Schedule):
    """Base of the schedules whose devices all hold shards of the embedding and of the output layer: three stages a
    device, those with layers first, then those of the embedding, then those of the output layer."""

    backward_kinds = ("BW", "B", "W")

    def chunks_per_device(self) -> int:
        return STAGES * super().chunks_per_device()

    @property
    def early_gradients(self) -> bool:
        """See `VocabularyShards.early`."""
        return False

    def shards(self, shape: PipelineShape) -> VocabularyShards:
        """Returns the stages with layers, and those with shards."""
        p = shape.p
        return VocabularyShards(range(p), range(p, 2 * p), range(2 * p, 3 * p), self.early_gradients)

    def predecessors(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        return (stage - 1,) if 0 < stage < shape.p else ()


def find_shards(schedule: Schedule, shape: PipelineShape) -> VocabularyShards | None:
    """Returns the stages that hold shards of the vocabulary; None if one stage has the whole embedding, and one the
    whole output layer."""
    return schedule.shards(shape) if isinstance(schedule, ShardsVocabulary) else None
