"""Functions that the processes of the tests run: two ranks that share the model, or the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshcast.validation.reference import model, optimizer, tokens
from meshcast.validation.reference.tensor_parallel import TensorGroup
from tests.validation.reference.plans import MODELS, plan

CPU = torch.device("cpu")


@contextmanager
def gloo_group() -> Iterator[None]:
    """The group of all ranks, inside the block."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@gloo_group()
def divided(rank: int) -> dict[str, Any]:
    """By model and sequence parallelism: loss, gradients that are whole or of this rank's part, their norm, and the
    weights after a step."""
    found = {}
    for name, shape in MODELS.items():
        for sequence in (False, True):
            given = plan(shape, gpus=2, tp=2, sequence_parallel=sequence)
            stage = model.build_stage(given, None, TensorGroup(2, rank, dist.group.WORLD, sequence), CPU)
            adam = optimizer.Optimizer(stage.parameters(), given, [dist.group.WORLD])
            ids, targets = tokens.make_tokens(given, 0, 0, 0)
            loss = stage(ids, targets)
            loss.backward()
            for param in stage.parameters():
                if param.partial_gradient:  # type: ignore[attr-defined]
                    dist.all_reduce(param.grad)
            gradients = {n: param.grad.clone() for n, param in stage.named_parameters() if param.grad is not None}
            norm = adam.step()
            weights = {n: param.detach().clone() for n, param in stage.named_parameters()}
            found[name, sequence] = {
                "loss": loss.item(),
                "gradients": gradients,
                "norm": norm.item(),
                "weights": weights,
                "cuts": {n: (cut.dim, cut.sections) for n, cut in stage.shardings.items()},
            }
    return found


@gloo_group()
def replicas(rank: int) -> dict[str, Any]:
    """Weights and norms of two steps with the optimizer's state divided over two replicas, by formats."""
    found = {}
    for precision, gradients, main in (("fp32", "fp32", "fp32"), ("bf16", "bf16", "fp32"), ("bf16", "fp32", "fp32")):
        formats = {"compute": precision, "gradients": gradients, "main_weights": main, "moments": main}
        given = plan(MODELS["llama"], job={"precision": formats}, gpus=2, dp=2)
        stage = model.build_stage(given, None, TensorGroup(), CPU)
        zero = optimizer.ZeroOptimizer(stage.parameters(), given, dist.group.WORLD)
        norms = []
        for step in range(2):
            ids, targets = tokens.make_tokens(given, step, 0, rank)
            stage(ids, targets).backward()
            norms.append(zero.step().item())
            zero.zero_grad()
        weights = {n: param.detach().clone() for n, param in stage.named_parameters()}
        found[precision, gradients] = {"norms": norms, "weights": weights, "state": zero.parts[0].shard.numel()}
    return found
