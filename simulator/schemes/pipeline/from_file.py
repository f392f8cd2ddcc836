"""torch.distributed.pipelining: the order of a CSV file as torch writes it, checked and played like any other schedule.

The file has a row a rank and a cell a step; `2F0` is the forward pass of micro-batch 0 through stage 2 (B: whole
backward pass; I, W: gradients of inputs, of weights; an empty cell: idle). It fixes which rank has which stage and the
numbers of ranks and micro-batches. Idle cells are ignored: a pass begins as soon as its inputs have arrived.

    0F0,0F1,,,0B0,0B1
    ,1F0,1B0,1F1,1B1

References: `_dump_csv` of torch.distributed.pipelining,
https://docs.pytorch.org/docs/stable/distributed.pipelining.html.
"""

from functools import cached_property

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.torch_schedule import TorchSchedule, read_csv
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, ScheduleItem


class FromFile(Schedule):
    paper = Paper(
        "https://docs.pytorch.org/docs/stable/distributed.pipelining.html", "torch.distributed.pipelining", 2024
    )

    backward_kinds = ("BW", "B", "W")
    pairs_passes = True

    class Options(Schedule.Options):
        path: str
        """The CSV file; it fixes the chunks of a device."""

    @cached_property
    def torch_schedule(self) -> TorchSchedule:
        return read_csv(self.options.path)

    def chunks_per_device(self) -> int:
        return self.torch_schedule.chunks

    def device(self, shape: PipelineShape, stage: int) -> int:
        return self.torch_schedule.devices[stage]

    def order(self, shape: PipelineShape, device: int) -> list[ScheduleItem]:
        return self.torch_schedule.orders[device]

    def check(self, shape: PipelineShape) -> None:
        schedule = self.torch_schedule
        for name, wanted, stated in (
            ("pp", len(schedule.rows), shape.p),
            ("chunks", schedule.chunks, shape.v),
            ("micro-batches per replica", schedule.microbatches, shape.m),
        ):
            if stated != wanted:
                rule = (
                    f"{schedule.where} is a schedule of {len(schedule.rows)} ranks with {schedule.chunks} stages each"
                )
                rule += f" and {schedule.microbatches} micro-batches"
                raise PlanError(name, rule, f"{name} = {wanted} would work, or another file", stated)
        if self.options.chunks not in (1, schedule.chunks):
            rule = f"{schedule.where} has {schedule.chunks} stages a rank"
            raise PlanError("plan.chunks", rule, "Leave chunks out: the file fixes it", self.options.chunks)
