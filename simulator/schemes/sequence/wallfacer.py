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

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.attention_mask import ScoreBlock
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_steps import STREAM, AttentionSteps, mask_block, mask_blocks
from meshcast.simulator.schemes.sequence.shared.query_ring import ring_of_queries, rotate, row_sums_key, sum_rows
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme


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


GATHERED = "gathered by a team"
"""The mark of attention whose queries and keys are those of a whole team."""

Axes = tuple[str, ...]


def attend_in_teams(
    operator: CoreAttention, inner: LowerModule, mesh: Mesh, axes: Sequence[Axes], token_order: str
) -> Fragment:
    """Returns attention on ranks (group, place, position in the team) along `axes`; there are as many groups as a team
    has ranks.

    Rank l of a team in group g starts with the keys of the team at the same place in group g - l, and passes them on to
    the next place; so the ranks of a team cover all groups. The partial outputs that a reduce-scatter adds up are
    rescaled by the row sums of all.
    """
    groups, places, team = axes
    ranks, around = mesh.size(team), mesh.size(places)
    blocks = team_blocks(token_order, ranks, around, operator.bidirectional)
    start = Collective(
        "shift", 0, (*groups, *team), targets=first_keys(ranks, mesh.stride(groups[0]) > mesh.stride(team[0]))
    )
    whole = replace(operator, marks=operator.marks | {GATHERED})
    steps = AttentionSteps(whole, inner, places, blocks, around - 1, start=start)
    return _TeamAttention(operator, inner(operator), steps, team, ranks).fragment


def team_blocks(token_order: str, ranks: int, around: int, bidirectional: bool = False) -> list[ScoreBlock]:
    """Returns the score blocks of the steps, in numbers of teams.

    ranks: of a team, as many as groups.
    around: places in a group.
    """
    team = range(ranks)
    steps = (
        [
            (group * around + place, (group - rank) % ranks * around + (place - i) % around)
            for group in team
            for place in range(around)
            for rank in team
        ]
        for i in range(around)
    )
    return [mask_block(token_order, pairs, bidirectional) for pairs in steps]


def first_keys(ranks: int, groups_outside: bool) -> tuple[int, ...]:
    """Returns where the ranks of all groups at a place send the keys of their teams: rank l of group g to rank l of g +
    l.

    ranks: of a team, as many as groups.
    groups_outside: whether the axis of the groups lies outside that of the team, which decides the order of positions.
    """
    targets = {
        (group, rank) if groups_outside else (rank, group): ((group + rank) % ranks, rank)
        for group in range(ranks)
        for rank in range(ranks)
    }
    ends = (targets[position] for position in sorted(targets))
    return tuple(group * ranks + rank if groups_outside else rank * ranks + group for group, rank in ends)


class _TeamAttention:
    """The ops of a rank, in `fragment`: gathers, steps, and reductions.

    local: the fragment of attention between the rank's shards, which only tells their memory.
    """

    def __init__(self, operator: CoreAttention, local: Fragment, steps: AttentionSteps, team: Axes, ranks: int) -> None:
        self.name, self.team, self.ranks = operator.name, team, ranks
        q, k, v, o = steps.q, steps.k, steps.v, steps.o
        self.shards, self.gathered = (_memory_of_tensors(part, o) for part in (local, steps.step_fragments[0]))
        out = self.fragment = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
        out.grad_entry = {o: Op(f"d{o} in", phase="B")}
        for name in (q, k, v):
            steps.fragment.entry[name].after.append(self._gather_tensor(name, out.entry[name], "F"))
        arrived = steps.fragment.grad_entry[o]
        self._bring_gradients(steps, arrived)
        rotate(steps, arrived)
        out.forward += steps.fragment.forward
        out.exit = {o: self._combine_outputs(o, steps)}
        out.backward += steps.fragment.backward
        moved = {self.gathered[name][0] for name in (q, k, v)}
        back = {*out.backward}
        for use in steps.fragment.tensor_uses:
            # Gathered again for the backward pass.
            out.tensor_uses.append(replace(use, key=f"{use.key}~") if use.op in back and use.key in moved else use)
        out.grad_exit = {name: self._scatter(f"d:{name}", steps.fragment.grad_exit[name], "B") for name in (q, k, v)}

    def _bring_gradients(self, steps: AttentionSteps, arrived: Op) -> None:
        """Gathers what the backward pass reads. arrived: waits for it."""
        out, o = self.fragment, steps.o
        shards = self.shards[o], self.shards[f"d:{o}"]
        rows = f"{self.name}.rows", steps.lse // self.ranks
        op = sum_rows(out, sum(nbytes for _, nbytes in shards), rows)
        self._use(op, *shards)
        arrived.after.append(self._gather_tensor(f"d:{o}", out.grad_entry[o], "B"))
        arrived.after.append(self._gather(rows[0], rows, (row_sums_key(self.name), steps.lse), [op], "B"))
        arrived.after += [self._gather_tensor(name, out.grad_entry[o], "B") for name in (steps.q, steps.k, steps.v)]

    def _use(self, op: Op, *memory: tuple[str, int], made: bool = False) -> None:
        self.fragment.tensor_uses += [TensorUse(key, nbytes, op, made) for key, nbytes in memory]

    def _issue(self, op: Op) -> Op:
        (self.fragment.forward if op.phase == "F" else self.fragment.backward).append(op)
        return op

    def _gather(self, name: str, shard: tuple[str, int], whole: tuple[str, int], after: Sequence[Op], phase: str) -> Op:
        """All-gathers what `shard` holds of every rank of the team into `whole`."""
        op = Op(f"all_gather {name}", STREAM, Collective("all_gather", whole[1], self.team), [*after], phase)
        self._use(op, shard)
        self._use(op, whole, made=True)
        return self._issue(op)

    def _gather_tensor(self, name: str, after: Op, phase: str) -> Op:
        key, nbytes = self.gathered[name]
        key = f"{key}~" if phase == "B" and not name.startswith("d:") else key
        return self._gather(name.replace(":", ""), self.shards[name], (key, nbytes), [after], phase)

    def _scatter(self, name: str, after: Op, phase: str) -> Op:
        """Adds up the tensor over the ranks of the team, of which each keeps its shard."""
        whole = self.gathered[name]
        work = Collective("reduce_scatter", whole[1], self.team)
        op = Op(f"reduce_scatter {name.replace(':', '')}", STREAM, work, [after], phase)
        self._use(op, whole)
        self._use(op, self.shards[name], made=True)
        return self._issue(op)

    def _combine_outputs(self, o: str, steps: AttentionSteps) -> Op:
        """Gathers the row sums of the team's outputs, rescales the rank's output by them, and adds up the outputs."""
        sums, (key, output) = (f"{self.name}.lse", steps.lse), self.gathered[o]
        every = f"{self.name}.lse of the team", self.ranks * steps.lse
        output_op = steps.fragment.exit[o]
        gathered = self._gather("row sums", sums, every, [output_op], "F")
        work = Memory("add", output + every[1], output + sums[1])
        rescaled = self._issue(Op(f"rescale {o}", work=work, after=[output_op, gathered]))
        self._use(rescaled, every, (key, output))
        self._use(rescaled, (key, output), sums, made=True)
        return self._scatter(o, rescaled, "F")


def _memory_of_tensors(fragment: Fragment, output: str) -> dict[str, tuple[str, int]]:
    """Returns the memory key and bytes of every tensor, and of gradients, with ``d:``.

    output: its gradient is that which the backward pass takes, also where this is kept as that of a cast behind it.
    """
    uses = [use for use in fragment.tensor_uses if "@" in use.key and "~" not in use.key]
    back = {*fragment.backward}
    taken = next(use for use in uses if use.op in back and use.key.startswith("d:") and not use.made)
    memory = {use.key.partition("@")[0]: (use.key, use.nbytes) for use in uses}
    return memory | {f"d:{output}": (taken.key, taken.nbytes)}
