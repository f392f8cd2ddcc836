"""Exchanges fused with the GEMM before or after them: a GEMM computes its tiles as their rows arrive, and results are
sent as they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, Op
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies, split_work_by
from meshcast.simulator.schemes.expert.shared.token_dispatch import find_rounds, wait_for_tokens_only


@dataclass(frozen=True)
class FusedRound:
    """One pass of tokens through the experts, as two fused kernels and what lies between them.

    dispatch: the collectives that bring the rows of the first GEMM; none where a rank has them.
    first: the kernels that read them, up to the first GEMM.
    last: the last GEMM, and kernels on its rows.
    combine: the ops that send its results, and a kernel that adds them up before.
    """

    dispatch: list[Op]
    first: list[Op]
    last: list[Op]
    combine: list[Op]


def find_all_to_all_rounds(fragment: Fragment, parts: Iterable[str]) -> list[FusedRound]:
    """Returns the rounds between all-to-alls among the ranks of `parts`."""
    rounds = []
    for expert_round in find_rounds(fragment, parts):
        ops = expert_round.ops
        first, *_, last = [i for i, op in enumerate(ops) if isinstance(op.work, Gemm)]
        wait_for_tokens_only(expert_round)
        moving = next(i for i, op in enumerate(ops) if op.stream == COMPUTE)
        coming = len(ops) - next(i for i, op in enumerate(reversed(ops)) if op.stream == COMPUTE)
        rounds.append(FusedRound(ops[:moving], ops[moving : first + 1], ops[last:coming], ops[coming:]))
    return rounds


def give_multiprocessors(fused_round: FusedRound, to_dispatch: int, to_combine: int) -> None:
    """Gives some multiprocessors of the two fused kernels to their communication."""
    for product, moving, sms in (
        (fused_round.first[-1:], fused_round.dispatch, to_dispatch),
        (fused_round.last[:1], fused_round.combine, to_combine),
    ):
        for op in (*product, *moving) if moving else ():
            if isinstance(op.work, Gemm):
                op.work = replace(op.work, sms=sms)
            elif isinstance(op.work, Collective):
                # Those of its GEMM.
                op.work = replace(op.work, sms=0)


def fuse_dispatch(fused: Rewrite, moving: list[Op], kernels: list[Op], steps: int, own_rows_first: bool) -> None:
    """Lets `kernels`, of which the last is a GEMM, work in `steps` on what the ops `moving` bring: on the last step
    once all has come. What follows the GEMM waits for it alone.

    own_rows_first: the first rows are those of the rank itself; otherwise the first step waits for its share of what is
        sent.
    """
    ready, ends = {op: moving[0].after for op in moving}, moving[-1:]
    if not own_rows_first:
        tile, ends = (_split_exchange(moving, (1, steps - 1), part, moving[0].after) for part in (0, 1))
        fused.swap(moving[0], [*tile, *ends], ends[:1])
        for op, end in zip(moving[1:], ends[1:], strict=True):
            fused.swap(op, [], [end])
        ready = {op: tile[-1:] for op in moving}
    for early, late in fused.chunk(kernels, (steps - 1, 1), one_kernel=True):
        early.after = replace_dependencies(early.after, ready)
        late.after = [*replace_dependencies(late.after, ready), early, *ends[-1:]]


def fuse_combine(fused: Rewrite, kernels: list[Op], moving: list[Op], steps: int) -> None:
    """Lets the ops `moving` send what `kernels`, a GEMM and what follows it, make in `steps`: nothing before the first
    is computed, and that of the last after it.
    """
    first, rest = fused.chunk(kernels, (1, steps - 1), one_kernel=True)[-1]
    most = _split_exchange(moving, (steps - 1, 1), 0, [first])
    panel = _split_exchange(moving, (steps - 1, 1), 1, [rest])
    fused.swap(moving[0], [*most, *panel], [most[0], panel[0]])
    for op, sent, end in zip(moving[1:], most[1:], panel[1:], strict=True):
        fused.swap(op, [], [sent, end])


def _split_exchange(moving: list[Op], sizes: tuple[int, int], which: int, after: Sequence[Op]) -> list[Op]:
    """Returns one of two parts, of relative `sizes`, of every op of an exchange, in order on its stream."""
    parts: list[Op] = []
    for op in moving:
        assert op.work is not None
        work, stream = split_work_by(op.work, sizes)[which], moving[-1].stream
        behind = [*(parts[-1:] or after)]
        parts.append(replace(op, name=f"{op.name} {which}", stream=stream, work=work, after=behind))
    return parts
