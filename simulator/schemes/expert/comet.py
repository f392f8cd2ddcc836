"""Comet: dispatch is fused into the first expert GEMM and combine into the last, tile by tile.

The first grouped GEMM of the experts computes tiles whose rows have arrived while other rows are still being sent. The
last computes its result panel by panel (groups of columns), and finished panels are sent back while others are
computed. Dispatch and GEMM are a single kernel, and so are GEMM and combine; expert/tutel splits GEMMs into chunks.

    dispatch       |t|tttttt|          last GEMM     |pppppppp|
    first GEMM       |......|t|        combine         |......|p|

Tokens come in either of two ways. All-to-all: a copy of a token for each of its experts, as in expert/all-to-all.
All-gather, as in the public kernels: every token once, to all ranks that share the experts; the first GEMM reads its
rows through an index, so no kernel permutes tokens. The last kernel adds up the results of each token's experts on the
rank, panel by panel, and reduce-scatters the sums. With P ranks of whole experts, Q ranks on each of them and k experts
per token (times the capacity factor) a rank sends, of T its tokens, 2 (P Q - 1) T forward, not 2 k T ((P - 1)/P
+ Q - 1).

An all-to-all of c seconds and a GEMM of g seconds take max(g + c/n, c + g/n) together, in n steps: as many as the GEMM
has tiles of rows, or panels of columns, but no more than waves of tiles. The first step waits for its tokens and the
last for the last ones; no panel is sent before it is made. All-gather and GEMM take max(g, c + g/n): a rank's rows
come first, the last of P Q shards last. Some multiprocessors of a fused kernel communicate and are missing in its GEMM;
copy engines bring gathered tokens.

References: Zhang et al. 2025, arXiv 2502.19811, sections 3.1 and 3.2; all-gather and reduce-scatter:
https://github.com/bytedance/flux, docs/design.md and src/moe_ag_scatter.
"""

from collections.abc import Iterable
from math import ceil
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE, Stage
from meshcast.simulator.ir.moe_operators import Permute
from meshcast.simulator.ir.ops import Fragment, Gemm, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper
from meshcast.simulator.lowering.rewrite import Rewrite, wave_count
from meshcast.simulator.schemes.expert.shared import fused_exchange as fusion
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_gather import find_gather_rounds, fuse_permutations_of


class Comet(ExpertScheme):
    paper = Paper(
        "arXiv:2502.19811", "Comet: Fine-grained Computation-communication Overlapping for Mixture-of-Experts", 2025
    )

    class Options(ExpertScheme.Options):
        tile: int = Field(default=128, ge=1, strict=True)
        """Rows of an output tile of a GEMM; all tiles are of the same size."""
        panel: int = Field(default=1024, ge=1, strict=True)
        """Columns of a panel, whose results are sent together; flux: 128 to 1280, by default 1024."""
        dispatch: Literal["auto", "all-to-all", "all-gather"] = "auto"
        """How tokens come to the ranks of their experts: auto as fewer bytes are sent."""
        sms: int = Field(default=28, ge=0, strict=True)
        """Multiprocessors of a fused kernel that communicate; flux on Hopper: 28 of 132, on GPUs before it: 3
        (FLUX_RS_BLOCKS of src/moe_gather_rs/ths_op/gemm_grouped_v2_gather_rs.cc)."""
        wave: int = Field(default=132, ge=1, strict=True)
        """Tiles computed at a time where no multiprocessor communicates; 132 as on an H100."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        if self.options.sms >= (number := job.cluster.gpu.multiprocessors):
            rule = f"{self.use} leaves some of the {number} multiprocessors of {job.cluster.gpu.name} to the GEMM"
            raise PlanError("plan.schemes", rule, f"sms below {number} would work", self.options.sms)

    def gathers_tokens(self, copies: float) -> bool:
        """Returns whether tokens are all-gathered. copies: expert slots that a token takes."""
        p, q = self.ranks, self.mesh.size(self.axes[1:])
        fewer = p * q - 1 <= copies * ((p - 1) / p + q - 1)
        return p * q > 1 and (fewer if self.options.dispatch == "auto" else self.options.dispatch == "all-gather")

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return super().lower_stage(fuse_permutations_of(stage, self.gathers_tokens), inner)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, MoE) or self.mesh.size(self.axes) == 1:
            return super().lower(module, inner)
        if any(isinstance(operator, Permute) for operator in module.operators()):
            fragment = super().lower(module, inner)
            return self._fuse(fragment, fusion.find_all_to_all_rounds(fragment, self.mesh.parts(self.axes[:1])), False)
        # Whatever the routing, every rank gathers all tokens.
        return self._fuse(fragment := inner(module), find_gather_rounds(fragment, self.over), True)

    def _fuse(self, fragment: Fragment, rounds: Iterable[fusion.FusedRound], gathered: bool) -> Fragment:
        fused, options = Rewrite(fragment), self.options
        for fused_round in rounds:
            up, down = fused_round.first[-1].work, fused_round.last[0].work
            assert isinstance(up, Gemm) and isinstance(down, Gemm)
            fusion.give_multiprocessors(fused_round, 0 if gathered else options.sms, options.sms)
            rows = self.mesh.size(self.axes) if gathered else up.batch * ceil(up.m / options.tile)
            rows = self._steps(up, rows, 0 if gathered else options.sms)
            panels = self._steps(down, ceil(down.n / options.panel), options.sms)
            if fused_round.dispatch and rows > 1:
                fusion.fuse_dispatch(fused, fused_round.dispatch, fused_round.first, rows, gathered)
            if fused_round.combine and panels > 1:
                fusion.fuse_combine(fused, fused_round.last, fused_round.combine, panels)
        return fused.apply()

    def _steps(self, product: Gemm, parts: int, sms: int) -> int:
        """Steps of a GEMM that has so many tiles of rows, panels or shards."""
        return min(parts, wave_count(product, max(1, self.options.wave - sms), self.options.tile))

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("expert_parameters", setting.expert_parameters / setting.ep, "E/P experts per rank")
        p, tokens, copies = setting.ep, setting.b * setting.s, setting.slots_per_token
        if p > 1 and p <= copies:
            sent = (p - 1) * tokens * (4 * setting.h * 2 + 2 * setting.top_k * 4)
            yield ClosedForm("sent_per_layer", sent, "flux: every token once, with the router's weights")
            return
        yield ClosedForm("sent_per_layer", 4 * (p - 1) / p * tokens * copies * setting.h * 2, "2.1: as all-to-alls")
        if p > 1:
            c, g, number = setting.exchange_s, setting.compute_s / 2, setting.experts // p
            up, down = (Gemm(tokens * copies / number, n, 1, number) for n in (setting.expert_ffn, setting.h))
            parts = ((up, number * ceil(up.m / self.options.tile)), (down, ceil(setting.h / self.options.panel)))
            rows, panels = (self._steps(product, most, self.options.sms) for product, most in parts)
            taken = max(g + c / rows, c + g / rows) + max(g + c / panels, c + g / panels)
            yield ClosedForm("forward_round", taken, "3.1: two GEMMs, one fused with each all-to-all")
            yield ClosedForm("backward_round", taken, "3.1: as forward")
