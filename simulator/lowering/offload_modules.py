"""Offloading of what chosen modules of a layer save, module by module (Megatron-Core's fine-grained offloading)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.modules import Operator, Stage, Unit
from meshcast.simulator.ir.ops import Fragment, HostCopy, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.lowering.offload import IN, OUT, saved_activations

EXPERT_OPERATORS = ("expert.up", "expert.act", "expert.down")


def _select_named(*names: str) -> Callable[[Operator], bool]:
    return lambda operator: operator.name in names


SELECTORS: Mapping[str, Callable[[Operator], bool]] = {
    "attn_norm": _select_named("norm1"),
    "qkv_linear": lambda operator: any(tensor.name == "norm1" for tensor in operator.ins),
    "core_attn": lambda operator: operator.label == "core_attn",
    "attn_proj": _select_named("proj"),
    "mlp_norm": _select_named("norm2"),
    "expert_fc1": _select_named("expert.up"),
    "moe_act": lambda operator: "moe_act" in operator.modules,
    "fused_group_mlp": _select_named(*EXPERT_OPERATORS),
}
"""Operators of a layer by the words for modules."""


@dataclass(frozen=True)
class SavedByModule:
    """The mark of a unit for a module whose saved tensors are offloaded.

    module: its word.
    tensors: names of the tensors that it saves; inputs: those of them that it reads.
    kept: those of them that other modules save, too, which stay on the GPU.
    buffers: what begins the keys of its other saved buffers.
    """

    module: str
    tensors: frozenset[str]
    inputs: frozenset[str]
    kept: frozenset[str]
    buffers: frozenset[str]

    def saves(self, key: str) -> bool:
        """Returns whether it saves the buffer with this memory key."""
        return name_tensor(key) in self.tensors or key.rpartition(".")[0] in self.buffers


def name_tensor(key: str) -> str:
    """Returns the name of the tensor with this memory key."""
    return key.partition("@")[0]


@dataclass(frozen=True)
class ModuleCopy:
    """What is copied of a module of a unit.

    saved: its saved buffers; freed: those of them that no other module keeps on the GPU.
    early: whether it is copied back during the backward pass of the unit behind, and not of its own.
    """

    module: SavedByModule
    saved: tuple[tuple[str, int], ...]
    freed: frozenset[str]
    early: bool

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.saved)


def mark_modules(stage: Stage, modules: Sequence[str], mark: str) -> Stage:
    """Returns a stage whose layers that bear a mark bear also what their chosen modules save."""
    units = [
        replace(unit, marks=unit.marks | {*_find_saved(unit, modules)}) if mark in unit.marks else unit
        for unit in stage.units
    ]
    return replace(stage, units=tuple(units))


def _find_saved(unit: Unit, modules: Sequence[str]) -> Iterable[SavedByModule]:
    chosen = {module: [*filter(SELECTORS[module], unit.operators())] for module in modules}
    all_chosen = {operator for operators in chosen.values() for operator in operators}
    others = _name_saved(operator for operator in unit.operators() if operator not in all_chosen)
    for module, operators in chosen.items():
        tensors = _name_saved(operators)
        inputs = tensors & {tensor.name for operator in operators for tensor in operator.ins}
        if operators:
            names = frozenset(operator.name for operator in operators)
            yield SavedByModule(module, tensors, inputs, tensors & others, names)


def _name_saved(operators: Iterable[Operator]) -> frozenset[str]:
    return frozenset(tensor.name for each in operators for tensor in (*each.saved_tensors, *each.saved_for_weights))


class UnitTurn(NamedTuple):
    """A unit of a stage in its turn.

    number: of its run.
    mine: what is copied of it; previous: of the unit before, what is copied back during its backward pass.
    alone: whether no unit behind it copies back what it saved.
    """

    number: int
    mine: tuple[ModuleCopy, ...]
    previous: tuple[ModuleCopy, ...]
    alone: bool


def offload_modules(stage_ops: StageOps, to: str, least: int, share: float) -> StageOps:
    """Rewrites `stage_ops` so that what marked modules save is copied out once they have computed, and back before
    their backward pass.

    What the unit before the loss saves stays, since its backward pass follows at once.

    to: host memory or disks. least: bytes of a tensor from which on it is offloaded.
    share: of the copies of a pass, in its order, which are made; the others stay on the GPU.
    """
    runs = stage_ops.unit_runs
    copies = [_find_copies(unit_run, least) for unit_run in runs]
    unit_runs: list[UnitRun] = []
    for turn, similar in groupby(_plan_turns(runs, copies, share)):
        unit_run = runs[turn.number]
        fragment = _UnitCopies(unit_run, copies[turn.number], to).rewrite(turn)
        unit_runs.append(replace(unit_run, fragment=fragment, count=len(list(similar))))
    return replace(stage_ops, unit_runs=unit_runs)


def _plan_turns(runs: Sequence[UnitRun], copies: Sequence[tuple[ModuleCopy, ...]], share: float) -> list[UnitTurn]:
    """Returns the units of a stage. copies: what can be copied of each unit of a run; share: see `offload_modules`."""
    numbers = [number for number, unit_run in enumerate(runs) for _ in range(unit_run.count)]
    behind = [runs[number] if runs[number].residual_in else None for number in numbers[1:]] + [None]
    stays = [unit_run is not None and not unit_run.residual_out for unit_run in behind]
    total = sum(len(copies[number]) for number, kept in zip(numbers, stays, strict=True) if not kept)
    room, before = total - int(total * (1 - share)), tuple[ModuleCopy, ...]()
    turns: list[UnitTurn] = []
    for place, number in enumerate(numbers):
        mine = () if stays[place] else copies[number][:room]
        room -= len(mine)
        turns.append(UnitTurn(number, mine, before if runs[number].residual_in else (), behind[place] is None))
        before = tuple(copy for copy in mine if copy.early)
    return turns


def _find_copies(unit_run: UnitRun, least: int) -> tuple[ModuleCopy, ...]:
    """Returns what can be copied of a unit, in the order of its forward pass. least: see `offload_modules`."""
    fragment, saved = unit_run.fragment, saved_activations(unit_run)
    copies: dict[tuple[int, str], ModuleCopy] = {}
    for mark in (mark for mark in unit_run.marks if isinstance(mark, SavedByModule)):
        mine = {key: nbytes for key, nbytes in saved.items() if nbytes >= least and mark.saves(key)}
        if mine:
            readers = _find_users(fragment, fragment.backward, mine)
            before, behind = fragment.backward[: readers[0]], fragment.backward[readers[-1] + 1 :]
            freed = frozenset(key for key in mine if name_tensor(key) not in mark.kept)
            copy = ModuleCopy(mark, tuple(mine.items()), freed, _count_flops(before) <= _count_flops(behind))
            copies[_find_end(fragment, fragment.forward, copy), mark.module] = copy
    return tuple(copies[place] for place in sorted(copies))


def _find_users(fragment: Fragment, ops: Sequence[Op], keys: Collection[str]) -> list[int]:
    """Returns the places of the ops of a pass that use any of these buffers."""
    users = {use.op for use in fragment.tensor_uses if use.key in keys}
    return [place for place, op in enumerate(ops) if op in users]


def _find_end(fragment: Fragment, forward: Sequence[Op], copy: ModuleCopy) -> int:
    """Returns the place in a forward pass behind which a module is copied: the last op that reads its inputs."""
    inputs = [key for key, _ in copy.saved if name_tensor(key) in copy.module.inputs]
    return _find_users(fragment, forward, inputs or [key for key, _ in copy.saved])[-1]


def _count_flops(ops: Iterable[Op]) -> float:
    return sum(op.work.flops for op in ops if op.work is not None)


class _UnitCopies:
    """A unit while copies are added to it.

    found: all copies that could be made of it, whose modules say when those of the unit before may be copied back.
    """

    def __init__(self, unit_run: UnitRun, found: Sequence[ModuleCopy], to: str) -> None:
        self.unit_run, self.to = unit_run, to
        self.fragment = unit_run.fragment.copy()
        self.passes = list(self.fragment.forward), list(self.fragment.backward)
        self.ends = {copy.module.module: self._find_last_reader(copy) for copy in found}
        gradient = self.fragment.grad_entry.get(unit_run.residual_out or "")
        self.gradient = [gradient] if gradient else []

    def _find_last_reader(self, copy: ModuleCopy) -> Op:
        keys = [key for key, _ in copy.saved]
        return self.passes[1][_find_users(self.fragment, self.passes[1], keys)[-1]]

    def rewrite(self, turn: UnitTurn) -> Fragment:
        """Returns the unit with its copies."""
        _, mine, previous, alone = turn
        if not mine and not previous:
            return self.unit_run.fragment
        fragment, backward = self.fragment, set(self.passes[1])
        readers = {copy: _find_users(fragment, self.passes[1], dict(copy.saved)) for copy in mine}
        freed = {key for copy in mine for key in copy.freed}
        fragment.tensor_uses = [
            replace(use, key=f"{use.key}~") if use.key in freed and use.op in backward else use
            for use in fragment.tensor_uses
        ]
        for copy in mine:
            self._copy_out(copy)
            self._bring_back(copy, [self.passes[1][place] for place in readers[copy]], alone or not copy.early)
        for copy in previous:
            self._copy_in_of_previous(copy)
        return fragment

    def _copy(self, copy: ModuleCopy, after: Sequence[Op], phase: str) -> Op:
        name, stream = ("out", OUT) if phase == "F" else ("in", IN)
        work = HostCopy(copy.nbytes, phase != "F", self.to, activations=True)
        return Op(f"copy {name} {copy.module.module}", stream, work, list(after), phase)

    def _copy_out(self, copy: ModuleCopy) -> None:
        end = self.passes[0][_find_end(self.fragment, self.passes[0], copy)]
        out = self._copy(copy, [end], "F")
        self.fragment.forward.insert(self.fragment.forward.index(end) + 1, out)
        self.fragment.tensor_uses += [TensorUse(key, nbytes, out) for key, nbytes in copy.saved]

    def _bring_back(self, copy: ModuleCopy, readers: Sequence[Op], itself: bool) -> None:
        """Adds what the backward pass of a unit finds in memory. itself: whether the unit copies it back."""
        begin = self.passes[1][0]
        if itself:
            begin = self._copy(copy, self.gradient, "B")
            self.fragment.backward.insert(0, begin)
            for op in readers:
                op.after.append(begin)
        for key, nbytes in copy.saved:
            # A tensor that stays is copied back to another place.
            place = f"{key}~" if key in copy.freed else f"{key}~{copy.module.module}"
            uses = [TensorUse(place, nbytes, begin, itself, "activations")]
            if key not in copy.freed:
                uses.append(TensorUse(place, nbytes, readers[-1], False, "activations"))
            self.fragment.tensor_uses += uses

    def _copy_in_of_previous(self, copy: ModuleCopy) -> None:
        """Copies back what a module of the previous unit saved, once that module of this unit is done."""
        end = self.ends.get(copy.module.module)
        back = self._copy(copy, [end] if end else self.gradient, "B")
        backward, exits = self.fragment.backward, self.fragment.grad_exit
        backward.insert(backward.index(end) + 1 if end else 0, back)
        if (name := self.unit_run.residual_in or "") in exits:
            exits[name] = Op(f"{back.name} of the previous unit", after=[exits[name], back], phase=back.phase)
        uses = (TensorUse(back.name, copy.nbytes, op, op is back, "activations") for op in (back, backward[-1]))
        self.fragment.tensor_uses += uses
