"""What interleaved schedules share: several chunks a device, and micro-batches that run through them in groups."""

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, nearest_multiple
from meshcast.simulator.scheduling.sequence_slicing import is_interleaved_group, smallest_interleaved_group


class Interleaved(Schedule):
    """Base of the schedules of several chunks a device, through which micro-batches run in groups."""

    least_chunks = 2

    class Options(Schedule.Options):
        group: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches that run through a chunk in a row; by default p."""

    def check(self, shape: PipelineShape) -> None:
        p, m, group = shape.p, shape.m, self.options.group
        if shape.v < self.least_chunks:
            raise PlanError(
                "plan.chunks",
                f"{self.use} needs at least {self.least_chunks} chunks a device",
                "Set chunks: 2, or use pipeline/1f1b",
                shape.v,
            )
        if group is None and m % p:
            remedy = f"{nearest_multiple(m, p)} would work: change batch.global or plan.dp"
            remedy += f"; or plan.schedule: {{use: {self.name}, group: {smallest_interleaved_group(m, p)}}}"
            rule = f"{self.use} needs micro-batches in multiples of pp = {p}, unless group is set"
            raise PlanError("micro-batches per replica", rule, remedy, m)
        if group is not None and not is_interleaved_group(group, m, p):
            rule = f"a group of {self.use} has from pp = {p} to {m} micro-batches"
            if m < p:
                rule = f"{m} micro-batches, fewer than pp = {p}, are one group"
            elif p <= group < m:
                rule = f"{m} micro-batches in groups of {group} leave {m % group} for the last, which has pp = {p}, too"
            raise PlanError("group", rule, f"{smallest_interleaved_group(m, p)} would work", group)
