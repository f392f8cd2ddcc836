"""Full recompute: a layer keeps its input only and is computed again in the backward pass.

Saves all activations inside a layer (2 b s h bytes stay, in the layout in which the input arrives) for one more
forward pass, its collectives included: about a third more time.

References: Chen et al. 2016, arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198, section 5.
"""

from collections.abc import Iterable
from math import inf

from pydantic import Field

from simulator.ops import Chain, Fragment
from simulator.recompute import marked, recompute
from simulator.scheme import Around, Inner, Law, MemoryScheme, Paper, SchemeOptions
from simulator.sites import Site, Stage, Unit


class RecomputeFull(MemoryScheme):
    role = "recompute scheme"
    paper = Paper("arXiv:1604.06174", "Training Deep Nets with Sublinear Memory Cost", 2016)

    class Options(SchemeOptions):
        layers: int | None = Field(default=None, ge=0)
        """How many layers of each stage, from the first on; null: all."""

    def lower_stage(self, stage: Stage, inner: Around) -> Chain:
        return inner(marked(stage, inf if self.options.layers is None else self.options.layers, self.role))

    def lower(self, site: Site, inner: Inner) -> Fragment:
        return recompute(site, inner) if isinstance(site, Unit) and self.role in site.marks else inner(site)

    def laws(self, setting) -> Iterable[Law]:  # type: ignore[no-untyped-def]
        yield Law("recomputed_forward_share", 1.0, "section 5: one more forward pass")
