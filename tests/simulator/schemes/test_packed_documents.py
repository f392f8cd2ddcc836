"""Documents packed into sequences: what the host does for each of them under context parallelism."""

from __future__ import annotations

import pytest

from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job


def job_of(cp: int, documents: int, comm: str = "a2a", micro: int = 1) -> Job:
    """Two layers on GPUs that share sequences, with documents of so many tokens."""
    schemes = [{"use": "data/zero-1", "over": "dp"}]
    schemes += [{"use": "sequence/megatron-cp", "over": "cp", "comm": comm}]
    return load_job(
        {
            "model": {"preset": "qwen3-8b", "layers": 2},
            "cluster": {"gpu": "h100-sxm", "gpus": 2 * cp, "gpus_per_node": 8},
            "framework": "megatron-core",
            "batch": {"micro": micro, "global": 2 * micro, "sequence": 8192, "documents": documents},
            "plan": {"mesh": {"pp": 1, "dp": 2, "cp": cp, "tp": 1}, "schemes": schemes},
        }
    )


@pytest.mark.parametrize(("cp", "micro"), [(2, 1), (4, 1), (2, 2)])
def test_the_host_puts_every_part_of_a_document_in_its_place(cp: int, micro: int) -> None:
    """Four tensors in each of two passes of two layers, two parts of a document for each rank."""
    steps = [forecast_step(job_of(cp, documents, micro=micro)).step_time for documents in (64, 128)]
    parts = 2 * 2 * 4 * 2 * cp * micro * (8192 / 64 - 8192 / 128)
    assert steps[0] - steps[1] == pytest.approx(0.6 * parts * 120e-6, rel=0.01)
    assert forecast_step(job_of(cp, 64, comm="all_gather", micro=micro)).step_time < 0.2 * steps[0]
