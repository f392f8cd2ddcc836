"""Messages between the pipeline devices of a plan whose stages have degrees of their own, or whose replicas differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from fractions import Fraction

from meshcast.hardware.remembered import remembered_by
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import Collective, StageOps, Transfer
from meshcast.simulator.lowering.cross_mesh import BoxGrid, Interval, border_layout, most_received, reshard
from meshcast.simulator.lowering.scatter_gather import has_backward
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.messages import StageEnd, StageMessages


class CrossMeshMessages(StageMessages):
    """Messages between devices of any meshes: cross-mesh resharding where two stages hold different boxes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.ranks.pipeline_axis)
        self.plan = plan

    def traits(self, stages: Sequence[Sequence[StageOps]]) -> Hashable:
        return None

    def results(self, sender: StageEnd, receiver: StageEnd, forward: bool) -> Transfer:
        if not forward and not has_backward(receiver.ops):
            first, other = (int(self.plan.ranks.of_device(end.device)[0]) for end in (sender, receiver))
            return Transfer(0, self.axis, sender.device, receiver.device, ((first, other, 0),))
        before, behind = (sender, receiver) if forward else (receiver, sender)
        joined = replace(self._grid(behind), parts=self._part(before, behind))
        ends = (self._grid(before), joined) if forward else (joined, self._grid(before))
        if ends[0].equals(ends[1]):
            work = super().results(sender, receiver, forward)
            return work if self._on_one_mesh else self._pairwise(work, sender.device, receiver.device)
        stated = sender if forward else receiver
        grid = ends[0] if forward else ends[1]
        nbytes = stated.ops.unit_runs[-1].nbytes * grid.boxes
        pairs = reshard(*ends, nbytes, receiver.ops.message_shares)
        return Transfer(most_received(pairs), self.axis, sender.device, receiver.device, pairs)

    def outputs(self, sender: StageEnd, receiver: StageEnd) -> Transfer:
        ends = self._output_grid(sender), self._output_grid(receiver)
        if self._on_one_mesh or ends[0].equals(ends[1]):
            return super().outputs(sender, receiver)
        assert sender.ops.batch_loss is not None
        pairs = reshard(*ends, sender.ops.batch_loss.nbytes * ends[0].boxes)
        return Transfer(most_received(pairs), self.axis, sender.device, receiver.device, pairs)

    def plain(self, nbytes: int, source: int, target: int) -> Transfer:
        if self._on_one_mesh:
            begin, end = (self.plan.ranks.pipeline_of(device)[1] for device in (source, target))
            return Transfer(nbytes, self.axis, begin, end)
        return self._pairwise(Transfer(nbytes, self.axis, source, target), source, target)

    def among(self, operation: str, nbytes: int, members: Sequence[int]) -> Collective:
        if self._on_one_mesh:
            return super().among(operation, nbytes, [self.plan.ranks.pipeline_of(member)[1] for member in members])
        ranks = tuple(int(self.plan.ranks.of_device(member)[0]) for member in members)
        return Collective(operation, nbytes, (self.axis,), tuple(members), ranks=ranks)

    def _part(self, branch: StageEnd, trunk: StageEnd) -> dict[str, Interval]:
        """Returns the interval of the sequence of the first stage of a trunk that a branch sends; empty if it is all of
        it.

        Stages of a single mesh shard every branch alike, and the trunk holds the shards of all branches.
        """
        pipeline, joining = self._stage_of(trunk)
        _, sending = self._stage_of(branch)
        held, joined = (
            pipeline.model_parts.layers_of(pipeline.model_parts.of_stage(stage)) for stage in (sending, joining)
        )
        model, seq = pipeline.job.model, pipeline.job.batch.sequence or 0
        tokens = [
            (branch.layers, Fraction(n)) for branch, n in zip(model.branches, model.branch_tokens(seq), strict=True)
        ]
        arriving = sum(of for layers, of in tokens if layers)
        begin, layer = Fraction(0), 0
        if self._on_one_mesh or joined.start != model.encoder_layers:
            return {}
        for layers, of in tokens:
            layer += layers
            if layers and held.start < layer:
                return {"s": (begin / arriving, (begin + of) / arriving)} if of < arriving else {}
            begin += of * (layers > 0)
        return {}

    def _stage_of(self, end: StageEnd) -> tuple[Plan, int]:
        """Returns the pipeline that has a stage, and the number of the stage in it."""
        pipeline, stage = self.plan.model_parts.pipeline_of(end.stage)
        return self.plan.every_pipeline[pipeline], stage

    @property
    def _on_one_mesh(self) -> bool:
        """Whether the ranks of all devices of a pipeline are positions of a single mesh."""
        return not self.plan.on(0).mesh.stage

    def _pairwise(self, work: Transfer, source: int, target: int) -> Transfer:
        """Makes a message between devices of equal degrees, rank by rank."""
        ends = (self.plan.ranks.of_device(device).tolist() for device in (source, target))
        pairs = tuple((sender, receiver, work.nbytes) for sender, receiver in zip(*ends, strict=True) if work.nbytes)
        return Transfer(work.nbytes, self.axis, source, target, pairs)

    @remembered_by(lambda messages, end: end.device)
    def _grid(self, end: StageEnd) -> BoxGrid:
        pipeline, stage = self._stage_of(end)
        part = pipeline.model_parts.of_stage(stage)
        return self._make_grid(end, self.plan.on(end.device).model_parts.stage(part))

    def _output_grid(self, end: StageEnd) -> BoxGrid:
        """Returns the boxes of the outputs of a stage behind its last unit."""
        pipeline, stage = self._stage_of(end)
        whole = self.plan.on(end.device).model_parts.stage(pipeline.model_parts.of_stage(stage))
        last = replace(whole.units[-1], residual_in=None)
        return self._make_grid(end, replace(whole, units=(last,)))

    def _make_grid(self, end: StageEnd, stage: Stage) -> BoxGrid:
        device_plan = self.plan.on(end.device)
        layout = border_layout(make_lowering(device_plan).scope, stage)
        return BoxGrid.of(layout, device_plan.mesh, self.axis, int(self.plan.ranks.of_device(end.device)[0]))


def choose_messages(plan: Plan) -> StageMessages:
    """Returns the messages between the devices of a plan, or of one of its heterogeneous replicas."""
    return CrossMeshMessages(plan) if plan.pipelines or plan.stage_plans else StageMessages(plan.ranks.pipeline_axis)
