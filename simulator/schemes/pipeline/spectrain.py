"""SpecTrain: PipeDream's order on weights that are predicted, for when a micro-batch has trained all devices.

The pipeline fills once and every micro-batch updates the weights, as in PipeDream, but no older weights are stashed.
Before each pass a device extrapolates its newest weights W along the smoothed gradient v of the optimizer by the s
updates that are to come, W - s lr v (lr: learning rate), so that both passes of a micro-batch, on all devices, use
estimates of the same weights:

    forward    s = p - 1 - i + floor(i/2)       updates of device i before the backward pass of the micro-batch, and
    backward   s = floor(i/2)                   from then until that of the first device

Of p devices, device i holds p - i micro-batches in flight and the newest weights beside those of a pass: one copy of
the weights more than a pipeline with a flush, where the optimizer has no main weights of its own. A prediction reads
the newest weights and writes a copy [w + c bytes a parameter], then reads copy and moments and writes the copy again
[2 c + v] (w, c: bytes of a weight of the optimizer and of the computation; v: of its moments), by two kernels a tensor,
twice a micro-batch. Time between two updates: the maximum of t_f + t_B over the devices [s], as of PipeDream.

Needs an optimizer with moments, whole on the GPU. Of Adam both moments are read, as XPipe (arXiv 1911.04610) predicts.

Not modelled: a copy back before the update, where the optimizer has no main weights.

References: Chen et al. 2018, arXiv 1809.02839; SpectrainSGDMomentum of facebookresearch/fairscale,
benchmarks/experimental/experimental_async_approaches.py.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import PredictsWeights, ShardsStates
from meshcast.simulator.ir.modules import Module, Unit
from meshcast.simulator.ir.ops import BYTES, Fragment, Memory, Op
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class SpecTrain(Schedule, PredictsWeights):
    paper = Paper(
        "arXiv:1809.02839",
        "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform",
        2018,
    )
    flush = False

    @property
    def predicts_weights(self) -> bool:
        return self.mesh.size(self.over) > 1

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        return one_forward_one_backward(forward, backward, shape.p - 1 - device)

    def microbatches_per_update(self, shape: PipelineShape) -> int:
        return 1

    def weight_version(self, shape: PipelineShape, device: int, microbatch: int) -> int:
        """Returns the newest version at its backward pass, the later of its two."""
        return microbatch

    def check_job(self, job: Any) -> None:
        """Refuses optimizers whose moments are not all on the GPU, which a prediction reads."""
        optimizer = job.framework.update.optimizer
        if self.predicts_weights and not job.framework.update.states.tensors:
            rule = f"{self.use} predicts weights by the moments of the optimizer, and {optimizer} has none"
            raise PlanError("optimizer", rule, "Set optimizer: adam, or use pipeline/pipedream", optimizer)
        for entry in job.plan.schemes if self.predicts_weights else ():
            kind = find_scheme(entry.use)
            sharded = issubclass(kind, ShardsStates) and kind.shards and self.mesh.size(entry.over) > 1
            if sharded or (kind.family == "memory" and "optimizer" in getattr(entry, "what", ())):
                rule = f"{self.use} predicts weights by the moments of each, which {entry.use} does not hold whole"
                raise PlanError("plan.schemes", rule, "Use data/ddp, or pipeline/pipedream", entry.use)

    @property
    def lowering_key(self) -> Hashable:
        """That of other schedules where nothing is predicted."""
        return (self.use, *self._sizes) if self.predicts_weights else super().lowering_key

    @property
    def _sizes(self) -> tuple[float, float, float]:
        """Bytes of a weight of the optimizer and of the computation, and of all moments of a weight."""
        framework = self.framework
        moments = framework.states.element_bytes(framework.moments)
        return BYTES[framework.main_weights], BYTES[framework.weights], moments

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        sizes = [param.size for param in fragment.params if param.trained]
        if isinstance(module, Unit) and self.predicts_weights and sizes:
            fragment.forward[:0] = self._predict(sizes, "F")
            fragment.backward[:0] = self._predict(sizes, "B")
        return fragment

    def _predict(self, sizes: Sequence[int], phase: str) -> list[Op]:
        """Returns the kernels that predict weights of so many elements before a pass."""
        main, copy, moments = self._sizes
        elements, launches = sum(sizes), float(len(sizes))
        copied = Memory("cast", round(elements * main), round(elements * copy))
        moved = Memory("add", round(elements * (copy + moments)), round(elements * copy))
        works = (("newest weights", copied), ("predict weights", moved))
        return [Op(name, work=work, phase=phase, launches=launches) for name, work in works]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("period", setting.t_total, "one micro-batch an update, the pipeline stays full")
        yield ClosedForm("weight_versions", [1] * p, "no weights are stashed; those of a pass are predicted")
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "as PipeDream")
