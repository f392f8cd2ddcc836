"""Scatter-gather of pipeline messages: each tensor-parallel rank sends its share of what all of them hold.

Under plain tensor parallelism each of t ranks holds the whole residual stream at the border of two stages. Each
sends 1/t of it to its counterpart, through its network port if it has any, and the receivers all-gather
the shares among themselves, over NVLink, before their pass begins (Narayanan et al. 2021, arXiv 2104.04473, section
4.1; `scatter_gather_tensors_in_pipeline` of Megatron-LM, `PartitionedTensor` of DeepSpeed). A residual stream that is
sharded (sequence parallelism, grids) has no copies, and is sent as it is.
"""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import Collective, Fragment, Op, StageOps, UnitRun
from meshcast.simulator.lowering.cross_mesh import border_layout
from meshcast.simulator.lowering.lower import Lowering


def scatter_gather(lowering: Lowering, stage: Stage, stage_ops: StageOps, forward: bool, backward: bool) -> StageOps:
    """Returns the ops of a stage that sends shares of its messages, and all-gathers those that it receives.

    forward: whether its input comes from another device; backward: whether the gradient of its output does.
    """
    # The output of an encoder, which passes all stages of a decoder, is sent whole.
    if not (forward or backward) or any(unit_run.context_nbytes for unit_run in stage_ops.unit_runs):
        return stage_ops
    axes, nbytes = _copies(lowering, stage), stage_ops.unit_runs[-1].nbytes
    shares = lowering.scope.mesh.size(axes)
    if shares == 1 or nbytes % shares:
        return stage_ops
    runs = list(stage_ops.unit_runs)
    if forward and (name := runs[0].residual_in):
        runs.insert(0, _gather(lowering, name, runs[0].nbytes_in, axes, "F"))
    if backward and has_backward(stage_ops) and (name := runs[-1].residual_out):
        runs.append(_gather(lowering, name, runs[-1].nbytes, axes, "B"))
    return replace(stage_ops, unit_runs=runs, message_shares=shares)


def has_backward(stage_ops: StageOps) -> bool:
    """Says whether a stage has a backward pass: it holds trained weights, or a stage before it does."""
    return any(unit_run.fragment.backward for unit_run in stage_ops.unit_runs)


def _copies(lowering: Lowering, stage: Stage) -> tuple[str, ...]:
    """Returns the tensor-parallel axes along which ranks hold copies of what enters and leaves a stage."""
    scope = lowering.scope
    sharded = border_layout(scope, stage)
    axes = [axis for scheme in scope.schemes if scheme.family == "tensor" and not scheme.view for axis in scheme.over]
    return tuple(axis for axis in axes if axis not in sharded and scope.mesh.size(axis) > 1)


def _gather(lowering: Lowering, name: str, nbytes: int, axes: tuple[str, ...], phase: str) -> UnitRun:
    """Makes a unit that does nothing but all-gather the residual stream, or (phase B) its gradient.

    What is gathered has its place in memory from the begin of the pass on, as the input of the first unit.
    """

    def make() -> UnitRun:
        came, back = Op(f"{name} in"), Op(f"d{name} in", phase="B")
        whole = lowering.scope.op(
            f"gather {'d' * (phase == 'B')}{name}",
            Collective("all_gather", nbytes, axes),
            [came if phase == "F" else back],
            phase,
        )
        fragment = Fragment([], [], {name: came}, {name: came}, {name: back}, {name: back})
        if phase == "F":
            fragment.forward, fragment.exit = [whole], {name: whole}
        else:
            fragment.backward, fragment.grad_exit = [whole], {name: whole}
        return UnitRun(f"receive {name}", fragment, 1, name, name, (name, name), nbytes, nbytes_in=nbytes)

    return lowering.shared_run(("scatter-gather", name, nbytes, axes, phase), make)
