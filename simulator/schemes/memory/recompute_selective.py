"""Selective recompute: chosen modules are computed again in the backward pass.

Recomputing the attention core alone (scores, softmax, dropout and their product with V) removes the 5 a s^2 b
bytes a layer that grow with the square of the sequence, for few FLOPs. With a flash kernel, which keeps no
scores, there is little left to save.

`modules`: core_attn (the attention core), attention (with its linears), mlp, moe (routed and shared experts, with their
all-to-alls).

References: Korthikanti et al. 2022, arXiv 2205.05198, section 5.
"""

from collections.abc import Iterable
from typing import Literal

from simulator.ops import Fragment
from simulator.recompute import recompute
from simulator.scheme import Inner, Law, MemoryScheme, Paper, SchemeOptions
from simulator.sites import Site

Module = Literal["core_attn", "attention", "mlp", "moe"]


class RecomputeSelective(MemoryScheme):
    role = "recompute scheme"
    paper = Paper("arXiv:2205.05198", "Reducing Activation Recomputation in Large Transformer Models", 2022)

    class Options(SchemeOptions):
        modules: tuple[Module, ...] = ("core_attn",)

    _within = False
    """Whether a chosen module is being lowered: one inside another is computed again with it."""

    def lower(self, site: Site, inner: Inner) -> Fragment:
        if self._within or site.module not in self.options.modules:
            return inner(site)
        self._within = True
        try:
            return recompute(site, inner)
        finally:
            self._within = False

    def laws(self, setting) -> Iterable[Law]:  # type: ignore[no-untyped-def]
        if setting.t == 1 and self.options.modules == ("core_attn",):
            yield Law(
                "activations_per_layer", 34 * setting.s * setting.b * setting.h, "section 5, without tensor parallelism"
            )
