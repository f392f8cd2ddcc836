"""DeepSpeed-MoE: fixed capacity with one-hot dispatch, all-to-alls in two levels, or once for all tensor ranks.

Gates choose the k best experts of a token; its slots of fixed capacity are filled by the product with a one-hot
matrix for all T tokens of a rank. Three measures cut the all-to-alls. Hierarchical (`two_level`): first within the n
nodes, then between them, (P/n - 1) + (n - 1) messages in place of P - 1, for twice the bytes. Coordinated: tensor
ranks, L of them with the same tokens, exchange 1/L of these each with their peers, and then all-gather; without it each
exchanges all. PR-MoE models (`moe.residual`, `moe.experts_from`) have a fixed expert beside the routed expert, so top-1
sends half of the slots of top-2, and more experts in the last layers than in others, so fewer parameters.

    tensor ranks have the same slots | drop: 1/L each | all-to-all | all-gather | experts | all-to-all | all-gather

Each all-to-all over P ranks sends (P-1)/P of c k T h elements, coordinated 1/L of that and then (L-1)/L of c k T h
among the tensor ranks. Expert-slicing (`over: [ep, etp]`) shards every expert over its tensor ranks, whose results are
all-reduced. With `drop_tokens` off, c is that of the most popular expert of any rank, an all-reduce of a count.
Experts without slices that are distributed over tensor ranks too are coordinated by the layouts alone.

The paper has hierarchical all-to-alls for inference, DeepSpeed's training code has none: `two_level` tells what they
would gain there. Coordination in training is TED's dropping of duplicate tokens (`drop_tokens` of mappings.py).
DeepSpeed 0.19.6 copies tokens by index in place of the one-hot products: `einsum: null`.

Not modelled: `min_capacity`; the gates' masks in fp32; the sort over the tokens of an expert by which a top-1 gate
chooses those that keep their slots (`use_rts`, on by default); TED's checkpointing without repeated collectives
(section 5.2); distillation (MoS). Every layer has the same number of expert ranks, where the paper gives each another
(section 4.1.3).

References: Rajbhandari et al. 2022, arXiv 2201.05596, sections 4.1, 5.2 and 5.3; Singh et al. 2023 (DeepSpeed-TED),
arXiv 2303.06318, section 5.1; https://github.com/deepspeedai/DeepSpeed, deepspeed/moe/sharded_moe.py and mappings.py.
"""

from collections.abc import Iterable
from typing import Any, Literal

from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import Collective, Fragment
from meshcast.simulator.ir.routing import least_capacity
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared import token_dispatch
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.one_hot_dispatch import FixedCapacity, GroupSize
from meshcast.simulator.schemes.expert.shared.two_level_exchange import TwoLevelScheme

COUNT = 8
"""Bytes of the largest number of tokens of an expert, a 64-bit integer."""


class DeepSpeedMoE(FixedCapacity, TwoLevelScheme):
    paper = Paper(
        "arXiv:2201.05596",
        "DeepSpeed-MoE: Advancing Mixture-of-Experts Inference and Training to Power Next-Generation AI Scale",
        2022,
    )
    default_capacity = 1.0

    class Options(FixedCapacity.Options, TwoLevelScheme.Options):
        einsum: GroupSize | Literal["all"] | None = "all"
        """Tokens of a group that GEMMs with one-hot matrices dispatch and combine, all: those of a micro-batch; null:
        kernels copy them (``use_tutel``)."""
        coordinated: bool = True
        """Whether tensor ranks that shard experts and hold the same tokens exchange a part of them each."""
        drop_tokens: bool = True
        """Whether tokens without a slot are dropped; otherwise all experts have as many slots as any needs."""

    def capacity(self, moe: Any) -> float | None:
        if self.options.drop_tokens or self.ranks == 1:
            return super().capacity(moe)
        return max(least_capacity(self.options.routing, number) for number in moe.expert_counts)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        exchanges = [op for ends in token_dispatch.find_all_to_alls(fragment, self._parts) for op in ends]
        if self.options.coordinated and (slices := self._slices_with_same_tokens(fragment)):
            once = Rewrite(fragment)
            exchanges = [token_dispatch.exchange_once(once, op, slices, self.mesh.size(slices)) for op in exchanges]
            fragment = once.apply()
        fragment = self.exchange_in_levels(fragment, exchanges)
        if not self.options.drop_tokens:
            token_dispatch.exchange_counts(fragment, self._parts, COUNT, "all_reduce")
        return fragment

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.mesh.parts(self.axes[:1])

    def _slices_with_same_tokens(self, fragment: Fragment) -> tuple[str, ...]:
        """Returns the axes that shard each expert, if ranks along them hold the same tokens: then results are
        all-reduced, not reduce-scattered."""
        slices = self.mesh.parts(self.axes[1:])
        works = (op.work for op in fragment.forward if op.stream == self.family)
        same = any(isinstance(work, Collective) and work.operation == "all_reduce" for work in works)
        return slices if same else ()

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "5.2: E/P experts per rank")
        yield from self.capacity_forms(setting, "sharded_moe.py, _capacity")
