"""ScatterMoE: the GEMMs of the experts gather and scatter rows of tokens themselves, without padding or copies before.

Grouped kernels want the copies of the tokens in the order of the experts, padded to blocks. ParallelLinear sorts
indices alone: its kernel loads rows of tokens through them, from scattered to grouped, or writes rows back from grouped
to scattered; padding exists in the tiles of a kernel only. For the backward pass each ParallelLinear groups an operand
by a copy, into buffers that hold something else already.

    x [T, h] --scatter2scatter--> up [k T, f] --> act --scatter2scatter--> results [k T, h] --weighted sum--> y [T, h]

On a single rank the forward pass writes no k T h copies of the inputs, and the tokens x, which the router keeps anyway,
are kept in their place; the results of the experts, k T h elements, are kept for the gradients of the router's weights,
and their buffer holds the grouped gradients later. Of four passes over k T h copies forward (copies in, results, sum)
and backward it saves the first.

The paper's kernels are of a single device. Among several ranks tokens are exchanged as in expert/all-to-all, and the
kernels read and write them in the order of arrival, where others order them by expert in between (two copies forward).

References: Tan et al. 2024, arXiv 2403.08245, sections 3.1 and 3.2; https://github.com/shawntan/scattermoe,
scattermoe/parallel_experts.py.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import ChangesKernels
from meshcast.simulator.ir.modules import Module, MoE, Stage, replace_children
from meshcast.simulator.ir.moe_operators import ArrivalOrderLinear, ExpertLinear, ScatteringLinear
from meshcast.simulator.ir.ops import StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_gather import fuse_permutations, replace_linear


class ScatterMoE(ExpertScheme, ChangesKernels):
    paper = Paper("arXiv:2403.08245", "Scattered Mixture-of-Experts Implementation", 2024)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        def change(module: Module) -> Module:
            if self.mesh.size(self.axes) > 1:
                return replace_linear(module, ArrivalOrderLinear) if isinstance(module, ExpertLinear) else module
            return fuse_permutations(module, ScatteringLinear) if isinstance(module, MoE) else module

        return super().lower_stage(replace_children(stage, change), inner)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        yield ClosedForm("rows_per_layer", slots, "section 3.1: no row is padded")
        yield ClosedForm("sent_per_layer", 4 * (p - 1) / p * slots * setting.h * 2, "tokens are exchanged as ever")
        tokens, copies = (rows * setting.h * 2 for rows in (setting.b * setting.s, slots))
        if p == 1:
            yield ClosedForm("permuted_bytes", 5 * copies + 4 * tokens, "3.2: one copy or sum forward, three backward")
        else:
            weights = 2 * setting.b * setting.s * setting.top_k * 4
            backward = 4 * copies if setting.experts > p else 0
            whole = 4 * (copies + tokens) + weights + backward
            yield ClosedForm("permuted_bytes", whole, "3.2: by expert in the backward pass only")
