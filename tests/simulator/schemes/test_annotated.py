"""Tables of layouts (`tensor/annotated`): they reproduce other schemes to the bit, and drawn ones conserve work."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, get_args

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Op
from meshcast.validation.contract.measure import backward_ops, forward_ops, params_of
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn, drawn_grid
from tests.simulator.schemes.drawn_tables import DrawnJob, draw_job

MODELS: dict[str, dict[str, Any]] = {
    "gpt3-5b": {"preset": "gpt3-5b", "layers": 4},
    "llama3-8b": {"preset": "llama3-8b", "layers": 4},
    "mixtral-8x7b": {"preset": "mixtral-8x7b", "layers": 4},
}
MEGATRON = {"divide": {"all": ["a", "f", "v"]}}
MEGATRON_SP = {"divide": {"all": ["a", "f", "v", "s"]}}


def annotated(over: str | list[str], *tables: Any, **options: Any) -> dict[str, Any]:
    return {"use": "tensor/annotated", "over": over, "tables": list(tables), **options}


def job_of(
    model: Any, mesh: dict[str, int], schemes: list[Any], micro: int = 1, batches: int = 2, **set_: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "cluster": "dgx-h100:1",
        "framework": {"name": "megatron-core", "set": set_},
        "batch": {"global": 8 * batches * micro, "micro": micro},
        "plan": {"mesh": mesh, "schemes": schemes},
    }


LEFT_OUT = ("job", "warnings", "broken_rules")
"""The job itself, and what Megatron-Core has no scheme for."""


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """All of a report but the job itself, and what is said of it."""
    return {key: value for key, value in simulate(job).to_dict().items() if key not in LEFT_OUT}


@pytest.mark.parametrize(
    ("name", "mesh", "regather"),
    drawn_grid(MODELS, [{"tp": 8}, {"pp": 2, "tp": 4}, {"x": 2, "y": 4}], [False, True]),
    ids=str,
)
def test_tables_reproduce_megatron(name: str, mesh: dict[str, int], regather: bool) -> None:
    """Also over two axes, along which equal steps are one collective."""
    pipeline = [{"use": "pipeline/1f1b", "over": "pp"}] if "pp" in mesh else []
    axes = [axis for axis in mesh if axis != "pp"]
    joined = {**{axis: n for axis, n in mesh.items() if axis == "pp"}, "tp": math.prod(mesh[axis] for axis in axes)}
    for use, table, stream in (("megatron", MEGATRON, {}), ("megatron-sp", MEGATRON_SP, "s")):
        theirs = [*pipeline, {"use": f"tensor/{use}", "over": "tp"}]
        ours = [*pipeline, annotated(axes, table, stream=stream)]
        one = answer(job_of(MODELS[name], joined, theirs, regather=regather))
        assert answer(job_of(MODELS[name], mesh, ours, regather=regather)) == one


def cube(rope: bool) -> dict[str, Any]:
    """The table of 3D tensor parallelism over i, j and l."""
    inner = {"qkv": "a", "proj": "a", "up": "f", "down": "f", "embedding": "v", "head": "v"}
    across = {"core": "a", "act": "f", "loss": "v", **({"rope": "a"} if rope else {})}
    divide: dict[str, Any] = {"all": {"i": "b", "j": "b", "l": "h"}}
    divide |= {name: {"i": "b", "j": dim, "l": "h"} for name, dim in inner.items()}
    divide |= {name: {"i": "b", "j": dim, "l": "b"} for name, dim in across.items()}
    return {"divide": divide, "rest": {name: {"i": "h"} for name in inner}}


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("name", ["gpt3-5b", "llama3-8b"])
def test_a_table_reproduces_3d(name: str, regather: bool) -> None:
    mesh, axes = {"i": 2, "j": 2, "l": 2}, ["i", "j", "l"]
    ours = annotated(axes, cube(name == "llama3-8b"), stream={"i": "b", "j": "b", "l": "h"})
    one, other = (
        answer(job_of(MODELS[name], mesh, [scheme], micro=8, regather=regather))
        for scheme in (ours, {"use": "tensor/3d", "over": axes})
    )
    assert one == other


@pytest.mark.parametrize(("name", "data"), drawn_grid(MODELS, ["ddp", "zero-1", "zero-3", "fsdp", "mics"]))
def test_a_data_scheme_on_an_annotated_axis_is_that_data_scheme(name: str, data: str) -> None:
    mesh, plain = {"dp": 8}, {"use": f"data/{data}", "over": "dp"}
    table = {"divide": {"all": {"dp": "b"}}}
    wanted = answer(job_of(MODELS[name], mesh, [plain]))
    assert answer(job_of(MODELS[name], mesh, [plain, annotated("dp", table)])) == wanted
    if data in ("fsdp", "zero-3", "mics"):
        rested = {**table, "rest": {"all": {"dp": "h"}}}
        assert answer(job_of(MODELS[name], mesh, [plain, annotated("dp", rested)])) == wanted


def test_weights_at_rest_without_a_data_scheme_are_gathered_by_their_operators() -> None:
    """The same bytes of matrices as FSDP's, and exposed."""
    model = MODELS["gpt3-5b"]
    table = {"divide": {"all": {"dp": "b"}}, "rest": {"all": {"dp": "h"}}}
    inline = simulate(job_of(model, {"dp": 8}, [annotated("dp", table)], micro=8)).to_dict()
    ahead = simulate(job_of(model, {"dp": 8}, [{"use": "data/fsdp", "over": "dp"}, annotated("dp", table)])).to_dict()
    assert inline["breakdown_s"]["exposed"]["tp"] > 5 * ahead["breakdown_s"]["exposed"]["dp"] > 0
    assert ahead["breakdown_s"]["exposed"]["tp"] == 0


def test_a_data_scheme_reduces_in_buckets_what_an_axis_leaves_partial() -> None:
    """Along x attention is sharded by samples and the MLP by columns: DDP reduces attention's gradients alone."""
    model = {**MODELS["gpt3-5b"], "tied": False}
    blocks = {name: {"x": "f"} for name in ("up", "act", "down")} | {"embedding": {"x": "v"}}
    table = {"divide": {"all": {"x": "b"}, **blocks, "head": {"x": "v"}, "loss": {"x": "v"}}}
    ddp = {"use": "data/ddp", "over": "x"}
    played = play_job(job_of(model, {"x": 8}, [ddp, annotated("x", table, stream={"x": "b"})]))
    reduced = sum(op.work.nbytes for _, op in played.instances() if op.stream == "data" and is_collective(op))
    divided = ("wup", "wdown", "bup", "embedding", "head")
    wanted = [param for param in params_of(played.stage_ops(0)) if param.name not in divided]
    assert reduced == sum(4 * param.total for param in wanted)
    assert all(param.size == param.total for param in wanted)


def is_collective(op: Op) -> bool:
    return isinstance(op.work, Collective)


def test_tables_of_some_layers() -> None:
    """The stream keeps one layout: layers with the same table are the same, whatever the others have."""
    model = MODELS["llama3-8b"]
    special = {"layers": "1-2", "divide": {"core": {"tp": "s"}, "rope": {"tp": "s"}}}
    mixed = play_job(job_of(model, {"tp": 8}, [annotated("tp", MEGATRON_SP, special, stream="s")]))
    plain = play_job(job_of(model, {"tp": 8}, [annotated("tp", MEGATRON_SP, stream="s")]))
    every = play_job(job_of(model, {"tp": 8}, [annotated("tp", MEGATRON_SP, {**special, "layers": "0-3"}, stream="s")]))
    runs = [(run.name, run.count) for run in mixed.stage_ops(0).unit_runs]
    assert runs == [("embedding", 1), ("layer", 1), ("layer", 2), ("layer", 1), ("ending", 1)]
    busy = [sum(one.flat.seconds) for one in (mixed, plain, every)]
    assert busy[0] == pytest.approx((busy[1] + busy[2]) / 2, rel=1e-12)
    assert busy[1] != busy[2]
    assert len({run.nbytes for run in mixed.stage_ops(0).unit_runs[:-1]}) == 1


def test_layers_keep_their_tables_on_stages_of_a_pipeline() -> None:
    """Also with the layers of the stages chosen by cost."""
    model, pipeline = MODELS["llama3-8b"], {"use": "pipeline/1f1b", "over": "pp"}
    special = {"layers": 3, "divide": {"up": {"tp": None}, "act": {"tp": None}, "down": {"tp": None}}}
    job = job_of(model, {"pp": 2, "tp": 4}, [pipeline, annotated("tp", MEGATRON, special)])
    flops = [sum(op.work.flops for op in forward_ops(one) if isinstance(op.work, Gemm)) for one in play_job(job).stages]  # type: ignore[arg-type]
    job["plan"]["schemes"][1] = annotated("tp", MEGATRON)
    without = [
        sum(op.work.flops for op in forward_ops(one) if isinstance(op.work, Gemm))  # type: ignore[arg-type]
        for one in play_job(job).stages
    ]
    assert flops[0] == without[0] and flops[1] > without[1]
    job["plan"] |= {"schemes": [pipeline, annotated("tp", MEGATRON, special)], "partition": "by-cost"}
    assert play_job(job).plan.layers == (3, 1)


# --------------------------------------------------------------------------------------------- drawn tables


@pytest.mark.parametrize("seed", drawn(range(300), keep=75))
def test_drawn_tables_conserve_work_bytes_and_parameters(seed: int) -> None:
    check_conservation(draw_job(seed))


def check_conservation(drawn: DrawnJob) -> None:
    """Over all ranks: FLOPs of every operator are those of one rank times the ranks that do the same, bytes of every
    tensor and parameters those of one rank times the ranks that hold the same; memory is given back, and all engines
    take the same time.
    """
    played, alone = play_job(drawn.job), play_job(drawn.alone)
    world = math.prod(drawn.mesh.values())
    for table, ours in zip(drawn.tables, layers_of(played, drawn), strict=True):
        divide, theirs = table["divide"], layers_of(alone, drawn)[0]
        wanted = flops_by_operator(theirs)
        found = flops_by_operator(ours)
        assert found.keys() == wanted.keys() and len(found) >= 15
        for (name, what), flops in found.items():
            copies = world // drawn.shards(divide[name])
            assert flops * world == pytest.approx(wanted[name, what] * copies, rel=1e-12), (name, what)
        check_parameters(drawn, table, ours)
        check_tensors(drawn, ours, theirs)
    # The gradient of a weight is whole behind the last of its scatters.
    scatters = [op for op in backward_ops(played.stage_ops(0)) if op.name.startswith("scatter w")]
    assert not {param.ready for param in params_of(played.stage_ops(0))} & {
        before for op in scatters for before in op.after if before in scatters
    }
    assert all(peak.left == 0 for peak in played.peaks)
    spans = [play_job(drawn.job, engine=engine).times.span for engine in get_args(Engine) if engine != "shared"]
    assert spans == pytest.approx([played.times.span] * len(spans), rel=1e-9)


def layers_of(played: Played, drawn: DrawnJob) -> list[list[Any]]:
    """The unit runs with the first table and, if there is one, with the second table."""
    runs = played.stage_ops(0).unit_runs
    if not drawn.border or played.plan.mesh.world == 1:
        return [runs]
    first, second, at = [], [], 0
    for run in runs:
        (second if run.name == "layer" and at >= drawn.border else first).append(run)
        at += run.count * (run.name == "layer")
    # The ends are in the first table.
    return [first, [*[run for run in first if run.name != "layer"], *second]]


def flops_by_operator(runs: list[Any]) -> dict[tuple[str, str], float]:
    """FLOPs of one copy of every operator, by operator and pass."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for run in {run.name + str(sorted(param.name for param in run.fragment.params)): run for run in runs}.values():
        for op in (*run.fragment.forward, *run.fragment.backward):
            if isinstance(op.work, Gemm | Attention):
                name = op.name if op.phase == "F" else op.name[1:]
                found[name, f"{run.name} {op.phase}"] += op.work.flops
    return found


def check_parameters(drawn: DrawnJob, table: dict[str, Any], runs: list[Any]) -> None:
    """Every weight is as large as the table says."""
    named = {weight: name for name, weights in WEIGHTS.items() for weight in weights}
    checked = 0
    for run in runs:
        for param in run.fragment.params:
            if param.name in named:
                name, dims = named[param.name], {*DIMS[param.name]}
                rest = {axis: dim for axis, dim in table["rest"].get(name, {}).items() if axis not in drawn.gathered}
                used = {axis: dim for axis, dim in table["divide"][name].items() if dim in dims}
                assert param.size * drawn.shards({**rest, **used}, dims) == param.total, param.name
                checked += 1
    assert checked >= 4


WEIGHTS = {"qkv": ("wq", "wk", "wv"), "proj": ("wproj",), "embedding": ("embedding",), "head": ("head",)}
DIMS = {"wq": "ha", "wk": "ha", "wv": "ha", "wproj": "ah", "embedding": "vh", "head": "hv"}


def check_tensors(drawn: DrawnJob, ours: list[Any], theirs: list[Any]) -> None:
    """A tensor, or its gradient, takes the bytes of one rank over the ranks that shard it."""
    whole = {use.key.partition("@")[0]: use.nbytes for run in theirs for use in run.fragment.tensor_uses}
    checked = 0
    for use in (use for run in ours for use in run.fragment.tensor_uses):
        name, sharded, layout = use.key.partition("@")
        if sharded and name in whole and "~" not in layout:
            axes = [shard.partition(":")[0] for shard in layout.split(",") if shard]
            assert use.nbytes * math.prod(drawn.mesh[axis] for axis in axes) == whole[name], use.key
            checked += 1
    assert checked >= 40
