"""Models are read as pydantic reads them, which is imported for what is not plainly of their types."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from meshcast.hardware.fast_validation import NotPlain
from meshcast.hardware.schemas import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from tests.pythons import ROOT

JOBS = ("gpt3-175b-dgx-a100", "llama3-70b-dgx-h100")


class Inner(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    kind: Literal["a", "b", 1]
    rate: float = Field(default=0.5, ge=0, lt=1)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    count: Annotated[int, Field(strict=True, gt=0)] | None = None
    names: Annotated[tuple[str, ...], BeforeValidator(lambda word: (word,) if isinstance(word, str) else word)] = ()
    inner: Inner | None = None
    sizes: dict[str, int | float] = {}
    total: int = Field(default_factory=lambda fields: len(fields["names"]), alias="all")

    @model_validator(mode="after")
    def _check_total(self) -> Outer:
        if self.total > 3:
            raise ValueError("at most 3. Write fewer")
        return self


scalars = st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([0.25, 2.0, float("inf"), "a", "b", "3", ""])
inner = st.dictionaries(st.sampled_from(["kind", "rate", "more"]), scalars)
values = scalars | st.lists(scalars, max_size=2) | inner
data = st.dictionaries(st.sampled_from(["count", "names", "inner", "sizes", "all", "odd"]), values)


@given(data)
def test_data_are_read_as_pydantic_reads_them(data: dict[str, object]) -> None:
    try:
        quick = Outer.validate_fast(data)
    except (NotPlain, ValueError, TypeError):
        return
    slow = TypeAdapter(Outer).validate_python(data)
    assert (repr(quick), quick.model_fields_set) == (repr(slow), slow.model_fields_set)
    assert quick == slow == copy.copy(quick) == pickle.loads(pickle.dumps(quick))


def test_faults_are_worded_by_pydantic() -> None:
    for fault in ({"count": 0}, {"odd": 1}, {"inner": {}}, {"all": 4}, {"names": [1]}):
        with pytest.raises(ValueError, match="validation error"):
            Outer.model_validate(fault)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_without_fault_is_forecast_without_pydantic(job: str) -> None:
    code = f"import sys, meshcast; meshcast.simulate('examples/{job}.yaml').to_dict(); print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"
