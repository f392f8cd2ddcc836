"""Switch Transformer: every token goes to one expert, and one-hot GEMMs fill the slots of experts of fixed capacity.

A router sends each token to its best expert alone (k = 1), so that dispatch, experts and combine move and compute half
of what top-2 routing does at the same capacity factor c. An expert has c T/E slots for the T tokens of a rank; tokens
beyond them only pass through the residual connection, slots that stay empty are computed. Mesh TensorFlow divides the
tokens into groups of S and dispatches a group by the product of its tokens with a one-hot matrix, and combines by
another.

    x [S, h] --one-hot [S, E C]--> slots [E, C, h] --all-to-all--> experts --all-to-all--> slots --one-hot--> y [S, h]

Each of the 4 all-to-alls over P ranks has c k T h elements, of which (P-1)/P are sent whatever the routing; experts
compute c k T rows. A one-hot product has 2 T (c k S) h FLOPs: two of them forward, three backward. As in Mesh
TensorFlow c is 1.25 where neither plan nor model states it, and S is 1024; a model with k = 2 runs by the same program,
which is the MoE baseline of the paper's table 1.

Not modelled: selective precision (the router's logits are cast to fp32 inside the router).

References: Fedus, Zoph and Shazeer 2021, arXiv 2101.03961, sections 2.1 and 2.2, appendix F; defaults: `MoE1D` in
https://github.com/tensorflow/mesh, mesh_tensorflow/transformer/moe.py.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.one_hot_dispatch import FixedCapacity, GroupSize


class Switch(FixedCapacity):
    paper = Paper(
        "arXiv:2101.03961",
        "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
        2021,
    )
    default_capacity = 1.25

    class Options(FixedCapacity.Options):
        einsum: GroupSize | Literal["all"] | None = 1024
        """Tokens of a group that GEMMs with one-hot matrices dispatch and combine, all: those of a micro-batch; null:
        kernels copy them."""

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "5.4: E/P experts per rank")
        yield from self.capacity_forms(setting, "equation 3, appendix F")
