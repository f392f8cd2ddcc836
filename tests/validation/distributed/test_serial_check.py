"""Sharded training equals serial training, in real processes that talk over gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from tests.validation.distributed.jobs import EXPERTS, LLAMA, context_job, job
from tests.validation.distributed.processes import run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

TWO = {
    "tensor": job(tp=2, sequence_parallel=False),
    "tensor with sequence": job(tp=2),
    "llama, tensor with sequence": job(tp=2, model=LLAMA),
    "gpipe": job(pp=2, schedule="gpipe"),
    "1f1b": job(pp=2),
    "1f1b, llama": job(pp=2, model=LLAMA),
    "interleaved": job(pp=2, chunks=2),
    "interleaved, recomputed": job(pp=2, chunks=2, recompute="full"),
    "breadth-first": job(pp=2, chunks=2, schedule="breadth-first"),
    "hanayo": job(pp=2, schedule="hanayo"),
    "zb-h1": job(pp=2, schedule="zb-h1"),
    "zb-h1, llama": job(pp=2, schedule="zb-h1", model=LLAMA),
    "zb-auto": job(pp=2, schedule="zb-auto"),
    "zb-v, one table on one rank": job(pp=2, schedule="zb-v"),
    "zb-v, llama, recomputed": job(pp=2, schedule="zb-v", model=LLAMA, recompute="full"),
    "v-half, 16 bits": job(pp=2, schedule="v-half", model=LLAMA)
    | {"precision": {"compute": "bf16", "gradients": "fp32"}},
    "ddp": job(dp=2, zero=0),
    "zero-1": job(dp=2),
    "fsdp": job(dp=2, fsdp=True),
    "fsdp, llama": job(dp=2, fsdp=True, model=LLAMA),
    "experts and ddp": job(dp=2, ep=2, zero=0, model=EXPERTS),
    "experts and zero-1, recomputed": job(dp=2, ep=2, model=EXPERTS, recompute="full"),
    "keys gathered": job(cp=2),
    "keys gathered, llama, recomputed core": job(cp=2, zero=0, model=LLAMA, recompute="selective"),
    "keys gathered and fsdp": job(cp=2, fsdp=True, model=LLAMA),
    "ulysses": context_job("sequence/ulysses"),
    "ulysses, llama": context_job("sequence/ulysses", "data/ddp", LLAMA),
    "bf16": job(tp=2, precision="bf16"),
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
SLOW = (
    *("tensor", "1f1b, llama", "interleaved", "zb-h1", "zb-v, llama, recomputed", "fsdp", "experts and ddp"),
    *("keys gathered", "ulysses, llama", "zb-h1 and tensor", "zb-v and zero-1", "keys gathered and zb-h1"),
    *("keys gathered and tensor", "llama, tensor with sequence", "1f1b", "ddp", "zero-1", "keys gathered and fsdp"),
    *("experts and pipeline", "gpipe", "pipeline and tensor", "interleaved and ddp", "replicas and tensor"),
    *("fsdp and tensor", "experts on two of four replicas and ddp", "keys gathered, replicas and experts"),
)
"""Jobs whose schemes are in others, too."""
BITS = ("bf16", "v-half, 16 bits")
"""The jobs in formats of 16 bits; gradients of the second are summed up in 32."""


def compared(jobs: dict[str, Any], world: int) -> dict[str, Any]:
    """The check of each job as plain data, by its name."""
    task = {"what": "checks", "device": "cpu", "jobs": list(jobs.values())}
    return {name: result["check"] for name, result in zip(jobs, run(task, world), strict=True)}


@pytest.fixture(scope="module")
def check_of(made_once: Any) -> Callable[[str], Any]:
    """The check of a job by its name; all of `SLOW` are made together, and so are all others."""
    from meshcast.validation.distributed.serial_check import SerialCheck

    def make(slow: bool) -> dict[str, Any]:
        two, four = ({name: jobs[name] for name in jobs if (name in SLOW) is slow} for jobs in (TWO, FOUR))
        return {**compared(two, 2), **(compared(four, 4) if four else {})}

    @cache
    def made(slow: bool) -> dict[str, Any]:
        return made_once(f"serial-checks-{slow}", lambda: make(slow))  # type: ignore[no-any-return]

    return lambda name: SerialCheck(**made(name in SLOW)[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in (*TWO, *FOUR) if name not in BITS],
)
def test_sharded_training_equals_serial_training(check_of: Callable[[str], Any], name: str) -> None:
    found = check_of(name)
    assert found.equal, str(found)
    assert found.gradient < 1e-5 and found.weights < 1e-3  # far inside the tolerances


@pytest.mark.parametrize("name", BITS)
def test_16_bit_formats_have_wider_tolerances(check_of: Callable[[str], Any], name: str) -> None:
    found = check_of(name)
    assert found.equal and found.weights is None and "bf16 within 1e-01" in str(found)


@pytest.mark.parametrize("field", ["loss", "gradient", "norm", "weights"])
def test_any_difference_is_reported(field: str) -> None:
    from meshcast.validation.distributed.serial_check import SerialCheck

    good = SerialCheck(format="fp32", loss=0.0, gradient=1e-6, worst="head.weight", norm=0.0, weights=0.0)
    assert good.equal and "equals" in str(good)
    bad = SerialCheck(**{**vars(good), field: 0.5})
    assert not bad.equal and "DIFFERS" in str(bad)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_sharded_step_that_goes_wrong_is_found(wrong: bool) -> None:
    """One process stands for all ranks. Gradients of half of the samples, twice as large, are another model's."""
    import torch
    import torch.distributed as dist

    from meshcast.simulator.loading.load import load_job
    from meshcast.validation.distributed.process_groups import make_process_groups
    from meshcast.validation.distributed.serial_check import compare_with_serial
    from meshcast.validation.distributed.trainer import Trainer
    from meshcast.validation.measurements.device import Device

    plan = resolve_plan(load_job(job(1)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer(plan, make_process_groups(plan, Device.of("cpu")))
        passes = trainer.passes
        if wrong:
            trainer.passes = lambda *given: passes(*(torch.cat([one.chunk(2)[0]] * 2) for one in given))
        found = compare_with_serial(trainer)
        assert found.equal is not wrong and (found.gradient > 0.1) is wrong
    finally:
        dist.destroy_process_group()


def test_a_model_that_one_device_cannot_hold_is_not_compared() -> None:
    from meshcast.simulator.loading.load import load_job
    from meshcast.validation.distributed.serial_check import fits_serially

    plan = resolve_plan(load_job(job()))
    assert fits_serially(plan, 2**30) and fits_serially(plan, None)
    assert not fits_serially(plan, 20 * plan.job.model.parameters)
