"""HybridEP: a token goes once to each NVLink domain and rank of its experts, by copy instructions (TMA) of few
multiprocessors.

The kernels, of NVIDIA, are a backend of DeepEP and of Megatron-Core's flex dispatcher, built for large NVLink domains
(NVL72). One warp group of a multiprocessor loads chunks of tokens into shared memory, another writes them to the ranks
of their experts; on several domains a third sends them to the rank at the same place of each other domain, which
forwards them. Combines run the same way back and add up results.

    memory --TMA--> shared memory of a multiprocessor --NVLink--> buffers of the ranks with its experts
                                                      --RDMA--> the same place of each other domain --NVLink--> ...

The bytes are those of expert/deepep, with the experts of a token on any number of domains. Every rank holds a buffer
for the dispatches and combines of all layers, with room for all tokens of all ranks: with T tokens on each of P ranks,
P T (2 h + 4 E/n) bytes for h elements of a token and its probabilities on the E/n experts of a domain, and on n > 1
domains T (n - 1) (2 h + 4 E/n) more.

The kernels find their way by a map of all tokens and experts: before each dispatch of a forward pass ranks all-gather
theirs, a byte for each token and expert, P T E bytes in all (67 MB for 4,096 tokens, 256 experts and 64 ranks), and a
kernel makes of it the places of all tokens on the ranks, 4 P T bytes, which the other passes use again.

Simplified: the custom all-gather within a domain (`enable_custom_allgather`) is priced as NCCL's. Not checked: the
largest buffer that a network adapter registers.

`over` as in expert/all-to-all.

References: https://github.com/deepseek-ai/DeepEP/pull/420; branch hybrid-ep @94a9f8f,
docs/Hybrid-EP_Implementation.md, sections 4.2 and 8, csrc/hybrid_ep/executor/executor.cu (`allgather_routing_map`,
`metadata_preprocess_core`); NVIDIA/Megatron-LM, pull request 2176.
"""

from typing import Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import HoldsBuffers
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import Collective, Exchange, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule, Paper
from meshcast.simulator.schemes.expert.shared.deduplicated_dispatch import DeduplicatedDispatch
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import OverlapsSharedExperts

PLACE = 4
"""Bytes of the place of a token on a rank (`sparse_to_dense_map`, 32 bits)."""


class HybridEP(OverlapsSharedExperts, DeduplicatedDispatch, HoldsBuffers):
    paper = Paper("https://github.com/deepseek-ai/DeepEP/pull/420", "Hybrid Expert Parallel Implementation", 2025)
    library = "hybrid-ep"

    class Options(OverlapsSharedExperts.Options):
        dispatch: Literal["fp8", "bf16"] = "bf16"
        """Format in which tokens are dispatched; gradients are dispatched, and results combined, in bf16."""
        sms: int = Field(default=16, ge=1, strict=True)
        """Multiprocessors that the kernels occupy (Megatron-Core: --moe-hybridep-num-sms)."""

    def dispatch_format(self, phase: str) -> str:
        return "bf16" if phase == "B" else str(self.options.dispatch)

    @property
    def multiprocessors(self) -> int:
        return int(self.options.sms)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE) and self.ranks > 1:
            gather_routing_map(fragment, self.ranks)
        return fragment

    def buffer_bytes(self, job: Any) -> int:
        if self.ranks == 1 or job.model.moe is None:
            return 0
        domains = len({rank // job.cluster.domain for rank in self.mesh.ranks(self.axes[:1])})
        tokens = job.batch.micro * job.batch.sequence // self.sequence_shards(job)
        width = job.model.moe.token_width(job.model.hidden)
        return exchange_buffer_bytes(tokens, self.ranks, domains, width, max(job.model.moe.expert_counts))


def gather_routing_map(fragment: Fragment, ranks: int) -> None:
    """Inserts the all-gather of the map of tokens and experts before each dispatch of a forward pass, and the kernel
    that reads it."""
    for op in [op for op in fragment.forward if isinstance(op.work, Exchange) and op.work.operation == "dispatch"]:
        assert isinstance(op.work, Exchange)
        nbytes = ranks * op.work.tokens * op.work.experts
        chosen = [each for each in fragment.forward if isinstance(each.work, Memory) and each.work.what == "router"]
        work = Collective("all_gather", nbytes, op.work.axes)
        gather = Op("all_gather routing map", op.stream, work, chosen, op.phase, op.when)
        places = Memory("permute", nbytes, PLACE * ranks * op.work.tokens)
        mapped = Op("places of tokens", work=places, after=[gather], phase=op.phase, when=op.when)
        at = fragment.forward.index(op)
        fragment.forward[at:at] = [gather, mapped]
        op.after.append(mapped)
        fragment.tensor_uses += [TensorUse("routing map", nbytes, user, user is gather) for user in (gather, mapped)]


def exchange_buffer_bytes(tokens: int, ranks: int, domains: int, hidden: int, experts: int) -> int:
    """Returns the bytes of the buffer of a rank.

    tokens: of a rank.
    domains: NVLink domains of the ranks.
    """
    token = 2 * hidden + 4 * experts // domains
    return tokens * token * (ranks + domains - 1)
