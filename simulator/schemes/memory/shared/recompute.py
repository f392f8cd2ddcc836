"""Recomputation: activations are freed after the forward pass and computed again for the backward pass.

There are two forms. `recompute` frees the inside of a module and computes all of it again once the gradient of its
output arrives. `discard_outputs` also frees outputs of chosen ops that other ops read, and repeats those ops just
before the backward pass of the first reader (output-discarding checkpoints of Megatron-Core).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Literal

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.modules import CompositeModule, Layer, Module, Operator, Stage, Unit, every_module
from meshcast.simulator.ir.operators import Cast
from meshcast.simulator.ir.ops import Communication, Fragment, Gemm, HostCopy, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.lowering.rewrite import Rewrite, working_predecessors


def recompute(
    module: Module,
    inner: LowerModule,
    saved_keys: Callable[[Fragment], Set[str]] | None = None,
    early_stop: bool = False,
    compiled: bool = True,
) -> Fragment:
    """Lowers `module` so that its inside is freed after the forward pass and computed again when the gradient has
    arrived.

    Its inputs are kept, and tensors that other modules need; all else lives within a pass.

    saved_keys: returns the keys of memory inside that is kept, too, of the lowered module; ops that only make kept
        memory are not repeated.
    early_stop: whether ops that only make outputs of the module are not repeated either.
    compiled: whether a compiler leaves out the matrix products whose results nothing reads; without it all that are not
        kept are repeated.
    """
    first = inner(module)
    if not first.backward:  # nothing of it is trained, nor below it
        return first
    again = first.copy()
    gradient = list(again.grad_entry.values())
    if saved_keys is not None or early_stop:
        kept = saved_keys(again) if saved_keys else set()
        _skip_kept(again, kept, gradient, early_stop, compiled)
    for mark in again.entry.values():
        mark.after += gradient
    for op in again.forward:
        op.phase, op.name = "R", f"re {op.name}"
    for op in (*first.forward, *again.forward, *again.backward):
        if isinstance(op.work, HostCopy):  # what a pass copies to the host waits there within the pass alone
            op.work = replace(op.work, activations=False)
    before, anew = set(first.forward), set(again.forward)
    inside = {t.key for t in again.tensor_uses if t.made and t.op in anew}
    tensor_uses = [t for t in first.tensor_uses if t.op in before]
    tensor_uses += [
        TensorUse(f"{t.key}~" if t.key in inside and not t.stays else t.key, t.nbytes, t.op, t.made, t.category)
        for t in again.tensor_uses
    ]
    for param, other in zip(again.params, first.params, strict=True):
        param.used = other.used
    return Fragment(
        forward=first.forward,
        backward=[*again.forward, *again.backward],
        entry=first.entry,
        exit=first.exit,
        grad_entry=again.grad_entry,
        grad_exit=again.grad_exit,
        params=again.params,
        shared_weights=again.shared_weights,
        tensor_uses=tensor_uses,
    )


def _skip_kept(again: Fragment, kept: Set[str], gradient: Sequence[Op], early_stop: bool, compiled: bool) -> None:
    """Removes from `again` the forward ops that make only what is `kept`, and those that make what only these read,
    but for matrix products that are not `compiled`. Ops that waited for them wait for the `gradient`.
    """
    written, read = defaultdict[Op, set[str]](set), defaultdict[Op, set[str]](set)
    for tensor_use in again.tensor_uses:
        (written if tensor_use.made else read)[tensor_use.op].add(tensor_use.key)
    asked = {key for keys in read.values() for key in keys}
    wanted = {key for op in again.forward for key in written[op] - asked - kept if not early_stop}
    wanted |= {key for op in again.backward for key in read[op] - kept}
    waited: set[Op] = set()
    dead = Rewrite(again)
    left: set[Op] = set()
    for op in reversed(again.forward):
        # Ops in the middle of an operator write no named tensor.
        dispatched = not compiled and bool(waited) and isinstance(op.work, Gemm) and not written[op] <= kept
        if written[op] & wanted or dispatched or (not written[op] and op in waited):
            _shorten(op, written[op] & wanted)
            wanted |= read[op] - kept
            waited |= working_predecessors(op)
        else:
            left.add(op)
            dead.swap(op, [], gradient)
    # An op with several outputs may be repeated for those that are not kept.
    forward = set(again.forward)
    again.tensor_uses = [
        t for t in again.tensor_uses if t.op not in left and not (t.made and t.op in forward and t.key in kept)
    ]
    dead.apply()


def _shorten(op: Op, wanted: Set[str]) -> None:
    """Leaves of a gated activation its function alone, if that is `wanted`, which it saves, and not their product."""
    is_saved = bool(wanted) and not any("@" in key for key in wanted)  # tensors have a layout in their keys
    if is_saved and isinstance(op.work, Memory) and op.work.what == "activation":
        op.work = Memory("gelu", op.work.read // 2, op.work.write)


def discard_outputs(fragment: Fragment, ops: Sequence[Op]) -> None:
    """Changes `fragment` so that the outputs of its forward `ops` are freed after the forward pass.

    The ops are repeated before the first backward op that needs any of the outputs, from the moment at which that op
    could begin. So is communication between them, and communication to and from them whose result is not saved anyway.
    Outputs that no backward op needs are not recomputed; what later slices of a sequence read stays.
    """
    backward = set(fragment.backward)
    staying = {use.key for use in fragment.tensor_uses if use.stays}
    saved = {use.key for use in fragment.tensor_uses if use.op in backward} - staying
    discarded = _with_communication(fragment, ops, saved)
    makers = {
        use.key: use.op for use in fragment.tensor_uses if use.made and use.op in discarded and use.key not in staying
    }
    readers = {use.op for use in fragment.tensor_uses if use.key in makers} & backward
    if not readers:
        return
    place, first = next((i, op) for i, op in enumerate(fragment.backward) if op in readers)
    again = {op: replace(op, name=f"re {op.name}", phase="R", after=[]) for op in fragment.forward if op in discarded}
    for op, other in again.items():
        other.after = [again[before] for before in working_predecessors(op) if before in again] or list(first.after)
    _read_again(fragment, makers, readers, again)
    fragment.backward[place:place] = again.values()


def _read_again(fragment: Fragment, makers: Mapping[str, Op], readers: Set[Op], again: Mapping[Op, Op]) -> None:
    """Lets the readers of tensors wait for the ops that make them again, under other keys.

    makers: by tensor, the op that makes it.
    again: by op, its repetition.
    """
    for use in fragment.tensor_uses:
        if use.op in readers and use.key in makers:
            use.op.after.append(again[makers[use.key]])
    fragment.tensor_uses += [replace(use, op=again[use.op]) for use in fragment.tensor_uses if use.op in again]
    later = {*readers, *again.values()}
    fragment.tensor_uses = [
        replace(use, key=f"{use.key}~") if use.op in later and use.key in makers else use
        for use in fragment.tensor_uses
    ]


ModuleName = Literal[
    "core_attn", "attention", "mlp", "moe", "shared_experts", "layernorm", "norm", "moe_act", "act", "mla_up_proj"
]
"""A module of a layer that is recomputed alone: see `memory/recompute-selective`."""

AGAIN = "recomputed"
"""The mark of a module that is recomputed as a whole."""

DISCARDED = "discarded"
"""The mark of an operator whose outputs are discarded."""


@dataclass(frozen=True)
class Discards:
    """The mark of a composite module inside which outputs are written and read, and can be discarded.

    groups: names of the operators that make them; operators that read from each other form a group.
    """

    groups: tuple[frozenset[str], ...]


def recompute_marks(unit: Unit, modules: Set[str]) -> dict[Module, frozenset[Hashable]]:
    """Marks for the `modules` named in the options: labels of modules, or words of operators (`Operator.modules`).

    Casts of discarded outputs are discarded with them. A group is discarded by the innermost composite module that
    holds all its readers.
    """
    again = [*_outermost(unit, modules)]
    inside = {part for module in again for part in every_module(module) if part is not module}
    operators = unit.operators()
    chosen = [operator for operator in operators if modules & {*operator.modules}]
    written = {tensor.name for operator in chosen for tensor in operator.outs}
    discarded = [
        operator
        for operator in operators
        if operator in chosen or (isinstance(operator, Cast) and operator.ins[0].name in written)
    ]
    discarded = [operator for operator in discarded if operator not in inside]
    readers: dict[str, list[Operator]] = defaultdict(list)
    for operator in operators:
        for tensor in operator.ins:
            readers[tensor.name].append(operator)

    def read_by(group: Iterable[Operator]) -> set[Operator]:
        return {reader for operator in group for tensor in operator.outs for reader in readers[tensor.name]}

    groups: list[list[Operator]] = []
    for operator in discarded:
        joined = [group for group in groups if operator in read_by(group)]
        groups = [group for group in groups if group not in joined] + [[*chain(*joined), operator]]
    homes: dict[Module, list[frozenset[str]]] = defaultdict(list)
    for group in groups:
        homes[_innermost(unit, {*group, *read_by(group)})].append(frozenset(operator.name for operator in group))
    marks: dict[Module, frozenset[Hashable]] = {home: frozenset({Discards(tuple(of))}) for home, of in homes.items()}
    for mark, bearers in ((AGAIN, again), (DISCARDED, discarded)):
        for module in bearers:
            marks[module] = marks.get(module, frozenset()) | {mark}
    return marks


def recompute_marked(module: Module, inner: LowerModule) -> Fragment:
    """Lowers a module as its marks say (`recompute_marks`)."""
    fragment = recompute(module, inner) if AGAIN in module.marks else inner(module)
    for mark in module.marks:
        if mark == DISCARDED:
            for op in fragment.forward:
                op.tag = module.name
        elif isinstance(mark, Discards):
            for group in mark.groups:
                discard_outputs(fragment, [op for op in fragment.forward if op.tag in group])
    return fragment


def _outermost(module: Module, labels: Set[str]) -> Iterator[Module]:
    """Yields the modules with any of these labels that lie inside no other."""
    if module.label in labels:
        yield module
    elif isinstance(module, CompositeModule):
        for child in module.children:
            yield from _outermost(child, labels)


def _innermost(composite: CompositeModule, operators: Set[Operator]) -> CompositeModule:
    """Returns the smallest composite module that holds all `operators`."""
    for child in composite.children:
        if isinstance(child, CompositeModule) and operators <= {*child.operators()}:
            return _innermost(child, operators)
    return composite


def _with_communication(fragment: Fragment, ops: Iterable[Op], saved: set[str]) -> set[Op]:
    """Returns `ops` with the communication between them, communication that brings inputs that are not saved, and
    communication whose result is saved.
    """
    chosen, joined = set(ops), set(ops)
    results = {t.op for t in fragment.tensor_uses if t.made and t.key in saved}
    for op in fragment.forward:
        for comm_chain in _communication_chains(op):
            inside = bool(chosen & working_predecessors(comm_chain[-1]))
            if (op in chosen and (inside or comm_chain[0] not in results)) or (
                inside and op in results and comm_chain[0] is op
            ):
                joined |= set(comm_chain)
    return joined


def _communication_chains(op: Op) -> list[list[Op]]:
    """Returns the chains of collectives that bring an op its inputs, or, if it is communication itself, the chain that
    ends with it: the last op first.
    """
    chains = []
    for last in {op} if isinstance(op.work, Communication) else working_predecessors(op):
        comm_chain: list[Op] = []
        while isinstance(last.work, Communication):
            comm_chain.append(last)
            last = next(iter(working_predecessors(last)), Op("input"))
        if comm_chain:
            chains.append(comm_chain)
    return chains


def mark_layers(stage: Stage, layers: float, mark: str) -> Stage:
    """Returns a stage whose first `layers` layers bear a mark; a run of units of which only some bear it is split in
    two."""
    units: list[Unit] = []
    for unit in stage.units:
        some = int(min(layers, unit.count)) if isinstance(unit, Layer) else 0
        layers -= some
        if some:
            units.append(replace(unit, count=some, marks=unit.marks | {mark}))
        if some < unit.count:
            units.append(replace(unit, count=unit.count - some))
    return replace(stage, units=tuple(units))
