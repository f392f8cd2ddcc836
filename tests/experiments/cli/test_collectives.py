"""``meshcast collectives``: tables that the reader of nccl-tests reads back, with the times of the forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.formats import nccl_tests
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
from tests.experiments.cli.samples import run

JOB = """\
model: {preset: llama3-8b, layers: 4}
cluster: dgx-h100:2
batch: {global: 16, micro: 1, sequence: 4096}
plan: {tp: 4, pp: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, "utf-8")
    return path


def read_back(text: str, folder: Path) -> list[nccl_tests.Run]:
    path = folder / "tables.txt"
    path.write_text(text, "utf-8")
    return nccl_tests.read(path)


def test_tables_of_a_cluster_are_read_back(tmp_path: Path) -> None:
    result = run("collectives", "--cluster", "dgx-h100:2", "-b", "1M", "-e", "64M", "-f", "4")
    assert result.exit_code == 0, result.output
    runs = read_back(result.stdout, tmp_path)
    assert [one.operation for one in runs] == list(nccl_tests.OPERATIONS.values())
    for one in runs:
        assert (one.members, len(one.hosts), one.finished, one.clock) == (16, 2, True, "gpu")
        assert [size.nbytes for size in one.sizes] == [1 << 20, 1 << 22, 1 << 24, 1 << 26]


def test_imported_times_are_those_of_the_forecast(tmp_path: Path) -> None:
    """The importer of measurements forecasts the same cluster by itself."""
    result = run("collectives", "--cluster", "dgx-h100:2", "-b", "1M", "-e", "64M", "-f", "8")
    (tmp_path / "tables.txt").write_text(result.stdout, "utf-8")
    found = import_nccl_tests(tmp_path / "tables.txt", {"model": "gpt2-124m", "cluster": "dgx-h100:2"})
    assert len(found.rows) == 3 * 2 * len(nccl_tests.OPERATIONS)
    for row in found.rows:
        assert row.samples[0] == pytest.approx(row.forecasts["catalog"].value, rel=2e-3)  # of two decimals


def test_rates_follow_from_sizes_and_times() -> None:
    factors = {"all_reduce": 2 * 7 / 8, "broadcast": 1.0, "send_recv": 1.0}
    answer = json.loads(run("collectives", "--cluster", "dgx-h100:1", "-b", "8M", "-e", "8M", "--json").stdout)
    for table in answer["tables"]:
        (row,) = table["rows"]
        assert row["algbw_gb_per_s"] == pytest.approx((8 << 20) / row["time_us"] / 1e3)
        factor = factors.get(table["operation"], 7 / 8)
        assert row["busbw_gb_per_s"] == pytest.approx(factor * row["algbw_gb_per_s"])


def test_the_count_is_of_a_rank_where_it_is_in_nccl_tests(tmp_path: Path) -> None:
    text = run("collectives", "--cluster", "dgx-h100:1", "-b", "8M", "-e", "8M").stdout
    counts = [int(line.split()[1]) for line in text.splitlines() if line and not line.startswith("#")]
    whole, share = (8 << 20) // 4, (8 << 20) // 4 // 8
    assert counts == [whole, share, share, share, whole, whole]


def test_tables_of_a_job_hold_its_communication(job: Path, tmp_path: Path) -> None:
    report = simulate(job)
    flat = report.play.step.flat
    for stage in (0, 1):
        answer = json.loads(run("collectives", job, "--stage", stage, "--json").stdout)
        ops = [(n, op.work) for n, op in enumerate(flat.ops) if flat.device[n] == stage]
        wanted = sum(flat.seconds[n] + flat.latency[n] for n, work in ops if isinstance(work, Collective | Transfer))
        rows = [row for table in answer["tables"] for row in table["rows"]]
        assert sum(row["step_s"] for row in rows) == pytest.approx(wanted)
        groups = {(table["operation"], *table["axes"]): table["ranks"] for table in answer["tables"]}
        assert groups["all_gather", "tp"] == [8 * stage + rank for rank in range(4)]
        assert groups["all_gather", "dp"] == [8 * stage, 8 * stage + 4]
    runs = read_back(run("collectives", job, "--stage", 0).stdout, tmp_path)
    assert {one.operation for one in runs} >= {"all_gather", "reduce_scatter", "send_recv"}
    messages = next(one for one in runs if one.operation == "send_recv")
    assert messages.places == ((0, 0), (1, 0))


def test_equal_hosts_of_large_groups_share_a_line(tmp_path: Path) -> None:
    words = ("collectives", "--cluster", "dgx-h100:64", "--operation", "all_reduce", "-b", "1G", "-e", "1G")
    text, whole = run(*words).stdout, run(*words, "--every-rank").stdout
    assert "#  Ranks 0 to 511 Group  0 on 64 hosts node-0 to node-63 devices 0 to 7 [0x00] h100-sxm" in text
    assert len(text.splitlines()) < 16 and whole.count("#  Rank ") == 512
    (short,), (long,) = read_back(text, tmp_path), read_back(whole, tmp_path)
    assert short.members == long.members == 512 and short.places == long.places
    assert [one.seconds for one in short.sizes] == [one.seconds for one in long.sizes]
    some = run(*words, "--gpus", "20").stdout
    assert "Ranks 0 to 15 Group  0 on 2 hosts node-0 to node-1" in some
    assert "Ranks 16 to 19 Group  0 on 1 host node-2 devices 0 to 3" in some
    assert read_back(some, tmp_path)[0].members == 20
    (tmp_path / "odd.txt").write_text(text.replace("511", "510"), "utf-8")
    assert "511 ranks are not on 64 equal hosts" in run("import", "nccl-tests", tmp_path / "odd.txt").stderr


def test_a_group_over_all_stages_has_the_ranks_of_the_cluster(job: Path) -> None:
    """The gradients' norm is summed over all of them, whichever stage is asked for."""
    for stage in (0, 1):
        tables = json.loads(run("collectives", job, "--stage", stage, "--json").stdout)["tables"]
        (norm,) = (table for table in tables if "pp" in table["axes"] and table["operation"] == "all_reduce")
        assert norm["ranks"] == list(range(16))


def test_only_some_operations(job: Path) -> None:
    answer = json.loads(run("collectives", job, "--operation", "all_gather", "--json").stdout)
    assert {table["operation"] for table in answer["tables"]} == {"all_gather"}
