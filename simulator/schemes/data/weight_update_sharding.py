"""Automatic weight-update sharding (XLA): each rank updates its shard of the weights, which are then all-gathered.

A compiler turns the all-reduce of the gradients and the update that every rank repeats into a reduce-scatter, an update
of 1/N of the weights and an all-gather. All tensors are fused into a collective after the backward pass. The
optimizer states stay sharded, or are all-gathered with the weights where other parts of the program expect them whole.

    backward | reduce-scatter gradients | update 1/N | all-gather weights (and states)

A rank sends (N-1)/N (g + w) bytes for g bytes of gradients and w of weights: those of an all-reduce where both have the
same type, and of ZeRO stage 1. The update takes 1/N of its time, and the states 12/N bytes per parameter instead of 12.
Gathered states are stored whole, and cost (N-1)/N of their bytes.

References: Xu et al. 2020, arXiv 2004.13336, sections 3 and 4.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.modules import Module, Update
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, sum_by_axes


class WeightUpdateSharding(DataScheme):
    paper = Paper(
        "arXiv:2004.13336", "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020
    )
    shards = ("optimizer",)

    class Options(SchemeOptions):
        keep_state: Literal["sharded", "gathered"] = "sharded"
        """How the optimizer states are stored between steps."""

    @property
    def overlaps_backward(self) -> bool:
        return False

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        return () if self.options.keep_state == "gathered" else super().shards_at_rest(state, param)

    def update_shards(self, param: Param) -> tuple[str, ...]:
        return super().shards_at_rest("optimizer", param)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, Update) and self.options.keep_state == "gathered":
            main = 0 if self.framework.main_weights == self.framework.weights else BYTES[self.framework.main_weights]
            each = main + self.framework.states.element_bytes(self.framework.moments)
            for axes, elements in sum_by_axes(module.params, lambda param: (self.update_shards(param), param.size)):
                states = Collective("all_gather", elements * each, axes)
                fragment.forward.append(Op("gather states", "data", states, [fragment.exit["parameters"]], "U"))
        return fragment

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, whole = setting.n, self.options.keep_state == "gathered"
        states = 12 / 2 * setting.weight_bytes if whole else 0
        moved = setting.grad_bytes + setting.weight_bytes + states
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "section 4: as many bytes as the all-reduce")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + (12 if whole else 12 / n), "section 4.3: states stay sharded"
        )
        yield ClosedForm(
            "read_by_update", round(8 * setting.weight_bytes / n), "section 3: each rank updates its shard"
        )
