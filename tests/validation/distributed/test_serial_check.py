"""Sharded training equals serial training, among ranks that talk over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.validation.distributed.jobs import EXPERTS, LLAMA, context_job, job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from meshcast.validation.distributed.serial_check import SerialCheck, compare_with_serial, fits_serially  # noqa: E402
from tests.validation.ranks import run_task  # noqa: E402

BITS = {
    "bf16": job(tp=2, precision="bf16"),
    "v-half, 16 bits": job(pp=2, schedule="v-half", model=LLAMA)
    | {"precision": {"compute": "bf16", "gradients": "fp32"}},
}
"""The jobs in formats of 16 bits; gradients of the second are summed up in 32."""
DAILY = {
    "tensor with sequence": job(tp=2),
    "interleaved, recomputed": job(pp=2, chunks=2, recompute="full"),
    "breadth-first": job(pp=2, chunks=2, schedule="breadth-first"),
    "hanayo": job(pp=2, schedule="hanayo"),
    "zb-h1, llama": job(pp=2, schedule="zb-h1", model=LLAMA),
    "zb-auto": job(pp=2, schedule="zb-auto"),
    "zb-v, one table on one rank": job(pp=2, schedule="zb-v"),
    "ddp": job(dp=2, zero=0),
    "fsdp, llama": job(dp=2, fsdp=True, model=LLAMA),
    "experts and zero-1, recomputed": job(dp=2, ep=2, model=EXPERTS, recompute="full"),
    "keys gathered, llama, recomputed core": job(cp=2, zero=0, model=LLAMA, recompute="selective"),
    "ulysses": context_job("sequence/ulysses"),
}
"""Every scheme, among two ranks."""
TWO = {
    "tensor": job(tp=2, sequence_parallel=False),
    "llama, tensor with sequence": job(tp=2, model=LLAMA),
    "gpipe": job(pp=2, schedule="gpipe"),
    "1f1b": job(pp=2),
    "1f1b, llama": job(pp=2, model=LLAMA),
    "interleaved": job(pp=2, chunks=2),
    "zb-h1": job(pp=2, schedule="zb-h1"),
    "zb-v, llama, recomputed": job(pp=2, schedule="zb-v", model=LLAMA, recompute="full"),
    "zero-1": job(dp=2),
    "fsdp": job(dp=2, fsdp=True),
    "experts and ddp": job(dp=2, ep=2, zero=0, model=EXPERTS),
    "keys gathered": job(cp=2),
    "keys gathered and fsdp": job(cp=2, fsdp=True, model=LLAMA),
    "ulysses, llama": context_job("sequence/ulysses", "data/ddp", LLAMA),
}
FOUR = {
    "pipeline and tensor": job(4, pp=2, tp=2),
    "interleaved and ddp": job(4, pp=2, dp=2, chunks=2, zero=0, model=LLAMA),
    "replicas and tensor": job(4, dp=2, tp=2),
    "zb-h1 and tensor": job(4, pp=2, tp=2, schedule="zb-h1", model=LLAMA),
    "zb-v and zero-1": job(4, pp=2, dp=2, schedule="zb-v"),
    "fsdp and tensor": job(4, dp=2, tp=2, fsdp=True, model=LLAMA),
    "experts on two of four replicas and ddp": job(4, dp=4, ep=2, zero=0, model=EXPERTS),
    "experts and pipeline": job(4, pp=2, dp=2, ep=2, model=EXPERTS),
    "keys gathered, replicas and experts": job(4, dp=2, cp=2, ep=2, model=EXPERTS),
    "keys gathered and zb-h1": job(4, pp=2, cp=2, schedule="zb-h1"),
    "keys gathered and tensor": job(4, cp=2, tp=2),
}


def check(jobs: dict[str, Any], world: int) -> dict[str, SerialCheck]:
    """The check of each job, by its name."""
    task = {"what": "checks", "device": "cpu", "jobs": list(jobs.values())}
    return {name: SerialCheck(**result["check"]) for name, result in zip(jobs, run_task(task, world), strict=True)}


JOBS = {"every scheme": (DAILY, 2), "other combinations": (TWO, 2), "four ranks": (FOUR, 4)}


@pytest.mark.parametrize("kind", drawn(JOBS, keep=3))
def test_sharded_training_equals_serial_training(kind: str) -> None:
    for name, result in check(*JOBS[kind]).items():
        assert result.equal, f"{name}: {result}"
        assert result.gradient < 1e-5 and result.weights < 1e-3, name  # far inside the tolerances


def test_16_bit_formats_have_wider_tolerances() -> None:
    for name, result in check(BITS, 2).items():
        assert result.equal and result.weights is None and "bf16 within 1e-01" in str(result), name


@pytest.mark.parametrize("field", ["loss", "gradient", "norm", "weights"])
def test_any_difference_is_reported(field: str) -> None:
    good = SerialCheck(format="fp32", loss=0.0, gradient=1e-6, worst="head.weight", norm=0.0, weights=0.0)
    assert good.equal and "equals" in str(good)
    bad = SerialCheck(**{**vars(good), field: 0.5})
    assert not bad.equal and "DIFFERS" in str(bad)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_sharded_step_that_goes_wrong_is_noticed(wrong: bool, ranks: Any) -> None:
    """A process that stands for all ranks: gradients of half of the samples, twice as large, are another model's."""
    from meshcast.validation.distributed.trainer import Trainer

    plan = resolve_plan(load_job(job(1)))
    trainer = Trainer(plan, ranks(plan, 0))
    passes = trainer.passes
    if wrong:
        trainer.passes = lambda *parts: passes(*(torch.cat([part.chunk(2)[0]] * 2) for part in parts))
    result = compare_with_serial(trainer)
    assert result.equal is not wrong and (result.gradient > 0.1) is wrong


def test_a_model_that_one_device_cannot_hold_is_not_compared() -> None:
    plan = resolve_plan(load_job(job()))
    assert fits_serially(plan, 2**30) and fits_serially(plan, None)
    assert not fits_serially(plan, 20 * plan.job.model.parameters)
