"""Stages and updates that are equal in all that they do, of which the first stands for all: jobs that differ in what
has no effect are lowered to equal ops, and whatever is made of these is then made once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

from meshcast.simulator.ir.ops import Fragment, Op, Param, SideOps, StageOps, TensorUse, UnitRun


class EqualOps:
    """The first of all stages, and of all updates, that are equal."""

    def __init__(self) -> None:
        self._stages: dict[Hashable, StageOps] = {}
        self._fragments: dict[Hashable, Fragment] = {}
        self._first: WeakKeyDictionary[Fragment, Fragment] = WeakKeyDictionary()

    def find_fragment(self, fragment: Fragment) -> Fragment:
        """Returns the first fragment that is equal to this one."""
        first = self._first.get(fragment)
        if first is None:
            first = self._first[fragment] = self._fragments.setdefault(_list_fragment(fragment), fragment)
        return first

    def find_stage(self, stage_ops: StageOps) -> StageOps:
        """Returns the first stage that is equal to this one. Ops that are formed at run time, and losses of a batch,
        are equal to no others."""
        sides = (stage_ops.ahead, stage_ops.behind, stage_ops.again)
        if stage_ops.batch_loss is not None or any(side.formed for part in sides for side in part):
            return stage_ops
        key = (
            tuple((self.find_fragment(run.fragment), *_list_run(run)) for run in stage_ops.unit_runs),
            _list_sides(sides),
            (stage_ops.whole_weights, stage_ops.whole_gradients, stage_ops.message_shares),
            (stage_ops.shared_gradients, stage_ops.held, stage_ops.shard_messages),
        )
        return self._stages.setdefault(key, stage_ops)


class _Numbers:
    """Ops by their numbers in the order in which they are described, and what describes them."""

    def __init__(self) -> None:
        self._number: dict[Op, int] = {}
        self.described: list[Hashable] = []

    def add(self, op: Op) -> int:
        """Returns the number of an op, which is described before if it is new; as are the ops that it waits for."""
        if op in self._number:
            return self._number[op]
        after = tuple([self.add(other) for other in op.after])
        launched = op.when, op.launches, op.meeting, op.priority, op.graph
        self.described.append((op.name, op.stream, op.work, after, op.phase, op.tag, *launched))
        self._number[op] = number = len(self._number)
        return number

    def add_all(self, ops: Iterable[Op]) -> tuple[int, ...]:
        """Returns the numbers of ops."""
        return tuple([self.add(op) for op in ops])


def _list_fragment(fragment: Fragment) -> Hashable:
    """Returns all that a fragment says."""
    numbers = _Numbers()
    passes = numbers.add_all(fragment.forward), numbers.add_all(fragment.backward)
    ends = (fragment.entry, fragment.exit, fragment.grad_entry, fragment.grad_exit)
    marks = tuple((*named, *numbers.add_all(named.values())) for named in ends)
    params = tuple(_list_param(param, numbers) for param in fragment.params)
    uses = tuple(_list_use(use, numbers) for use in fragment.tensor_uses)
    return passes, marks, params, tuple(fragment.shared_weights), uses, tuple(numbers.described)


def _list_param(param: Param, numbers: _Numbers) -> Hashable:
    sizes = param.size, param.total, param.matrix, param.shape, param.stored, param.split, param.recipe
    shared = param.partial, param.copies, param.view, param.tied, param.trained, param.in_layer
    return param.name, sizes, shared, numbers.add(param.ready), numbers.add(param.used)


def _list_use(use: TensorUse, numbers: _Numbers) -> Hashable:
    return use.key, use.nbytes, numbers.add(use.op), use.made, use.category, use.stays


def _list_run(run: UnitRun) -> tuple[Hashable, ...]:
    """Returns all that a run says besides its ops."""
    stream = run.residual_in, run.residual_out, run.keys, run.nbytes, run.nbytes_in, run.context_nbytes
    return run.name, run.count, run.layers, run.marks, run.allocated_before, run.freed_later, *stream


def _list_sides(parts: Sequence[Sequence[SideOps]]) -> Hashable:
    """Returns all that side ops say, but for those that are formed at run time."""
    numbers, place = _Numbers(), dict[SideOps, int]()
    listed = []
    for number, part in enumerate(parts):
        for side in part:
            after = None
            if side.after is not None:
                earlier, places = side.after
                after = place[earlier], places.tobytes()
            place[side] = len(place)
            ops, waits = numbers.add_all(side.ops), tuple(side.waits)
            listed.append((number, ops, side.params.tobytes(), side.starts.tobytes(), waits, after))
    return tuple(listed), tuple(numbers.described)
