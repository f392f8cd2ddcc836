"""Tutel: the tokens of a layer are split into chunks; the all-to-all of a chunk overlaps with the expert GEMMs of
another.

The slots of every expert are split into r chunks. Each chunk is dispatched, computed and combined by itself;
all-to-alls run on a separate stream, in the order of the chunks, dispatches before combines. The backward pass does
the same in reverse; gradients of weights follow it. On many ranks an all-to-all of small messages may go in two levels
(2DH): first among the ranks of a node, then among ranks at the same place of all nodes. That sends the same bytes over
the network in longer messages, for two local copies. Number of chunks, way of the all-to-all and parallelism are chosen
together, for the loads of each step.

    all-to-alls   D1 D2 D3 D4 C1    C2    C3    C4
    kernels          E1    E2    E3    E4

With t seconds of an all-to-all and u of the experts for each of r equal chunks, a pass takes max(2 r t + max(0, u - (r
- 1) t), 2 t + r u): 2 t + u for r = 1, and never less than 2 r t or r u. The default capacity is that of the most
popular expert, so that no token is dropped.

With a second axis each expert is sharded over R ranks, and weights rest so whatever the *parallelism*. `model`: the R
ranks gather their tokens, compute a slice of the inner width each, and reduce-scatter the sums. `data`: they gather the
weights, as in ZeRO-3, and compute their tokens. With S slots of a rank and W weights of a layer on the R ranks, of
b bytes each, a rank receives 2 (R - 1) S h b forward or (R - 1)/R W b: the first is less for few slots. As both have
the same layout, each step takes the faster (`auto`), and nothing migrates.

Not modelled: mixtures of both, with the weights of some ranks gathered and slices computed; the choice of the
all-to-all, linear or in two levels, by measurement: `two_level` is as the plan says.

References: Hwang et al. 2023, arXiv 2206.03382, sections 3.1 to 3.3. Closed form of the order: Shi et al. 2023
(PipeMoE), doi 10.1109/INFOCOM53939.2023.10228874, section IV.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import TriesAlternatives
from meshcast.simulator.ir.modules import Module, MoE, Operator
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.routing import least_capacity
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule, Scheme
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import chunk_round, find_rounds
from meshcast.simulator.schemes.expert.shared.two_level_exchange import TwoLevelScheme

DEGREES = (1, 2, 4, 8)
"""Numbers of chunks that adaptive pipelining tries."""

PARALLELISMS = ("model", "data")
"""Ways to use ranks that share an expert, of which adaptive parallelism takes the faster."""


class Tutel(TwoLevelScheme, TriesAlternatives):
    paper = Paper("arXiv:2206.03382", "Tutel: Adaptive Mixture-of-Experts at Scale", 2022)

    class Options(TwoLevelScheme.Options):
        degree: Literal[1, 2, 4, 8, "auto"] = 2
        """Chunks of the tokens; auto: the number with the fastest layer, as Tutel finds by profiling and PipeMoE by a
        model of it."""
        parallelism: Literal["model", "data", "auto"] = "model"
        """Among the ranks that share an expert: model gathers tokens, data weights; auto: that of the fastest layer."""
        two_level: Annotated[int, Field(ge=2, strict=True)] | Literal["auto"] | None = None  # type: ignore[assignment]
        """Ranks of a node, which exchange among themselves first; null: all ranks exchange at once; auto: that of both
        with the fastest layer, with as many ranks of a node as share its all-to-alls."""

    def alternatives(self, job: Any) -> Sequence[Scheme]:
        degree, parallelism, two_level = (
            getattr(self.options, name) for name in ("degree", "parallelism", "two_level")
        )
        if "auto" not in (degree, parallelism, two_level):
            return ()
        degrees = DEGREES if degree == "auto" else (degree,)
        ways = PARALLELISMS if parallelism == "auto" else (parallelism,)
        exchanges = (None, *self._list_levels(job)) if two_level == "auto" else (two_level,)
        return [
            self.with_options(degree=n, parallelism=way, two_level=near)
            for n, way, near in product(degrees, ways, exchanges)
        ]

    def _list_levels(self, job: Any) -> Iterable[int]:
        """Yields how many ranks of a node share an all-to-all, where it has two levels."""
        node = job.cluster.gpus_per_node
        near = sum(rank < node for rank in self.mesh.ranks(self.mesh.parts(self.axes[:1])))
        if 1 < near < self.ranks and self.ranks % near == 0:
            yield near

    def layouts(self, operator: Operator) -> Rule:
        rule, shared = super().layouts(operator), self.mesh.parts(self.axes[1:])
        if self.options.parallelism == "model":
            return rule
        divide = {part: dim for part, dim in rule.divide.items() if part not in shared}
        return Rule(divide, dict.fromkeys(shared, "f") if operator.has("f") else {})

    def capacity(self, moe: Any) -> float | None:
        chosen = super().capacity(moe)
        most = (least_capacity(self.options.routing, number) for number in moe.expert_counts)
        needed = max(most) if self.ranks > 1 else None
        return needed if chosen is None else chosen

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        parts = Rewrite(fragment)
        assert self.options.degree != "auto", "a plan chooses it"
        sent = []
        for expert_round in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
            out, *_, back = chunk_round(parts, expert_round, (1,) * self.options.degree)
            sent += [*out, *back]
        return self.exchange_in_levels(parts.apply(), sent)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "3.1: E/P experts per rank")
        if setting.ep > 1:
            seconds = setting.chunked_round_s(self.options.degree)
            yield ClosedForm("forward_round", seconds, "3.2; PipeMoE, section IV")
            yield ClosedForm("backward_round", seconds, "3.2: as forward")
