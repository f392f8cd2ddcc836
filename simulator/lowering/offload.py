"""Offloading to host memory or disks, as rewrites of lowered ops: activations between the two passes of a unit (such
as a layer), optimizer states between two updates.

Copies run during computation, to the host on a stream and back on another. The activations of a unit are copied out
while the next unit computes; the unit after that waits until the copy has finished. They are copied back during the
next unit's backward pass. So the GPU holds the activations of at most two units at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.modules import Update
from meshcast.simulator.ir.ops import (
    BYTES,
    Fragment,
    HostCopy,
    HostUpdate,
    Memory,
    Op,
    SideOps,
    StageOps,
    TensorUse,
    UnitRun,
)
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.lowering.update import UPDATE

OUT, IN, HOST = "memory-out", "memory-in", "memory-update"
"""Streams: copies to the host, copies back to the GPU, and the update on the host."""

Saved = dict[str, int]
"""Activations saved for the backward pass of a unit: bytes by memory key."""


def offload_activations(stage_ops: StageOps, mark: str, to: str, chosen: Collection[str] | None = None) -> StageOps:
    """Rewrites `stage_ops` so that the saved activations of units with `mark` are offloaded between their passes.

    The unit before the loss keeps its activations, since its backward pass follows at once. The last unit of any other
    stage copies out its activations itself after its forward pass, and back when its gradient has arrived.

    to: host memory or disks.
    chosen: names of the tensors that are offloaded; None: all are.
    """
    unit_runs: list[UnitRun] = []
    before: Saved = {}
    for unit_run, following in zip(stage_ops.unit_runs, [*stage_ops.unit_runs[1:], None], strict=True):
        after = following if following and following.residual_in else None
        saved = saved_activations(unit_run) if mark in unit_run.marks else {}
        saved = {key: size for key, size in saved.items() if chosen is None or key.partition("@")[0] in chosen}
        last = {} if after and not after.residual_out else saved
        before = before if unit_run.residual_in else {}
        copies = _divide_copies(unit_run.count, before, saved, last)
        for place, (count, previous, mine) in enumerate(copies):
            copies_own = after is None and place == len(copies) - 1
            fragment = _offload_unit(unit_run, mine, previous, copies_own, to)
            unit_runs.append(replace(unit_run, fragment=fragment, count=count))
        before = last
    return replace(stage_ops, unit_runs=unit_runs)


def _divide_copies(count: int, before: Saved, saved: Saved, last: Saved) -> list[tuple[int, Saved, Saved]]:
    """Divides equal units in a row by what they offload: numbers of units, what the unit before each of them saved, and
    what it saves itself.

    before: of the unit before the first.
    last: what the last saves.
    """
    if count > 1 and saved:
        return [part for part in [(1, before, saved), (count - 2, saved, saved), (1, saved, last)] if part[0]]
    if before or saved:
        return [part for part in [(1, before, last), (count - 1, {}, {})] if part[0]]
    return [(count, {}, {})]


def saved_activations(unit_run: UnitRun) -> Saved:
    """Finds the tensors that both passes of a unit use, except parameters, gradients and what other units also use."""
    fragment = unit_run.fragment
    forward, backward = set(fragment.forward), set(fragment.backward)
    others = {t.key for t in fragment.tensor_uses if t.stays or t.category in ("parameters", "gradients")}
    others |= {unit_run.keys[1] or "", *unit_run.allocated_before, *unit_run.freed_later}
    both = {t.key for t in fragment.tensor_uses if t.op in forward} & {
        t.key for t in fragment.tensor_uses if t.op in backward
    }
    saved: Saved = {}
    for tensor_use in fragment.tensor_uses:
        if tensor_use.key in both - others and tensor_use.nbytes:
            saved[tensor_use.key] = max(tensor_use.nbytes, saved.get(tensor_use.key, 0))
    return saved


def _offload_unit(unit_run: UnitRun, saved: Saved, previous: Saved, copies_own: bool, to: str) -> Fragment:
    """Returns the fragment of a unit whose `saved` activations are offloaded, and during whose passes those of the
    `previous` unit are copied.

    copies_own: the unit copies its saved activations, since no later unit of the stage does.
    to: host memory or disks.
    """
    if not saved and not previous:
        return unit_run.fragment
    offloaded = unit_run.fragment.copy()
    backward = set(offloaded.backward)
    offloaded.tensor_uses = [
        replace(t, key=f"{t.key}~") if t.key in saved and t.op in backward else t for t in offloaded.tensor_uses
    ]
    grads = [offloaded.grad_entry[unit_run.residual_out]] if unit_run.residual_out in offloaded.grad_entry else []
    begin: Op | None = None
    if saved and copies_own:
        result = offloaded.exit[unit_run.residual_out or ""]
        offloaded.forward.append(_copy(saved, [result], "F", to))
        begin = back = _copy(saved, grads, "B", to)
        for tensor_use in offloaded.tensor_uses:
            if tensor_use.op in backward and tensor_use.key.removesuffix("~") in saved:
                tensor_use.op.after.append(back)
        offloaded.backward.insert(0, back)
    if previous:
        inputs = [offloaded.entry[unit_run.residual_in]] if unit_run.residual_in in offloaded.entry else []
        _copy_beside(
            offloaded, offloaded.forward, _copy(previous, inputs, "F", to), (offloaded.exit, unit_run.residual_out)
        )
        _copy_beside(
            offloaded, offloaded.backward, _copy(previous, grads, "B", to), (offloaded.grad_exit, unit_run.residual_in)
        )
    for key, nbytes in saved.items():
        offloaded.tensor_uses.append(TensorUse(key, nbytes, offloaded.forward[-1]))
        # Where this unit copies nothing, the next unit has copied them back during its backward pass.
        restored = TensorUse(f"{key}~", nbytes, begin or offloaded.backward[0], begin is not None, "activations")
        offloaded.tensor_uses.append(restored)
    return offloaded


def _copy_beside(offloaded: Fragment, ops: list[Op], copy: Op, gate: tuple[dict[str, Op], str | None]) -> None:
    """Copies activations of the previous unit during the `ops` of a pass. gate: exits of the pass, and that which waits
    for the copy, too."""
    assert isinstance(copy.work, HostCopy)
    exits, name = gate
    ops.insert(0, copy)
    if name in exits:
        exits[name] = Op(f"{copy.name} of the previous unit", after=[exits[name], copy], phase=copy.phase)
    key, nbytes = f"{copy.name} {copy.phase}", copy.work.nbytes
    offloaded.tensor_uses += [TensorUse(key, nbytes, op, op is copy, "activations") for op in (copy, ops[-1])]


def _copy(saved: Saved, after: list[Op], phase: str, to: str) -> Op:
    """Makes the op that copies activations to the host in a forward pass, and back in a backward pass."""
    back = phase != "F"
    name, stream = ("copy in", IN) if back else ("copy out", OUT)
    return Op(name, stream, HostCopy(sum(saved.values()), back, to, activations=True), list(after), phase)


def update_on_host(
    module: Update,
    fragment: Fragment,
    weights: float,
    to: str,
    gradients_on_host: bool = False,
    delayed: bool = False,
    share: float = 1.0,
    by_parameter: bool = False,
) -> Fragment:
    """Rewrites the update of states that are kept on the host: gradients are copied there, CPUs update the states, and
    weights are copied back.

    weights: bytes per element of the weights that are copied back; 0 if none are.
    to: where the states are kept; from disks they are read into host memory, and written back, piece by piece.
    gradients_on_host: the gradients are on the host already and are not copied.
    delayed: the states are updated beside the passes of the next step, see `delayed_update`.
    share: of the states; the GPU updates the rest at the same time, and has room for what that takes.
    by_parameter: each parameter is copied while others are updated.
    """
    fragment.tensor_uses = _scale_workspace(fragment.tensor_uses, 1 - share)
    rewrite = Rewrite(fragment)
    for op in fragment.forward:
        if not isinstance(op.work, Memory):
            continue
        stays, (read, write) = _divide_kernel(op, op.work, share)
        if op.work.what == "adam":
            part = _find_host_part(module, read, write, weights, to)
            part = replace(part, sent=0) if gradients_on_host else part
            pieces = part.divide(count_parameters(module, read / module.read) if by_parameter else 1)
            ops = [step for piece in pieces for step in piece.make_ops(op.after, delayed)]
            rewrite.swap(op, [*stays, *ops], [*stays, *ops[-1:]])
        elif gradients_on_host:
            there = Op(op.name, HOST, HostUpdate(read, write), list(op.after), op.phase)
            rewrite.swap(op, [*stays, there], [*stays, there])
    return rewrite.apply()


@dataclass(frozen=True)
class HostPart:
    """A part of an update on the host.

    sent: bytes of gradients that are copied to the host before; 0: they are there.
    update: of the states.
    back: bytes of weights that are copied to the GPU behind it; 0: none are.
    """

    sent: int
    update: HostUpdate
    back: int

    def divide(self, pieces: int) -> list[HostPart]:
        """Returns equal pieces of it."""
        if pieces == 1:
            return [self]
        figures = (self.sent, self.update.read, self.update.write, self.update.loaded, self.update.stored, self.back)
        ends = [[i * figure // pieces for i in range(pieces + 1)] for figure in figures]
        parts = ([end[i + 1] - end[i] for end in ends] for i in range(pieces))
        return [HostPart(sent, HostUpdate(*update), back) for sent, *update, back in parts]

    def make_ops(self, after: Sequence[Op], delayed: bool) -> list[Op]:
        """Returns its ops, each after that before. delayed: without the update itself."""
        ops = [Op("copy gradients", OUT, HostCopy(self.sent), list(after), "U")] if self.sent else []
        if not delayed:
            ops.append(Op("adam on the host", HOST, self.update, ops[-1:] or list(after), "U"))
        if self.back:
            ops.append(Op("copy weights", IN, HostCopy(self.back, True), ops[-1:] or list(after), "U"))
        return ops


def _divide_kernel(op: Op, work: Memory, share: float) -> tuple[list[Op], tuple[int, int]]:
    """Returns what a kernel leaves to the GPU, if anything, and the bytes read and written for a share of its work."""
    if share == 1.0:
        return [], (work.read, work.write)
    kept = replace(work, read=round(work.read * (1 - share)), write=round(work.write * (1 - share)))
    return [replace(op, work=kept)], (work.read - kept.read, work.write - kept.write)


def _find_host_part(module: Update, read: int, write: int, weights: float, to: str) -> HostPart:
    """Returns the part of an update that reads and writes so many bytes; see `update_on_host`."""
    elements = round(read / module.read)
    sent, back = elements * module.grad_bytes, round(elements * weights)
    disks = (read - sent, write - back) if to == "nvme" else (0, 0)
    return HostPart(sent, HostUpdate(read, write, *disks), back)


def count_parameters(module: Update, elements: float) -> int:
    """Counts the parameters that have so many elements of all that a device holds."""
    trained = [(count, count * param.size) for param, count in module.params if param.trained]
    whole = sum(size for _, size in trained)
    return max(1, round(sum(count for count, _ in trained) * elements / whole)) if whole else 1


def _scale_workspace(tensor_uses: Iterable[TensorUse], share: float) -> list[TensorUse]:
    """Returns tensors of an update of which the GPU does a share."""
    scaled = [replace(use, nbytes=round(share * use.nbytes)) if use.key == UPDATE else use for use in tensor_uses]
    return [use for use in scaled if use.nbytes]


def delayed_update(elements: int, framework: Any) -> SideOps:
    """Makes the update on the host of so many elements from the gradients of the step before, which nothing in a step
    waits for but its own end.
    """
    states = BYTES[framework.main_weights] + framework.states.element_bytes(framework.moments)
    cast = BYTES[framework.weights] if framework.weights != framework.main_weights else 0
    work = HostUpdate(elements * (states + BYTES[framework.gradients]), elements * (states + cast))
    op = Op("adam on the host, of the step before", HOST, work, [], "U", "first")
    return SideOps([op], np.zeros(0, int), np.zeros(1, int))
