"""A step rank by rank, with jitter and stragglers: every rank runs its kernels at a pace of its own, and every
collective and message has one.

A pipeline device stands for all ranks of its stage. Here each of its ops has one time for every rank: an array over the
mesh axes inside a stage. A collective over some of these axes begins for its group when the last rank has come;
pipeline messages go from a rank to the rank at the same place of another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from simulator.engine.task_time import task_seconds
from simulator.ir.mesh import Mesh
from simulator.ir.ops import COMPUTE, Collective, Communication, Exchange
from simulator.program.flatten import FlatProgram, flatten
from simulator.program.program import Program
from simulator.scheduling.schedule import ACTION_KINDS, Action, ScheduleItem, actions_of

TRANSFERS = 10
"""Last number of the seed of collectives and messages, which tells their draws from those of kernels."""


@dataclass(frozen=True)
class Pace:
    """How the paces of ranks are drawn.

    jitter: standard deviation of log(duration) of kernels, drawn for every rank and action.
    stragglers: share of the ranks that are slow in every action of a step.
    slow: factor of the durations of their kernels.
    seed: of all draws.
    communication: standard deviation of log(duration) of collectives and messages, drawn for each of them.
    persistent: the same ranks are stragglers in all steps.
    """

    jitter: float = 0.0
    stragglers: float = 0.0
    slow: float = 1.0
    seed: int = 0
    communication: float = 0.0
    persistent: bool = False

    def always(self, shape: tuple[int, ...], devices: int, step: int = 0) -> np.ndarray:
        """Factors of the ranks in all actions of one step [devices, *shape]."""
        draw = np.random.default_rng([self.seed, 0, *([] if self.persistent else [1 + step])])
        return np.where(draw.random((devices, *shape)) < self.stragglers, self.slow, 1.0)

    def transfers(self, step: int, action: Key) -> Callable[[tuple[int, ...]], np.ndarray]:
        """Factors of the collectives and messages of one action, in the order of their issue, each from its shape."""
        draw = np.random.default_rng([self.seed, 1 + step, *action, TRANSFERS])
        return lambda shape: np.asarray(np.exp(self.communication * draw.standard_normal(shape)))

    def once(self, shape: tuple[int, ...], step: int, action: Key) -> np.ndarray:
        """Factors of the ranks in one action of one step, the same in whichever order actions are played."""
        if not self.jitter:
            return np.ones(shape)
        drawn = np.random.default_rng([self.seed, 1 + step, *action]).standard_normal(shape)
        return np.asarray(np.exp(self.jitter * drawn))


@dataclass(frozen=True)
class Unfolded:
    """One step with all its ranks.

    span: from the begin of the first op to the end of the last, on whichever rank [s].
    busy: how long each rank ran kernels of its own [s]; an array over pipeline devices and the axes inside a stage.
    waited: how long it waited for others in collectives that it had reached [s].
    updates: ends of the updates that are actions of the timetable, by number of the action [s].
    """

    span: float
    busy: np.ndarray
    waited: np.ndarray
    updates: Mapping[int, float]


Key = tuple[int, ...]
"""An action by numbers: the draw of its paces depends on nothing else."""


def unfold(
    program: Program, mesh: Mesh, pipeline: str, pace: Pace, step: int = 0, flat: FlatProgram | None = None
) -> Unfolded:
    """Plays one of the steps, each of which draws paces of its own.

    pipeline: the pipeline's axis, if there is one.
    flat: the program op by op, where that is known.
    """
    axes, shape = _inside(mesh, pipeline)
    flat = flat or flatten(program)
    owner = _owners(program, flat)
    last = _last_readers(flat)
    always = pace.always(shape, program.devices, step)
    update_ends = {flat.behind[action] - 1: action for actions in program.timetable.updates for action in actions}
    updates: dict[int, float] = {}
    draws: dict[Key, Callable[[tuple[int, ...]], np.ndarray]] = {}
    queue: dict[int, int] = {}
    for i, numbers in enumerate(flat.queues.values()):
        queue.update(dict.fromkeys(numbers, i))
    ready = [np.zeros(shape) for _ in flat.queues]
    seen: dict[int, np.ndarray] = {}
    clock = [0.0] * program.devices
    busy, waited = np.zeros((2, *always.shape))
    span, action, factor = 0.0, Key(), np.ones(shape)
    rows = zip(flat.ops, flat.seconds, flat.latency, flat.issue, flat.after, flat.device, strict=True)
    for number, (op, seconds, latency, issue, after, device) in enumerate(rows):
        at = ready[queue[number]]
        for other in after:
            at = np.maximum(at, seen[other])
        if issue:
            clock[device] += issue
            at = np.maximum(at, clock[device])
        if joined := _over(op.work, axes):
            come, at = at, np.broadcast_to(at.max(axis=joined, keepdims=True), shape)
            waited[device] += at - come
        if seconds and op.stream == COMPUTE and not isinstance(op.work, Communication):
            if owner[number] != action:
                action = owner[number]
                factor = always[device] * pace.once(shape, step, action)
            own = seconds * factor
            busy[device] += own
            end = at + own
        elif pace.communication and seconds and isinstance(op.work, Communication):
            key = owner[number]
            if key not in draws:
                draws[key] = pace.transfers(step, key)
            # All ranks of a group are in its collective for as long.
            group = tuple(1 if i in joined else n for i, n in enumerate(shape))
            end = at + seconds * draws[key](group)
        else:
            end = at + seconds
        ready[queue[number]] = end
        seen[number] = end + latency if latency else end
        span = max(span, float(end.max()))
        if number in update_ends:
            updates[update_ends[number]] = float(end.max())
        for other in last[number]:
            del seen[other]
    return Unfolded(span, busy, waited, updates)


def stretch_passes(
    program: Program, mesh: Mesh, pipeline: str, pace: Pace, step: int
) -> Callable[[ScheduleItem], float]:
    """Durations of the passes of a step on the slowest rank of their stage, each as if it were alone [s]."""
    _, shape = _inside(mesh, pipeline)
    table = program.timetable
    always = pace.always(shape, program.devices, step)
    known: dict[int, float] = {}
    slots = {action: slot for action, slot in zip(table.actions, table.slot, strict=True)}

    def lasts(turn: ScheduleItem) -> float:
        action = actions_of([turn])[0]
        slot, device = slots[action], table.device(action.stage)
        if slot not in known:
            known[slot] = task_seconds(program.tasks[slot], program.host)
        return known[slot] * float((always[device] * pace.once(shape, step, _key(action))).max())

    return lasts


def _inside(mesh: Mesh, pipeline: str) -> tuple[list[str], tuple[int, ...]]:
    """The axes inside a stage, and their sizes."""
    axes = [axis for axis in mesh.axes if not pipeline or axis not in mesh.parts(pipeline)]
    return axes, tuple(mesh.axes[axis] for axis in axes)


def _key(action: Action) -> Key:
    return action.stage, ACTION_KINDS.index(action.kind), action.microbatch, action.slice


def _over(work: object, axes: list[str]) -> tuple[int, ...]:
    """Which of a stage's axes an op joins."""
    joined = work.axes if isinstance(work, Collective | Exchange) else ()
    return tuple(i for i, axis in enumerate(axes) if axis in joined)


def _owners(program: Program, flat: FlatProgram) -> list[Key]:
    """The action that every op belongs to, messages to the action that sends them; an update belongs to its device."""
    found = [Key()] * len(flat.ops)
    for action, first, behind in zip(program.timetable.actions, flat.first, flat.behind, strict=True):
        found[first:behind] = [_key(action)] * (behind - first)
    for number, _, _ in flat.sent:
        found[number] = found[number - 1]
    for device, numbers in enumerate(flat.updates):
        for number in numbers:
            found[number] = (device,)
    return found


def _last_readers(flat: FlatProgram) -> list[list[int]]:
    """For every op, those whose results nobody needs behind it: their per-rank times are dropped then."""
    reader = list(range(len(flat.ops)))
    for number, after in enumerate(flat.after):
        for other in after:
            reader[other] = number
    found: list[list[int]] = [[] for _ in flat.ops]
    for number, at in enumerate(reader):
        found[at].append(number)
    return found
