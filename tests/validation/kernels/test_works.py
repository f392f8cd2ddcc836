"""Works of kernels in measurement files: read back, and refused where a field has another type."""

from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work
from meshcast.validation.kernels.works import work_fields, work_of

WORKS: list[Work] = [Gemm(96, 192, 320, dtype="fp32"), Attention(1, 192, 192, 4, 4, 64, 64), Memory("norm", 100, 200)]


@pytest.mark.parametrize("work", WORKS)
def test_a_work_reads_back(work: Work) -> None:
    assert work_of(work_fields(work)) == work


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": "96"}, "shape.m is '96': it must be a number from 0 to 1e+15"),
        ({"n": {"a": 1}}, "shape.n is {'a': 1}: it must be a number"),
        ({"k": 10**400}, "shape.k is 1000"),
        ({"batch": True}, "shape.batch is True: it must be a number"),
        ({"accumulate": 1}, "shape.accumulate is 1: it must be true or false"),
        ({"dtype": "fp33"}, "shape.dtype is 'fp33': there is no number format of this name. Did you mean 'fp32'?"),
        ({"what": 3}, "shape.what is 3: it must be text"),
        ({"groups": 3}, "shape.groups is 3: it must be a list"),
    ],
)
def test_a_field_of_another_type_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as refused:
        work_of({**work_fields(WORKS[0]), **change})
    assert words in str(refused.value)


def test_fields_of_no_kernel_are_no_work() -> None:
    assert work_of({}) is None and work_of({**work_fields(WORKS[0]), "other": 1}) is None
