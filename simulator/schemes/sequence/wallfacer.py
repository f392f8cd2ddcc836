"""WallFacer (later StarTrail): teams of ranks gather their tokens, so that fewer and larger shards go round rings.

Attention is a direct n-body problem: every query meets every key. As in communication-avoiding algorithms for it, p
ranks form teams of C that hold C copies of the work's operands. A team all-gathers its queries, keys and values; rank l
of it computes its queries against the keys of 1/C of the teams, which come round a ring of p/C^2 ranks; a
reduce-scatter adds up the C outputs. Backward, keys stay and queries with their gradients go round, as in
BurstAttention.

    p = 8, C = 2   team (g, j): ranks (g, j, 0) and (g, j, 1); ranks (g, j, l) for all j are a ring
    rank (g, j, l)   all-gather q, k, v | keys of team (g-l, j) | compute, pass on to j+1 | reduce-scatter o

`over` names three axes: groups of teams, rings, teams; there are as many groups as ranks in a team. Their order in the
mesh says which of them are near. Positions are zigzag over the teams, which balances the causal mask. With n = b s
tokens, h and k the widths of queries and keys, and r = p/C^2 ranks in a ring, a rank sends forward
(C-1)/p n (2 h + 2 k) elements in its team, 2 (r-1) C/p n k round the ring and before, where it does not start at home,
2 C/p n k: the mean is 2 (C-1)/p n k. Row sums of C n/p rows come on top. C = 1 is a ring, C = sqrt(p) needs no ring.
Backward, inputs are gathered again: (C-1)/p n (3 h + 4 k) with the gradients in the team, and queries and gradients
of outputs r-1 hops, gradients of queries r hops, all of them also between the groups.

Not modelled: other token orders.

References: Liu et al. 2024, arXiv 2407.00611.
"""

from collections.abc import Iterable
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_steps import mask_blocks
from meshcast.simulator.schemes.sequence.shared.query_ring import ring_of_queries
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme
from meshcast.simulator.schemes.sequence.shared.team_attention import GATHERED, attend_in_teams


class WallFacer(RingScheme):
    kernels, kernels_reason = "flash", "computes the scores of queries from other ranks again, as flash kernels do"
    least_axes, most_axes = 3, 3
    paper = Paper(
        "arXiv:2407.00611",
        "WallFacer: Harnessing Multi-dimensional Ring Parallelism for Efficient Long Sequence Model Training",
        2024,
    )

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        return [(team, ranks // team**2, team) for team in range(2, ranks) if ranks % team**2 == 0]

    @property
    def token_order(self) -> str:
        return "zigzag over teams"

    def layouts(self, operator: Operator) -> str | Rule | None:
        if GATHERED in operator.marks:
            return Rule(dict.fromkeys(self.mesh.parts(self.axes[:2]), "s|t"))
        return super().layouts(operator)

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        groups, _, team = (self.mesh.size(self.mesh.parts(axis)) for axis in self.axes)
        if groups != team:
            rule = f"{self.use} needs as many groups (axis {self.axes[0]}) as ranks in a team (axis {self.axes[2]})"
            raise PlanError("plan.mesh", f"{rule}, and there are {groups} and {team}", f"{team} and {team} would work")

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        axes = [tuple(part for part in self.mesh.parts(axis) if self.mesh.size(part) > 1) for axis in self.axes]
        if not axes[2]:
            blocks = mask_blocks("zigzag", self.ranks, operator.bidirectional)
            return ring_of_queries(operator, inner, axes[1], blocks)
        return attend_in_teams(operator, inner, self.mesh, axes, "zigzag")

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        _, ring, c = setting.grid
        h, k, rows, n = 2 * setting.h, 2 * setting.kv_width, 4 * setting.heads, setting.b * setting.s / setting.cp
        hop = 2 * c * n * k
        forward = (c - 1) * n * (2 * h + 2 * k) + (ring - 1) * hop + (c - 1) / c * hop + (c - 1) * c * n * rows
        yield ClosedForm(
            "sent_forward", forward, "team collectives, p/C^2 - 1 hops and the start, row sums of the team"
        )
        moved = c * n * (2 * h + 2 * rows), c * n * h
        around = (ring - 1) * moved[0] + (ring * moved[1] if ring > 1 else 0) + (c - 1) / c * sum(moved)
        team = (c - 1) * n * (2 * h + 2 * k + rows) + (c - 1) * n * (h + 2 * k)
        yield ClosedForm("sent_backward", around + team, "queries and their gradients go round, and meet in the team")
        yield ClosedForm("attention_efficiency", 1.0, "zigzag over the teams")
        yield ClosedForm("ring_hops", ring - 1, "p/C^2 - 1")
