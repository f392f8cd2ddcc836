"""Races with Calculon and SimuMax on equal jobs. Neither is in the package index: its `calculon` is another program,
and ``pip download --no-deps simumax`` finds no version (2026-11-26). So both run from checkouts, with a Python that has
their packages, by hand::

    git clone https://github.com/calculon-ai/calculon
    git clone https://github.com/MooreThreads/SimuMax
    python -m venv peer && peer/bin/pip install numpy pandas psutil matplotlib sympy tabulate tqdm
    CALCULON=$PWD/calculon CALCULON_PYTHON=$PWD/peer/bin/python SIMUMAX=$PWD/SimuMax \\
        SIMUMAX_PYTHON=$PWD/peer/bin/python .venv/bin/pytest benchmarks/test_peers.py

`extra_info` of every benchmark has CPU seconds, the best of several runs in turn, which a loaded machine changes least.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from meshcast.experiments.sweeps.jobs import forecast_lines
from meshcast.simulator import SharedWork, load_job
from meshcast.simulator.forecast.step import forecast_step

CHECKOUT = os.environ.get("CALCULON", "")
PYTHON = os.environ.get("CALCULON_PYTHON", sys.executable)
ROUNDS = 5

SIMUMAX = os.environ.get("SIMUMAX", "")
SIMUMAX_PYTHON = os.environ.get("SIMUMAX_PYTHON", sys.executable)

needs_calculon = pytest.mark.skipif(not CHECKOUT, reason="CALCULON names no checkout of calculon-ai/calculon")
needs_simumax = pytest.mark.skipif(
    not SIMUMAX, reason="SIMUMAX names no checkout of MooreThreads/SimuMax, which is not in the package index"
)

GRID = list(product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 3)))
"""tp, pp, micro-batch and chunks of GPT-3 175B on 1,024 A100s."""


def job(tp: int, pp: int, micro: int, chunks: int, **more: Any) -> dict[str, Any]:
    """A job of the grid. more: further keys of its plan."""
    return {
        "model": "gpt3-175b",
        "cluster": "dgx-a100:128",
        "batch": {"global": 1536, "micro": micro, "sequence": 2048},
        "plan": {"tp": tp, "pp": pp, "chunks": chunks, **more},
    }


def execution(
    tp: int, pp: int, micro: int, chunks: int, recompute: str = "none", sharded: bool = False
) -> dict[str, Any]:
    """The same plan for Calculon. recompute: none, attn_only or full; sharded: ZeRO-1."""
    return {
        **{"num_procs": 1024, "tensor_par": tp, "pipeline_par": pp, "data_par": 1024 // (tp * pp)},
        **{"tensor_par_net": 0, "pipeline_par_net": int(tp * pp > 8), "data_par_net": 1, "batch_size": 1536},
        **{"microbatch_size": micro, "datatype": "float16", "fused_activation": True, "attention_type": "multihead"},
        **{"activation_recompute": recompute, "pipeline_interleaving": chunks, "optimizer_sharding": sharded},
        **{"tensor_par_comm_type": "ar", "tensor_par_overlap": "none", "seq_par_ag_redo": False},
        **{"data_par_overlap": False, "weight_offload": False, "activations_offload": False},
        **{"optimizer_offload": False, "training": True},
    }


def strategy(tp: int, pp: int, micro: int) -> dict[str, Any]:
    """The same plan without chunks for SimuMax, whose interleaved schedule is a preview that fails on many plans:
    ZeRO-1, sequence parallelism, nothing recomputed."""
    data_ranks = 1024 // (tp * pp)
    return {
        **{"world_size": 1024, "tp_size": tp, "pp_size": pp, "seq_len": 2048, "dtype": "bf16"},
        **{"micro_batch_size": micro, "micro_batch_num": 1536 // (data_ranks * micro)},
        **{"zero_state": 1, "enable_sequence_parallel": tp > 1, "enable_recompute": False},
    }


def cpu_of_process(*command: str, **environment: str) -> float:
    """CPU seconds of a whole process."""

    def spent() -> float:
        of = resource.getrusage(resource.RUSAGE_CHILDREN)
        return of.ru_utime + of.ru_stime

    before = spent()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    return spent() - before


@needs_calculon
def test_one_job_as_a_process(benchmark: Any, tmp_path: Path) -> None:
    """`meshcast predict JOB` and `calculon llm` on one plan, in turn, with bytecode cached as in an installed one."""
    mine, theirs, folder = tmp_path / "job.json", tmp_path / "execution.json", Path(CHECKOUT)
    mine.write_text(json.dumps(job(8, 8, 1, 3, zero=1, recompute="selective")))
    theirs.write_text(json.dumps(execution(8, 8, 1, 3, "attn_only", sharded=True)))
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    files = folder / "models" / "gpt3-175B.json", theirs, folder / "systems" / "a100_80g.json"
    peer = PYTHON, str(folder / "bin" / "calculon"), "llm", *map(str, files), "-"
    found: list[tuple[float, float]] = []

    def race() -> None:
        ours = cpu_of_process(sys.executable, "-m", "meshcast", "predict", str(mine), **cached)
        found.append((ours, cpu_of_process(*peer, PYTHONPATH=CHECKOUT, **cached)))

    benchmark.pedantic(race, rounds=ROUNDS, warmup_rounds=1)
    ours, other = (min(times) for times in zip(*found, strict=True))
    benchmark.extra_info.update({"meshcast cpu s": ours, "calculon cpu s": other, "ratio": ours / other})


@needs_calculon
def test_valid_plans_of_the_grid(benchmark: Any, tmp_path: Path) -> None:
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
    command = PYTHON, str(Path(__file__).with_name("calculon_grid.py")), CHECKOUT, str(tmp_path / "executions.json")
    lines = [json.dumps(job(*plan)) for plan in GRID]
    times: list[tuple[float, float]] = []
    rows: list[tuple[bool, bool]] = []

    def race() -> None:
        theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        begin = process_time()
        ours = ["error" not in answer for answer in forecast_lines(lines, "jobs", Path("."))]
        times.append((process_time() - begin, theirs["cpu_s"]))
        rows[:] = zip(ours, theirs["valid"], strict=True)

    benchmark.pedantic(race, rounds=ROUNDS)
    ours, other = (min(own) for own in zip(*times, strict=True))
    benchmark.extra_info.update(
        {
            "meshcast valid plans a second": sum(mine for mine, _ in rows) / ours,
            "calculon valid plans a second": sum(theirs for _, theirs in rows) / other,
        }
    )
    by_row = list(zip(rows, GRID, strict=True))
    ours_alone = [plan for (mine, theirs), plan in by_row if mine and not theirs]
    theirs_alone = [plan for (mine, theirs), plan in by_row if theirs and not mine]
    assert (len(ours_alone), len(theirs_alone), rows.count((True, True))) == (12, 60, 108)
    assert all(pp == 1 and chunks > 1 for _, pp, _, chunks in ours_alone)
    assert all(plan[3] > 1 and _microbatches(*plan) % plan[1] for plan in theirs_alone)


@needs_simumax
def test_one_job_as_a_process_with_simumax(benchmark: Any, tmp_path: Path) -> None:
    """`meshcast predict JOB` and one plan in SimuMax, which has no command, in turn, with bytecode cached."""
    mine, theirs = tmp_path / "job.json", tmp_path / "strategies.json"
    mine.write_text(json.dumps(job(8, 8, 1, 1)))
    theirs.write_text(json.dumps([strategy(8, 8, 1)]))
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    found: list[tuple[float, float]] = []

    def race() -> None:
        ours = cpu_of_process(sys.executable, "-m", "meshcast", "predict", str(mine), **cached)
        found.append((ours, cpu_of_process(*simumax_command(theirs), **cached)))

    benchmark.pedantic(race, rounds=ROUNDS, warmup_rounds=1)
    ours, other = (min(times) for times in zip(*found, strict=True))
    benchmark.extra_info.update({"meshcast cpu s": ours, "simumax cpu s": other, "ratio": ours / other})


@needs_simumax
def test_plans_of_the_grid_with_simumax(benchmark: Any, tmp_path: Path) -> None:
    """The plans without chunks whose replicas divide the batch: both answer all of them. SimuMax is given the number of
    micro-batches in place of the global batch."""
    plans = [plan for plan in GRID if plan[3] == 1 and 1536 % (1024 // (plan[0] * plan[1]) * plan[2]) == 0]
    lines, strategies = [json.dumps(job(*plan)) for plan in plans], tmp_path / "strategies.json"
    strategies.write_text(json.dumps([strategy(*plan[:3]) for plan in plans]))
    times: list[tuple[float, float]] = []

    def race() -> None:
        command = simumax_command(strategies)
        theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        begin = process_time()
        ours = [*forecast_lines(lines, "jobs", Path("."))]
        times.append((process_time() - begin, theirs["cpu_s"]))
        assert not [one for one in ours if "error" in one] and all(theirs["valid"]) and len(ours) == len(plans) == 60

    benchmark.pedantic(race, rounds=ROUNDS)
    ours, other = (min(own) for own in zip(*times, strict=True))
    rates = {"meshcast plans a second": len(plans) / ours, "simumax plans a second": len(plans) / other}
    benchmark.extra_info.update({**rates, "ratio": ours / other})


def simumax_command(strategies: Path) -> tuple[str, ...]:
    """The command that forecasts a file of strategies in SimuMax."""
    return SIMUMAX_PYTHON, str(Path(__file__).with_name("simumax_grid.py")), SIMUMAX, str(strategies)


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
