"""From modules to ops: every scheme is asked in turn, and what is left is lowered by default.

``Lowering.lower(module)`` hands the module to the outermost scheme, whose ``inner`` is the next, and so on. Inside
all of them stands the default: an operator becomes its kernels at local sizes, a composite module joins its children by
the collectives that their layouts imply. Producer and readers of every tensor are known from the module tree before any
op exists. Units of a stage share the residual stream only, so each is lowered by itself, and equal units once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate

from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import AnnotatesOperators, ChangesWholeUnits, ShardsStates, schemes_with
from meshcast.simulator.ir.graph_parts import SHARED
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import BatchLossUnit, CompositeModule, Module, Operator, Stage, Unit, Update
from meshcast.simulator.ir.operators import Boundary, Embedding
from meshcast.simulator.ir.ops import READ_BY_HOST, Fragment, HostLaunch, Memory, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.scheme import LowerModule, Scheme
from meshcast.simulator.lowering.operator import lower_operator
from meshcast.simulator.lowering.resharding import Resharding
from meshcast.simulator.lowering.scope import ONE_BY_ONE, HostLaunches, Scope
from meshcast.simulator.lowering.update import lower_update

LoweredUnits = dict[Hashable, UnitRun]
"""Lowered units by what they depend on. Their fragments are shared: whoever adds to one copies it (`Fragment.copy`)."""

HOST_STREAM = "host"
"""The stream of the host's launches, where they are ops."""


class Lowering:
    """Lowers the modules of a stage, or the update of a device, under the `schemes` of a plan (outermost first).

    regather: see `Scope`.
    known: units that were lowered before, for this plan or another; new ones are added.
    fused_gradients: GEMMs add weight gradients to the accumulated ones.
    accumulated: format in which gradients are accumulated; empty: that of the weights.
    forward_only: units have no backward passes, and no weights are trained.
    host: how the host launches ops.
    """

    keeps_modules = False
    """Whether the modules of units are kept in `known`, too, for plans whose other schemes change whole units."""

    def __init__(
        self,
        mesh: Mesh,
        schemes: Sequence[Scheme],
        regather: bool = False,
        known: LoweredUnits | None = None,
        fused_gradients: bool = True,
        forward_only: bool = False,
        accumulated: str = "",
        host: HostLaunches = ONE_BY_ONE,
    ) -> None:
        self.schemes, self.fused_gradients, self.forward_only = tuple(schemes), fused_gradients, forward_only
        self.accumulated = accumulated
        mesh = mesh.with_joined(scheme.over for scheme in schemes_with(schemes, AnnotatesOperators))
        self.scope = Scope(mesh, schemes, regather, host)
        self._known: LoweredUnits = known if known is not None else {}
        traits = regather, fused_gradients, accumulated, forward_only, host
        ordered = tuple(self.scope.keeps_issue_order(view) for view in ("", *mesh.views))
        common = (*traits, tuple(mesh.axes), tuple(mesh.views), ordered)
        keys = [scheme.unit_key if isinstance(scheme, ShardsStates) else scheme.lowering_key for scheme in schemes]
        self.unit_key = (*common, *keys)
        inside = (key for scheme, key in zip(schemes, keys, strict=True) if not isinstance(scheme, ChangesWholeUnits))
        self._modules_key = (*common, *inside)
        self._roles_of_units = {scheme.role for scheme in schemes_with(schemes, ChangesWholeUnits)}
        self._unit: tuple[Unit, Hashable] | None = None
        """The unit that is lowered, and what its modules depend on."""

    def run(self, stage: Stage, embeds: bool = False, within: int = 0) -> StageOps:
        """Lowers a whole stage.

        embeds: its device holds the embedding, in this stage or another.
        within: outermost schemes that are not asked.
        """
        operators = (operator for unit in stage.units for operator in unit.operators())
        embeddings = [operator for operator in operators if isinstance(operator, Embedding)]
        self.scope.embeds = embeds or any(not embedding.tied for embedding in embeddings)
        self.scope.copies_table = any(embedding.tied and bool(embedding.weights) for embedding in embeddings)
        stage_ops = self._lower_stage(stage, within)
        if self.scope.host.waits or self.scope.host.graphed:
            stage_ops.unit_runs[:] = [self._launch_on_host(unit_run) for unit_run in stage_ops.unit_runs]
        return stage_ops

    def run_batch_loss(self, unit: BatchLossUnit) -> UnitRun:
        """Lowers a loss over the samples of a batch. The outputs of its stage, and their gradients, have their place in
        memory before and after it."""
        lowered, held = self._unit_run(unit), list[str]()
        nbytes = 0
        for tensor in unit.stage_outputs:
            border = Boundary("border", (tensor,), (tensor,))
            layout = border.output_layout(tensor, self.scope.division(border))
            held += [key := self.scope.key(tensor, layout), f"d:{key}"]
            nbytes += tensor.nbytes(layout, self.scope.mesh)
        outside = tuple(held)
        run = replace(lowered, nbytes=nbytes, allocated_before=outside, freed_later=outside)
        return self._launch_on_host(run) if self.scope.host.waits else run

    def lower(self, module: Module) -> Fragment:
        """Lowers `module` through all schemes."""
        return self._lower_module(module, 0)

    def _lower_stage(self, stage: Stage, depth: int) -> StageOps:
        if depth < len(self.schemes):
            return self.schemes[depth].lower_stage(stage, lambda part: self._lower_stage(part, depth + 1))
        return StageOps([self._unit_run(unit) for unit in stage.units])

    def _unit_run(self, unit: Unit) -> UnitRun:
        reads = any(getattr(operator, "tied", False) for operator in unit.operators())
        tied = (self.scope.embeds, self.scope.copies_table) if reads else ()
        traits = unit.lowering_key, unit.marks, tied, unit.receives, self.unit_key
        key = traits if unit.lowering_key is not None else unit
        self._unit = None
        if self.keeps_modules and unit.lowering_key is not None:
            marks = unit.marks - self._roles_of_units
            self._unit = unit, ("modules", unit.lowering_key, marks, tied, unit.receives, self._modules_key)
        return replace(self.shared_run(key, lambda: self._lower_unit(unit)), count=unit.count, marks=unit.marks)

    def shared_run(self, key: Hashable, make: Callable[[], UnitRun]) -> UnitRun:
        """Returns the unit run that depends on `key` alone, lowered once for all stages and plans."""
        return remember(self._known, key, make)

    def _launch_on_host(self, unit_run: UnitRun) -> UnitRun:
        waits = self.scope.host.waits

        def launch() -> UnitRun:
            fragment = launch_graphs(unit_run.fragment) if self.scope.host.graphed else unit_run.fragment
            return replace(unit_run, fragment=launch_on_host(fragment, waits) if waits else fragment)

        return replace(unit_run, fragment=self.shared_run(("launched", unit_run.fragment), launch).fragment)

    def _lower_unit(self, unit: Unit) -> UnitRun:
        keys, nbytes = self.scope.enter(unit)
        takes, gives = (tensor.name if tensor is not None else None for tensor in (unit.residual_in, unit.residual_out))
        names = [operator.name for operator in unit.operators()]
        freed_later, allocated_before = (tuple(f"d:{name}.{what}" for name in names) for what in ("found", "left"))
        context = 0
        if unit.context:
            border = Boundary("border", (unit.context,), (unit.context,))
            layout = border.output_layout(unit.context, self.scope.division(border))
            context = unit.context.nbytes(layout, self.scope.mesh)
            if not unit.receives:  # it has its place from the unit on that joins encoder and decoder, or receives it
                shared = (key := self.scope.key(unit.context, layout), f"d:{key}")
                freed_later, allocated_before = (*freed_later, *shared), (*allocated_before, *shared)
        fragment = _use_stream(self.lower(unit), takes, gives, keys, nbytes)
        stream = takes, gives, keys, nbytes[1] or nbytes[0]
        unit_run = UnitRun(
            unit.name, fragment, 1, *stream, freed_later, allocated_before, nbytes[0], context_nbytes=context
        )
        return drop_backward(unit_run) if self.forward_only else unit_run

    def _lower_module(self, module: Module, depth: int) -> Fragment:
        if depth < len(self.schemes):
            inner: LowerModule = lambda part: self._lower_module(part, depth + 1)  # noqa: E731
            return self.schemes[depth].lower(module, inner)
        if isinstance(module, CompositeModule):
            if self._unit is None or module is not self._unit[0]:
                return self._join(module)
            return self.shared_run(self._unit[1], lambda: UnitRun(module.name, self._join(module))).fragment.copy()
        if isinstance(module, Update):
            return lower_update(self.scope, module)
        assert isinstance(module, Operator)
        return lower_operator(self.scope, module, self.fused_gradients, self.accumulated)

    def _join(self, module: CompositeModule) -> Fragment:
        return Resharding(self.scope, module, [self.lower(child) for child in module.children]).fragment


def _use_stream(
    fragment: Fragment,
    takes: str | None,
    gives: str | None,
    keys: tuple[str | None, str | None],
    nbytes: tuple[int, int],
) -> Fragment:
    """Adds the uses of the residual stream, and of its gradient, in the layout of the border of units, where operators
    only slice it from another layout or to another, which is no op."""
    used = {use.key for use in fragment.tensor_uses}
    (taken, passed), forward, backward = keys, fragment.forward, fragment.backward

    def add(key: str, name: str, ops: Sequence[Op], written: bool, size: int) -> None:
        """Adds the use of `key` by the op nearest to the border that has the tensor in another layout."""
        if not ops or key in used:
            return
        having = {use.op for use in fragment.tensor_uses if use.key.startswith(f"{name}@")}
        near = [op for op in ops if op in having] or ops
        fragment.tensor_uses.append(TensorUse(key, size, near[-1 if written else 0], written))

    if taken is not None:
        add(taken, taken.partition("@")[0], forward, False, nbytes[0])
        if takes in fragment.grad_exit:
            add(f"d:{taken}", "d:" + taken.partition("@")[0], backward, True, nbytes[0])
    if passed is not None:
        add(passed, passed.partition("@")[0], forward, True, nbytes[1])
        if gives in fragment.grad_entry:
            add(f"d:{passed}", "d:" + passed.partition("@")[0], backward, False, nbytes[1])
    return fragment


def drop_backward(unit_run: UnitRun) -> UnitRun:
    """Drops the backward pass of a unit: tensors are freed after their last use in the forward pass.

    Slices of sequences pass keys and values on to the next slice, in as many bytes as their gradients, which backward
    passes hand to the slice before.
    """
    fragment, freed, allocated = unit_run.fragment, unit_run.freed_later, unit_run.allocated_before
    forward, passed = {*fragment.forward}, {*freed, *allocated}
    tensor_uses = [use for use in fragment.tensor_uses if use.op in forward]
    tensor_uses += [
        replace(use, op=fragment.forward[-1], made=use.key in allocated)
        for use in fragment.tensor_uses
        if use.key in passed
    ]
    params = [replace(param, trained=False) for param in fragment.params]
    kept = Fragment(
        fragment.forward, [], fragment.entry, fragment.exit, {}, {}, params, fragment.shared_weights, tensor_uses
    )
    return replace(unit_run, fragment=kept, allocated_before=freed, freed_later=allocated)


GRAPH_LAUNCHES = 1.0
"""Time of the host to launch a CUDA graph of modules of a layer, over that of an op of the framework: the autograd
function of its replay, copies of inputs and of gradients to where the graph reads them, views of its results and
cudaGraphLaunch are some seven calls, as many as an op (`Graphed` in transformer_engine/pytorch/graph.py @d0067d0da)."""


def launch_graphs(fragment: Fragment) -> Fragment:
    """Returns the fragment in which the host launches each CUDA graph with the first of its ops.

    A graph holds all ops in turn that are in graphs; so parts of a layer one behind the other share one. What schemes
    put between two ops of the same part is in its graph, too.
    """
    launched = fragment.copy()
    for issued in (launched.forward, launched.backward):
        working = [op for op in issued if op.work is not None]
        parts = [op.graph for op in working]
        before = list(accumulate(parts, _take_last))
        behind = list(accumulate(reversed(parts), _take_last))[::-1]
        running = False
        for op, last, following in zip(working, before, behind, strict=True):
            inside = bool(last) and last == following
            if inside or op.graph:
                op.launches = 0.0 if running or op.graph == SHARED else GRAPH_LAUNCHES
            running = inside or bool(op.graph)
    return launched


def _take_last(last: str, part: str) -> str:
    return part or last


def launch_on_host(fragment: Fragment, waits: frozenset[str]) -> Fragment:
    """Returns the fragment with an op on the stream of the host before each of its ops, which waits for it.

    waits: operations at which the host itself waits, of `Memory`.

    Where no token is dropped, the host must know how many tokens each expert has before it can launch their kernels: it
    waits for the router, and all that was launched before it has ended (`cudaStreamSynchronize` in the token
    dispatchers of Megatron-Core, megatron/core/transformer/moe/token_dispatcher.py). Where ranks exchange their counts
    (`READ_BY_HOST`), it waits for these (`cpu()` behind the all-to-all of counts in parallel_forward_once of
    MegaBlocks, megablocks/layers/moe.py; `count_by_gate` of FastMoE, fmoe/functions.py). Nothing is then left in the
    queue of launches, and the kernels of the experts begin in turn as the host launches them.

        host      launch norm | launch router | (waits)      | launch permute | launch dispatch | ...
        compute                 norm            router                          permute

    Of packed documents it reads the lengths before it rotates queries and keys without a fused kernel, so it waits for
    all that was launched before (`tolist` in _apply_rotary_pos_emb_thd, megatron/core/models/common/embeddings/
    rope_utils.py of Megatron-Core to core_v0.19.0).

    Without such waits the times of all launches are known beforehand, and the engine adds them up (`Program.host`).
    """
    launched = fragment.copy()
    for issued in (launched.forward, launched.backward):
        counted = any(op.tag == READ_BY_HOST for op in issued)
        issued[:] = [part for op in issued for part in _launch(op, waits, counted)]
    return launched


def _launch(op: Op, waits: frozenset[str], counted: bool) -> list[Op]:
    """Returns an op between its launch and the host's wait: for what it reads, or for its result.

    counted: ranks exchange the counts that the host needs, for which it waits in place of the router.
    """
    is_forward = isinstance(op.work, Memory) and not op.work.backward and op.phase in "FR"
    wait = op.work.what if is_forward and op.work.what in waits else ""  # type: ignore[union-attr]
    launched, before = [op], list(op.after)
    if op.issued:
        launch = Op(f"launch {op.name}", HOST_STREAM, HostLaunch(op.launches), [], op.phase, op.when)
        op.after, op.launches = [*op.after, launch], 0.0
        launched = [launch, op]
    if wait and wait != "router":
        launched.insert(0, Op(f"wait before {op.name}", HOST_STREAM, HostLaunch(0.0), before, op.phase, op.when))
    elif op.tag == READ_BY_HOST if counted and "router" in waits else wait:
        launched.append(Op(f"wait for {op.name}", HOST_STREAM, HostLaunch(0.0), [op], op.phase, op.when))
    return launched
