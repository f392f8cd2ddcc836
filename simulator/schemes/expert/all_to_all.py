"""Expert parallelism: every rank holds E/P of the experts; all-to-alls dispatch the tokens and combine the results.

A router picks k of the E experts for each token. Copies of the tokens, ordered by expert, are exchanged among the P
ranks of the group (dispatch), pass through their experts as a grouped GEMM per matrix, and are exchanged back
(combine): 4 all-to-alls per layer and micro-batch, two forward and two backward. Each sends c k T h (P-1)/P elements
per rank, with T tokens on a rank and c the capacity factor (1 where no token is dropped). Weights and optimizer states
of the experts shrink by P; their gradients are summed only over the ranks that hold the same experts (the rest of the
view).

    x --router, permute--> all-to-all [up | act | down] all-to-all --unpermute--> y

`over`: the axis of the view over which experts are distributed, then, optionally, the axis that shards each expert as
tensor parallelism would: its inputs are all-gathered over that axis, its outputs reduce-scattered. Under uneven routing
all ranks wait for the most loaded rank.

References: Lepikhin et al. 2020 (GShard), arXiv 2006.16668, section 3.2; with gathered inputs and folding over other
axes: Liu et al. 2025, arXiv 2504.14960.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import OverlapsSharedExperts


class AllToAll(OverlapsSharedExperts):
    paper = Paper("arXiv:2006.16668", "GShard: Scaling Giant Models with Conditional Computation", 2020)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        yield ClosedForm(
            "sent_per_layer",
            4 * (p - 1) / p * slots * setting.h * 2,
            "section 3.2: dispatch and combine, forward and backward",
        )
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "section 3.2: E/P experts per rank")
