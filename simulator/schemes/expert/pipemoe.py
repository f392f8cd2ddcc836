"""PipeMoE: the number of chunks into which tokens are split is chosen by linear models of all-to-all and experts.

The tokens of a layer are split into r chunks, so that the all-to-all of a chunk overlaps with the experts of another.
Few chunks hide little, many add start times. Before training the system fits t(x) = a + b x to an all-to-all of x bytes
and to the experts' GEMMs, and takes the r with the least time, in the backward pass, whose GEMMs of inputs have the
FLOPs of the forward pass and whose weight gradients follow, by itself.

    all-to-alls   D1 D2 D3 C1    C2    C3
    kernels          E1    E2    E3

With t seconds of an all-to-all and u of the experts for each of r equal chunks a pass takes

    T(r) = max(2 r t + max(0, u - (r - 1) t), 2 t + r u).

Where computing bounds it, T falls up to r = sqrt(2 b n / a), with b n seconds for the bytes of an all-to-all and a for
the start of the GEMMs; where communication does, up to the r that hides the experts.

Not modelled: the buffers of chunks are shared with those of the layer (MPipeMoE).

References: Shi et al. 2023, doi 10.1109/INFOCOM53939.2023.10228874, section IV.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.chunk_degree import ChosenDegree
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import chunk_round, find_rounds


class PipeMoE(ChosenDegree):
    paper = Paper(
        "doi:10.1109/INFOCOM53939.2023.10228874",
        "PipeMoE: Accelerating Mixture-of-Experts through Adaptive Pipelining",
        2023,
    )

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        chunks = Rewrite(fragment)
        for expert_round in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
            if (degree := self.degree_of(expert_round)) > 1:
                chunk_round(chunks, expert_round, (1,) * degree)
        return chunks.apply()

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        yield ClosedForm("sent_per_layer", 4 * (p - 1) / p * slots * setting.h * 2, "chunks send what the whole would")
        if p > 1 and self.options.degree != "auto":
            seconds = setting.chunked_round_s(self.options.degree)
            yield ClosedForm("forward_round", seconds, "section IV: T(r)")
            yield ClosedForm("backward_round", seconds, "section IV: T(r)")
