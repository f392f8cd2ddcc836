"""Vocabulary parallelism: 1F1B whose devices all hold 1/p of the embedding and of the output layer.

Without it the last device also has the output layer, and the first the embedding: the more words, the longer the others
wait. Here every device has V/p of the V rows of both. A micro-batch passes the output layer as two passes on all
devices, S and T, between which collectives sum up what softmax needs. They are put between the passes of 1F1B, one
interval behind the other, and the collectives run beside other passes.

With one barrier (`barriers: 1`, Vocab-2 of the paper) S computes logits, their exponentials and the gradient of its
input, all scaled by the sum of its own rows; an all-reduce corrects and adds the gradients up (C1); T computes the
gradient of the weights, and may run later. With two (Vocab-1) S computes logits and exponentials, T both gradients,
which another all-reduce adds up (C2).

    p = 4, `barriers: 1`; S: S of a micro-batch with T of that before
    device 0   F0 F1 F2 F3 S0 F4 S1 S2 B0 S3 F5 B1 S4 F6 ..
    device 3   .. .. .. F0 S0 F1 .. B0 S1 F2 B1 S2 F3 ..

Device i holds p - i + 1 micro-batches of layers with one barrier, p - i + 2 with two, where 1F1B holds p - i; the
bubble is 1F1B's, (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of the layers of a device). S comes
behind a backward pass or a forward pass, as durations of passes say. The embedding's look-ups of all devices are added
up ahead of the first layers, and their gradient is broadcast to all devices.

Not modelled: a broadcast begins on each device by itself once what it sends is there; between S and T exponentials are
kept in 16 bits, as gradients of logits are, not in fp32.

References: Yeung et al. 2024, arXiv 2411.05288, sections 4 and 5; sail-sg/VocabularyParallelism @6191c3bf,
megatron/core/pipeline_parallel/vocab_parallel_schedule.py (--enable-vocab-parallel; two barriers:
--disable-backward-fusion).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    ActionKind,
    PassDurations,
    PipelineSetting,
    PipelineShape,
)
from meshcast.simulator.scheduling.vocabulary import STAGES, ShardsVocabulary, VocabularyShards


class Vocabulary1F1B(ShardsVocabulary):
    paper = Paper("arXiv:2411.05288", "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024)
    needs_durations = True

    class Options(ShardsVocabulary.Options):
        barriers: Literal[1, 2] = 1
        """Collectives between the layers' forward and backward passes of a micro-batch, beside the broadcast to all
        devices."""

    @property
    def early_gradients(self) -> bool:
        return bool(self.options.barriers == 1)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[Action]]:
        behind_backward, ahead = _places_of_shards(shape.p, durations)
        shards = self.shards(shape)
        return [
            [*_Order(shards, shape, device, behind_backward[device], (ahead[device], ahead[0])).actions()]
            for device in range(shape.p)
        ]

    def check(self, shape: PipelineShape) -> None:
        if self.options.chunks != 1 or shape.v not in (1, STAGES):
            rule = f"{self.use} has one chunk of layers a device, beside its shards of embedding and output layer"
            raise PlanError("plan.chunks", rule, "Leave it out", self.options.chunks)
        if shape.forward_only:
            raise PlanError("plan.schemes", f"{self.use} has backward passes", "Use pipeline/1f1b", self.use)

    def check_job(self, job: Any) -> None:
        model = job.model
        plain = not (model.branches or model.mtp or model.streams or model.output or model.cross_attention)
        if model.tied or not plain or getattr(model, "diffusion", None) or job.adapters:
            rule = f"{self.use} shards an embedding and an output layer of their own, of a plain decoder"
            remedy = "Use pipeline/1f1b, or model.tied: false where the embedding is shared"
            raise PlanError("plan.schemes", rule, remedy, self.use)
        if isinstance(job.plan.partition, str) and job.plan.partition != "even":
            rule = f"the stages of {self.use} have layers alone, and as many each"
            raise PlanError("plan.partition", rule, "Use even, or a list of layers", job.plan.partition)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape = setting.shape
        more = 1 if self.early_gradients else 2
        held = [min(shape.m, shape.p - i + more) for i in range(shape.p)]
        yield ClosedForm("layers_in_flight", held, "table of schedules: p + 1 with one barrier, p + 2 with two")


def _places_of_shards(p: int, durations: PassDurations | None) -> tuple[list[bool], list[int]]:
    """Returns for every device whether S comes behind a backward pass, rather than behind a forward pass, and how many
    of them run before the first backward pass, beside the first.

    Each device's S passes end one forward pass ahead of those of the device before, as long as that fits into a
    backward pass.
    """
    forward, backward = 1.0, 2.0
    if durations is not None:
        again = durations.recomputation[0]
        forward, backward = durations.forward[0], again + durations.input_gradients[0] + durations.weight_gradients[0]
        backward = max(backward, forward)
    offset, behind = 0.0, [True]
    while len(behind) < p:
        if offset - forward >= -backward:
            offset -= forward
            behind.append(True)
        else:
            behind += [False, True]
            offset += backward - forward
    behind = behind[:p][::-1]
    ahead = [0]
    for this, following in pairwise(reversed(behind)):
        ahead.append(ahead[-1] + (this or not following))
    return behind, ahead[::-1]


class ShardPasses(NamedTuple):
    """Passes of shards of the vocabulary, and the collectives that are issued before and behind them."""

    ahead: Sequence[Action] = ()
    passes: Sequence[Action] = ()
    behind: Sequence[Action] = ()

    @property
    def in_turn(self) -> tuple[Action, ...]:
        """All of them."""
        return (*self.ahead, *self.passes, *self.behind)


NOTHING = ShardPasses()


class _Order:
    """Makes the order of a device, as the program of the paper does."""

    def __init__(
        self, shards: VocabularyShards, shape: PipelineShape, device: int, behind_backward: bool, ahead: tuple[int, int]
    ) -> None:
        """Prepares the order.

        behind_backward: whether S comes behind a backward pass.
        ahead: S passes before the first backward pass, beside the first, of this device and of the first.
        """
        self.shards, self.shape, self.behind_backward = shards, shape, behind_backward
        self.layers, self.input, self.output = (stages[device] for stages in shards[:3])
        self.ahead, self.most_ahead = ahead
        self.further = 0 if shards.early else 1
        """Further micro-batches in flight."""
        self.forwards = min(shape.p - device, shape.m)
        """Forward passes before the first S."""
        self.next_input = self.next_gradient = self.next_output = 0

    def actions(self) -> Iterator[Action]:
        """Yields the actions of the device."""
        m = self.shape.m
        for _ in range(min(self.shape.p, m) - self.forwards + 1):
            yield from self._look_up().in_turn
        for k in range(self.forwards):
            yield from self._look_up().in_turn
            yield Action(self.layers, "F", k)
        yield from self._run_output().in_turn
        done = self.forwards
        for further in range(1 + self.further):
            yield from (self._run_output() if further else self._look_up() if self.further else NOTHING).in_turn
            yield from self._run_forward(done)
            done += 1
        for i in range(self.ahead):
            if self.next_output < m:
                yield from self._run_output().in_turn
                yield from (self._look_up() if i + 1 >= self.most_ahead else NOTHING).in_turn
        for k in range(m):
            yield from self._run_interval(k, done)
            done += 1
        while self.next_gradient < m:
            yield from self._return_gradient().in_turn
        yield from self._run_output().in_turn if self.next_output == m else ()

    def _run_forward(self, k: int) -> list[Action]:
        """Returns a forward pass of the layers, if it is left."""
        return [Action(self.layers, "F", k)] if k < self.shape.m else []

    def _run_interval(self, k: int, forward: int) -> Iterator[Action]:
        """Yields a backward and a forward pass of the layers, and the passes of the shards of both ends behind one of
        them, before which the collectives are issued that they wait for."""
        shards, backward = self._run_shards(), [Action(self.layers, "BW", k)]
        if self.behind_backward:
            yield from (*shards.ahead, *backward, *shards.passes, *shards.behind, *self._run_forward(forward))
        else:
            yield from (*backward, *shards.ahead, *self._run_forward(forward), *shards.passes, *shards.behind)

    def _run_shards(self) -> ShardPasses:
        """Returns the next passes of the shards of both ends."""
        m, before = self.shape.m, self.next_output
        gradient = before >= self.most_ahead + 2 + self.further and self.next_gradient < m
        returned = self._return_gradient() if gradient else NOTHING
        if before >= m + self.further:
            return returned
        output = self._run_output()
        looked_up = self._look_up() if before >= self.most_ahead + self.further else NOTHING
        ahead, passes = [*returned.ahead, *output.ahead], [*output.passes, *looked_up.passes, *returned.passes]
        return ShardPasses(ahead, passes, [*looked_up.behind, *output.behind])

    def _run_output(self) -> ShardPasses:
        """Returns T of a micro-batch, and S of the next, as far as they are left."""
        k, stage, early = self.next_output, self.output, self.shards.early
        self.next_output += 1
        passes, behind = list[Action](), list[Action]()
        if k:
            passes.append(Action(stage, "W" if early else "BW", k - 1))
        if k < self.shape.m:
            passes += [Action(stage, "F", k), *([Action(stage, "B", k)] if early else [])]
            behind.append(Action(stage, ActionKind.JOIN, k))
        if k and not early:
            behind.append(Action(stage, ActionKind.JOIN_GRADIENTS, k - 1))
        return ShardPasses([Action(stage, ActionKind.SPREAD, k)] if k < self.shape.m else [], passes, behind)

    def _look_up(self) -> ShardPasses:
        """Returns the next forward pass of the embedding, if one is left."""
        k, stage = self.next_input, self.input
        if k == self.shape.m:
            return NOTHING
        self.next_input += 1
        return ShardPasses([], [Action(stage, "F", k)], [Action(stage, ActionKind.JOIN, k)])

    def _return_gradient(self) -> ShardPasses:
        """Returns the next backward pass of the embedding."""
        k, stage = self.next_gradient, self.input
        self.next_gradient += 1
        return ShardPasses([Action(stage, ActionKind.SPREAD, k)], [Action(stage, "BW", k)], [])
