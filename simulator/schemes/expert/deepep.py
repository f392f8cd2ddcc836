"""DeepEP: a token is sent once to each node that holds any of its experts, and from there to each rank that does.

An all-to-all sends a token k times, once for each of its experts. DeepEP sends it over the network once per distinct
*node* among them, and forwards it over NVLink to each distinct rank; results are added up on the way back. Tokens are
dispatched in 8 bits with their scales and combined in 16, and the router restricts the experts of a token to few nodes
so that the network can follow. The kernels occupy a few multiprocessors, which computation then lacks.

    rank --network--> one rank of node 1 --NVLink--> ranks with its experts
         --network--> one rank of node 2 --NVLink--> ranks with its experts

With n nodes of E/n experts each, the k experts of a token lie on n (1 - C(E - E/n, k) / C(E, k)) nodes: for E = 256 and
k = 8 on 1.99 of 2, 3.61 of 4, 5.29 of 8. Where they lie on at most M < n nodes, the same holds for M nodes with their E
M / n experts; ranks are counted likewise. For T tokens of h elements of w bytes, T h w nodes (1 - 1/n) bytes go over
the network and T h w ranks (1 - n/P) over NVLink. The gradient of a combine is a dispatch, that of a dispatch a
combine: four exchanges per layer and micro-batch.

Not modelled: the kernel that counts tokens for ranks (`get_dispatch_layout`), the wait of the host for how many arrive.

`over` as in expert/all-to-all. Buffers of received tokens hold 16 bits per element.

References: DeepSeek-AI 2024 (DeepSeek-V3), arXiv 2412.19437, sections 2.1.2 and 3.2.2; the kernels:
https://github.com/deepseek-ai/DeepEP, README.
"""

from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.deduplicated_dispatch import DeduplicatedDispatch
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import OverlapsSharedExperts


class DeepEP(OverlapsSharedExperts, DeduplicatedDispatch):
    paper = Paper("arXiv:2412.19437", "DeepSeek-V3 Technical Report", 2024)
    library = "deepep"

    class Options(OverlapsSharedExperts.Options):
        dispatch: Literal["fp8", "bf16"] = "fp8"
        """Format in which tokens are dispatched; results are combined in bf16."""
        gradients: Literal["fp8", "bf16"] = "bf16"
        """Format in which gradients of results are dispatched."""
        most: int = Field(default=4, ge=1, strict=True)
        """Most nodes that hold experts of a token; at most the nodes of the group."""
        sms: int = Field(default=24, ge=1, strict=True)
        """Multiprocessors that the kernels occupy; 24 as in DeepEP's README and tests, 20 where nothing is set
        (`Buffer.num_sms`)."""

    def dispatch_format(self, phase: str) -> str:
        return str(self.options.gradients if phase == "B" else self.options.dispatch)

    @property
    def multiprocessors(self) -> int:
        return int(self.options.sms)

    def most_nodes(self, nodes: int) -> int:
        return int(self.options.most)
