"""Equal stages are one object, and a stage that differs in anything is another."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Fragment, Memory, Op, Param, SideOps, StageOps, TensorUse, UnitRun
from meshcast.simulator.lowering.equal_ops import EqualOps

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "sequence": 4096},
    "plan": {"tp": 4, "pp": 2, "zero": 1, "recompute": "full"},
}

WITHOUT_EFFECT = {"overlap": {"ep": True}}, {"bucket": {"sequence_format": "fp32"}}, {"loss": {"kept_of_all": True}}
WITH_EFFECT = {"bucket": {"elements": 1e8}}, {"deterministic": True}, {"fused_gradients": False}


def forecast(changes: dict[str, Any], shared: SharedWork | None = None) -> Any:
    framework = {"name": "megatron-core", "set": changes}
    return simulate(JOB | {"framework": framework}, shared_work=shared or SharedWork())


def test_jobs_that_differ_in_what_has_no_effect_have_the_stages_of_the_first() -> None:
    shared, apart = SharedWork(related=True), SharedWork()
    first = {work: forecast({}, work) for work in (shared, apart)}
    for changes in WITHOUT_EFFECT:
        assert forecast(changes, shared).play.program is first[shared].play.program
    for changes in WITH_EFFECT:
        assert forecast(changes, shared).play.program is not first[shared].play.program
    assert any(forecast(changes, apart).play.program is not first[apart].play.program for changes in WITHOUT_EFFECT)


@pytest.mark.parametrize("name", ["deepspeed", "torchtitan"])
def test_looking_for_equal_stages_changes_no_answer(name: str) -> None:
    shared = SharedWork(related=True)
    for framework in ({"name": "megatron-core"}, {"name": name}):
        for schemes in ({}, {"zero": 3}):
            job = JOB | {"framework": framework, "plan": JOB["plan"] | schemes}
            one, other = simulate(job, shared_work=shared), simulate(job)
            assert one.step_time == other.step_time and one.needs == other.needs
            assert one.breakdown == other.breakdown


def lower() -> StageOps:
    """A stage whose gradients are reduced in chains of two, and its own objects."""
    plan = forecast({}).play.plan
    stage = lower_stages(plan)[0][0]
    assert isinstance(stage, StageOps) and stage.behind and stage.ahead
    return stage


def copy(stage: StageOps) -> StageOps:
    """The same stage, of other objects: runs, fragments and side ops, each with its own ops."""
    fragments = {run.fragment: run.fragment.copy() for run in stage.unit_runs}
    runs = [dataclasses.replace(run, fragment=fragments[run.fragment]) for run in stage.unit_runs]
    return dataclasses.replace(stage, unit_runs=runs, **{part: copy_sides(getattr(stage, part)) for part in SIDES})


SIDES = ("ahead", "behind", "again")


def copy_sides(sides: list[SideOps]) -> list[SideOps]:
    copied: dict[SideOps, SideOps] = {}
    for side in sides:
        after = (copied[side.after[0]], side.after[1]) if side.after else None
        ops = {op: op.copy() for op in side.ops}
        for op, other in ops.items():
            other.after = [ops.get(before, before) for before in op.after]
        copied[side] = dataclasses.replace(side, ops=[ops[op] for op in side.ops], after=after)
    return [*copied.values()]


def test_a_copy_is_equal_and_whatever_differs_is_not() -> None:
    stage = lower()
    equal = EqualOps()
    assert equal.find_stage(stage) is stage and equal.find_stage(copy(stage)) is stage
    for field in dataclasses.fields(StageOps):
        if field.name not in ("unit_runs", *SIDES):
            assert_differs(equal, stage, lambda other, name=field.name: [(other, name)])
    parts = {
        UnitRun: lambda other: other.unit_runs[0],
        SideOps: lambda other: other.behind[-1],
        Op: lambda other: other.unit_runs[0].fragment.backward[-1],
        Fragment: lambda other: other.unit_runs[0].fragment,
    }
    for kind, find in parts.items():
        for field in dataclasses.fields(kind):
            if field.name not in ("fragment", "ops"):
                assert_differs(equal, stage, lambda other, find=find, name=field.name: [(find(other), name)])
    for kind, listed in ((Param, "params"), (TensorUse, "tensor_uses")):
        for field in dataclasses.fields(kind):
            other = copy(stage)
            parts_of_unit = getattr(other.unit_runs[0].fragment, listed)
            value = other_value(getattr(parts_of_unit[0], field.name))
            parts_of_unit[0] = dataclasses.replace(parts_of_unit[0], **{field.name: value})
            assert equal.find_stage(other) is not stage, (kind, field.name)


def assert_differs(equal: EqualOps, stage: StageOps, choose: Any) -> None:
    """Asserts that a copy with another value of a field is another stage. choose: returns its owner, and its name."""
    other = copy(stage)
    for owner, name in choose(other):
        value = (other.ahead[0], np.zeros(1)) if name == "after" and isinstance(owner, SideOps) else None
        setattr(owner, name, value or other_value(getattr(owner, name)))
        assert equal.find_stage(other) is not stage, (type(owner), name)


def other_value(value: Any) -> Any:
    """Another value of the same kind, or of another kind where there is none."""
    if isinstance(value, Op):
        return Op("another op", work=Memory("another", 1, 1))
    if isinstance(value, np.ndarray):
        return value + 1
    if isinstance(value, list | tuple):
        return type(value)([*value, *value]) if value else type(value)(["another"])
    if isinstance(value, dict):
        return dict([*value.items()][1:]) if value else {"another": Op("another op")}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, frozenset):
        return value | {"another"}
    return f"{value} another"
