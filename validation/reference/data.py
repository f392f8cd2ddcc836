"""Made-up tokens: the same for a step, micro-batch and replica wherever they are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.plan.plan import Plan


def tokens(plan: Plan, step: int, microbatch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Ids [b, s] (int64, on the CPU) and the tokens that follow them, the targets, of one micro-batch."""
    batch = plan.job.batch
    assert batch.sequence is not None
    place = (step * plan.shape.m + microbatch) * plan.replicas + replica
    generator = torch.Generator().manual_seed(place)
    drawn = torch.randint(plan.job.model.vocab, (batch.micro, batch.sequence + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
