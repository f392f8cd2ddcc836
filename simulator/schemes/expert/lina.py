"""Lina: all-to-alls go before gradient all-reduces on links that they share, in micro-ops that overlap with experts.

In the backward pass all-reduces of gradients use the network at the same time as all-to-alls, which then take about
twice as long, and unlike an all-reduce an all-to-all is waited for. Lina splits both into micro-ops of equal size and
starts that of an all-reduce only while no all-to-all waits. Experts compute on the tokens of a micro-op of an
all-to-all while later ones are on their way.

    network, fair      | AR + D | AR + D | AR ...         network, Lina   | AR | D D D | AR | C C C | AR ...
    D, C: micro-ops of the dispatching and of the combining all-to-all; AR: all-reduce

With S bytes of an all-to-all, n = ceil(S/`micro`), t seconds of a micro-op and u of the experts for it, a pass takes
max(2 n t + max(0, u - (n - 1) t), 2 t + n u); an all-to-all takes its time whatever runs beside it, and an
all-reduce there that much longer. Expert packing, several experts on a rank so that u is at least t and fewer ranks
exchange, is a smaller `ep` in the plan, at the price of more weights and all-reduces on every rank; Lina's search for
the number of experts is left to a sweep over `ep`.

Priorities matter where links are shared, with `--engine shared`; other engines let all streams communicate at full
rate. Simplified: all-reduces stay whole, in the buckets of the data scheme, and an all-to-all interrupts them at once,
while in Lina it waits for the end of the micro-op of an all-reduce that is under way. Not modelled: inference.

References: Li et al. 2023, arXiv 2210.17223, sections 4.1 and 4.2.
"""

from collections.abc import Iterable
from math import ceil

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import Collective, Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting, expert_collectives
from meshcast.simulator.schemes.expert.shared.token_dispatch import chunk_round, find_rounds

MAX_PARTS = 256
"""Most micro-ops of an all-to-all: each is forecast by itself."""


class Lina(ExpertScheme):
    paper = Paper("arXiv:2210.17223", "Accelerating Distributed MoE Training and Inference with Lina", 2022)

    class Options(ExpertScheme.Options):
        micro: int | None = Field(default=30_000_000, ge=1, strict=True)
        """Bytes of a micro-op of an all-to-all, of which there are at most 256; null: none is split."""
        priority: bool = True
        """Whether all-to-alls go before other communication."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        parts = Rewrite(fragment)
        for expert_round in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
            assert isinstance(expert_round.out.work, Collective)
            if (number := self._number_of_parts(expert_round.out.work.nbytes)) > 1:
                chunk_round(parts, expert_round, (1,) * number)
        fragment = parts.apply()
        for op in expert_collectives(fragment, self) if self.options.priority else ():
            op.priority = 1
        return fragment

    def _number_of_parts(self, nbytes: float) -> int:
        """Micro-ops of an all-to-all of `nbytes`."""
        return min(MAX_PARTS, ceil(nbytes / self.options.micro)) if self.options.micro else 1

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        whole = slots * setting.h * 2
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        yield ClosedForm("sent_per_layer", 4 * (p - 1) / p * whole, "4.1: micro-ops send what the whole would")
        if p > 1:
            number = self._number_of_parts(whole)
            yield ClosedForm("exchanges", 4 * number, "4.1: micro-ops of equal size")
            yield ClosedForm("forward_round", setting.chunked_round_s(number), "4.2: micro-ops overlap with experts")
            yield ClosedForm("backward_round", setting.chunked_round_s(number), "4.2: micro-ops overlap with experts")
