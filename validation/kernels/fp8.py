"""Runs the GEMMs of linear layers in fp8 (`torch._scaled_mm`) for timing; casts to fp8 are not part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.kernels.modes import Work
from meshcast.validation.kernels.operators import LocalOperator
from meshcast.validation.measurements.device import Device

MIN_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 tensor cores (Ada; Hopper is 9.0)."""

MULTIPLE = 16
"""Number of which m, n and k must be multiples (documentation of cuBLASLt's fp8 GEMMs)."""


def why_missing(device: Device, plan: Plan) -> str:
    """Returns the reason why fp8 cannot be measured, "" if it can."""
    if device.cuda is None:
        return "fp8: not measured, torch has its GEMMs on GPUs only"
    capability = device.cuda.capability
    if capability < MIN_CAPABILITY:
        return f"fp8: not measured, a GPU of compute capability {capability[0]}.{capability[1]} has no fp8 tensor cores"
    gpu = plan.job.cluster.gpu
    return "" if "fp8" in gpu.peak else f"fp8: not measured, for {gpu.name} has no peak rate to forecast it from"


def fp8_gemms(local: LocalOperator, backward: bool) -> Sequence[Gemm]:
    """Returns the GEMMs of a linear layer in fp8, with results in bf16.

    [] for other operators, routers, experts, and sizes that are no multiples of `MULTIPLE`.
    """
    if not isinstance(local.operator, Linear) or local.operator.view or local.name == "router":
        return []
    works = [work for work in (local.backward if backward else local.forward) if isinstance(work, Gemm)]
    if any(size % MULTIPLE for work in works for size in (work.m, work.n, work.k)):
        return []
    return [replace(work, dtype="fp8", out_dtype="bf16") for work in works]


def operands(work: Gemm, device: Device) -> tuple[Tensor, Tensor]:
    """Makes random fp8 operands, m x k in row-major and k x n in column-major order, as tensor cores need them."""
    left = torch.randn(int(work.m), int(work.k), dtype=torch.bfloat16, device=device.torch)
    right = torch.randn(work.n, int(work.k), dtype=torch.bfloat16, device=device.torch)
    return left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()


def make_runner(works: Sequence[Gemm], device: Device) -> Work:
    """Returns a function that runs the GEMMs in turn, with one scale per tensor."""
    scale = torch.ones((), device=device.torch)
    pairs = [operands(work, device) for work in works]

    def work() -> None:
        for left, right in pairs:
            torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return work
