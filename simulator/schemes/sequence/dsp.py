"""Dynamic sequence parallelism (DSP): of the two axes of a video, the axis that attention does not run along is
sharded.

Every rank holds 1/p of the places of all frames, so attention across frames needs no communication. For attention
within frames an all-to-all gives each rank all places of 1/p of the frames, from before the projections to queries,
keys and values until behind the output projection; a second takes the result back. All other operators work on a
token at a time. Heads stay whole.

    across frames   x (u, s/p) -> q, k, v -> attention over u -> o (u, s/p)
    within frames   x (u, s/p) --all-to-all--> (u/p, s) -> q, k, v -> attention over s -> o --all-to-all--> (u, s/p)

With n = b u s tokens (b samples, u frames, s places in a frame) and hidden size h, a rank sends 2 n h/p (p-1)/p
elements forward in each pair of layers and as many backward: half of sequence/ulysses, whose all-to-alls move queries,
keys, values and outputs of attention within frames, and a quarter of Ulysses around the attention of both layers. With
a single frame or place nothing is left to shard.

Not modelled: padding of axes that p does not divide; the splits and gathers at the ends of the network.

References: Zhao et al. 2024, arXiv 2403.10266; VideoSys, https://github.com/NUS-HPC-AI-Lab/VideoSys.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import AttendsAlong, Operator
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SequenceScheme
from meshcast.simulator.ir.settings import SequenceSetting


class Dsp(SequenceScheme):
    paper = Paper("arXiv:2403.10266", "DSP: Dynamic Sequence Parallelism for Multi-Dimensional Transformers", 2024)
    position_axes: ClassVar[int] = 2
    """Axes of positions that the tokens of a model must have."""

    def layouts(self, operator: Operator) -> str | None:
        dim = "u" if AttendsAlong("s") in operator.marks else "s"
        return dim if operator.has(dim) else None

    def check_job(self, job: Any) -> None:
        if self.mesh.size(self.over) == 1:
            return
        if not job.model.frames:
            rule = f"{self.use} changes between two axes of positions, and {job.model.name} has one"
            raise PlanError("plan.schemes", rule, "Use sequence/ulysses, or give model.frames")
        if job.train.has_adapters:
            rule = f"{self.use} knows the operators of attention of a plain model, and this one has adapters"
            raise PlanError("train.mode", rule, "Use sequence/ulysses, or train all weights", job.train.mode)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n = setting.cp, setting.b * setting.s
        moved = 2 * n * setting.h / p * (p - 1) / p * 2
        yield ClosedForm("sent_forward", moved, "two all-to-alls in a pair of layers")
        yield ClosedForm("sent_backward", moved, "two all-to-alls of gradients in a pair of layers")
        yield ClosedForm("attention_efficiency", 1.0, "every rank has whole axes")
