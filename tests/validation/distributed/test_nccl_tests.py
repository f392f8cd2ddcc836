"""Collectives against NVIDIA's nccl-tests, on a machine with several GPUs that has them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshcast.simulator.formats import nccl_tests  # noqa: E402
from meshcast.validation.distributed.measure import measure_collectives  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
SIZES = (2**12, 2**20, 2**26)


@pytest.mark.parametrize("operation", PROGRAMS)
def test_collectives_take_as_long_as_in_nccl_tests(operation: str, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    program = shutil.which(PROGRAMS[operation])
    if gpus < 2 or program is None:
        pytest.skip(f"needs two GPUs and {PROGRAMS[operation]} of nccl-tests on the PATH")
    sizes = ["-b", str(SIZES[0]), "-e", str(SIZES[-1]), "-f", "2", "-g", str(gpus)]
    log = tmp_path / "nccl-tests.txt"
    log.write_text(subprocess.run([program, *sizes], capture_output=True, text=True, check=True).stdout, "utf-8")
    (run,) = nccl_tests.read(log, operation, gpus)
    theirs = {size.nbytes: size.seconds["out-of-place"] for size in run.sizes if "out-of-place" in size.seconds}
    job = {"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": gpus, "gpus_per_node": gpus}}
    found = measure_collectives(job, "cuda", tmp_path / "ours.json", SIZES, [operation])
    for row in found.rows:
        assert row.median == pytest.approx(theirs[row.shape["bytes"]], rel=0.05), row.name
