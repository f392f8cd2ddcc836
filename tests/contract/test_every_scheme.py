"""The contract of a scheme, checked for every file: a new file is tested the day it is added."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.capabilities import ChangesKernels
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import FAMILIES, Paper
from meshcast.simulator.scheduling.schedule import PipelineSetting, PipelineShape, Schedule
from meshcast.simulator.scheduling.vocabulary import ShardsVocabulary
from meshcast.validation.contract import of_pipeline
from meshcast.validation.contract.composed import DEFAULTS, complete_schemes, entries_with
from meshcast.validation.contract.laws import MIXED, closed_form_problems, find_measures, identity_problems, offloads
from meshcast.validation.contract.measure import op_fields
from meshcast.validation.contract.played import FREE, Ideal, Played, play_job, state_orders
from tests.draws import drawn, drawn_grid
from tests.strategies import EVERY, SECONDS, SHARE, chain_options, examples, jobs_of_all

SCHEMES = complete_schemes()

every_scheme = pytest.mark.parametrize("use", SCHEMES)


def source(use: str) -> str:
    """The text of a scheme's file."""
    family, _, name = use.partition("/")
    root = Path(__file__).parents[2] / "simulator" / "schemes"
    return (root / family / f"{name.replace('-', '_')}.py").read_text("utf-8")


def family(name: str) -> list[str]:
    return [use for use in SCHEMES if use.startswith(f"{name}/")]


# ---------------------------------------------------------------------------------------------- the file


@every_scheme
def test_one_scheme_a_file_with_the_right_name(use: str) -> None:
    kind = find_scheme(use)
    assert kind.name == use.partition("/")[2]
    assert kind().use == use
    assert kind.family == use.partition("/")[0] in FAMILIES
    # A class cannot begin with a digit: 1F1B is written OneFOneB, 3d ThreeD.
    spoken = kind.__name__.lower().replace("one", "1").replace("three", "3")
    assert spoken == kind.name.replace("-", "").replace("one", "1")


@every_scheme
def test_it_names_its_publication(use: str) -> None:
    paper = find_scheme(use).paper
    assert isinstance(paper, Paper)
    assert paper.ref.startswith(("arXiv:", "doi:", "https://"))
    assert len(paper.title) > 10
    assert 1980 < paper.year < 2030
    if paper.ref.startswith("arXiv:"):
        assert 0 <= paper.year - (2000 + int(paper.ref.removeprefix("arXiv:")[:2])) <= 1


@every_scheme
def test_its_docstring_explains_it(use: str) -> None:
    text = source(use).split('"""')[1]
    assert len(text.split("\n\n")[0]) < 130, "the first line states the idea in one sentence"
    assert "References:" in text
    assert find_scheme(use).paper.ref.removeprefix("arXiv:").removeprefix("doi:") in text
    assert "print(" not in source(use) and "logging" not in source(use)


@every_scheme
def test_it_defines_what_its_capabilities_ask_for(use: str) -> None:
    kind = find_scheme(use)
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind)}
    assert not [name for name, member in members.items() if getattr(member, "__isabstractmethod__", False)]


@every_scheme
def test_unknown_options_are_refused(use: str) -> None:
    kind = find_scheme(use)
    with pytest.raises(PlanError, match="no such key"):
        validate_data(kind.Options, {"no_such_option": 1}, "plan.schemes[0]", PlanError)
    defaults = kind.Options()
    assert type(defaults).model_config.get("frozen"), "options of a plan do not change"
    assert kind().options == defaults


# ------------------------------------------------------------------------------------------ closed forms


def settings_of(use: str) -> Iterator[Any]:
    kind = find_scheme(use)
    return find_measures(kind).settings(kind)


@every_scheme
def test_its_closed_forms_hold(use: str) -> None:
    """`make test` measures at one setting with each options, and at some more."""
    settings, asked, enough = list(settings_of(use)), Counter[str](), 0
    if SHARE > 1:
        Random(use).shuffle(settings)
        by_options = {getattr(setting, "options", ()): setting for setting in settings}
        settings, enough = [*dict.fromkeys([*by_options.values(), *settings])], max(3, len(by_options))
    for number, setting in enumerate(settings):
        if 0 < enough <= number and min(asked.values(), default=0) >= 3:
            break
        assert closed_form_problems(use, setting, asked) == []
    assert asked, "a scheme states at least one closed form"
    assert min(asked.values()) >= 3, f"every closed form is measured at several settings: {asked}"


@pytest.mark.parametrize("use", family("pipeline"))
@given(data=st.data())
@examples(40)
def test_its_closed_forms_hold_at_drawn_times(use: str, data: st.DataObject) -> None:
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    shape = data.draw(st.sampled_from(of_pipeline.shapes(kind)))
    setting = PipelineSetting(shape, data.draw(SECONDS), data.draw(SECONDS), data.draw(SECONDS))
    assert closed_form_problems(use, setting, Counter()) == []


# ---------------------------------------------------------------------------------- degree one is nothing


@pytest.mark.parametrize(("use", "attention"), drawn_grid(SCHEMES, ["flash", "unfused"]))
def test_degree_one_is_the_identity(use: str, attention: str) -> None:
    assert identity_problems(use, attention) == []


ANY_CHUNKS = tuple(
    f"pipeline/{name}"
    for name in ("breadth-first", "grouped-interleaved", "interleaved-1f1b", "interleaved-zb", "seq1f1b", "slimpipe")
)
"""Schedules of any number of chunks a device."""


@pytest.mark.parametrize("use", family("pipeline"))
def test_a_pipeline_of_one_device_only_computes(use: str) -> None:
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    for setting in drawn(of_pipeline.settings(kind), keep=5):
        if setting.shape.p == 1:
            assert of_pipeline.MEASURES["bubble"](setting, use) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("use", sorted({*family("pipeline"), "pipeline/distmm"} - {"pipeline/from-file", *ANY_CHUNKS}))
def test_a_schedule_of_a_number_of_chunks_refuses_another(use: str) -> None:
    schedule = find_scheme(use)(options=find_scheme(use).Options(**chain_options(use)))
    assert isinstance(schedule, Schedule)
    more = 4 if isinstance(schedule, ShardsVocabulary) else 3
    with pytest.raises(PlanError) as refused:
        schedule.check(PipelineShape(4, 8, more))
    assert refused.value.where == "plan.chunks"


ON_ONE_GPU = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "moe": MIXED},
    "cluster": {"gpu": "h100-sxm", "gpus": 1},
    "batch": {"global": 4},
}


@cache
def a_step_without_schemes() -> Played:
    return play_job({**ON_ONE_GPU, "plan": {"mesh": {"pp": 1}, "schemes": []}})


@pytest.mark.parametrize(
    "use",
    drawn(
        [
            use
            for use in SCHEMES
            if use.partition("/")[0] not in ("pipeline", "memory")
            and not offloads(use)
            and not issubclass(find_scheme(use), ChangesKernels)
        ],
        keep=3,
    ),
)
def test_all_degrees_one_is_the_plan_without_schemes(use: str) -> None:
    """With the default schemes of all other families."""
    bare = a_step_without_schemes()
    schemes, mesh = entries_with(use, 1, {name: other for name, other in DEFAULTS.items() if name != "memory"})
    views = {EXPERTS: {"edp": 1, "ep": 1, "etp": 1}}
    full = play_job({**ON_ONE_GPU, "plan": {"mesh": mesh, "views": views, "schemes": schemes}})
    assert [op_fields(op) for op in full.flat.ops] == [op_fields(op) for op in bare.flat.ops]
    assert (full.flat.after, full.flat.queues) == (bare.flat.after, bare.flat.queues)
    assert full.times == bare.times
    assert full.peaks == bare.peaks


# ---------------------------------------------------------------------------------------- played programs


@examples(25)
@given(
    job=jobs_of_all(EVERY),
    price=st.builds(Ideal, links=st.sampled_from([1e5, 1e6, 1e8]), latency=st.sampled_from([0.0, 1e-4])),
)
def test_faster_links_never_slow_a_step(job: dict[str, Any], price: Ideal) -> None:
    """With fixed orders: schedules that depend on durations keep their order."""
    shared = SharedWork()
    played = play_job(job, price, shared=shared)
    assume(not played.by_a_clock)
    slow, orders = played.times.span, state_orders(played)

    def span(price: Ideal) -> float:
        return play_job(job, price, engine="matrices", orders=orders, shared=shared).step.span

    twice, near = span(replace(price, links=2 * price.links)), span(replace(price, latency=price.latency / 2))
    free = span(FREE)
    assert free <= twice * (1 + 1e-12) and free <= near * (1 + 1e-12)
    assert twice <= slow * (1 + 1e-12) and near <= slow * (1 + 1e-12)


@examples(50)
@given(job=jobs_of_all(EVERY))
def test_with_free_communication_a_step_is_its_computing(job: dict[str, Any]) -> None:
    """No device takes longer than its kernels and its waits in the pipeline; a single device never waits, unless other
    ops take time: copies of fused kernels, or a clock.
    """
    played = play_job(job, FREE)
    flat, busy, other_seconds = played.flat, [0.0] * played.plan.shape.p, 0.0
    for number, op in played.instances():
        if op.stream == COMPUTE:
            busy[flat.device[number]] += flat.seconds[number]
        else:
            other_seconds += flat.seconds[number] + flat.latency[number]
    assert played.times.span >= max(busy) * (1 - 1e-12)
    if len(busy) == 1 and not other_seconds:
        assert played.times.span == pytest.approx(busy[0])


@pytest.mark.slow
@examples(15)
@given(job=jobs_of_all(EVERY))
def test_the_same_job_gives_the_same_times(job: dict[str, Any]) -> None:
    one, other = play_job(job), play_job(job)
    assert one.times == other.times and one.peaks == other.peaks
