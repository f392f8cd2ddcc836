"""What every scheme owes, asked of every file that there is: a new file is tested the day it is added."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.errors import PlanError
from hardware.load import validated
from simulator.expert_leaves import EXPERTS
from simulator.lowering import Lowering
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import Chain, Collective, Memory
from simulator.schedule import MOVES, Action, PipelineSetting, Schedule, Shape
from simulator.scheme import FAMILIES, Paper, Scheme, find_scheme, scheme_names
from tests.contract import of_data, of_experts, of_memory, of_pipeline, of_sequence, of_tensor
from tests.contract.measure import (
    backward_ops,
    described,
    forward_ops,
    listed,
    make,
    ops_beside,
    told,
)
from tests.contract.played import FREE, Ideal, play_job, stated
from tests.strategies import EVERY, SECONDS, jobs

SCHEMES = [
    use
    for use in scheme_names()
    if not any(one.is_required() for one in find_scheme(use).Options.model_fields.values())
]
"""All that need to be told nothing. What must be (a file) is tested where that is there."""
AXES = {"pipeline": "pp", "data": "dp", "tensor": "tp", "sequence": "cp", "expert": "ep"}
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
    # A class cannot begin with a digit: 1F1B is written OneFOneB.
    spoken = kind.__name__.lower().replace("one", "1")
    assert spoken == kind.name.replace("-", "").replace("one", "1")


@every_scheme
def test_it_says_where_it_was_published(use: str) -> None:
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
    assert len(text.split("\n\n")[0]) < 130, "the first line says the idea in one sentence"
    assert "References:" in text
    assert find_scheme(use).paper.ref.removeprefix("arXiv:").removeprefix("doi:") in text
    assert "print(" not in source(use) and "logging" not in source(use)


@every_scheme
def test_it_is_one_short_file(use: str) -> None:
    assert 20 <= len(source(use).splitlines()) <= 120, "30 to 120 lines are the aim; a data scheme may be one statement"


@every_scheme
def test_options_refuse_what_they_do_not_know(use: str) -> None:
    kind = find_scheme(use)
    with pytest.raises(PlanError, match="no such key"):
        validated(kind.Options, {"no_such_option": 1}, "plan.schemes[0]", PlanError)
    defaults = kind.Options()
    assert type(defaults).model_config.get("frozen"), "options of a plan do not change"
    assert kind().options == defaults


# -------------------------------------------------------------------------------------------------- laws

FAMILY_SETTINGS = {
    "pipeline": of_pipeline,
    "tensor": of_tensor,
    "sequence": of_sequence,
    "expert": of_experts,
    "data": of_data,
    "memory": of_memory,
}
"""Where the laws of a family are asked, and how what they speak of is measured."""


def settings_of(use: str) -> Iterator[Any]:
    kind = find_scheme(use)
    return FAMILY_SETTINGS[kind.family].settings(kind)


def check_laws(use: str, setting: Any) -> set[str]:
    """Asserts every law at one setting; which quantities it asked for."""
    kind = find_scheme(use)
    asked = set()
    for law in kind().laws(setting):
        measures = FAMILY_SETTINGS[kind.family].MEASURES
        assert law.quantity in measures, f"nothing measures {law.quantity}"
        assert law.where, "a law says where it stands"
        measured = measures[law.quantity](setting, use)
        assert measured == pytest.approx(law.value, rel=1e-9, abs=1e-9), (law.quantity, setting)
        asked.add(law.quantity)
    return asked


@every_scheme
def test_its_laws_hold(use: str) -> None:
    asked = Counter(quantity for setting in settings_of(use) for quantity in check_laws(use, setting))
    assert asked, "a scheme states at least one closed form"
    assert min(asked.values()) >= 3, f"every law is asked at several settings: {asked}"


@pytest.mark.parametrize("use", family("pipeline"))
@given(data=st.data())
@settings(max_examples=40)
def test_its_laws_hold_at_drawn_times(use: str, data: st.DataObject) -> None:
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    shape = data.draw(st.sampled_from(of_pipeline.shapes(kind)))
    check_laws(use, PipelineSetting(shape, data.draw(SECONDS), data.draw(SECONDS), data.draw(SECONDS)))


# ---------------------------------------------------------------------------------- degree one is nothing


MIXED = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "first_dense": 1}
"""Experts behind a first dense layer."""


def a_stage(mesh: Mesh, schemes: Sequence[Scheme], attention: str = "flash") -> Chain:
    model = Model(layers=2, hidden=32, heads=4, vocab=64, seq=16, dropout=0.1, tied=False, moe=MIXED)
    blocks = Blocks(model, 2, 16, 64, attention=attention)
    return Lowering(mesh, schemes, True).run(blocks.stage(range(2), True, True))


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@every_scheme
def test_degree_one_is_the_identity(use: str, attention: str) -> None:
    mesh = Mesh({"x": 1})
    alone = a_stage(mesh, [], attention)
    if use.startswith("memory/"):
        # No axis, and a different thing to do: what it keeps out of memory it must do again.
        with_it = a_stage(mesh, [make(use, mesh)], attention)
        assert [(link.name, link.count) for link in with_it.links] == [(link.name, link.count) for link in alone.links]
        for one, other in zip(with_it.links, alone.links, strict=True):
            assert listed(one.fragment.forward) == listed(other.fragment.forward)
        return
    if use.startswith("expert/"):
        again = Mesh({"x": 1}, {EXPERTS: {"edp": 1, "ep": 1}}, ["x"])
        assert described(a_stage(again, [make(use, again, ("ep",))], attention)) == described(alone)
        return
    assert described(a_stage(mesh, [make(use, mesh, ("x",))], attention)) == described(alone)


@pytest.mark.parametrize("use", family("pipeline"))
def test_a_pipeline_of_one_device_only_computes(use: str) -> None:
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    for setting in of_pipeline.settings(kind):
        if setting.shape.p == 1:
            assert of_pipeline.MEASURES["bubble"](setting, use) == pytest.approx(0, abs=1e-9)


def test_all_degrees_one_is_the_plan_without_schemes() -> None:
    model = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "moe": MIXED}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 4}}
    mesh = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    bare = play_job({**job, "plan": {"mesh": mesh, "schemes": []}})
    chosen = [family(name) for name in ("data", "sequence", "tensor", "expert")]
    for uses in product(*chosen):
        entries = [("pipeline/1f1b", "pp"), *((use, AXES[use.partition("/")[0]]) for use in uses)]
        schemes = [{"use": use, "over": over} for use, over in entries]
        views = {EXPERTS: {"edp": 1, "ep": 1, "etp": 1}}
        full = play_job({**job, "plan": {"mesh": mesh, "views": views, "schemes": schemes}})
        assert [told(op) for op in full.flat.ops] == [told(op) for op in bare.flat.ops]
        assert (full.flat.after, full.flat.queues) == (bare.flat.after, bare.flat.queues)
        assert full.times == bare.times
        assert full.peaks == bare.peaks


# ---------------------------------------------------------------------------------------- played programs


@given(job=jobs(EVERY))
def test_memory_returns_to_its_baseline(job: dict[str, Any]) -> None:
    for peak in play_job(job).peaks:
        assert peak.left == 0
        assert peak.total == pytest.approx(sum(peak.by.values()))
        assert min(peak.by.values()) >= 0


@given(job=jobs(EVERY))
def test_every_action_happens_once(job: dict[str, Any]) -> None:
    played = play_job(job)
    plan, table, flat = played.plan, played.program.timetable, played.flat
    counts = Counter(action for action in table.actions if action.kind not in (*MOVES, "O"))
    assert set(counts.values()) == {1}
    units: dict[int, int] = {}
    for stage in range(plan.shape.stages):
        passing = [(k, part) for k in plan.schedule.microbatches(plan.run, stage) for part in range(plan.shape.slices)]
        units[stage] = len(passing)
        for k, part in passing:
            done = [kind for kind in ["F", "BW", "B", "W", "R"] if Action(stage, kind, k, part) in counts]
            assert done[0] == "F" and [kind for kind in done[1:] if kind != "R"] in (["BW"], ["B", "W"])
    assert sum(units.values()) == sum(1 for action in counts if action.kind == "F")
    # All actions together run all ops of their stages, of every pass and layer.
    ran = Counter(id(flat.ops[at]) for number in range(len(table.actions)) for at in played.ops(number))
    wanted: Counter[int] = Counter()
    for number, action in enumerate(table.actions):
        task = played.task(number)
        wanted.update(id(op) for op in ops_beside((*task.ahead, *task.behind)))
        if action.kind == "F":
            chain = played.chain(action.stage, action.slice)
            wanted.update(id(op) for op in (*forward_ops(chain), *backward_ops(chain)))
        elif action.kind in (*MOVES, "O"):
            wanted.update(id(op) for part in task.parts for op in part.block.ops)
    assert ran == wanted
    # Each op has a time of its own, after all that it waits for.
    times = played.times
    assert sorted(n for queue in flat.queues.values() for n in queue) == list(range(len(flat.ops)))
    for number, after in enumerate(flat.after):
        assert times.end[number] == pytest.approx(times.begin[number] + flat.seconds[number])
        for other in after:
            assert other < number
            assert times.begin[number] >= times.end[other] + flat.latency[other] - 1e-12


@settings(max_examples=25)
@given(
    job=jobs(EVERY),
    price=st.builds(Ideal, links=st.sampled_from([1e5, 1e6, 1e8]), latency=st.sampled_from([0.0, 1e-4])),
)
def test_faster_links_never_slow_a_step(job: dict[str, Any], price: Ideal) -> None:
    """By the same orders: what depends on how long passes last is left as it was."""
    played = play_job(job, price)
    slow, orders = played.times.span, stated(played)
    twice = play_job(job, replace(price, links=2 * price.links), orders=orders).times.span
    near = play_job(job, replace(price, latency=price.latency / 2), orders=orders).times.span
    free = play_job(job, FREE, orders=orders).times.span
    assert free <= twice * (1 + 1e-12) and free <= near * (1 + 1e-12)
    assert twice <= slow * (1 + 1e-12) and near <= slow * (1 + 1e-12)


@given(job=jobs(EVERY))
def test_with_free_communication_a_step_is_its_computing(job: dict[str, Any]) -> None:
    """No device takes longer than it computes and waits in the pipeline; one device alone never waits."""
    played = play_job(job, FREE)
    busy = [
        sum(played.flat.seconds[number] for number, _ in played.instances(device))
        for device in range(played.plan.shape.p)
    ]
    assert played.times.span >= max(busy) * (1 - 1e-12)
    if len(busy) == 1:
        assert played.times.span == pytest.approx(busy[0])


@settings(max_examples=15)
@given(job=jobs(EVERY))
def test_the_same_job_gives_the_same_times(job: dict[str, Any]) -> None:
    one, other = play_job(job), play_job(job)
    assert one.times == other.times and one.peaks == other.peaks


# ------------------------------------------------------------------------------------------- composition


DEFAULTS = {
    "pipeline": "pipeline/1f1b",
    "tensor": "tensor/megatron-sp",
    "sequence": "sequence/all-gather",
    "expert": "expert/all-to-all",
    "data": "data/zero-1",
    "memory": "memory/recompute-selective",
}


CHAINS = {"pipeline/graphpipe": {"branches": 1}}
"""Options with which a schedule of graphs has a chain of stages."""


@pytest.mark.parametrize("overlap", [True, False])
@every_scheme
def test_it_composes_with_the_default_of_every_other_family(use: str, overlap: bool) -> None:
    """All five axes at once, and a memory scheme inside: nothing is lost, and nothing is done or held twice."""
    kind = find_scheme(use)
    chosen = {**DEFAULTS, kind.family: use}
    chunks = 1
    if issubclass(kind, Schedule) and use not in CHAINS and not of_pipeline.exists(kind, Shape(2, 4, kind.ways)):
        chunks = 2
    entries: list[dict[str, Any]] = []
    for name in FAMILIES:
        over = {"over": AXES[name]} if name in AXES else {}
        more = {"chunks": chunks, **CHAINS.get(use, {})} if name == "pipeline" else {}
        entries.append({"use": chosen[name], **over, **more})
    sizes = {"layers": 8, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 32}
    kind_of_gpt = {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 24, "shared_experts": 1, "first_dense": 1, "every": 2}
    mesh = {"pp": 2, "dp": 2, "cp": 2, "tp": 2}
    job = {
        "model": {**sizes, **kind_of_gpt, "moe": moe},
        "cluster": {"gpu": "h100-sxm", "gpus": 16},
        "framework": {"name": "megatron-core", "set": {"overlap": {"dp": overlap, "pp": overlap}}},
        "batch": {"global": 8},
        "plan": {"mesh": mesh, "views": {EXPERTS: {"edp": 2, "ep": 4}}, "schemes": entries},
    }
    played = play_job(job)
    shape, model, data = played.plan.shape, played.plan.job.model, chosen["data"]
    ways = played.plan.schedule.ways
    assert (shape.p, shape.v) == (2, chunks * ways)
    kinds = Counter(action.kind for action in played.program.timetable.actions)
    # Without a flush a run of some batches is played, in which every device updates its weights again and again.
    m, updates = played.plan.run.m, len(played.program.timetable.updates[0]) or 1
    assert kinds["F"] == kinds["BW"] + kinds["W"] == shape.stages * m * shape.slices / ways
    assert kinds["B"] == kinds["W"]
    assert all(peak.left == 0 for peak in played.peaks)
    assert played.times.span > play_job(job, FREE).times.span > 0
    assert played.flops("F") == pytest.approx(played.wanted)
    families = {op.stream.partition("-")[0] for _, op in played.instances()}
    assert families == {"compute", *AXES}
    assert any(isinstance(op.work, Memory) and op.phase == "U" for _, op in played.instances())

    # Four ranks (cp x dp) hold the same of what is not the experts', two (edp) the same experts. Norms and routers are
    # whole on both tensor ranks; all else is divided. Each way through the devices has weights of its own.
    experts = 3 * 8 * 3 * 64 * 24
    whole = 64 * (2 * 8 + 1) + 3 * 64 * 8
    plain = model.parameters - experts
    held = [param for device in range(2) for param in played.held(device)]
    local = {2: ways * experts / 4, 4: ways * ((plain - whole) / 2 + whole)}
    assert sum(param.size for param in held if param.view) == local[2]
    assert sum(param.size for param in held if not param.view) == local[4]
    states = [played.resting(device) for device in range(2)]
    cut = find_scheme(data)(("dp",)).shards
    main = 4 if "parameters" in cut else 0
    for name, nbytes in (("parameters", main or 2), ("gradients", 4), ("optimizer", 12 - main)):
        wanted = sum(size / (n if name in cut else 1) for n, size in local.items())
        assert sum(state[name] for state in states) == pytest.approx(nbytes * wanted)
    turns = m // ways if data == "data/fsdp" else updates
    reduced: dict[int, float] = defaultdict(float)
    for _, op in played.instances():
        if op.stream == "data" and isinstance(op.work, Collective) and op.work.operation != "all_gather":
            reduced[played.plan.mesh.size(op.work.axes)] += op.work.nbytes
    assert reduced == {n: 4 * turns * size for n, size in local.items()}
