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

`over` as in expert/all-to-all.

References: https://github.com/deepseek-ai/DeepEP/pull/420; branch hybrid-ep @94a9f8f,
docs/Hybrid-EP_Implementation.md, sections 4.2 and 8; NVIDIA/Megatron-LM, pull request 2176.
"""

from typing import Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import HoldsBuffers
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.deduplicated_dispatch import DeduplicatedDispatch
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import OverlapsSharedExperts


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

    def buffer_bytes(self, job: Any) -> int:
        if self.ranks == 1 or job.model.moe is None:
            return 0
        domains = len({rank // job.cluster.domain for rank in self.mesh.ranks(self.axes[:1])})
        tokens = job.batch.micro * job.batch.sequence // self.sequence_shards(job)
        width = job.model.moe.token_width(job.model.hidden)
        return exchange_buffer_bytes(tokens, self.ranks, domains, width, max(job.model.moe.expert_counts))


def exchange_buffer_bytes(tokens: int, ranks: int, domains: int, hidden: int, experts: int) -> int:
    """Returns the bytes of the buffer of a rank.

    tokens: of a rank.
    domains: NVLink domains of the ranks.
    """
    token = 2 * hidden + 4 * experts // domains
    return tokens * token * (ranks + domains - 1)
