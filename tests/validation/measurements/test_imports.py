"""Measurements of others become a measurement file: rows, samples, and the forecast of the job."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.validation.measurements import measurement
from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
from meshcast.validation.measurements.import_trace import import_trace
from meshcast.validation.measurements.import_training_log import import_training_log
from meshcast.validation.measurements.imported_file import NOT_BLIND
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow
from tests.simulator.formats.samples import event, kernel
from tests.simulator.formats.test_logs import FORK, MEGATRON, TITAN
from tests.simulator.formats.test_nccl_tests import RANKS, TABLE, document

RUN = {"tokens": 65536, "gpus": 8}
MODEL = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
JOB: dict[str, Any] = {"model": MODEL, "cluster": "dgx-h100:2", "batch": {"global": 128}, "plan": {"tp": 8}}


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(text: str, name: str = "given") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return write


def by_name(file: Measurement) -> dict[tuple[str, str], MeasurementRow]:
    return {(row.group, row.name): row for row in file.rows}


def whole(file: Measurement, tmp_path: Path) -> bool:
    """Whether the file holds the whole measurement, up to the seventh digit of a sample."""
    return measurement.to_json(measurement.read(file.write(tmp_path / "out.json"))) == measurement.to_json(file)


def test_nccl_tests_with_and_without_a_job(put: Any, tmp_path: Path) -> None:
    file = put(TABLE)
    plain, file = import_nccl_tests(file, command="meshcast import"), import_nccl_tests(file, JOB)
    assert whole(plain, tmp_path) and whole(file, tmp_path)
    assert (plain.kind, plain.machine.name, plain.machine.count) == ("collectives", "NVIDIA H100 80GB HBM3", 4)
    assert plain.versions["nccl"] == "2.28.9" and plain.command == "meshcast import"
    assert NOT_BLIND in plain.notes
    rows = by_name(file)
    assert len(rows) == 6 and rows.keys() == by_name(plain).keys()
    row = rows["in-place", "all_reduce 1048576"]
    assert row.samples == pytest.approx((27.49e-6,))
    assert row.shape == {"operation": "all_reduce", "bytes": 2**20, "members": 4, "dtype": "float"}
    value = row.forecasts["catalog"]
    assert 0 < value.low < value.value < value.high and not by_name(plain)["in-place", row.name].forecasts
    # Four GPUs of two nodes are slower than four of one.
    near = TABLE.replace("node-0001", "node-0000")
    inside = by_name(import_nccl_tests(put(near, "near"), JOB))["in-place", "all_reduce 8589934592"]
    assert inside.forecasts["catalog"].value < rows["in-place", "all_reduce 8589934592"].forecasts["catalog"].value


@pytest.mark.parametrize("test", ["all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"])
def test_every_operation_is_forecast(put: Any, test: str) -> None:
    file = import_nccl_tests(put(TABLE.replace("all_reduce", test)), JOB)
    seconds = [row.forecasts["catalog"].value for row in file.rows if row.group == "in-place"]
    assert len(seconds) == 3 and seconds == sorted(seconds) and all(map(math.isfinite, seconds)) and seconds[0] > 0


def test_single_calls_repeated_runs_and_other_sizes_of_groups(put: Any) -> None:
    (row,) = import_nccl_tests(put(json.dumps(document()))).rows
    assert row.samples == pytest.approx((26e-6, 28e-6)) and row.instrument.endswith("every call")
    twice = by_name(import_nccl_tests(put(TABLE + TABLE)))
    assert len(twice["out-of-place", "all_reduce 1048576"].samples) == 2 and len(twice) == 6
    pair = TABLE.replace(RANKS.format(group=0), "".join(RANKS.format(group=0).splitlines(keepends=True)[:2]))
    both = by_name(import_nccl_tests(put(TABLE + pair)))
    assert {group for group, _ in both} == {f"{p}, {n} ranks" for p in ("in-place", "out-of-place") for n in (2, 4)}


def test_notes_of_a_run(put: Any) -> None:
    stopped = TABLE.partition("# Out of")[0].replace("0.10      0    14.98", "0.10      3    14.98")
    notes = import_nccl_tests(put(stopped)).notes
    assert {"all_reduce: the run was stopped before its end", "all_reduce: 3 elements had wrong results"} <= {*notes}
    empty = TABLE.replace("        1024           256", "           0             0")
    file = import_nccl_tests(put(empty), JOB)
    assert len(file.rows) == 4 and "1 sizes of 0 bytes are left out" in file.notes[-1]
    # What the user's environment was is nobody's business.
    assert "somebody" not in measurement.to_json(import_nccl_tests(put(json.dumps(document()))))


def test_more_ranks_than_the_cluster_has_are_refused_before_they_are_listed(put: Any) -> None:
    bare = "".join(line for line in TABLE.splitlines(keepends=True) if " Rank " not in line)
    with pytest.raises(PlanError, match=f"the run used {10**12} on"):
        import_nccl_tests(put(bare), JOB, members=10**12)


@pytest.mark.parametrize(
    ("text", "job", "words"),
    [
        (TABLE.replace("    time ", " cputime "), None, "without -C"),
        (TABLE, {**JOB, "cluster": "dgx-h100:1", "batch": {"global": 8}}, "the run used 4 on 2 machines"),
        (TABLE.replace("262144", "0").replace("1048576", "0"), {"model": MODEL}, "cluster"),
        ("\n".join(row for row in TABLE.split("\n") if "10" not in row or row[:1] == "#"), None, None),
    ],
)
def test_runs_that_cannot_be_compared(put: Any, text: str, job: Any, words: str | None) -> None:
    if words is None:
        assert len(import_nccl_tests(put(text), job).rows) == 2
        return
    with pytest.raises(Exception, match=words) as caught:
        import_nccl_tests(put(text), job)
    assert type(caught.value).__module__ == "meshcast.hardware.errors"


def test_a_log_of_megatron(put: Any, tmp_path: Path) -> None:
    file = import_training_log(put(MEGATRON), "megatron", JOB, skip=1)
    assert whole(file, tmp_path)
    (row,) = file.rows
    assert (row.name, row.samples, file.kind, file.machine.count) == ("step", (5.5338,), "distributed", 16)
    assert row.forecasts["catalog"].value == pytest.approx(simulate(JOB).step_time)
    assert "the first 1 of 2 logged lines" in file.notes[1]
    assert import_training_log(put(FORK), "megatron", skip=0).rows[0].samples == (3.21,)


def test_a_log_of_torchtitan(put: Any, tmp_path: Path) -> None:
    file = import_training_log(put(TITAN), "torchtitan", JOB, skip=0)
    step, reserved = file.rows
    tokens = 128 * 128
    assert step.samples == pytest.approx((tokens / 16 / 1850, tokens / 16 / 5593))
    assert reserved.quantity == "bytes" and reserved.samples[1] == pytest.approx(49.70 * 2**30)
    assert reserved.forecasts["catalog"].value == pytest.approx(simulate(JOB).peak_reserved)
    given = import_training_log(put(TITAN), "torchtitan", skip=1, **RUN)
    assert given.rows[0].samples == pytest.approx((65536 / 8 / 5593,)) and not given.rows[0].forecasts
    assert whole(given, tmp_path)


@pytest.mark.parametrize(
    ("text", "framework", "options", "words"),
    [
        (MEGATRON, "megatron", {}, "--skip"),
        (MEGATRON, "megatron", {"skip": -1}, "--skip"),
        (MEGATRON, "nemo", {}, "megatron, torchtitan"),
        (MEGATRON, "megatron", {"skip": 0, "job": JOB | {"batch": {"global": 64}}}, "batch is 64, the log's is 128"),
        (TITAN, "torchtitan", {"skip": 0}, "--tokens"),
        (TITAN, "torchtitan", {"skip": 0, "tokens": 65536}, "--gpus"),
        (TITAN.replace("5,593", "1e-320"), "torchtitan", {"skip": 0, **RUN}, "longer than a number can say"),
    ],
)
def test_logs_that_cannot_be_compared(put: Any, text: str, framework: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        import_training_log(put(text), framework, **options)


def test_classes_of_kernels(put: Any, tmp_path: Path) -> None:
    job = {**JOB, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "plan": {}}
    rows = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("ProfilerStep#2", "user_annotation", 100, 100),
        kernel("nvjet_tst", 10, 30, 1),
        kernel("nvjet_tst", 110, 32, 2),
        kernel("flash_fwd_kernel", 150, 10, 3),
    ]
    data = {"deviceProperties": [{"name": "NVIDIA H100"}], "traceEvents": rows}
    file = import_trace(put(json.dumps(data)), job)
    assert whole(file, tmp_path) and file.rows[0].name == "step"
    named = by_name(file)
    assert named["compute", "gemm"].samples == pytest.approx((30e-6, 32e-6), rel=1e-4)
    assert named["compute", "attention"].samples == pytest.approx((0.0, 10e-6), rel=1e-4)
    value = named["compute", "gemm"].forecasts["catalog"]
    assert 0 < value.low < value.value < value.high
    sums = simulate(job).play.program.sums[0, :, 0].sum()
    compute = [row.forecasts["catalog"].value for (group, _), row in named.items() if group == "compute"]
    assert sum(compute) == pytest.approx(sums)
    assert (file.kind, file.machine.name) == ("kernels", "NVIDIA H100")
    assert named["", "step"].samples[0] == pytest.approx(30e-6)
