"""Attention of teams: the ranks of a team gather their queries, keys and values, and each of them computes the team's
queries against the keys of other teams.

Teams are numbered (group, place). Rank l of a team in group g starts with the keys of the team at the same place in
group g - l, and passes them on to the next place; so the ranks of a team cover all groups. At the end a team adds up
its partial outputs by a reduce-scatter, each rescaled by the row sums of all. Backward, the queries of the teams travel
instead (`query_ring`), and reduce-scatters add up the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.ir.attention_mask import ScoreBlock
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.schemes.sequence.shared.attention_steps import STREAM, AttentionSteps, mask_block
from meshcast.simulator.schemes.sequence.shared.query_ring import rotate, row_sums_key, sum_rows

GATHERED = "gathered by a team"
"""The mark of attention whose queries and keys are those of a whole team."""

Axes = tuple[str, ...]


def attend_in_teams(
    operator: CoreAttention, inner: LowerModule, mesh: Mesh, axes: Sequence[Axes], token_order: str
) -> Fragment:
    """Attention on ranks (group, place, position in the team) along `axes`; there are as many groups as a team has
    ranks."""
    groups, places, team = axes
    ranks, around = mesh.size(team), mesh.size(places)
    found = team_blocks(token_order, ranks, around, operator.bidirectional)
    start = Collective(
        "shift", 0, (*groups, *team), targets=first_keys(ranks, mesh.stride(groups[0]) > mesh.stride(team[0]))
    )
    whole = replace(operator, marks=operator.marks | {GATHERED})
    steps = AttentionSteps(whole, inner, places, found, around - 1, start=start)
    return _TeamAttention(operator, inner(operator), steps, team, ranks).fragment


def team_blocks(token_order: str, ranks: int, around: int, bidirectional: bool = False) -> list[ScoreBlock]:
    """The score blocks of the steps, in numbers of teams.

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
    """Where the ranks of all groups at one place send the keys of their teams: rank l of group g to rank l of g + l.

    ranks: of a team, as many as groups.
    groups_outside: whether the axis of the groups lies outside that of the team, which decides the order of positions.
    """
    found = {
        (group, rank) if groups_outside else (rank, group): ((group + rank) % ranks, rank)
        for group in range(ranks)
        for rank in range(ranks)
    }
    ends = (found[position] for position in sorted(found))
    return tuple(group * ranks + rank if groups_outside else rank * ranks + group for group, rank in ends)


class _TeamAttention:
    """The ops of a rank, in `fragment`: gathers, steps, and reductions.

    own: the fragment of attention between the rank's own shards, which only tells their memory.
    """

    def __init__(self, operator: CoreAttention, own: Fragment, steps: AttentionSteps, team: Axes, ranks: int) -> None:
        self.name, self.team, self.ranks = operator.name, team, ranks
        self.shards, self.gathered = _memory_of_tensors(own), _memory_of_tensors(steps.step_fragments[0])
        q, k, v, o = steps.q, steps.k, steps.v, steps.o
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

    def _gather(self, name: str, own: tuple[str, int], whole: tuple[str, int], after: Sequence[Op], phase: str) -> Op:
        """All-gathers what `own` holds of every rank of the team into `whole`."""
        op = Op(f"all_gather {name}", STREAM, Collective("all_gather", whole[1], self.team), [*after], phase)
        self._use(op, own)
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
        made = steps.fragment.exit[o]
        gathered = self._gather("row sums", sums, every, [made], "F")
        work = Memory("add", output + every[1], output + sums[1])
        rescaled = self._issue(Op(f"rescale {o}", work=work, after=[made, gathered]))
        self._use(rescaled, every, (key, output))
        self._use(rescaled, (key, output), sums, made=True)
        return self._scatter(o, rescaled, "F")


def _memory_of_tensors(fragment: Fragment) -> dict[str, tuple[str, int]]:
    """Memory key and bytes of every tensor, and of gradients, with ``d:``."""
    uses = (use for use in fragment.tensor_uses if "@" in use.key and "~" not in use.key)
    return {use.key.partition("@")[0]: (use.key, use.nbytes) for use in uses}
