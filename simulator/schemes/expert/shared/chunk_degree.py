"""Number of chunks of a round of tokens, chosen by linear models of the all-to-all and of the experts (PipeMoE).

The models, seconds = start + slope x amount, are fitted before training to an all-to-all and to the GEMMs of the
experts, each of all tokens of a rank and of an eighth of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import FitsModels
from meshcast.simulator.ir.ops import BYTES, Collective, Gemm, Work
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, chunked_round_s
from meshcast.simulator.schemes.expert.shared.token_dispatch import ExpertRound

MAX_DEGREE = 64
"""Most chunks that are tried."""

PART = 8
"""Of two amounts that a model is fitted to, the larger over the smaller."""

ROUNDED = 1e-9
"""Relative difference of durations that is rounding."""

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE, strict=True)]
Line = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
"""Start [s] and slope [s per byte or FLOP]."""


def fastest_degree(nbytes: float, flops: float, exchange: Line, compute: Line, most: int = MAX_DEGREE) -> int:
    """Returns the number of chunks with the fastest round; the least of several. nbytes: of an all-to-all of all
    tokens."""

    def seconds(n: int) -> float:
        each = exchange[0] + exchange[1] * nbytes / n, compute[0] + compute[1] * flops / n
        return chunked_round_s(*each, n)

    durations = [seconds(n) for n in range(1, most + 1)]
    return 1 + next(i for i, duration in enumerate(durations) if duration <= min(durations) * (1 + ROUNDED))


class ChosenDegree(ExpertScheme, FitsModels):
    """Base of the expert schemes that choose the number of chunks themselves."""

    class Options(ExpertScheme.Options):
        degree: Degree | Literal["auto"] = "auto"
        """Chunks of the tokens; auto: as the two linear models say, forward and backward each."""
        exchange: Line | None = None
        """Start [s] and slope [s/byte] of the model of an all-to-all; null: fitted to the cluster."""
        compute: Line | None = None
        """Start [s] and slope [s/FLOP] of the model of the GEMMs of all experts of a rank; null: fitted to it."""

    def fit_models(self, job: Any, measure: Callable[[Work], float]) -> Scheme:
        options, moe = self.options, job.model.moe
        if options.degree != "auto" or self.ranks == 1 or moe is None or (options.exchange and options.compute):
            return self
        shards = self.sequence_shards(job)
        rows = job.batch.micro * job.batch.sequence / shards * moe.top_k * (moe.capacity or 1.0)
        width, experts = BYTES[self.framework.weights], moe.experts // self.ranks
        hidden = moe.token_width(job.model.hidden)

        def measure_exchange(part: int) -> tuple[float, float]:
            nbytes = int(rows * hidden * width / part)
            work = Collective("all_to_all", nbytes, self.mesh.parts(self.axes[:1]))
            return nbytes, measure(work)

        def measure_experts(part: int) -> tuple[float, float]:
            m, up = rows / experts / part, (2 if job.model.gated else 1) * moe.expert_ffn
            sizes = (up, hidden), (hidden, moe.expert_ffn)
            works = [Gemm(m, n, k, experts, self.framework.weights, groups=((experts, m),)) for n, k in sizes]
            return sum(work.flops for work in works), sum(map(measure, works))

        return self.with_options(
            exchange=options.exchange or _fit_line(measure_exchange(PART), measure_exchange(1)),
            compute=options.compute or _fit_line(measure_experts(PART), measure_experts(1)),
        )

    def degree_of(self, expert_round: ExpertRound) -> int:
        """Returns the number of chunks of a round; without fitted models 1."""
        assert isinstance(expert_round.out.work, Collective)
        if self.options.degree != "auto":
            return int(self.options.degree)
        if self.options.exchange is None or self.options.compute is None:
            return 1
        products = [op.work for op in expert_round.inside if isinstance(op.work, Gemm)]
        rows = min(work.batch * work.m for work in products)
        flops = sum(work.flops for work in products)
        most = min(MAX_DEGREE, max(1, int(rows)))
        return fastest_degree(expert_round.out.work.nbytes, flops, self.options.exchange, self.options.compute, most)


def _fit_line(small: tuple[float, float], large: tuple[float, float]) -> Line:
    """Returns the line through two pairs of amount and seconds, with a start of at least 0."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return max(0.0, small[1] - slope * small[0]), slope
