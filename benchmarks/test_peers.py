"""Which plans of the grid Calculon answers, and which meshcast; and a plan whose stages are known. Run by hand: see
`benchmarks.race` for the checkout and the Python of Calculon."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from benchmarks.jobs import GRID, execution, job
from benchmarks.race import PEERS, PYTHON
from meshcast.experiments.sweeps.jobs import forecast_lines
from meshcast.simulator import SharedWork, load_job
from meshcast.simulator.forecast.step import forecast_step


@pytest.mark.skipif(not PEERS["Calculon"], reason="CALCULON names no checkout of calculon-ai/calculon")
def test_valid_plans_of_the_grid(tmp_path: Path) -> None:
    """Of the 240 plans both answer 108 and refuse 60, whose replicas have no whole number of micro-batches: 12 where
    they do not divide the batch, 48 where micro-batches do not divide the samples of a replica.

    Calculon alone answers 60: interleaved schedules of a number of micro-batches that is no multiple of pp. Megatron-LM
    runs groups of pp micro-batches unless told otherwise, and refuses a last group smaller than pp, as meshcast does
    (`forward_backward_pipelining_with_interleaving` in megatron/core/pipeline_parallel/schedules.py). 28 of them have
    fewer micro-batches than pp, which Megatron-LM refuses with any group. It runs the other 32, of 1.5 pp
    micro-batches, with --microbatch-group-size-per-virtual-pipeline-stage 1.5 pp; meshcast answers them, too, with the
    option `group` of pipeline/interleaved-1f1b. Without that option neither of them has a plan to answer.

    meshcast alone answers 12: several chunks on one device, which run one after another. Megatron-LM and Calculon
    refuse them. So meshcast refuses no plan of the grid that Megatron-LM would run as it is written.
    """
    (tmp_path / "executions.json").write_text(json.dumps([execution(*plan) for plan in GRID]))
    script = str(Path(__file__).with_name("calculon_grid.py"))
    command = PYTHON, script, PEERS["Calculon"], str(tmp_path / "executions.json")
    valid = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["valid"]
    lines = [json.dumps(job(*plan)) for plan in GRID]
    ours = ["error" not in answer for answer in forecast_lines(lines, "jobs", Path("."))]
    by_row = list(zip(ours, valid, GRID, strict=True))
    ours_alone = [plan for mine, theirs, plan in by_row if mine and not theirs]
    theirs_alone = [plan for mine, theirs, plan in by_row if theirs and not mine]
    both = sum(mine and theirs for mine, theirs, _ in by_row)
    assert (len(ours_alone), len(theirs_alone), both) == (12, 60, 108)
    assert all(pp == 1 and chunks > 1 for _, pp, _, chunks in ours_alone)
    assert all(plan[3] > 1 and _microbatches(*plan) % plan[1] for plan in theirs_alone)


def _microbatches(tp: int, pp: int, micro: int, _: int) -> int:
    """Micro-batches of a replica."""
    return 1536 * tp * pp // (1024 * micro)


def test_step_and_memory_alone(benchmark: Any) -> None:
    """`forecast_step` of one job whose stages are known, as in a search; extra_info has the best CPU time."""
    known, wanted, times = SharedWork(), load_job(job(8, 8, 1, 3, zero=1, recompute="selective")), list[float]()

    def warm() -> None:
        begin = process_time()
        forecast_step(wanted, known)
        times.append(process_time() - begin)

    benchmark.pedantic(warm, rounds=20, warmup_rounds=2)
    benchmark.extra_info["cpu ms"] = 1e3 * min(times)
