"""GShard: experts have a fixed capacity, so that every message and GEMM has the same size; excess tokens are dropped.

A router chooses k of the E experts for each token. With capacity factor c every expert has c k T/E slots for the T
tokens of a rank: tokens that find no slot are dropped (they only pass through the residual connection), slots that stay
empty are padding. So shapes are known before any token is routed, all messages and GEMMs are equal, and no rank waits
for another. The price is quality, and padding: if a share r of all choices finds a slot, (c - r)/c of the slots.

    router chooses: expert 0  # # # # #      slots   # # # | dropped # #      c = 1, k T/E = 3
                    expert 1  #              slots   # . . | padding . .

Each all-to-all over P ranks has c k T h elements, of which (P-1)/P are sent whatever the routing, and experts compute
c k T rows. Where neither plan nor model states c, it is 2: with k = 2 the paper has 2 N/E slots per expert for the N
tokens of a batch (k = 1 is Switch). If a rank holds all experts, their capacity is limited only where plan or model
state c.

With `einsum` set to S, tokens are dispatched by a GEMM with a one-hot matrix [S, E C], C = c k S/E, for each group of S
tokens, as in the paper's algorithm 2, and combined by another: 2 T (c k S) h FLOPs for either, on top of the model's.
Without it kernels copy tokens, as later implementations do.

References: Lepikhin et al. 2020 (GShard), arXiv 2006.16668, section 2.2, algorithms 1 and 2; Fedus et al. 2021
(Switch), arXiv 2101.03961.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.one_hot_dispatch import FixedCapacity


class GShard(FixedCapacity):
    paper = Paper("arXiv:2006.16668", "GShard: Scaling Giant Models with Conditional Computation", 2020)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "3.2: E/P experts per rank")
        yield from self.capacity_forms(setting, "section 2.2, algorithm 1")
