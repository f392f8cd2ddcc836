"""Linears in fp8: their three products by `torch._scaled_mm`, with operands that were cast before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simulator.ir.operators import Linear
from simulator.ir.ops import Gemm
from simulator.plan.plan import Plan
from validation.kernels.modes import Work
from validation.kernels.operators import OperatorOfRank
from validation.measurements.device import Device

LEAST = (8, 9)
"""Compute capability of the first GPUs that multiply fp8 (Ada; Hopper is 9.0)."""

MULTIPLE = 16
"""Sizes of the operands must divide by it (the documentation of cuBLASLt's fp8 products)."""


def lacking(device: Device, plan: Plan) -> str:
    """Why no fp8 is measured; empty where it can be."""
    if device.kind != "cuda":
        return "fp8: not measured, torch multiplies it on GPUs only"
    capability = torch.cuda.get_device_capability(device.index)
    if capability < LEAST:
        return f"fp8: not measured, a GPU of compute capability {capability[0]}.{capability[1]} does not multiply it"
    gpu = plan.job.cluster.gpu
    return "" if "fp8" in gpu.peak else f"fp8: not measured, for {gpu.name} has no peak rate to forecast it from"


def products(part: OperatorOfRank, backward: bool) -> Sequence[Gemm]:
    """The products of a linear in fp8, with results in bf16; none of other leaves, of routers and of odd sizes."""
    if not isinstance(part.operator, Linear) or part.operator.view or part.name == "router":
        return []
    works = [work for work in (part.backward if backward else part.forward) if isinstance(work, Gemm)]
    if any(size % MULTIPLE for work in works for size in (work.m, work.n, work.k)):
        return []
    return [replace(work, dtype="fp8", out_dtype="bf16") for work in works]


def operands(work: Gemm, device: Device) -> tuple[Tensor, Tensor]:
    """Both factors, (m x k) by rows and (k x n) by columns, as the hardware wants them for every product."""
    left = torch.randn(int(work.m), int(work.k), dtype=torch.bfloat16, device=device.torch)
    right = torch.randn(work.n, int(work.k), dtype=torch.bfloat16, device=device.torch)
    return left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()


def run_products(works: Sequence[Gemm], device: Device) -> Work:
    """What runs some products one after another, each with one scale a tensor."""
    scale = torch.ones((), device=device.torch)
    factors = [operands(work, device) for work in works]

    def work() -> None:
        for left, right in factors:
            torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return work
