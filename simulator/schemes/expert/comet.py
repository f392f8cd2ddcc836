"""Comet: dispatch is fused into the first expert GEMM and combine into the last one, tile by tile.

The first grouped GEMM of the experts computes tiles whose rows have arrived while other rows are still being sent. The
last one computes its result panel by panel (groups of columns), and finished panels are sent back while others are
computed. No kernel is split, unlike in systems that split the tokens into chunks (expert/tutel): dispatch and GEMM are
one kernel, and so are GEMM and combine.

    dispatch       |t|tttttt|          last GEMM     |ppppppp|
    first GEMM       |......|          combine       |.......|t|

An all-to-all of c seconds and a GEMM of g seconds and n tiles of rows (or panels of columns) take max(g + c/n, c)
together: all but the first tile, which the GEMM waits for, or the last panel is hidden. Kernels between the first and
the last GEMM run after the one and before the other. The exchange uses the multiprocessors of an all-to-all.

References: Zhang et al. 2025, arXiv 2502.19811, sections 3.1 and 3.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from pydantic import Field

from simulator.ir.modules import Module, MoE
from simulator.ir.ops import COMPUTE, Fragment, Gemm, Op
from simulator.ir.scheme import ClosedForm, LowerModule, Paper
from simulator.lowering.rewrite import Rewrite, replace_dependencies, split_work_by
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from simulator.schemes.expert.shared.token_dispatch import ExpertRound, find_rounds, wait_for_tokens_only


class Comet(ExpertScheme):
    paper = Paper(
        "arXiv:2502.19811", "Comet: Fine-grained Computation-communication Overlapping for Mixture-of-Experts", 2025
    )

    class Options(ExpertScheme.Options):
        tile: int = Field(default=128, ge=1, strict=True)
        """Rows, and columns, of an output tile of a GEMM; the default is assumed."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE) and self.ranks > 1:
            fused = Rewrite(fragment)
            for one in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
                self._fuse_round(fused, one)
            fragment = fused.apply()
        return fragment

    def _fuse_round(self, fused: Rewrite, one: ExpertRound) -> None:
        """Fuses the all-to-alls of a round with the GEMMs next to them."""
        ops = one.ops
        first, *_, last = [i for i, op in enumerate(ops) if isinstance(op.work, Gemm)]
        wait_for_tokens_only(one)
        moving = next(i for i, op in enumerate(ops) if op.stream == COMPUTE)
        coming = len(ops) - next(i for i, op in enumerate(reversed(ops)) if op.stream == COMPUTE)
        up, down = ops[first].work, ops[last].work
        assert isinstance(up, Gemm) and isinstance(down, Gemm)
        rows, panels = ceil(up.batch * up.m / self.options.tile), ceil(down.n / self.options.tile)
        if rows > 1:
            self._fuse_dispatch(fused, ops[:moving], ops[moving : first + 1], rows)
        if panels > 1:
            self._fuse_combine(fused, ops[last:coming], ops[coming:], panels)

    def _fuse_dispatch(self, fused: Rewrite, moving: list[Op], kernels: list[Op], tiles: int) -> None:
        """The first GEMM waits for one tile of the dispatch, and what follows it also for the rest."""
        tile = self._split_exchange(moving, (1, tiles - 1), 0, moving[0].after)
        rest = self._split_exchange(moving, (1, tiles - 1), 1, moving[0].after)
        fused.swap(moving[0], [*tile, *rest], rest[:1])
        for op, end in zip(moving[1:], rest[1:], strict=True):
            fused.swap(op, [], [end])
        for op in kernels:
            op.after = replace_dependencies(op.after, {moving[-1]: tile[-1:]})
        fused.swap(kernels[-1], kernels[-1:], [kernels[-1], rest[-1]])

    def _fuse_combine(self, fused: Rewrite, kernels: list[Op], moving: list[Op], panels: int) -> None:
        """All panels but the last are sent during the last GEMM."""
        most = self._split_exchange(moving, (panels - 1, 1), 0, kernels[0].after)
        panel = self._split_exchange(moving, (panels - 1, 1), 1, kernels[-1:])
        fused.swap(moving[0], [*most, *panel], [most[0], panel[0]])
        for op, sent, end in zip(moving[1:], most[1:], panel[1:], strict=True):
            fused.swap(op, [], [sent, end])

    def _split_exchange(self, moving: list[Op], sizes: tuple[int, int], which: int, after: Sequence[Op]) -> list[Op]:
        """One of two parts, of relative `sizes`, of every op of an exchange, one after the other."""
        found: list[Op] = []
        for op in moving:
            assert op.work is not None
            work = split_work_by(op.work, sizes)[which]
            found.append(replace(op, name=f"{op.name} {which}", work=work, after=[*(found[-1:] or after)]))
        return found

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "E/P experts per rank")
        if setting.ep > 1:
            rows, panels = (
                ceil(n / self.options.tile) for n in (setting.b * setting.s * setting.slots_per_token, setting.h)
            )
            c, g = setting.exchange_s, setting.compute_s / 2
            taken = max(g + c / rows, c) + max(g + c / panels, c)
            yield ClosedForm("forward_round", taken, "3.1: two GEMMs, one fused with each all-to-all")
            yield ClosedForm("backward_round", taken, "3.1: as forward")
