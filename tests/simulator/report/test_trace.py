"""The trace shows the played program in a form that viewers of Chrome traces read."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.hardware.units import GIB
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.ir.scheme import FAMILIES
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.categories import KINDS
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.trace import write_rank_traces, write_trace
from meshcast.simulator.report.tracing.lanes import HOST, RECEIVES, THREADS, describe_ranks, thin_samples
from meshcast.simulator.report.tracing.names import name_kernel
from tests.draws import drawn
from tests.jobs import on_gpus

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 64}
BASE = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}}
TOWERS = {"mesh": {"pp": 4, "dp": 2}, "schemes": [{"use": "data/zero-1", "over": "dp"}]}


def with_settings(**settings: Any) -> dict[str, Any]:
    return {"framework": {"name": "megatron-core", "set": settings}}


def with_towers(use: str, **options: int) -> dict[str, Any]:
    return {"plan": {**TOWERS, "schemes": [{"use": use, "over": "pp", **options}, *TOWERS["schemes"]]}}


CHANGES: dict[str, dict[str, Any]] = {
    "alone": {"cluster": {"gpu": "a100-sxm-80", "gpus": 1}},
    "gpipe": {"plan": {"pp": 4, "schedule": "gpipe", "zero": 0}},
    "1f1b": {"plan": {"tp": 2, "pp": 2, "recompute": "selective"}},
    "interleaved": {"plan": {"tp": 2, "pp": 2, "chunks": 2, "recompute": "full"}},
    "slow host": {"plan": {"pp": 4}, **with_settings(launch_s=1e-5)},
    "slow host, one stage": {"plan": {"tp": 4}, **with_settings(launch_s=1e-5)},
    "no overlap": {"plan": {"pp": 2}, **with_settings(overlap={"dp": False, "pp": False})},
    "no host": {"plan": {"pp": 2}, **with_settings(step_overhead_s=0, launch_s=0)},
    "ends without layers": {"plan": {"pp": 4, "dp": 2, "partition": [0, 2, 2, 0]}},
    "other order": on_gpus(8, {"dp": 2, "pp": 2, "tp": 2}, "data/zero-1 over dp", "pipeline/1f1b over pp",
        "tensor/megatron over tp"),
    "branches": {"model": {**MODEL, "branches": [{"layers": 2}] * 2}, **with_towers("pipeline/graphpipe", trunk=2)},
    "contrastive": {"model": {**MODEL, "layers": 0, "contrastive": 64, "branches": [{"layers": 2}] * 2},
        **with_towers("pipeline/distmm", branches=2)},
    "two ways": {"plan": {"pp": 4, "schedule": "chimera"}},
    "pairs": {"batch": {"global": 16}, "plan": {"pp": 4, "schedule": "dualpipe"}, **with_settings(launch_s=1e-5)},
    "a real one": {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:2",
        "plan": {"tp": 4, "pp": 2, "chunks": 2}},
}  # fmt: skip
JOBS = {name: {**BASE, **changes} for name, changes in CHANGES.items()}
FEW = ("alone", "interleaved", "slow host", "no host", "ends without layers", "contrastive", "pairs", "a real one")
every_job = pytest.mark.parametrize("name", drawn(JOBS, keep=FEW))

ON_GPU = ("kernel", "gpu_memcpy")
ON_HOST = ("cpu_op", "cuda_runtime", "user_annotation", "gpu_user_annotation")

REQUIRED = {
    "M": {"name", "pid", "tid", "args"}, "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"}, "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "tid", "ts", "args"},
}  # fmt: skip


@cache
def report(name: str) -> Report:
    return simulate(JOBS[name])


@cache
def trace(name: str, folder: Path) -> dict[str, Any]:
    """The trace as a viewer gets it, its times as they are written."""
    path = folder / f"{name}.json"
    write_trace(report(name), path)
    return json.loads(path.read_text("utf-8"), parse_float=Decimal)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def events(name: str, folder: Path, ph: str) -> list[dict[str, Any]]:
    return [event for event in trace(name, folder)["traceEvents"] if event["ph"] == ph]


def threads(name: str, folder: Path) -> dict[tuple[int, int], str]:
    """The names of the threads by process and id."""
    named = [event for event in events(name, folder, "M") if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def slices(name: str, folder: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The events of every stream, by device and the name of its thread."""
    named, found = threads(name, folder), defaultdict(list)
    for event in events(name, folder, "X"):
        if event["cat"] in ON_GPU:
            found[event["pid"], named[event["pid"], event["tid"]]].append(event)
    return found


def annotations(name: str, folder: Path, device: int, category: str) -> list[dict[str, Any]]:
    """The annotations of a device, on its host or on its stream of kernels."""
    return [e for e in events(name, folder, "X") if e["pid"] == device and e["cat"] == category]


def end(event: dict[str, Any]) -> Decimal:
    return event["ts"] + event["dur"]


# -------------------------------------------------------------------------------------------- format


@every_job
def test_every_event_has_the_fields_of_the_format(name: str, folder: Path) -> None:
    document = trace(name, folder)
    assert document["displayTimeUnit"] == "ms" and document["schemaVersion"] == 1
    for event in document["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0 and event.get("bp", "e") == "e"
        assert event.get("cat") in (None, "send", *ON_GPU, *ON_HOST)
        if event.get("cat") in ON_GPU:
            assert event["args"].keys() >= {"device", "context", "stream", "correlation", "kind", "op"}


@every_job
def test_every_process_and_thread_has_a_name_and_a_place(name: str, folder: Path) -> None:
    devices = range(report(name).play.program.devices)
    named = defaultdict(set)
    for event in events(name, folder, "M"):
        named[event["name"]].add((event["pid"], event["tid"]))
    assert named["process_name"] == named["process_sort_index"] == {(d, 0) for d in devices}
    used = {(event["pid"], event["tid"]) for event in events(name, folder, "X")}
    assert named["thread_name"] == named["thread_sort_index"] == used
    ids = [tid for _, tid in used]
    assert len(set(ids)) == len(ids)


def test_threads_stand_in_one_order(folder: Path) -> None:
    named = threads("a real one", folder)
    shown = [name for (pid, _), name in sorted(named.items()) if pid == 0]
    streams = ["tensor", "data", "pipeline-forward", "pipeline-backward", RECEIVES]
    assert shown == [HOST, COMPUTE, *streams]
    assert {stream.partition("-")[0] for stream in THREADS[2:]} == set(FAMILIES)


@pytest.mark.parametrize(("axes", "device", "words"), [
    ({"pp": 2, "dp": 1, "tp": 2}, 1, "ranks 2 to 3: 2 ranks"),
    ({"dp": 2, "pp": 2, "tp": 2}, 0, "ranks 0, 1, 4, 5: 4 ranks"),
    ({"dp": 64, "pp": 8}, 1, "ranks 1, 9, 17, 25, ...: 64 ranks"),
    ({"pp": 4}, 3, "rank 3"),
    ({"dp": 8}, 0, "ranks 0 to 7: 8 ranks"),
])  # fmt: skip
def test_a_process_names_its_ranks(axes: dict[str, int], device: int, words: str) -> None:
    uses = {"pp": "pipeline/1f1b", "dp": "data/zero-1", "tp": "tensor/megatron"}
    job = on_gpus(math.prod(axes.values()), axes, *(f"{use} over {axis}" for axis, use in uses.items() if axis in axes))
    plan = resolve_plan(load_job({**job, "batch": {"global": 8 * axes.get("dp", 1)}}))
    assert describe_ranks(plan.ranks.of_device(device).tolist()) == words


def test_it_names_the_forecast_job(folder: Path) -> None:
    about = trace("1f1b", folder)["otherData"]
    assert about["meshcast"] and about["job"]["plan"]["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert float(about["step_time_s"]) == report("1f1b").step_time


def test_a_folder_has_the_trace_of_the_first_rank_of_every_stage(folder: Path) -> None:
    written = write_rank_traces(report("a real one"), folder / "ranks")
    assert [path.name for path in written] == ["rank-0.pt.trace.json.gz", "rank-8.pt.trace.json.gz"]
    for device, path in enumerate(written):
        text = gzip.decompress(path.read_bytes()).decode()
        assert f'"rank": {8 * device}, "world_size": 16' in text  # one line, with the space that HTA looks for
        document = json.loads(text, parse_float=Decimal)
        assert [gpu["name"] for gpu in document["deviceProperties"]] == ["h100-sxm"]
        own = [event for event in document["traceEvents"] if event["ph"] == "X"]
        assert own == [event for event in events("a real one", folder, "X") if event["pid"] == device]


def test_collectives_name_their_groups(folder: Path) -> None:
    found = [event["args"] for own in slices("a real one", folder).values() for event in own]
    groups = {one["Process Group Name"]: one for one in found if "Process Group Name" in one}
    assert groups["tp"]["Process Group Ranks"] in ("[0, 1, 2, 3]", "[8, 9, 10, 11]")
    assert groups["tp"]["Process Group Description"] == "TENSOR_MODEL_PARALLEL_GROUP"
    assert groups["dp"]["Process Group Ranks"] in ("[0, 4]", "[8, 12]") and groups["dp"]["Group size"] == 2
    gathers = [one for one in found if one.get("Collective name") == "_allgather_base"]
    assert gathers and all(
        gather["Out msg nelems"] // gather["Group size"] == gather["In msg nelems"] for gather in gathers
    )


# --------------------------------------------------------------------------------------------- times


@every_job
def test_slices_of_a_thread_do_not_overlap(name: str, folder: Path) -> None:
    """And streams have one number each."""
    numbers = defaultdict(set)
    for (_, thread), on_thread in slices(name, folder).items():
        numbers[thread] |= {event["args"]["stream"] for event in on_thread}
        for before, after in pairwise(on_thread):
            assert end(before) <= after["ts"]
    assert numbers[COMPUTE] == {7} and all(len(number) == 1 for number in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)


@every_job
def test_annotations_of_a_thread_nest(name: str, folder: Path) -> None:
    on_thread = defaultdict(list)
    for event in events(name, folder, "X"):
        on_thread[event["tid"]].append(event)
    for found in on_thread.values():
        open_: list[Decimal] = []
        for event in sorted(found, key=lambda one: (one["ts"], -one["dur"])):
            while open_ and open_[-1] <= event["ts"]:
                open_.pop()
            assert not open_ or end(event) <= open_[-1]
            open_.append(end(event))


@every_job
def test_the_last_slices_end_with_the_step(name: str, folder: Path) -> None:
    shown = events(name, folder, "X")
    host = [event for event in shown if event["name"] == "host: data, logging"]
    span, step = report(name).play.step.span, report(name).step_time
    last = max(end(event) for event in shown if event["cat"] in ON_GPU)
    assert float(last) * 1e-6 == pytest.approx(span, abs=1e-9)
    assert len(host) == (report(name).play.program.devices if step > span else 0)
    assert all(event["ts"] == last for event in host)
    assert float(max(map(end, shown))) * 1e-6 == pytest.approx(step, abs=1e-9)
    steps = [event for event in shown if event["name"] == "ProfilerStep#0"]
    assert len(steps) == report(name).play.program.devices
    assert all((event["ts"], end(event)) == (0, max(map(end, shown))) for event in steps)


@every_job
def test_every_op_is_one_slice_in_its_own_time(name: str, folder: Path) -> None:
    flat, times = report(name).play.step.flat, report(name).play.step.times
    found = {event["args"]["correlation"] - 1: event for own in slices(name, folder).values() for event in own}
    launched = [n for n, op in enumerate(flat.ops) if op.work is not None]
    received = [len(flat.ops) + n for n, _, _ in flat.sent]
    assert sorted(found) == [*launched, *sorted(received)]
    sent = {n: receiver for n, _, receiver in flat.sent}
    for number, event in found.items():
        n = number % len(flat.ops)
        assert event["pid"] == (flat.device[n] if number == n else sent[n])
        assert event["args"]["op"] == flat.ops[n].name
        if n not in sent:
            assert event["name"] == name_kernel(flat.ops[n])
        assert float(event["ts"]) * 1e-6 == pytest.approx(times.begin[n], abs=1e-9)
        assert float(event["dur"]) * 1e-6 == pytest.approx(flat.seconds[n] + flat.latency[n], abs=1e-9)


@every_job
def test_every_kernel_has_a_launch_before_it(name: str, folder: Path) -> None:
    kernels = [event for event in events(name, folder, "X") if event["cat"] in ON_GPU]
    launches = {e["args"]["correlation"]: e for e in events(name, folder, "X") if e["cat"] == "cuda_runtime"}
    operators = {e["args"]["External id"]: e for e in events(name, folder, "X") if e["cat"] == "cpu_op"}
    assert len(launches) == len(operators) == len(kernels)
    for kernel in kernels:
        launch = launches[kernel["args"]["correlation"]]
        assert launch["pid"] == kernel["pid"] and end(launch) <= kernel["ts"]
        operator = operators[launch["args"]["External id"]]
        assert operator["ts"] <= launch["ts"] and end(launch) <= end(operator)


@every_job
def test_categories_and_work_add_up(name: str, folder: Path) -> None:
    """Time by category and FLOPs of a device equal those of the program; a message counts on the sender."""
    program = report(name).play.program
    for device in range(program.devices):
        own = [e for (d, _), found in slices(name, folder).items() if d == device for e in found]
        for i, kind in enumerate(KINDS):
            seconds = sum(float(event["dur"]) for event in own if event["args"]["kind"] == kind) * 1e-6
            if kind not in ("pp", "host"):  # the host has slices of its own, one for each action
                assert seconds == pytest.approx(program.sums[device, i, 0], abs=1e-9 * len(own))
        flops = sum(event["args"].get("FLOPs", 0) for event in own)
        assert flops == pytest.approx(program.sums[device, :, 3].sum(), rel=1e-12)


@every_job
def test_every_action_is_one_slice_that_holds_its_kernels(name: str, folder: Path) -> None:
    table, shown = report(name).play.program.timetable, slices(name, folder)
    for device, order in enumerate(table.orders):
        actions = annotations(name, folder, device, "gpu_user_annotation")
        kernels = defaultdict(list)
        for event in shown[device, COMPUTE]:
            kernels[event["args"]["action"]].append(event)
        assert [event["name"] for event in actions] == [str(a) for a in (*order, "O") if str(a) in kernels]
        for action in actions:
            own = kernels[action["name"]]
            assert action["ts"] == own[0]["ts"] and end(action) == end(own[-1])


@pytest.mark.parametrize("name", ["slow host", "slow host, one stage", "pairs"])
def test_the_host_issues_every_op_before_it_begins(name: str, folder: Path) -> None:
    program, flat = report(name).play.program, report(name).play.step.flat
    firsts = dict(zip(program.timetable.actions, flat.first, strict=True))
    for device in range(program.devices):
        noted = annotations(name, folder, device, "user_annotation")
        begins = {str(item): firsts[getattr(item, "forward", item)] for item in program.timetable.orders[device]}
        begins["O"] = flat.updates[device][0]
        issued = {event["args"]["action"]: event for event in noted if "action" in event["args"]}
        hosted = [n for n, d in enumerate(flat.device) if d == device and flat.issue[n]]
        assert sum(event["args"]["ops"] for event in issued.values()) == len(hosted)
        busy = sum(float(event["dur"]) for event in issued.values()) * 1e-6
        # An op without launch time takes a nanosecond of the op before it.
        assert busy == pytest.approx(sum(flat.issue[n] for n in hosted), abs=1e-9 * len(flat.ops))
        for event in annotations(name, folder, device, "gpu_user_annotation"):
            # The first op, which may be no kernel, is issued ahead of all others; behind the last kernel comes a send.
            first = issued[event["name"]]["ts"] + Decimal(flat.issue[begins[event["name"]]] * 1e6)
            assert event["ts"] >= first - Decimal("0.001")


# -------------------------------------------------------------------------------------------- arrows


@every_job
def test_arrows_join_sends_and_waiting_ops(name: str, folder: Path) -> None:
    begins = {event["id"]: event for event in events(name, folder, "s")}
    ends = {event["id"]: event for event in events(name, folder, "f")}
    assert begins.keys() == ends.keys()
    sent = report(name).play.step.flat.sent
    assert len(begins) == len(events(name, folder, "s")) == len(events(name, folder, "f")) == len(sent)
    shown, named = slices(name, folder), threads(name, folder)
    at: dict[tuple[int, str, Decimal], dict[str, Any]] = {
        (device, thread, event["ts"]): event for (device, thread), found in shown.items() for event in found
    }
    for number, begin in begins.items():
        there = ends[number]
        send = at[begin["pid"], named[begin["pid"], begin["tid"]], begin["ts"]]
        reader = at[there["pid"], named[there["pid"], there["tid"]], there["ts"]]
        assert send["args"]["work"] == "transfer" and send["name"] == f"ncclDevKernel_SendRecv(send {begin['name']})"
        assert (send["args"]["source"], send["args"]["target"]) == (begin["pid"], there["pid"])
        assert reader["ts"] >= end(send)
        stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", begin["name"]).groups()  # type: ignore[union-attr]
        table = report(name).play.program.timetable
        takers, kinds = (table.stages.successors, kind) if kind in "FN" else (table.stages.predecessors, "BW?")
        takers, kinds = (table.stages.coupled, {"X": "Y", "Y": "Z"}[kind]) if kind in "XY" else (takers, kinds)
        stages = "|".join(map(str, takers[int(stage)]))
        # A pair is named after both of its passes.
        assert re.search(rf"\b({stages}){kinds}{microbatch}\b", reader["args"]["action"])


# -------------------------------------------------------------------------------------------- memory


@every_job
def test_counters_peak_where_the_report_does(name: str, folder: Path) -> None:
    span = report(name).play.step.span
    for device, peak in enumerate(report(name).play.peaks):
        samples = [event for event in events(name, folder, "C") if event["pid"] == device]
        assert 2 <= len(samples) <= 2000
        totals = [float(sum(event["args"].values())) * GIB for event in samples]
        assert max(totals) == pytest.approx(peak.total, rel=1e-7)
        # The same total may be reached at several moments, by different categories.
        highest = [event["args"] for event, total in zip(samples, totals, strict=True) if total > max(totals) - 100]
        assert any(
            all(float(args.get(k, 0)) * GIB == pytest.approx(n, rel=1e-7, abs=100.0) for k, n in peak.by.items())
            for args in highest
        )
        moments = [event["ts"] for event in samples]
        assert moments == sorted(moments) and float(moments[-1]) * 1e-6 <= span * (1 + 1e-9)


def test_thinning_keeps_peaks_and_both_ends() -> None:
    moments = np.sort(np.random.default_rng(1).uniform(0, 1, 50_000))
    total = np.random.default_rng(2).uniform(0, 1, 50_000)
    kept = thin_samples(moments, total, 2000)
    assert len(kept) <= 2000 and (np.diff(kept) > 0).all()
    assert total[kept].max() == total.max() and kept[0] == 0 and kept[-1] == len(moments) - 1
    assert len(thin_samples(moments[:5], total[:5], 2000)) == 5
    assert len(thin_samples(np.zeros(5000), total[:5000], 2000)) <= 3


# --------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", drawn(JOBS, keep=("pairs",)))
def test_compressed_and_plain_hold_the_same_bytes(name: str, folder: Path) -> None:
    plain, first, second = (folder / f"{name}{end}" for end in ("-a.json", "-b.json.gz", "-c.JSON.GZ"))
    write_trace(report(name), plain)
    write_trace(report(name), first)
    write_trace(simulate(JOBS[name]), second)
    assert gzip.decompress(first.read_bytes()) == plain.read_bytes()
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) < len(plain.read_bytes()) / 3
