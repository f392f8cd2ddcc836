"""Traces that meshcast writes are read back by its own readers, and by HolisticTraceAnalysis where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from meshcast.experiments.render.terminal import traces
from meshcast.hardware.errors import PlanError
from meshcast.simulator import Report, simulate
from meshcast.simulator.formats import kineto
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.categories import kind_of
from meshcast.simulator.report.trace import write_rank_traces, write_trace
from meshcast.simulator.report.tracing.names import is_launched, name_kernel
from meshcast.validation.measurements.import_trace import import_trace
from meshcast.validation.traces.comparison import compare_step

_SHARDED = {"use": "data/zero-1", "over": "dp"}
_LLAMA = {"preset": "llama3-8b", "layers": 4}


def job_of(model: dict[str, Any], nodes: int, samples: int, sequence: int, **plan: Any) -> dict[str, Any]:
    batch = {"global": samples, "micro": 1, "sequence": sequence}
    return {"model": model, "cluster": f"dgx-h100:{nodes}", "batch": batch, "plan": plan}


JOBS: dict[str, dict[str, Any]] = {
    "dense": job_of({**_LLAMA, "layers": 8}, 2, 8, 4096, tp=4, pp=2, chunks=2),
    "experts": job_of({"preset": "mixtral-8x7b", "layers": 4}, 4, 32, 4096, pp=2, ep=8),
    "long sequences": job_of(
        _LLAMA, 2, 4, 16384,
        mesh={"dp": 2, "cp": 4, "tp": 2},
        schemes=[
            _SHARDED,
            {"use": "sequence/ring", "over": "cp"},
            {"use": "tensor/megatron-sp", "over": "tp"},
            {"use": "memory/recompute-full"},
        ],
    ),
    "deepep": job_of(
        {"preset": "deepseek-v2-lite", "layers": 4}, 2, 32, 4096,
        mesh={"dp": 16}, views={"experts": {"ep": 16}}, schemes=[_SHARDED, {"use": "expert/deepep", "over": "ep"}],
    ),
    "offloaded": job_of(
        _LLAMA, 1, 8, 8192, mesh={"dp": 8}, schemes=[_SHARDED, {"use": "memory/offload", "what": ["optimizer"]}]
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def report(job: str) -> Report:
    return simulate(JOBS[job])


@pytest.fixture(scope="module")
def files(report: Report, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_rank_traces(report, tmp_path_factory.mktemp("ranks"))


def test_a_comparison_with_itself_finds_no_difference(report: Report, files: list[Path]) -> None:
    for device, path in enumerate(files):
        trace = kineto.read(path)
        assert (trace.rank, trace.world) == (
            int(report.play.plan.ranks.of_device(device).min()),
            report.job.cluster.gpus,
        )
        assert [step.name for step in trace.steps()] == ["ProfilerStep#0"]
        found = compare_step(trace, report)
        assert found.device == device and not found.notes
        for line in found.lines:
            # Times are rounded to nanoseconds; work that takes no time is a kernel of a trace, and no simulated slice.
            assert line.real == pytest.approx(line.simulated, abs=1e-9 * line.real_calls)
            assert line.real_calls >= line.simulated_calls > 0


def test_the_seconds_of_classes_are_imported(job: str, files: list[Path]) -> None:
    found = import_trace(files[0], JOBS[job])
    classes = [row for row in found.rows if row.name != "step"]
    assert len(classes) > 8 and found.machine.device == "cuda"
    for row in classes:
        assert row.samples[0] == pytest.approx(row.forecasts["catalog"].value, rel=1e-4)


def test_one_file_of_all_stages_is_refused(job: str, report: Report, tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    write_trace(report, path)
    if report.play.program.devices == 1:
        assert compare_step(kineto.read(path), report).device == 0
        return
    for use in (lambda: compare_step(kineto.read(path), report), lambda: import_trace(path, JOBS[job])):
        with pytest.raises(PlanError, match=r"has 2 processes.*--trace FOLDER/ writes one for each stage"):
            use()


def test_the_constant_time_of_the_framework_is_explained(report: Report, files: list[Path]) -> None:
    found, page = compare_step(kineto.read(files[0]), report), Console(record=True, width=200)
    page.print(traces.page(found))
    words = "the forecast's step has 35 ms of the framework (step_overhead_s)"
    assert report.job.framework.step_overhead_s == found.to_dict()["framework_s"] == 0.035
    assert words in page.export_text()


# ------------------------------------------------------------------------------- HolisticTraceAnalysis


def intervals(report: Report, device: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When the kernels of a device compute, and when its collectives, messages and copies run [us]."""
    flat, times = report.play.step.flat, report.play.step.times
    computing, other = [], []
    received = {number for number, _, receiver in flat.sent if receiver == device}
    for number, op in enumerate(flat.ops):
        if not is_launched(op) or (flat.device[number] != device and number not in received):
            continue
        span = times.begin[number] * 1e6, (times.end[number] + flat.latency[number]) * 1e6
        computes = op.stream == COMPUTE and not name_kernel(op).startswith("nccl")
        (computing if computes else other).append(span)
    return computing, other


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of a union of intervals."""
    total, reach = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


@pytest.mark.parametrize("job", ["dense", "experts", "long sequences"], indirect=True)
def test_hta_finds_the_same_times(report: Report, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")  # otherwise it cuts every kernel to whole microseconds
    traces = analysis.TraceAnalysis(trace_dir=str(files[0].parent))
    temporal = traces.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = traces.get_comm_comp_overlap(visualize=False).set_index("rank")
    for device in range(report.play.program.devices):
        rank = int(report.play.plan.ranks.of_device(device).min())
        computing, other = intervals(report, device)
        both = covered(computing + other)
        within = max(end for _, end in computing + other) - min(begin for begin, _ in computing + other)
        row = temporal.loc[rank]
        assert row["kernel_time(us)"] == pytest.approx(within, rel=1e-6)
        assert row["compute_time(us)"] == pytest.approx(covered(computing), rel=1e-6)
        assert row["non_compute_time(us)"] == pytest.approx(both - covered(computing), rel=1e-5)
        assert row["idle_time(us)"] == pytest.approx(within - both, rel=1e-5, abs=1)
        hidden = covered(computing) + covered(other) - both
        assert overlap.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(100 * hidden / covered(other), abs=0.01)
    kinds, kernels = traces.get_gpu_kernel_breakdown(visualize=False, num_kernels=1000)
    assert kinds["sum"].sum() > 0
    gemms = kernels[kernels["name"].str.startswith(("gemm(", "grouped_gemm("))].groupby("rank")["sum (us)"].sum()
    flat = report.play.step.flat
    for device in range(report.play.program.devices):
        ours = sum(
            flat.seconds[n]
            for n, op in enumerate(flat.ops)
            if flat.device[n] == device and op.work is not None and kind_of(op) == "gemm"
        )
        assert gemms.loc[int(report.play.plan.ranks.of_device(device).min())] == pytest.approx(ours * 1e6, rel=1e-6)
    streams = traces.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
    assert {7} <= set(streams["stream"]) and (streams["idle_time"] >= -1e-3).all()
    assert len(traces.get_gpu_user_annotation_breakdown(visualize=False)) > 0
