"""ZeRO-Infinity: every state is sharded over the ranks, and the shards lie in host memory or on disks.

Before the all-gather of a module every rank copies its own 1/N of the weights from its host; after the reduction of
the gradients it copies its own 1/N back, where gradients are accumulated over micro-batches and the host's processors
update the shard. As each rank copies a part of every weight, the links of all ranks to their hosts work at once: a
module arrives N times as fast as from one owner that would broadcast it. How far ahead modules are asked for, and the
limit of elements in memory, are those of ZeRO stage 3 (`parameter_coordinator`).

    memory-in     shard 2   shard 3                     shard 2   shard 1
    data                 gather 2   gather 3                  gather 2   gather 1        reduce-scatter 3 ...
    compute       unit 1 .......... unit 2 ....         unit 3 ......... unit 2 ....
    memory-out                                                                   shard of gradients 3 ...

The network carries the bytes of ZeRO stage 3: 3 a (N-1)/N M for M bytes of weights and of gradients, a micro-batches. A
rank's link to its host carries 2 M/N in and M/N out per micro-batch. The GPU holds the modules that compute, and no
states. Without overlap the efficiency of a step is ait bw / (ait bw + peak), with ait = sequence x micro-batch
FLOP/byte, bw of all links together, and the peak of one GPU.

One rank offloads everything, without collectives.

A linear layer that is too large for a GPU runs as `tiles` smaller ones (`tiling`).

Not modelled: the host's accumulation over micro-batches.

References: Rajbhandari et al. 2021, arXiv 2104.07857, sections 4, 5 and 6.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.parameter_coordinator import CoordinatedScheme, CoordinatorOptions
from meshcast.simulator.schemes.data.shared.tiling import tile_linear_layers


class ZeroInfinity(CoordinatedScheme):
    paper = Paper("arXiv:2104.07857", "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Training", 2021)
    updates_weights = False

    class Options(CoordinatorOptions):
        parameters: Literal["gpu", "cpu", "nvme"] = "cpu"
        """Where shards of the weights lie."""
        optimizer: Literal["cpu", "nvme"] = "cpu"
        """Where gradients and optimizer states lie."""
        tiles: int = Field(default=1, ge=1)
        """Tiles of a linear layer, each of which is gathered and freed on its own."""

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return super().lower_stage(stage, lambda part: tile_linear_layers(inner(part), self.options.tiles))

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        place = self.options.parameters if state == "parameters" else self.options.optimizer
        return {} if place == "gpu" else {place: 1.0}

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "arXiv 1910.02054, section 7.2.2: as ZeRO stage 3")
        yield ClosedForm("state_bytes_per_parameter", 0, "section 5.1: all model states are off the GPU")
