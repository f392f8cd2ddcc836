"""The tensors of a device, step by step, played through the caching allocator.

The first step finds no moments of the optimizer. Its update makes them, in the room that freed activations have left,
so that the second step needs new segments where the first had enough; later steps find what the second left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.allocator import CachedBlock, CachingAllocator
from meshcast.simulator.engine.peak_memory import in_flight
from meshcast.simulator.program.block import TensorKind
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import Flow, Task
from meshcast.simulator.scheduling.schedule import MEETINGS

Place = tuple[int, int]
"""Of a tensor in a task: number of the part, and of the row in the tensors of all of its copies."""
FIRST, LAST = (-1, 0), (-1, 1)
"""Places of what a task takes before its first part, and of what it gives behind the last."""


@dataclass(frozen=True)
class StateTensors:
    """The tensors on a GPU that live through steps, in the order in which a program makes them.

    copied: weights that are freed once `buffers` have their values.
    buffers: of weights and gradients.
    held: what else is there before the first step.
    late: what the first update of the optimizer makes.
    """

    copied: Sequence[TensorKind] = ()
    buffers: Sequence[TensorKind] = ()
    held: Sequence[TensorKind] = ()
    late: Sequence[TensorKind] = ()


class TensorReplay:
    """The tensors of a device in an allocator.

    Attributes:
        allocator: which has all tensors.
        live: those that passes have allocated and not freed, by owner and kind. An owner is a pass of a micro-batch.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.live: dict[Hashable, dict[TensorKind, list[CachedBlock]]] = defaultdict(lambda: defaultdict(list))

    def allocate(self, kind: TensorKind, stream: str = "") -> CachedBlock:
        """Makes a tensor."""
        return self.allocator.allocate(kind[1], stream)

    def free(self, block: CachedBlock) -> None:
        """Frees a tensor."""
        self.allocator.free(block)

    def hold(self, kinds: Iterable[TensorKind]) -> list[CachedBlock]:
        """Makes tensors that stay."""
        return [self.allocate(kind) for kind in kinds]

    def start(self, states: StateTensors) -> None:
        """Makes the states that are there before the first step."""
        copied = self.hold(states.copied)
        self.hold(states.buffers)
        for block in copied:
            self.free(block)
        self.hold(states.held)

    def run(self, owner: Hashable, task: Task, flying: float = 0.0) -> Iterator[Place]:
        """Plays a pass. Before every tensor that is allocated or freed it yields the place.

        flying: bytes of messages beside the pass.
        """
        message = [(flying, "buffers")] if flying else []
        for flow in (*message, *task.inputs):
            yield FIRST
            self._make(owner, _kind_of(flow))
        for number, part in enumerate(task.parts):
            for row, (begins, kind, stream) in enumerate(part.block.tensors * part.count):
                yield number, row
                if begins:
                    self._make(owner, kind, stream)
                else:
                    self._free(owner, kind)
        for flow in (*task.results, *message):
            yield LAST
            self._free(owner, _kind_of(flow))

    def _make(self, owner: Hashable, kind: TensorKind, stream: str = "") -> None:
        if kind[1]:
            self.live[owner][kind].append(self.allocate(kind, stream))

    def _free(self, owner: Hashable, kind: TensorKind) -> None:
        """Frees the latest tensor of a kind. Of a tensor that a pass frees in part, the rest becomes another."""
        category, left = kind
        while left and (match := self._find(owner, (category, left))):
            blocks, nbytes = match
            self.free(blocks.pop())
            self._make(owner, (category, max(nbytes - left, 0)))
            left = max(left - nbytes, 0)

    def _find(self, owner: Hashable, kind: TensorKind) -> tuple[list[CachedBlock], int] | None:
        """Returns the tensors of a kind and their bytes: those of the owner, of another owner, as two passes that
        overlap are a single task, or any of the category; None if there is none."""
        if blocks := self.live[owner].get(kind):
            return blocks, kind[1]
        every = [(other, blocks) for live in self.live.values() for other, blocks in live.items() if blocks]
        same = [(blocks, other[1]) for other, blocks in every if other == kind]
        return next(iter(same or [(blocks, other[1]) for other, blocks in every if other[0] == kind[0]]), None)

    def end_step(self) -> None:
        """Frees what the passes of a step have left: gradients that are computed anew in every step."""
        for live in self.live.values():
            for blocks in live.values():
                for block in blocks:
                    self.free(block)
        self.live.clear()


def _kind_of(flow: Flow) -> TensorKind:
    nbytes, category = flow
    return category, round(nbytes)


def play_first_step(replay: TensorReplay, program: Program, device: int, states: StateTensors) -> None:
    """Plays the first step of a run: states that are there before it, passes, and the update that makes the others."""
    replay.start(states)
    for _ in play_passes(replay, program, device):
        pass
    replay.hold(states.late)
    for _ in play_update(replay, program, device):
        pass
    replay.end_step()


def play_passes(replay: TensorReplay, program: Program, device: int) -> Iterator[tuple[int, Place]]:
    """Plays the passes of a step. Yields before every tensor the number of the action and the place in its task."""
    table = program.timetable
    actions = range(*table.starts[device : device + 2])
    for action, flying in zip(actions, in_flight(program)[actions.start : actions.stop].tolist(), strict=True):
        slot = table.slots[table.slot[action]]
        if slot.kind not in MEETINGS:  # which take no further memory
            owner = slot.stage, table.actions[action].microbatch, table.actions[action].slice
            for place in replay.run(owner, program.tasks[table.slot[action]], flying):
                yield action, place


def play_update(replay: TensorReplay, program: Program, device: int) -> Iterator[Place]:
    """Plays the update behind the passes of a step, if there is any."""
    for update in program.updates[device : device + 1]:
        yield from replay.run("update", update)
