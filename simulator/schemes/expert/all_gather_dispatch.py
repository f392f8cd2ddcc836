"""All-gather dispatcher of Megatron-Core: every rank gathers all tokens and computes those of its experts.

In place of an all-to-all of k copies of each token, tokens and the router's choice are all-gathered among the P ranks
of the experts. Each rank copies the tokens that chose any of its experts, in the order of the experts, computes them,
and adds up its results for each token; a reduce-scatter adds up those of all ranks and returns every token to its rank.
No rank waits for counts of tokens, and what is sent does not depend on the routing.

    x --all-gather--> [permute | up | act | down | unpermute] --reduce-scatter--> y

With T tokens on a rank, of width h, a rank sends 2 (P-1) T h elements forward and as many backward, with the router's
weights of k experts per token; the all-to-alls of expert/all-to-all send 2 k T h (P-1)/P: this is less for P < k. Every
rank holds P T tokens meanwhile. Experts are not sharded further.

References: NVIDIA Megatron-Core, MoEAllGatherTokenDispatcher in megatron/core/transformer/moe/token_dispatcher.py
(`--moe-token-dispatcher-type allgather`); Liu et al. 2025, arXiv 2504.14960.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.modules import Module, MoE, Stage, replace_children
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_gather import permute_after_gather


class AllGatherDispatch(ExpertScheme):
    paper = Paper("arXiv:2504.14960", "MoE Parallel Folding: Heterogeneous Parallelism Mappings", 2025)
    most_axes = 1

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        def gather(module: Module) -> Module:
            return permute_after_gather(module) if isinstance(module, MoE) and self.ranks > 1 else module

        return super().lower_stage(replace_children(stage, gather), inner)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        # Whatever the routing, every rank gathers all tokens.
        return inner(module) if isinstance(module, MoE) and self.ranks > 1 else super().lower(module, inner)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, tokens = setting.ep, setting.b * setting.s
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        sent = (p - 1) * tokens * (4 * setting.h * 2 + 2 * setting.top_k * 4)
        yield ClosedForm("sent_per_layer", sent, "token_dispatcher.py: every token once, with the router's weights")
