"""ZeRO-Offload: the weights stay on the GPU, gradients and optimizer states are sharded over the ranks' hosts.

As in ZeRO stage 2 the gradients of a unit are reduce-scattered after its backward pass. Every rank copies its 1/N
to its host while the backward pass goes on, and the host's processors update its shard. The updated weights are copied
back and all-gathered. One rank offloads everything, without collectives.

    backward      unit 3 ...   unit 2 ...   unit 1 ...
    data             reduce-scatter 3   reduce-scatter 2   reduce-scatter 1
    memory-out                    gradients 3   gradients 2   gradients 1
    memory-update                                                           Adam
    memory-in                                                                      weights    all-gather

The GPU holds 2 bytes per parameter, the weights, and the gradients of the unit that computes and of the unit before it;
the hosts hold 16/N with fp32 gradients. Per step a rank's link carries a g/N out and w/N in, for g bytes of gradients,
w of weights and a micro-batches.

With `delayed_update` the update of a step runs beside the passes of the next step, which uses weights that are a step
old; the updated weights are copied back after these passes. A step then takes the longer of both. The paper delays from
step 40 on; steps before that are as without the option.

Not modelled: copies of weights that begin while the update goes on; the host's accumulation over micro-batches.

References: Ren et al. 2021, arXiv 2101.06840, sections 4 and 5.
"""

from collections.abc import Iterable, Mapping

from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper, SchemeOptions
from meshcast.simulator.lowering.offload import delayed_update
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme


class ZeroOffload(ShardedScheme):
    paper = Paper("arXiv:2101.06840", "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021)
    shards = ("optimizer", "gradients")
    updates_weights = False

    class Options(SchemeOptions):
        delayed_update: bool = False
        """Whether the host updates the states during the passes of the next step."""

    @property
    def delays_update(self) -> bool:  # type: ignore[override]
        return bool(self.options.delayed_update)

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        return {"cpu": 1.0} if state in self.shards else {}

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        if self.options.delayed_update:
            elements = sum(
                count * param.size / self.mesh.size(self.update_shards(param))
                for param, count in stage_ops.params()
                if param.trained
            )
            update = [delayed_update(round(elements), self.framework)] if elements else []
            stage_ops.ahead = [*stage_ops.ahead, *update]
        return stage_ops

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * setting.grad_bytes + setting.weight_bytes
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "section 4.2: as ZeRO stage 2")
        yield ClosedForm("state_bytes_per_parameter", 2, "section 4.1: the GPU holds the 16-bit weights alone")
