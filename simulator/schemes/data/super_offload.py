"""SuperOffload: ZeRO stage 3 whose hosts update a part of the weights as soon as its gradients are there.

The GPUs hold the sharded weights. A unit's gradients are reduced and copied to the host as in ZeRO-Infinity. In the
last micro-batch of a step a process of its own on the host then updates these states, while the GPU computes the
backward pass of other units. That is speculative: a step whose gradients overflow is rolled back. The updated weights
are copied to the GPU at the end of the step. With `ratio` r the hosts have r of gradients and optimizer states, and the
GPUs update the others at the end of the step. Where gradients are clipped, DeepSpeed waits for their norm first.

    backward        unit 3 ...  unit 2 ...    unit 1 ...
    data               reduce-scatter 3   reduce-scatter 2   reduce-scatter 1
    memory-out                     gradients 3    gradients 2    gradients 1
    memory-update                            Adam 3         Adam 2         Adam 1
    memory-in                                                                     weights

A GPU holds 2/N + 16 (1 - r) / N bytes per parameter, with fp32 gradients, and the units that compute.

Not modelled: steps that are rolled back; sub-groups, of which each is updated at once (here units are); casts on the
GPU, and the smaller buffers of a Superchip's fast link.

References: Lian et al. 2025, arXiv 2509.21271, section 4; DeepSpeed runtime/superoffload/superoffload_stage3.py.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import BYTES, HostUpdate, Op, SideOps, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper
from meshcast.simulator.lowering.offload import HOST
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.parameter_coordinator import CoordinatedScheme, CoordinatorOptions


class SuperOffload(CoordinatedScheme):
    paper = Paper(
        "arXiv:2509.21271", "SuperOffload: Unleashing the Power of Large-Scale LLM Training on Superchips", 2025
    )
    updates_weights = False
    divides_while_loading = True

    class Options(CoordinatorOptions):
        ratio: float = Field(default=1.0, gt=0, le=1)
        """Share of gradients and optimizer states that lies in host memory."""
        clips: bool = False
        """Gradients are clipped, so that the host updates nothing before all of them are there."""

    @property
    def delays_update(self) -> bool:  # type: ignore[override]
        """Whether the host has updated its states before the update at the end of a step."""
        return not self.options.clips

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        return {"cpu": self.options.ratio} if state in ("gradients", "optimizer") else {}

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        if not self.options.clips and (updates := self._update_units(stage_ops)):
            stage_ops.behind = [*stage_ops.behind, updates]
        return stage_ops

    def _update_units(self, stage_ops: StageOps) -> SideOps | None:
        """Returns the updates of units on the host, each once its gradients are there in the last micro-batch."""
        ops, params, first = list[Op](), list[np.ndarray](), 0
        for unit_run in stage_ops.unit_runs:
            owned = unit_run.fragment.params
            trained = np.array([i for i, param in enumerate(owned) if param.trained], int)
            elements = sum(owned[i].size / self.mesh.size(self.update_shards(owned[i])) for i in trained)
            for copy in range(unit_run.count if elements else 0):
                ops.append(Op("adam on the host", HOST, self._update_on_host(elements), [], "W", "last"))
                params.append(first + copy * len(owned) + trained)
            first += unit_run.count * len(owned)
        if not ops:
            return None
        starts = np.cumsum([0, *(len(part) for part in params[:0:-1])])
        return SideOps(ops[::-1], np.concatenate(params[::-1]), starts)

    def _update_on_host(self, elements: float) -> HostUpdate:
        """Returns the update of the host's part of so many elements."""
        framework, mine = self.framework, self.options.ratio * elements
        states = BYTES[framework.main_weights] + framework.states.element_bytes(framework.moments)
        cast = BYTES[framework.weights] if framework.weights != framework.main_weights else 0
        return HostUpdate(round(mine * (states + BYTES[framework.gradients])), round(mine * (states + cast)))

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "arXiv 1910.02054, section 7.2.2: as ZeRO stage 3")
        kept = (2 + 16 * (1 - self.options.ratio)) / n
        yield ClosedForm("state_bytes_per_parameter", kept, "section 4: the GPU holds the 16-bit weights")
