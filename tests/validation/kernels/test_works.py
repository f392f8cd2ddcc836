"""Works of kernels in measurement files: read back, and refused where a field has another type."""

import pytest

from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work
from meshcast.validation.kernels.works import work_fields, work_of

WORKS: list[Work] = [Gemm(96, 192, 320, dtype="fp32"), Attention(1, 192, 192, 4, 4, 64, 64), Memory("norm", 100, 200)]


@pytest.mark.parametrize("work", WORKS)
def test_a_work_reads_back(work: Work) -> None:
    assert work_of(work_fields(work)) == work


def test_fields_of_no_kernel_are_no_work() -> None:
    assert work_of({}) is None and work_of({**work_fields(WORKS[0]), "other": 1}) is None
