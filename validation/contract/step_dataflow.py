"""Data flow of a whole step: what passes, stages, gradient buckets and updates wait for.

`dataflow` looks into one unit. Between units the program of a step joins passes to passes: through
messages between stages, through gathers and reductions beside the units (`SideOps`), and through the update at the end.
`step_problems` demands of every plan:

1. A forward pass waits for the results of the stages before it, a backward pass for its own forward pass and for the
   gradients of the stages behind it; from another device through a message to this one, of more than zero bytes.
2. A reduction beside the units waits for the complete gradients of all its parameters; the first use of a parameter
   waits for its gather.
3. The update of a device waits for all gradients and all reductions of the device.
4. Each unit of each stage obeys the rules of `meshcast.validation.contract.dataflow`, and so do the ops of the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import COMPUTE, Collective, Communication, Op, Param, UnitRun
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.task import PricedSideOps
from meshcast.simulator.scheduling.schedule import Action
from meshcast.validation.contract.dataflow import run_problems, through_marks
from meshcast.validation.contract.played import Played


def step_problems(played: Played) -> list[str]:
    """Violations of the rules in a step, in words."""
    return [*dict.fromkeys([*unit_problems(played), *StepFlow(played, played.flat).problems()])]


def unit_problems(played: Played) -> Iterator[str]:
    """Violations inside the units of all stages."""
    seen = set()
    for stage, part in product(range(len(played.stages)), range(played.plan.shape.slices)):
        for run in played.stage_ops(stage, part).unit_runs:
            if run.fragment not in seen:
                seen.add(run.fragment)
                borrowers = {name.removeprefix("w") for name in run.fragment.shared_weights}
                yield from (f"{run.name}: {problem}" for problem in run_problems(run, borrowers))


@dataclass(frozen=True)
class StepFlow:
    """Dependencies of the op instances of a step.

    flat: the step, op by op.
    """

    played: Played
    flat: FlatProgram

    def problems(self) -> Iterator[str]:
        """Violations between units."""
        yield from self.pass_problems()
        yield from self.side_problems()
        yield from self.update_problems()

    @cached_property
    def awaited(self) -> list[int]:
        """For each instance a bit for every instance that it waits for, itself included: those named, and those before
        it on its stream."""
        flat = self.flat
        awaited: list[int] = []
        on_stream: dict[tuple[int, str], int] = defaultdict(int)
        for number, op in enumerate(flat.ops):
            bits = 1 << number | on_stream[flat.device[number], op.stream]
            for other in flat.after[number]:
                bits |= awaited[other]
            awaited.append(bits)
            on_stream[flat.device[number], op.stream] = bits
        return awaited

    def waits(self, number: int, other: int) -> bool:
        return bool(self.awaited[number] >> other & 1)

    @cached_property
    def places(self) -> dict[Action, int]:
        """The number of every action."""
        return {action: number for number, action in enumerate(self.played.program.timetable.actions)}

    @cached_property
    def instances(self) -> list[dict[Op, list[int]]]:
        """Instances of each op in every action. Overlapped passes have theirs in the first of their two actions."""
        table, by_action = self.played.program.timetable, list[dict[Op, list[int]]]()
        for number in range(len(table.actions)):
            if table.slots[table.slot[number]].follows:
                by_action.append(by_action[-1])
                continue
            here: dict[Op, list[int]] = defaultdict(list)
            for at in self.played.ops(number):
                here[self.flat.ops[at]].append(at)
            by_action.append(here)
        return by_action

    # --------------------------------------------------------------------------------------------- passes

    def pass_problems(self) -> Iterator[str]:
        """Passes that do not wait for what they read, and results that come without a message."""
        for action, number in self.places.items():
            for giver in self._same_stage(action):
                if giver in self.places:
                    reads, writes = self._kernels(action, number), self._kernels(giver, self.places[giver])
                    if not reads or not writes or not self.waits(reads[0], writes[-1]):
                        yield f"{action} does not wait for {giver}"
            for giver in self._other_stages(action):
                if giver in self.places:
                    readers, writers = self._readers(action), self._writers(giver)
                    if not readers or not writers:
                        yield f"no op of {action} reads what {giver} writes"
                    elif not all(self.waits(reader, other) for reader in readers for other in writers):
                        yield f"{action} does not wait for {giver}"
                    elif not self._is_sent(readers, action, giver):
                        yield f"{action} waits for no message of {giver}, which another device runs"

    @staticmethod
    def _same_stage(action: Action) -> Iterator[Action]:
        """Actions of the same stage and micro-batch whose results a pass reads; not every schedule has all of them."""
        if action.kind == "F":
            # Later positions of a sequence attend to earlier ones.
            yield action._replace(slice=action.slice - 1)
        elif action.kind in ("B", "BW"):
            yield from (action._replace(kind=kind) for kind in "FR")
            yield from (action._replace(kind=kind, slice=action.slice + 1) for kind in ("B", "BW"))
        elif action.kind == "W":
            yield action._replace(kind="B")

    def _other_stages(self, action: Action) -> Iterator[Action]:
        """Actions of other stages whose results a pass reads."""
        schedule, shape = self.played.plan.schedule, self.played.plan.shape
        if action.kind == "F":
            yield from (action._replace(stage=stage) for stage in schedule.predecessors(shape, action.stage))
        elif action.kind in ("B", "BW"):
            behind = (other for other in range(shape.stages) if action.stage in schedule.predecessors(shape, other))
            yield from (action._replace(stage=stage, kind=kind) for stage in behind for kind in ("B", "BW"))

    def _kernels(self, action: Action, number: int) -> list[int]:
        """Instances of the kernels of a pass, in issue order."""
        phases = {"F": "F", "R": "R", "B": "BR", "W": "W"}.get(action.kind, "BWR")
        numbers = (at for op, some in self.instances[number].items() if self._is_kernel(op, phases) for at in some)
        return sorted(numbers)

    @staticmethod
    def _is_kernel(op: Op, phases: str) -> bool:
        return op.stream == COMPUTE and op.work is not None and op.phase in phases

    def _readers(self, action: Action) -> list[int]:
        """Instances of the ops that read the result of another stage."""
        run = self._runs(action)[0 if action.kind == "F" else -1]
        frag = run.fragment
        ops, marks, key = (
            (frag.forward, frag.entry, run.residual_in)
            if action.kind == "F"
            else (frag.backward, frag.grad_entry, run.residual_out)
        )
        mark = marks[key or ""]
        return self._instances_of([op for op in ops if mark in through_marks(op)], self.places[action], 0)

    def _writers(self, action: Action) -> list[int]:
        """Instances of the ops that write the result for another stage."""
        run = self._runs(action)[-1 if action.kind == "F" else 0]
        frag = run.fragment
        ends, key = (frag.exit, run.residual_out) if action.kind == "F" else (frag.grad_exit, run.residual_in)
        return self._instances_of(with_work(ends[key or ""]), self.places[action], -1)

    def _instances_of(self, ops: Iterable[Op], number: int, copy: int) -> list[int]:
        """Instances of ops in the n-th copy of their unit that an action runs; -1: the last one."""
        here = self.instances[number]
        return [here[op][copy] for op in ops if op.work is not None and op in here]

    def _is_sent(self, readers: list[int], action: Action, giver: Action) -> bool:
        """Whether the readers are on the device of the giver, or wait for a message to theirs."""
        table, flat = self.played.program.timetable, self.flat
        here, there = (table.device_of[self.places[place]] for place in (action, giver))
        sent = [at for at, source, target in flat.sent if (source, target) == (there, here)]
        sent = [at for at in sent if flat.ops[at].name == f"send {giver}"]
        return here == there or (bool(sent) and all(self.waits(reader, sent[0]) for reader in readers))

    # ------------------------------------------------------------------------------------------ side ops

    def side_problems(self) -> Iterator[str]:
        """Gathers beside the units that end after their first reader, and reductions that begin before their input is
        complete."""
        for action, number in self.places.items():
            task = self.played.task(number)
            for ahead, sides in ((True, task.ahead), (False, task.behind)):
                # A pair of passes has the side ops of both in its first action.
                if sides and self._runs_side_ops(action, number, ahead):
                    left = {op: iter(some) for op, some in self.instances[number].items()}
                    for side in sides:
                        yield from self._side_problems(side, left, action, ahead)

    def _runs_side_ops(self, action: Action, number: int, ahead: bool) -> bool:
        """Whether the side ops of an action are of its own pass: not, of a pair, of the other one."""
        slot = self.played.program.timetable.slots[self.played.program.timetable.slot[number]]
        if ahead:
            again = bool(self.played.stage_ops(action.stage, action.slice).again) and slot.partner is None
            return slot.first and (action.kind == "F" or (again and action.kind in ("B", "BW")))
        return slot.last and action.kind in ("BW", "W")

    def _side_problems(
        self, side: PricedSideOps, left: Mapping[Op, Iterator[int]], action: Action, ahead: bool
    ) -> Iterator[str]:
        backward = action.kind != "F"
        params = [*self._params(action, backward)]
        places = [self.places[place] for place in (action, action._replace(kind="B")) if place in self.places]
        for op, numbers in zip(side.ops, np.split(side.params, side.starts[1:]), strict=True):
            at = next(left[op])
            for param, copy, kernels in (params[number] for number in numbers.tolist()):
                ends = kernels if ahead and backward else with_work(param.used if ahead else param.ready)
                touching = [number for place in places for number in self._instances_of(ends, place, copy)]
                if ahead and not all(self.waits(number, at) for number in touching):
                    yield f"{param.name} of {action} is read before {op} has brought it"
                elif not ahead and not all(self.waits(at, number) for number in touching):
                    yield f"{op} of {action} does not wait for the gradient of {param.name}"

    def _params(self, action: Action, backward: bool) -> Iterator[tuple[Param, int, list[Op]]]:
        """Parameters of a stage by their numbers, each with the turn in which a pass runs this copy of its unit, and
        the kernels of the unit's backward pass. Equal units of several runs may share a fragment."""
        runs = self._runs(action)
        for number, run in enumerate(runs):
            others = runs[number + 1 :] if backward else runs[:number]
            before = sum(other.count for other in others if other.fragment is run.fragment)
            kernels = [op for op in run.fragment.backward if op.stream == COMPUTE and op.work is not None]
            for copy in range(run.count):
                turn = before + (run.count - 1 - copy if backward else copy)
                yield from ((param, turn, kernels) for param in run.fragment.params)

    def _runs(self, action: Action) -> list[UnitRun]:
        return self.played.stage_ops(action.stage, action.slice).unit_runs

    # -------------------------------------------------------------------------------------------- updates

    def update_problems(self) -> Iterator[str]:
        """Updates that do not wait for a gradient or a reduction of their device, and messages of zero bytes."""
        flat, counts = self.flat, self.played.counts
        for op in counts:
            if isinstance(op.work, Communication) and op.work.nbytes <= 0:
                yield f"{op} sends zero bytes"
        makers = {op for op in counts if makes_gradients(op)}
        for device, update in enumerate(flat.updates):
            gradients = [at for at, op in self.played.instances(device) if op in makers]
            for step in (at for at in update if "adam" in flat.ops[at].name):
                for at in gradients:
                    if at < step and not self.waits(step, at):
                        yield f"the update of device {device} does not wait for {flat.ops[at]}"


def with_work(end: Op) -> list[Op]:
    """An op, or the ops that a mark joins."""
    return [end] if end.work is not None else [op for op in through_marks(end) if op.work is not None]


def makes_gradients(op: Op) -> bool:
    """Whether an op makes weight gradients, or reduces them after the backward pass."""
    reduces = isinstance(op.work, Collective) and op.work.operation in ("all_reduce", "reduce_scatter", "reduce")
    return op.phase == "W" or (op.phase == "U" and reduces)
