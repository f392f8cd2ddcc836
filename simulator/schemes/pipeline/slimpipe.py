"""SlimPipe: 1F1B over slices of equal length, whose devices exchange attention so that all slices take equally long.

The order is that of 1F1B over slices: the activations of little more than one micro-batch are held, and warm-up and
cool-down consist of passes of slices. Causal attention makes late slices slower than early ones. At any time the
devices have slices from all over a sequence, so a device with a late one sends its queries, with keys and values of
some earlier tokens, to one with an early one, which returns its part of the output: both then compute the mean.

Per layer and slice of q tokens that attend to x keys more or fewer than the mean: q tokens of queries and x tokens of
keys and values go one way, q tokens of output the other; backward, the gradient of the output goes along, and gradients
of queries, keys and values return. For s slices: bubble (p-1)(t_f + t_B)/s [s] (t_f, t_B: forward and whole backward
pass of a micro-batch on a device), p - i + s - 1 slices in flight on device i; v times less with v chunks a device.

Not modelled: which devices exchange (neighbours here), keys and values that are sent ahead, waiting for the partner, an
exchange for recomputed attention, and the vocabulary shared among devices.

References: Li et al. 2025, arXiv 2504.14519 (from its abstract: the exchanged bytes follow from the balance).
"""

from collections.abc import Hashable, Iterable
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape
from meshcast.simulator.scheduling.sequence_slicing import SliceCount, SlicedSchedule, sliced_1f1b, sliced_1f1b_forms
from meshcast.simulator.schemes.pipeline.shared.slice_exchange import exchange_attention


class SlimPipe(SlicedSchedule):
    paper = Paper(
        "arXiv:2504.14519",
        "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context LLM Training",
        2025,
    )

    class Options(SlicedSchedule.Options):
        slices: SliceCount = 4
        """Number of slices of equal length."""

    @property
    def lowering_key(self) -> Hashable:
        return self.use, self.axes, self.options.slices

    def check(self, shape: PipelineShape) -> None:
        """Any number of chunks and slices works."""

    def check_job(self, job: Any) -> None:
        if job.framework.attention != "flash":
            rule = f"{self.use} adds up outputs of attention by their log-sum-exp, which flash kernels save"
            raise PlanError("framework.set.attention", rule, "Use flash", job.framework.attention)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return sliced_1f1b(shape, device)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, CoreAttention) or self.mesh.size(self.over) == 1:
            return inner(module)
        return exchange_attention(module, inner, self.over)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        return sliced_1f1b_forms(setting, len(self.slices))
