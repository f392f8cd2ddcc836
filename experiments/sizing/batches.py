"""The global batch of a cluster: that of the job, or the largest one within limits that the GPUs divide well.

A larger batch hides more of what a step costs once: pipeline bubbles, gradients, the update. What limits it is
learning: beyond some size more tokens a step buy no fewer steps. DeepSeek LLM (arXiv 2401.02954, section 3.1) fits the
best batch of its runs as 0.2920 C^0.3271 tokens, where C are the FLOPs of the whole training; batches of a wide range
around it are within 0.25 % of the least loss there. A batch that GPUs divide well lies between half of it and all.
"""

from __future__ import annotations

import math

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.counts import read_tokens

FACTOR, EXPONENT = 0.2920, 0.3271
"""Of the best batch [tokens] by the FLOPs of the training: arXiv 2401.02954, equation 1."""

FLOPS_EACH = 6
"""FLOPs of a parameter and token, forward and backward."""


NEAR = 0.05
"""Share by which a batch may differ from a stated one: 16.8M tokens are 2,048 sequences of 8,192, or 1,984 for 31 x 4
nodes."""


@dataclass(frozen=True)
class BatchLimits:
    """Global batches that a training may have.

    least, most: sequences.
    reason: why.
    """

    least: int
    most: int
    reason: str

    def choose(self, gpus: int) -> int:
        """Returns the batch for a number of GPUs, which replicas of many degrees divide: of the multiples of their odd
        part, or where there is none of all, that with the largest power of two in it; the largest of several."""
        odd = gpus // (gpus & -gpus)
        for factor in (odd, 1):
            first, last = -(-self.least // factor), self.most // factor
            if first <= last:
                power = next(power for power in range(last.bit_length(), -1, -1) if (last >> power) << power >= first)
                return int(factor * ((last >> power) << power))
        return self.most


def best_batch(parameters: float, tokens: float) -> float:
    """Returns the best global batch of a training by the law of DeepSeek LLM [tokens]. parameters: that a token
    passes. tokens: of the training."""
    return float(FACTOR * (FLOPS_EACH * parameters * tokens) ** EXPONENT)


def limit_by_law(parameters: float, tokens: float, sequence: int) -> BatchLimits:
    """Returns the limits of a training whose batch is not stated. sequence: tokens."""
    best = best_batch(parameters, tokens)
    most = max(1, int(best / sequence))
    reason = f"at most {best / 1e6:,.3g} M tokens, the best batch by the law of DeepSeek LLM (arXiv 2401.02954, "
    reason += "section 3.1), at least half of it"
    return BatchLimits(max(1, -(-most // 2)), most, reason)


def read_limits(words: str, sequence: int, where: str) -> BatchLimits:
    """Returns the limits that ``4M..16M`` or ``16M`` states, in tokens of a step.

    sequence: tokens. where: of the words, for errors. Raises PlanError for other words, and for limits without a whole
    sequence between them.
    """
    ends = [read_tokens(part.strip()) for part in words.split("..", 1)]
    tokens = [float(end) if isinstance(end, int | float) else _read_plain(str(end)) for end in ends]
    if any(not 0 < end < 1e15 for end in tokens) or tokens[0] > tokens[-1]:
        raise PlanError(where, "it is the tokens of a step, or the least and the most", "Write 4M..16M, or 16M", words)
    least, most = math.ceil(tokens[0] / sequence), math.floor(tokens[-1] / sequence)
    if len(tokens) == 1:
        least, most = math.ceil((1 - NEAR) * tokens[0] / sequence), math.floor((1 + NEAR) * tokens[0] / sequence)
    if most < max(least, 1):
        rule = f"no batch of whole sequences of {sequence:,} tokens lies there"
        raise PlanError(where, rule, "Write wider limits", words)
    near = "" if len(tokens) > 1 else f" to within {NEAR:.0%}, as nodes divide it"
    return BatchLimits(max(least, 1), most, f"{words} tokens, as stated{near}")


def _read_plain(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
