"""All-to-alls in two levels: among the ranks of a node, then among ranks at the same place of all nodes; and in two
parts at the same time.

In levels, the second sends the bytes of the flat all-to-all over the network in longer messages, n - 1 instead of P -
P/n of them on n nodes; the first level, and a copy before either that groups the tokens by destination, come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import Collective, Fragment, Memory, Op
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme

NEAR = "expert-near"
"""The stream of exchanges within a node beside others."""


def exchange_beside_nodes(
    rewrite: Rewrite, op: Op, ranks: int, node: int, near_nbytes: float, far_nbytes: float
) -> None:
    """Splits an all-to-all among `ranks` ranks into two at the same time: among the `node` ranks of a node, on a
    separate stream and with ranks of other nodes.

    near_nbytes, far_nbytes: bytes that a rank sends to others in its node, and to other nodes.
    """
    assert isinstance(op.work, Collective)
    nodes, parts = ranks // node, []
    if node > 1:
        inside = replace(op.work, nbytes=round(near_nbytes * node / (node - 1)), members=tuple(range(node)))
        parts.append(replace(op, name=f"{op.name} near", stream=NEAR, work=inside))
    # A rank exchanges the tokens of a whole node with a rank of each other node.
    outside = replace(op.work, nbytes=round(far_nbytes * nodes / (nodes - 1)), members=tuple(range(0, ranks, node)))
    parts.append(replace(op, name=f"{op.name} far", work=outside))
    rewrite.swap(op, parts, parts)


class TwoLevelScheme(ExpertScheme):
    """Base of the expert schemes whose all-to-alls may be in two levels."""

    class Options(ExpertScheme.Options):
        two_level: int | None = Field(default=None, ge=2, strict=True)
        """Ranks of a node, which exchange among themselves first; null: all ranks exchange at once."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        near = self.options.two_level
        if near not in (None, "auto") and self.ranks % near:
            fits = [n for n in range(2, self.ranks + 1) if self.ranks % n == 0]
            remedy = f"two_level = {' or '.join(map(str, fits)) or 'null'} would work"
            raise PlanError(
                "plan.schemes", f"two_level must divide the {self.ranks} ranks of the experts", remedy, near
            )

    def exchange_in_levels(self, fragment: Fragment, exchanges: Iterable[Op]) -> Fragment:
        """Returns the fragment with these all-to-alls in two levels, where the plan wants them so."""
        levels = Rewrite(fragment)
        for op in exchanges if self.options.two_level else ():
            levels.swap(op, self._split_into_levels(op))
        return levels.apply()

    def _split_into_levels(self, op: Op) -> list[Op]:
        work, near = op.work, self.options.two_level
        assert isinstance(work, Collective) and near != "auto", "a plan chooses it"
        steps: list[Op] = []
        for members in (range(near), range(0, self.mesh.size(work.axes), near)):
            copy = Memory("permute", work.nbytes, work.nbytes, pace=work.pace)
            for step in (copy, replace(work, members=tuple(members))):
                steps.append(replace(op, work=step, after=steps[-1:] or op.after))
        return steps
