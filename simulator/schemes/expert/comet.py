"""Tokens pass experts tile by tile inside one kernel: as they come in at the first product, out of the last one.

The first grouped product of the experts computes tiles whose rows have come while others are on their way; the last one
makes the columns of its result panel by panel, and finished panels are sent back while others are computed. No kernel
is cut for it, as systems that cut tokens in parts do (expert/tutel): dispatch and product are one, and product and
combination.

    dispatch       |t|tttttt|          last product  |ppppppp|
    first product    |......|          combination   |.......|t|

Of a product of n tiles of rows (or panels of columns), an exchange of c seconds and a product of g take
max(g + c/n, c) together: all is hidden but the tile that the product waits for, or the panel that it makes last. What
is between the first and the last product follows the one and precedes the other. The multiprocessors that exchange are
those of an all-to-all.

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
        """Rows, and columns, of a tile of a product; the default is assumed."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE) and self.ranks > 1:
            fused = Rewrite(fragment)
            for one in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
                self._fuse_round(fused, one)
            fragment = fused.apply()
        return fragment

    def _fuse_round(self, fused: Rewrite, one: ExpertRound) -> None:
        """Joins the exchanges of a round with the products beside them."""
        ops = one.ops
        first, *_, last = [i for i, op in enumerate(ops) if isinstance(op.work, Gemm)]
        wait_for_tokens_only(one)
        moving = next(i for i, op in enumerate(ops) if op.stream == COMPUTE)
        coming = len(ops) - next(i for i, op in enumerate(reversed(ops)) if op.stream == COMPUTE)
        up, down = ops[first].work, ops[last].work
        assert isinstance(up, Gemm) and isinstance(down, Gemm)
        rows, panels = ceil(up.batch * up.m / self.options.tile), ceil(down.n / self.options.tile)
        self._fuse_dispatch(fused, ops[:moving], ops[moving : first + 1], rows)
        self._fuse_combine(fused, ops[last:coming], ops[coming:], panels)

    def _fuse_dispatch(self, fused: Rewrite, moving: list[Op], kernels: list[Op], tiles: int) -> None:
        """Kernels wait for one tile of what comes, and what follows them for the rest too."""
        tile = self._split_exchange(moving, (1, tiles - 1), 0, moving[0].after)
        rest = self._split_exchange(moving, (1, tiles - 1), 1, moving[0].after)
        fused.swap(moving[0], [*tile, *rest], rest[:1])
        for op, end in zip(moving[1:], rest[1:], strict=True):
            fused.swap(op, [], [end])
        for op in kernels:
            op.after = replace_dependencies(op.after, {moving[-1]: tile[-1:]})
        fused.swap(kernels[-1], kernels[-1:], [kernels[-1], rest[-1]])

    def _fuse_combine(self, fused: Rewrite, kernels: list[Op], moving: list[Op], panels: int) -> None:
        """All panels but the last leave while others are computed."""
        most = self._split_exchange(moving, (panels - 1, 1), 0, kernels[0].after)
        panel = self._split_exchange(moving, (panels - 1, 1), 1, kernels[-1:])
        fused.swap(moving[0], [*most, *panel], panel[:1])
        for op, end in zip(moving[1:], panel[1:], strict=True):
            fused.swap(op, [], [end])

    def _split_exchange(self, moving: list[Op], sizes: tuple[int, int], which: int, after: Sequence[Op]) -> list[Op]:
        """A part of every step of an exchange, one behind the other."""
        found: list[Op] = []
        for op in moving:
            assert op.work is not None
            work = split_work_by(op.work, sizes)[which]
            found.append(replace(op, name=f"{op.name} {which}", work=work, after=[*(found[-1:] or after)]))
        return found

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "experts over all ranks")
        if setting.ep > 1:
            rows, panels = (
                ceil(n / self.options.tile) for n in (setting.b * setting.s * setting.slots_per_token, setting.h)
            )
            c, g = setting.exchange_s, setting.compute_s / 2
            taken = max(g + c / rows, c) + max(g + c / panels, c)
            yield ClosedForm("forward_round", taken, "3.1: of two products, one with each exchange")
            yield ClosedForm("backward_round", taken, "3.1: likewise")
