"""A real trace against the simulated one: a trace made from a forecast agrees with it in every line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.measured import traces as plot
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.hardware import load
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats import kineto
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.categories import COMPUTING
from meshcast.simulator.report.report import Report
from meshcast.validation.traces.comparison import Comparison, compare_step, differs, simulated_timeline
from meshcast.validation.traces.gpu_timeline import ranks_along, stream_of
from meshcast.validation.traces.timeline import UNATTRIBUTED, Slice
from tests.draws import drawn as drawn_cases
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled
from tests.simulator.formats.samples import event, kernel, launch

MODEL = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"model": MODEL, "cluster": {"gpu": "a100-sxm-80", "gpus": 1}, "batch": {"global": 2}},
    "many": {
        "model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1},
        "plan": {"tp": 2, "pp": 2, "zero": 1}, "framework": {"set": {"launch_s": 1e-5}},
    },
}  # fmt: skip
GPUS = {"a100-sxm-80": "NVIDIA A100-SXM4-80GB", "h100-sxm": "NVIDIA H100 80GB HBM3"}
NAMES = {
    "gemm": "nvjet_tst_192x192",
    "attention": "void pytorch_flash::flash_fwd_kernel<...>",
    "norm": "vectorized_layer_norm_kernel",
    "activation": "GeluCUDAKernelImpl",
    "rope": "fused_rope_forward",
    "addition": "CUDAFunctor_add<float>",
    "embedding": "indexSelectLargeIndex",
    "loss": "cross_entropy_forward",
    "optimizer": "FusedAdamMathFunctor",
    "copy": "Memcpy DtoD (Device -> Device)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
    "all_gather": "ncclDevKernel_AllGather_RING_LL",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "send_recv": "ncclDevKernel_SendRecv",
}
WHOLE = "the trace marks no steps: the whole trace counts as one"
GROUPS = {"tensor": "mesh_tp", "data": "DATA_PARALLEL_GROUP_WITH_CP", "pipeline": "mesh_pp"}


def pictured(report: Report, rank: int, device: int, slower: float = 1.0) -> dict[str, Any]:
    """The forecast as if a GPU had been traced; kernels of computation last `slower` times as long as forecast."""
    rows: list[dict[str, Any]] = []
    for i, slice_ in enumerate(simulated_timeline(report, device).slices):
        computes = slice_.stream == COMPUTE
        # The reduction of the gradients' norm is one over all ranks.
        group = {} if computes else {"Process Group Description": GROUPS.get(slice_.stream, "default_pg")}
        length = slice_.seconds * (slower if computes else 1.0) * 1e6
        rows.append(kernel(NAMES[slice_.kind], slice_.begin * 1e6, length, i, hash(slice_.stream) % 50, **group))
    info = {"rank": rank, "world_size": report.play.plan.mesh.world, "backend": "nccl"}
    devices = [{"name": GPUS[report.job.cluster.gpu.name]}]
    return {"deviceProperties": devices, "distributedInfo": info, "traceEvents": rows}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {name: simulate(job) for name, job in JOBS.items()}


@pytest.fixture
def put(tmp_path: Path) -> Any:
    """Writes a trace, or the events of one, and reads it."""

    def write(data: Any) -> kineto.Trace:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(data if isinstance(data, dict) else {"traceEvents": data}), "utf-8")
        return kineto.read(path)

    return write


@pytest.mark.parametrize(("name", "rank", "device"), [("alone", 0, 0), ("many", 1, 0), ("many", 6, 1)])
def test_a_trace_made_from_the_forecast_agrees_with_it(
    reports: Any, put: Any, name: str, rank: int, device: int
) -> None:
    report = reports[name]
    compared = compare_step(put(pictured(report, rank, device)), report)
    assert (compared.device, compared.on, compared.notes) == (device, GPUS[report.job.cluster.gpu.name], (WHOLE,))
    streams = {line.stream for line in compared.lines}
    assert streams == ({COMPUTE} if name == "alone" else {COMPUTE, "tensor", "data", "pipeline", UNATTRIBUTED})
    for line in compared.lines:
        assert line.ratio == pytest.approx(1.0, rel=1e-6), line
        assert line.real_calls == line.simulated_calls > 0
    real, forecast = compared.real.account, compared.simulated.account
    # Moments of a trace are far from zero: a nanosecond is all that they resolve.
    assert (real["compute"], real["exposed"]) == pytest.approx((forecast["compute"], forecast["exposed"]), rel=1e-4)
    # It reaches from kernel to kernel; the host issues the first one a moment earlier.
    first = compared.simulated.slices[0].begin
    assert compared.real.span == pytest.approx(report.play.step.span - first, rel=1e-4)


def test_the_simulated_side_is_the_forecast(reports: Any) -> None:
    for report in reports.values():
        for device in range(report.play.program.devices):
            side = simulated_timeline(report, device)
            assert sum(side.account.values()) == pytest.approx(report.step_time)
            sums = report.play.program.sums[device, : len(COMPUTING), 0].sum()
            talk = sum(s for (stream, kind), (s, _) in side.sums.items() if kind in plot.LOOKS and stream == COMPUTE)
            in_updates = side.sums.get((UNATTRIBUTED, "all_reduce"), (0.0, 0))[0]
            assert talk + in_updates == pytest.approx(sums)


def test_ratios_show_slower_kernels(reports: Any, put: Any) -> None:
    compared = compare_step(put(pictured(reports["many"], 0, 0, slower=1.25)), reports["many"])
    for line in compared.lines:
        assert line.ratio == pytest.approx(0.8 if line.stream == COMPUTE else 1.0, rel=1e-6)
    answer = compared.to_dict()
    assert len(answer["rows"]) == len(compared.lines) and json.dumps(answer)


def test_operators_around_a_launch_and_the_marked_step(reports: Any, put: Any) -> None:
    rows = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("ProfilerStep#2", "user_annotation", 100, 100),
        event("_RMSNorm", "cpu_op", 110, 20),
        launch(10, 1),
        launch(112, 2),
        launch(190, 3),
        kernel("void gemm", 50, 30, 1),
        kernel("void elementwise_kernel", 150, 10, 2),  # begins behind the step before, runs behind its own mark
        kernel("void gemm", 205, 5, 3),
        kernel("another GPU", 0, 1, 9, device=1),
    ]
    trace, report = put(rows), reports["alone"]
    last, first = compare_step(trace, report), compare_step(trace, report, step=0)
    seconds = {line.kind: line.real for line in last.lines if line.real}
    assert seconds == pytest.approx({"norm": 10e-6, "gemm": 5e-6}, rel=1e-4)
    assert last.real.span == pytest.approx(60e-6, rel=1e-4)
    assert last.notes[0].startswith("compared is step 1 of the 2 steps (0 to 1)")
    assert {line.kind: line.real for line in first.lines if line.real} == pytest.approx({"gemm": 30e-6}, rel=1e-4)
    for step in (2, -3):
        with pytest.raises(PlanError, match="marks 2 steps"):
            compare_step(trace, report, step=step)


def test_groups_of_a_collective(reports: Any, put: Any) -> None:
    plan = reports["many"].play.plan
    assert [ranks_along(plan, 6, axis) for axis in ("tp", "pp", "dp")] == [(6, 7), (2, 6), (4, 6)]
    config = [{"pg_name": "3", "pg_desc": "undefined", "ranks": [4, 6]}, {"pg_name": "4", "ranks": [2, 6]}]
    gemm = kernel("gemm", 0, 1, 1)
    trace = put({"distributedInfo": {"rank": 6, "world_size": 8, "pg_config": config}, "traceEvents": [gemm]})

    def stream(**args: Any) -> str:
        fields = {name.replace("_", " "): value for name, value in args.items()}
        return stream_of(trace, plan, 6, kineto.Event("nccl", "kernel", 0.0, 1.0, ("0", "7"), fields))

    assert stream(Process_Group_Description="mesh_dp") == "data"
    assert stream(Process_Group_Description="EXPERT_MODEL_PARALLEL_GROUP") == "expert"
    assert stream(Process_Group_Ranks="[6, 7]") == "tensor"
    assert stream(Process_Group_Name="3") == "data" and stream(Process_Group_Name="4") == "pipeline"
    for listed in ("[6 7]", "[6, , 7]", "[6, 7", f"[{'9' * 5_000}]"):
        assert stream(Process_Group_Ranks=listed) == ""
    odd = put({"distributedInfo": {"rank": True, "world_size": -1}, "traceEvents": [gemm]})
    assert odd.rank is None and odd.world is None
    assert stream(Process_Group_Description="default_pg") == stream() == stream(Process_Group_Ranks="[...]") == ""


def test_collectives_without_a_group_in_the_trace_are_joined(reports: Any, put: Any) -> None:
    data = pictured(reports["many"], 0, 0)
    for row in data["traceEvents"]:
        row["args"].pop("Process Group Description", None)
    compared = compare_step(put(data), reports["many"])
    lines = {(line.stream, line.kind): line for line in compared.lines}
    # Only one stream of the forecast sends messages; several reduce.
    assert lines["pipeline", "send_recv"].ratio == pytest.approx(1.0, rel=1e-6)
    assert "all_reduce" in compared.notes[-1] or "all_gather" in compared.notes[-1]
    for line in compared.lines:
        assert line.ratio == pytest.approx(1.0, rel=1e-6), line


def test_a_processor_waits_for_what_it_sends(reports: Any, put: Any) -> None:
    node = "autograd::engine::evaluate_function: "
    rows = [
        event("step", "user_annotation", 0, 200),
        event("aten::linear", "cpu_op", 10, 40),
        event("aten::mm", "cpu_op", 15, 30),
        event(f"{node}_CopyBackward", "cpu_op", 60, 100),
        event("_CopyBackward", "cpu_op", 62, 96),
        event("c10d::allreduce_", "cpu_op", 64, 4),
        event("aten::add_", "cpu_op", 100, 10),  # computes beside the collective
        event("gloo:all_reduce", "user_annotation", 70, 80, tid=2),
        event("aten::copy_", "cpu_op", 80, 20, tid=2),  # gloo's own
    ]
    compared = compare_step(put(rows), reports["alone"]).real
    times = {kind: seconds for (_, kind), (seconds, _) in compared.sums.items() if kind != "other"}
    assert times == pytest.approx({"gemm": 40e-6, "addition": 10e-6, "all_reduce": 80e-6}, rel=1e-3)
    assert compared.sums[COMPUTE, "gemm"][1] == 1  # one product, called through another operator
    # What the function has for itself before and behind the collective is the host's work, what lies beside it is not.
    assert compared.sums[COMPUTE, "other"][0] == pytest.approx(20e-6, rel=1e-3)
    account = {"compute": 70e-6, "exposed": 70e-6, "idle": 60e-6}
    assert compared.account == pytest.approx(account, rel=1e-3) and compared.span == pytest.approx(200e-6, rel=1e-3)


def test_collectives_requested_from_gloo(reports: Any, put: Any) -> None:
    rows = [
        event("c10d::_reduce_scatter_base_", "cpu_op", 0, 5),
        event("gloo:all_reduce", "user_annotation", 10, 20, tid=2),
        event("c10d::_allgather_base_", "cpu_op", 6, 5),
        event("gloo:all_gather", "user_annotation", 30, 20, tid=2),
    ]
    compared = compare_step(put(rows), reports["many"])
    # The forecast scatters and gathers for several, so the trace, which does not say for whom, has one line for all.
    calls = {
        (line.stream, line.kind): line.real_calls for line in compared.lines if line.real and line.stream != COMPUTE
    }
    sharded = {"reduce_scatter", "all_gather"}
    assert calls.keys() == {(line.stream, line.kind) for line in compared.lines if line.kind in sharded}
    assert {kind for _, kind in calls} == sharded and set(calls.values()) == {1}
    fewer = compare_step(put(rows[1:]), reports["many"])
    kinds = {line.kind for line in fewer.lines if line.real_calls and line.stream != COMPUTE}
    assert kinds == {"all_reduce", "all_gather"}


@pytest.mark.parametrize(
    ("info", "rank", "words"),
    [({"rank": 0, "world_size": 16}, None, "has 8 ranks"), ({"rank": 9}, None, "0 to 7"), ({}, -1, "0 to 7")],
)
def test_a_trace_of_another_job(reports: Any, put: Any, info: dict[str, int], rank: int | None, words: str) -> None:
    trace = put({"distributedInfo": info, "traceEvents": [kernel("gemm", 0, 1, 1)]})
    with pytest.raises(PlanError, match=words):
        compare_step(trace, reports["many"], rank)


def test_a_trace_of_another_device_is_noted(reports: Any, put: Any) -> None:
    other, same = "the trace is of NVIDIA H200, the job of NVIDIA H100", "the trace is of"
    data = pictured(reports["many"], 0, 0)
    data["deviceProperties"] = [{"name": "NVIDIA H200"}]
    assert any(note.startswith(other) for note in compare_step(put(data), reports["many"]).notes)
    on_cpu = put([event("aten::mm", "cpu_op", 2, 3)])
    assert any("is of CPU, the job of NVIDIA A100" in note for note in compare_step(on_cpu, reports["alone"]).notes)
    for name in ("", "NVIDIA H100", "h100-sxm"):
        data["deviceProperties"] = [{"name": name}] if name else []
        assert not any(same in note for note in compare_step(put(data), reports["many"]).notes)
    h100, cpu = reports["many"].job.cluster.gpu, load("gpus", "cpu-core")
    assert [differs(name, h100) for name in ("NVIDIA H100 PCIe", "NVIDIA GH200", "CPU")] == [True, True, True]
    assert [differs(name, cpu) for name in ("CPU", "NVIDIA H100")] == [False, True]
    own = h100.model_copy(update={"name": "lab-7"})
    assert not differs("NVIDIA H200", own), "a name that the catalog does not have says nothing"


def test_steps_without_work(reports: Any, put: Any) -> None:
    marks = [event("step", "user_annotation", 0, 5), event("step", "user_annotation", 50, 5)]
    with pytest.raises(PlanError, match="no operator ran"):
        compare_step(put([*marks, event("aten::mm", "cpu_op", 2, 0)]), reports["alone"])
    other = [kernel("gemm", 2, 1, 1, device=1), kernel("gemm", 20, 9, 2, device=0)]
    with pytest.raises(PlanError, match="no kernel was launched"):
        compare_step(put([*marks, *other]), reports["alone"])
    # The second mark is that of a step which was not recorded.
    compared = compare_step(put([*marks, event("aten::mm", "cpu_op", 2, 3)]), reports["alone"])
    assert compared.real.span == pytest.approx(5e-6, rel=1e-3)
    with pytest.raises(PlanError, match="marks no steps"):
        compare_step(put([kernel("gemm", 20, 1, 1)]), reports["alone"], step=0)


# -------------------------------------------------------------------------------------------- figure


def drawn(comparison: Comparison) -> Any:
    with matplotlib.rc_context(style.RC):
        figure = plot.traces(comparison)
        FigureCanvasAgg(figure).draw()
    return figure


@pytest.fixture(params=["alone", "many"])
def comparison(request: Any, reports: Any, put: Any) -> Comparison:
    return compare_step(put(pictured(reports[request.param], 0, 0, 1.25)), reports[request.param])


def test_the_figure_shows_the_table(comparison: Comparison) -> None:
    figure = drawn(comparison)
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text().strip()]
    words = {text.get_text() for text in texts}
    for line in comparison.lines:
        assert {line.kind.replace("_", "-"), f"{line.real * 1e3:,.3f}", f"{line.ratio:.2f}"} <= words
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


@pytest.mark.parametrize("width", style.WIDTHS)
def test_long_numbers_of_kernels_have_room(reports: Any, put: Any, width: style.Width) -> None:
    compared = compare_step(put(pictured(reports["many"], 0, 0)), reports["many"])
    many = [replace(slice_, calls=1_234_567) for slice_ in compared.real.slices]
    wide = replace(compared, real=replace(compared.real, slices=tuple(many)), framework_s=0.035)
    figure = draw_styled(plot.traces, wide, width=width)
    check_figure(figure, width)
    words = {text.get_text(): text for text in figure.texts}
    assert "35 ms of the framework" in " ".join(words)
    if width != "column":
        bars = figure.axes[0].get_window_extent()
        assert words["exposed comm."].get_window_extent().x1 < bars.x0, "words touch their bar"


@pytest.mark.parametrize("kind", drawn_cases(["svg", "png"], keep=2))
def test_the_same_comparison_gives_the_same_bytes(comparison: Comparison, tmp_path: Path, kind: str) -> None:
    for name in ("first", "second"):
        save(lambda: plot.traces(comparison), tmp_path / f"{name}.{kind}")
    first, second = (tmp_path / f"{name}.{kind}" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes() and first.stat().st_size > 10_000


def test_columns_have_the_colours_of_their_kernels() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    slices = [Slice(COMPUTE, "gemm", 0.0, 1.5), Slice(COMPUTE, "norm", 2.0, 1.0), Slice(COMPUTE, "norm", 2.0, 1.0)]
    colours = plot.mix_colours(slices, edges)
    gemm, norm = (np.array(plot.class_colour(COMPUTE, kind)) for kind in ("gemm", "norm"))
    assert colours == pytest.approx(np.array([gemm, (gemm + 1) / 2, norm]))


# ------------------------------------------------------------------------------------ a real trace


@pytest.mark.torch
def test_a_real_step_on_a_processor(reports: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layers = torch.nn
    model = layers.Sequential(layers.Linear(64, 256), layers.GELU(), layers.Linear(256, 64), layers.LayerNorm(64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        x = torch.randn(2, 4, 64, 16)
        y = layers.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        out = model(y.transpose(1, 2).reshape(2, 64, 64))
        layers.functional.cross_entropy(out.flatten(0, 1), torch.zeros(128, dtype=torch.int64)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("step"):
        step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    compared = compare_step(kineto.read(tmp_path / "trace.json"), reports["alone"])
    calls = {line.kind: line.real_calls for line in compared.lines}
    # Two linear layers: a product each forward, and backward one for the weight, and for the input of the second.
    assert calls["gemm"] == 5 and calls["attention"] == 1 and calls["norm"] == calls["activation"] == 2
    assert {"loss", "optimizer"} <= calls.keys() and compared.on == "CPU"
    assert sum(compared.real.account.values()) == pytest.approx(compared.real.span)
    assert compared.real.account["compute"] == pytest.approx(sum(line.real for line in compared.lines))
