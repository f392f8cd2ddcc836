"""Model parallelism without a pipeline: layers on several GPUs of a process, of which one computes at a time.

A micro-batch passes all stages forward and backward before the next begins, so a GPU waits while the others compute.
So a process runs whose layers lie on several GPUs (`device_map` of Transformers and Accelerate, `parallelize` before):
it is for models that a GPU does not hold, not for speed.

    device 0   F0 .. .. .. .. B0 F1 .. .. .. .. B1
    device 1   .. F0 .. .. B0 .. .. F1 .. .. B1
    device 2   .. .. F0 B0 .. .. .. .. F1 B1

bubble m (p-1)(t_f + t_B) [s], one micro-batch in flight. Messages are copies between GPUs of a node, priced as those of
NCCL.

Not modelled: layers that are spread unevenly by the free memory of GPUs (`device_map: auto` fills GPU after GPU where
`balanced` divides); `partition` says others than equal stages.

References: https://huggingface.co/docs/transformers/v4.57.3/perf_train_gpu_many; huggingface/accelerate,
src/accelerate/big_modeling.py (dispatch_model) and hooks.py (AlignDevicesHook).
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule


class Naive(Schedule):
    paper = Paper(
        "https://huggingface.co/docs/transformers/v4.57.3/perf_train_gpu_many",
        "Parallelism methods of Transformers",
        2025,
    )

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return [Action(device, kind, k) for k in shape.microbatches for kind in ("F", "BW")]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape = setting.shape
        yield ClosedForm("bubble", shape.m * (shape.p - 1) * setting.t_total, "one GPU computes at a time")
        yield ClosedForm("in_flight_b", [1] * shape.p, "one micro-batch at a time")
        yield ClosedForm("bubble_per_hop", 2 * shape.m * (shape.p - 1), "a hop for every pass over a border")
