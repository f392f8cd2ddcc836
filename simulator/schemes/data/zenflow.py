"""ZenFlow: ZeRO-Offload whose GPUs update the columns with the largest gradients, and whose hosts the others seldom.

Gradients of the `topk_ratio` k of the columns of every matrix stay on the GPU, which holds their states and updates
them in every step. Those of the others are copied to the host, which adds them up over an `update_interval` of S steps,
and then updates its states once; the weights are copied back. With `overlap_step` that happens beside the passes of the
steps that follow, of which one then takes the longer of its passes and of 1/S of the update. The forecast step is the
mean over an interval.

    step           1      2      ..      S      S+1    S+2   ..
    GPU            Adam k Adam k         Adam k Adam k ..
    memory-out     (1-k) of the gradients in every micro-batch
    memory-update                               Adam (1-k) ............
    memory-in                                                          weights (1-k)

Per step a rank's link carries a (1 - k) g/N out and (1 - k) w/(S N) in, for g bytes of gradients, w of weights and a
micro-batches. A GPU holds 2 + 16 k/N bytes per parameter, with fp32 gradients.

Not modelled: how columns are selected, and what that costs; intervals that adapt to the gradients; warm-up rounds; the
second buffer of gradients on the host with `overlap_step`; selected states on the host (`offload`).

References: Lan et al. 2025, arXiv 2505.12242; DeepSpeed runtime/zenflow/zenflow_stage_1_and_2.py, defaults of
zenflow_config.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, Stage, Update
from meshcast.simulator.ir.ops import Fragment, HostCopy, HostUpdate, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper, SchemeOptions
from meshcast.simulator.lowering.offload import delayed_update
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme


class ZenFlow(ShardedScheme):
    paper = Paper("arXiv:2505.12242", "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates", 2025)
    shards = ("optimizer", "gradients")
    updates_weights = False

    class Options(SchemeOptions):
        topk_ratio: float = Field(default=0.1, ge=0, lt=1)
        """Share of the columns that the GPU updates in every step."""
        update_interval: int = Field(default=4, ge=1, le=10_000, strict=True)
        """Steps from an update of the other columns to the next; the default is that of DeepSpeed's tutorial."""
        overlap_step: bool = False
        """Whether the host updates beside the passes of the steps that follow."""

    @property
    def delays_update(self) -> bool:  # type: ignore[override]
        return bool(self.options.overlap_step)

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        return {"cpu": 1.0 - self.options.topk_ratio} if state in self.shards else {}

    def assumptions(self, model: object) -> Iterable[str]:
        if self.options.update_interval > 1:
            yield f"the mean of {self.options.update_interval} steps, after one of which the host updates its states"

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        if self.options.overlap_step:
            elements = sum(
                count * param.size / self.mesh.size(self.update_shards(param))
                for param, count in stage_ops.params()
                if param.trained
            )
            seldom = round(elements * self.offloaded_to("optimizer")["cpu"] / self.options.update_interval)
            stage_ops.ahead = [*stage_ops.ahead, *([delayed_update(seldom, self.framework)] if seldom else [])]
        return stage_ops

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        interval = self.options.update_interval
        for op in fragment.forward if isinstance(module, Update) else ():
            if isinstance(op.work, HostUpdate):
                op.work = replace(op.work, read=op.work.read // interval, write=op.work.write // interval)
            elif isinstance(op.work, HostCopy):
                op.work = replace(op.work, nbytes=op.work.nbytes // interval)
        return fragment

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * setting.grad_bytes + setting.weight_bytes
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "arXiv 2101.06840, section 4.2: as ZeRO stage 2")
        kept = 2 + 16 * self.options.topk_ratio / n
        yield ClosedForm("state_bytes_per_parameter", kept, "the GPU holds the states of the selected columns")
