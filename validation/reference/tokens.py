"""Random training tokens, reproducible from their place in the training run."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcast.simulator.plan.plan import Plan


def make_tokens(plan: Plan, step: int, microbatch: int, replica: int) -> tuple[Tensor, Tensor]:
    """Returns the token ids and targets of a micro-batch: two [b, s] int64 tensors on the CPU, targets shifted by a
    position.

    They depend on step, micro-batch and replica only, so every rank can make the tokens of any other.
    """
    batch = plan.job.batch
    assert batch.sequence is not None
    place = (step * plan.shape.m + microbatch) * plan.ranks.replicas + replica
    generator = torch.Generator().manual_seed(place)
    drawn = torch.randint(plan.job.model.vocab, (batch.micro, batch.sequence + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
