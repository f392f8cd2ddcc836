"""Runs with a planted cause, and clean ones: every case writes the files of its run, with the job that is forecast.

What is planted is what happens to the seconds of steps and to the kernels of a trace, and what the programs print of
it; the noise is that of real runs. Cases of real processes are in `processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshcast.simulator import Report, simulate
from meshcast.validation.traces.host_timeline import unite_spans
from tests.experiments.diagnosis import written_logs as logs
from tests.experiments.diagnosis.written_logs import WrittenRun, vary
from tests.experiments.diagnosis.written_traces import LOADER, WrittenTrace, is_collective, spans_of

Files = Iterable[Path]
Rng = np.random.Generator

LLAMA: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 128, "micro": 1, "sequence": 4096},
    "plan": {"tp": 4, "pp": 2},
}
FSDP: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"gpu": "h100-sxm", "gpus": 16, "inter": {"kind": "infiniband", "gbps_per_gpu": 400}},
    "framework": "torchtitan",
    "batch": {"global": 32, "micro": 2, "sequence": 4096},
    "plan": {"fsdp": True},
}
SHORT = FSDP | {"batch": {"global": 16, "micro": 1, "sequence": 512}, "plan": {"dp": 16}}
EXPERTS: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 1, "sequence": 4096},
    "plan": {"ep": 8},
}
STEPS = 240
TITAN = "[rank0]:[titan] 2026-04-06 02:30:48,735 - root"
OVERFLOW = (
    "[2026-04-06 00:41:17,848] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
)


class Case(NamedTuple):
    """A run.

    cause: that is planted; empty: none. job: that is forecast. write: writes the files of the run into a folder.
    """

    cause: str
    job: dict[str, Any]
    write: Callable[[Path, Rng], Files]


@cache
def step_of_llama() -> float:
    """Forecast of `LLAMA` [s]."""
    return simulate(LLAMA).step_time


CASES: dict[str, Case] = {}


def case(
    cause: str, job: dict[str, Any] = LLAMA
) -> Callable[[Callable[[Path, Rng], Files]], Callable[[Path, Rng], Files]]:
    """Adds a function to `CASES`, by its name."""

    def add(write: Callable[[Path, Rng], Files]) -> Callable[[Path, Rng], Files]:
        CASES[write.__name__.replace("_", " ")] = Case(cause, job, write)
        return write

    return add


def put(folder: Path, name: str, text: str) -> Path:
    """Writes a file."""
    path = folder / name
    path.write_text(text, "utf-8")
    return path


# ---------------------------------------------------------------------------------------------- logs


@case("slow rank")
def straggler_in_the_detector_of_megatron(folder: Path, rng: Rng) -> Files:
    slow = step_of_llama() * 1.25
    seconds = vary(rng, slow, STEPS)
    behind = {
        number: [
            " 0: INFO:megatron.core.utils:[2026-04-06 02:59:36] | "
            f"MnRtt/Rnk: {1e3 * took / 1.25 * rng.normal(1, 0.01):.2f}ms/{rng.integers(0, 11)} | "
            f"MxRtt/Rnk: {1e3 * took * 0.99:.2f}ms/11 | MnPwr/Rnk: 601796W/8 | MxPwr/Rnk: 683801W/18 | "
            "MnTmp/Rnk: 52C/0 | MxTmp/Rnk: 65C/11 | MnUtl/Rnk: 97%/8 | MxUtl/Rnk: 100%/6 | MnClk/Rnk: 1410MHz/11 | "
            "MxClk/Rnk: 1980MHz/0 | MnDRtt/Rnk: 14.27ms/3 | MxDRtt/Rnk: 34.65ms/3 | MnEtpt/Rnk: 296.02TF/11 | "
            "MxEtpt/Rnk: 297.32TF/8"
        ]
        for number, took in enumerate(seconds, 1)
        if number % 10 == 0
    }
    return [put(folder, "run.log", WrittenRun(seconds, behind=behind).write(logs.megatron))]


@case("slow rank")
def straggler_in_the_timers_of_megatron(folder: Path, rng: Rng) -> Files:
    seconds = vary(rng, step_of_llama() * 1.15, STEPS)
    behind = {}
    for number, took in enumerate(seconds, 1):
        rows = ["times across ranks (ms):"]
        for name, share in (("forward-compute", 0.3), ("backward-compute", 0.6)):
            rows.append(f"  {name}:")
            for rank in range(16):
                own = took * share / 1.15 * (1.15 if rank == 5 else 1.0) * (0.93 if rank >= 8 else 1.0)
                rows.append(f"     rank {rank:2d}: {1e3 * own * rng.normal(1, 0.01):.2f}")
        behind[number] = rows
    return [put(folder, "run.log", WrittenRun(seconds, behind=behind).write(logs.megatron))]


@case("data loading")
def slow_batches_in_the_timers_of_megatron(folder: Path, rng: Rng) -> Files:
    step = step_of_llama()
    waits = step * 0.3 * np.exp(rng.normal(0, 0.2, STEPS))
    seconds = vary(rng, step, STEPS) + waits
    behind = {
        number: [
            "(min, max) time across ranks (ms):",
            f"    {'forward-compute '.ljust(48, '.')}: ({290 * step:.2f}, {300 * step:.2f})",
            f"    {'batch-generator '.ljust(48, '.')}: ({900 * wait:.2f}, {1e3 * wait:.2f})",
        ]
        for number, wait in enumerate(waits, 1)
    }
    return [put(folder, "run.log", WrittenRun(seconds, behind=behind).write(logs.megatron))]


@case("checkpoint saves")
def saves_between_the_steps_of_megatron(folder: Path, rng: Rng) -> Files:
    saves = {number: 3 * step_of_llama() * rng.normal(1, 0.1) for number in range(30, STEPS + 1, 30)}
    behind = {
        number: [f"saving checkpoint at iteration {number:7d} to /checkpoints in torch_dist format"] for number in saves
    }
    run = WrittenRun(vary(rng, step_of_llama(), STEPS), between=saves, behind=behind)
    return [put(folder, "run.log", run.write(logs.megatron))]


@case("checkpoint saves", LLAMA | {"run": {"steps": 1000, "checkpoints": {"every_steps": 40}}})
def saves_that_only_their_period_shows(folder: Path, rng: Rng) -> Files:
    seconds = vary(rng, step_of_llama(), STEPS)
    seconds[40::40] += 2.5 * step_of_llama()
    return [put(folder, "run.log", WrittenRun(seconds).write(logs.megatron))]


@case("garbage collection")
def collections_of_torchtitan(folder: Path, rng: Rng) -> Files:
    seconds, took = vary(rng, step_of_llama(), STEPS), 1.5 * step_of_llama()
    ahead = {}
    for number in range(20, STEPS + 1, 20):
        seconds[number - 1] += took
        ahead[number] = [f"{TITAN} - INFO - [GC] Performing periodic GC collection took {took:.2f} seconds"]
    return [put(folder, "run.log", WrittenRun(seconds, ahead=ahead).write(logs.torchtitan))]


@case("checkpoint saves")
def saves_of_torchtitan_in_lines_of_ten_steps(folder: Path, rng: Rng) -> Files:
    seconds, took = vary(rng, step_of_llama(), 600), 9 * step_of_llama()
    behind = {}
    for number in range(50, 600, 50):
        seconds[number] += took
        behind[number] = [
            f"{TITAN} - INFO - Saving the checkpoint (or staging if async is enabled).",
            f"{TITAN} - INFO - Finished saving the checkpoint (or staging if async is enabled)in {took:.2f} seconds.",
        ]
    return [put(folder, "run.log", WrittenRun(seconds, behind=behind, every=10).write(logs.torchtitan))]


@case("allocator retries")
def retries_of_torchtitan(folder: Path, rng: Rng) -> Files:
    seconds, count, ahead = vary(rng, step_of_llama(), STEPS), 0, {}
    for number in range(5, STEPS + 1):
        if rng.random() < 0.3:
            seconds[number - 1] += 0.4 * step_of_llama()
            count += int(rng.integers(1, 4))
        if count:
            ahead[number] = [f"{TITAN} - WARNING - {count} CUDA memory allocation retries."]
    run = WrittenRun(seconds, ahead=ahead, reserved=0.985)
    return [put(folder, "run.log", run.write(logs.torchtitan))]


@case("allocator retries")
def flushes_of_deepspeed(folder: Path, rng: Rng) -> Files:
    seconds, ahead = vary(rng, step_of_llama(), STEPS), {}
    for number in range(3, STEPS + 1):
        if rng.random() < 0.2:
            seconds[number - 1] += 0.5 * step_of_llama()
            ahead[number] = [
                "[2026-04-06 02:30:48,735] [WARNING] [stage3.py:2114:step] 2 pytorch allocator cache flushes since "
                "last step. this happens when there is high memory pressure and is detrimental to performance."
            ]
    return [put(folder, "run.log", WrittenRun(seconds, ahead=ahead).write(logs.deepspeed))]


@case("skipped steps")
def overflows_of_deepspeed(folder: Path, rng: Rng) -> Files:
    words = f"{OVERFLOW} Attempted loss scale: 65536, reducing to 32768"
    ahead = {number: [words] for number in range(1, STEPS + 1) if rng.random() < 0.06}
    return [put(folder, "run.log", WrittenRun(vary(rng, step_of_llama(), STEPS), ahead=ahead).write(logs.deepspeed))]


@case("evaluations")
def evaluations_of_a_trainer(folder: Path, rng: Rng) -> Files:
    took = {number: 8 * step_of_llama() * rng.normal(1, 0.05) for number in range(40, STEPS + 1, 40)}
    behind = {
        number: [f"{{'eval_loss': 1.8, 'eval_runtime': {seconds:.4f}, 'eval_samples_per_second': 31.4, 'epoch': 0.1}}"]
        for number, seconds in took.items()
    }
    run = WrittenRun(vary(rng, step_of_llama(), STEPS), between=took, behind=behind)
    return [put(folder, "run.log", logs.write_trainer(run))]


@case("checkpoint saves")
def saves_of_a_trainer(folder: Path, rng: Rng) -> Files:
    took = {number: 12 * step_of_llama() * rng.normal(1, 0.05) for number in range(50, STEPS, 50)}
    behind = {number: [f"Saving model checkpoint to out/checkpoint-{number}"] for number in took}
    run = WrittenRun(vary(rng, step_of_llama(), STEPS), between=took, behind=behind)
    return [put(folder, "run.log", logs.write_trainer(run))]


@case("long warm-up")
def compilation_in_a_run_of_nemo(folder: Path, rng: Rng) -> Files:
    seconds = vary(rng, step_of_llama(), STEPS)
    seconds[:12] *= np.linspace(9, 3, 12)
    return [put(folder, "run.log", WrittenRun(seconds).write(logs.nemo))]


@case("clock drop")
def clocks_that_fall(folder: Path, rng: Rng) -> Files:
    clocks = np.full((400, 8), 1755.0) * np.exp(rng.normal(0, 0.01, (400, 8)))
    clocks[200:] *= 0.8
    seconds = vary(rng, step_of_llama(), STEPS)
    seconds[STEPS // 2 :] *= 1.2
    return [
        put(folder, "run.log", WrittenRun(seconds).write(logs.nanotron)),
        put(folder, "dmon.txt", logs.write_dmon(clocks)),
    ]


@case("clock drop")
def one_gpu_that_is_too_hot(folder: Path, rng: Rng) -> Files:
    clocks = np.full((300, 8), 1740.0) * np.exp(rng.normal(0, 0.012, (300, 8)))
    clocks[:, 3] *= 0.7
    masks = np.where(rng.random((300, 8)) < 0.5, 0x4, 0)
    masks[:, 3] = 0x40
    return [
        put(folder, "run.log", WrittenRun(vary(rng, step_of_llama() * 1.3, STEPS)).write(logs.megatron)),
        put(folder, "samples.csv", logs.write_query(clocks, masks)),
    ]


# -------------------------------------------------------------------------------------------- traces


@cache
def forecast(key: str) -> Report:
    """Forecasts of the jobs that traces are made of, by their names."""
    jobs = {
        "fsdp": FSDP,
        "experts": EXPERTS,
        "throttled": FSDP | {"cluster": FSDP["cluster"] | {"inter": {"kind": "infiniband", "gbps_per_gpu": 60}}},
        "late": SHORT | {"framework": {"name": "torchtitan", "set": {"launch_s": 6e-4}}},
        "sequential": FSDP | {"framework": {"name": "torchtitan", "set": {"overlap": {"dp": False}}}},
    }
    return simulate(jobs[key])


def write_ranks(folder: Path, rng: Rng, key: str, ranks: Iterable[int] = (0, 1)) -> list[Path]:
    """Writes the trace of a forecast, as those of several ranks of a stage, each with noise of its own."""
    return [
        WrittenTrace(forecast(key), folder / "own").vary(rng).write(folder / f"rank-{rank}.json.gz", rank)
        for rank in ranks
    ]


@case("slow communication", FSDP)
def throttled_links(folder: Path, rng: Rng) -> Files:
    return write_ranks(folder, rng, "throttled")


@case("missing overlap", FSDP)
def collectives_in_the_stream_of_computation(folder: Path, rng: Rng) -> Files:
    return write_ranks(folder, rng, "sequential")


@case("host-bound phases", SHORT)
def a_host_that_launches_slowly(folder: Path, rng: Rng) -> Files:
    return write_ranks(folder, rng, "late")


@case("host pauses", FSDP)
def a_host_that_sleeps(folder: Path, rng: Rng) -> Files:
    files = []
    for rank in (0, 1):
        trace = WrittenTrace(forecast("fsdp"), folder / "own").vary(rng)
        for share in (0.3, 0.5, 0.7):
            trace.insert(share, 0.06 * forecast("fsdp").step_time)
        files.append(trace.write(folder / f"rank-{rank}.json.gz", rank))
    return files


@case("data loading", FSDP)
def a_loader_that_steps_wait_for(folder: Path, rng: Rng) -> Files:
    files = []
    for rank in (0, 1):
        trace = WrittenTrace(forecast("fsdp"), folder / "own").vary(rng)
        trace.insert(0.0, 0.25 * forecast("fsdp").step_time, LOADER)
        files.append(trace.write(folder / f"rank-{rank}.json.gz", rank))
    return files


def write_unequal(folder: Path, rng: Rng, key: str, factor: float, wanted: Callable[[str], bool]) -> Files:
    """Writes the traces of four ranks, of which rank 2 has longer kernels, and the others wait inside collectives."""
    files = []
    for rank in range(4):
        trace = WrittenTrace(forecast(key), folder / "own").vary(rng)
        longer = unite_spans(spans_of(trace.kernels(wanted)))
        extra = sum(high - low for low, high in longer) * (factor - 1)
        if rank == 2:
            trace.stretch(longer, factor)
        else:
            compute = unite_spans(spans_of(trace.kernels(lambda name: not is_collective(name))))
            waits = subtract(unite_spans(spans_of(trace.kernels(is_collective))), compute)
            trace.stretch(waits, 1 + extra / sum(high - low for low, high in waits))
        files.append(trace.write(folder / f"rank-{rank}.json.gz", rank))
    return files


def subtract(spans: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans without holes."""
    left = []
    for low, high in spans:
        at = low
        for begin, end in holes:
            if end <= at or begin >= high:
                continue
            if begin > at:
                left.append((at, begin))
            at = max(at, end)
        if at < high:
            left.append((at, high))
    return left


@case("slow rank", FSDP)
def a_rank_with_slow_kernels(folder: Path, rng: Rng) -> Files:
    return write_unequal(folder, rng, "fsdp", 1.3, lambda name: not is_collective(name))


@case("expert imbalance", EXPERTS)
def experts_of_one_rank(folder: Path, rng: Rng) -> Files:
    return write_unequal(folder, rng, "experts", 1.8, lambda name: "expert" in name and not is_collective(name))


# --------------------------------------------------------------------------------------------- links


def write_links(rng: Rng, factor: float) -> str:
    """Returns what nccl-tests prints of an all-gather of all 16 ranks."""
    from meshcast.simulator.formats.nccl_tests_table import NcclTable, TableLine

    times = {1 << power: factor * (1 << power) * 15 / 16 / 350e9 + 60e-6 for power in range(20, 33)}
    lines = [TableLine(nbytes, seconds * rng.normal(1, 0.03)) for nbytes, seconds in times.items()]
    places = [(f"node-{rank // 8}", rank % 8) for rank in range(16)]
    return NcclTable("all_gather", places, "NVIDIA H100 80GB HBM3", lines, every_rank=True).render()


@case("slow communication", FSDP)
def links_that_nccl_tests_find_slow(folder: Path, rng: Rng) -> Files:
    return [put(folder, "links.txt", write_links(rng, 2.5))]


# --------------------------------------------------------------------------------------------- clean


@case("")
def clean_megatron(folder: Path, rng: Rng) -> Files:
    step = step_of_llama()
    seconds = vary(rng, step * 1.05, STEPS)
    seconds[rng.integers(5, STEPS)] *= 1.3  # a hiccup of the network
    behind = {
        number: [f"saving checkpoint at iteration {number:7d} to /c in torch_dist format"] for number in (100, 200)
    }
    for number in range(1, STEPS + 1):
        rows = ["(min, max) time across ranks (ms):"]
        for name, share in (("forward-compute", 0.28), ("backward-compute", 0.6), ("batch-generator", 0.004)):
            own = 1e3 * share * step * rng.normal(1, 0.01)
            rows.append(f"    {(name + ' ').ljust(48, '.')}: ({own * 0.98:.2f}, {own * 1.01:.2f})")
        behind[number] = [*behind.get(number, []), *rows]
    run = WrittenRun(seconds, between={100: 0.3 * step, 200: 0.3 * step}, behind=behind)
    return [put(folder, "run.log", run.write(logs.megatron))]


@case("")
def clean_torchtitan(folder: Path, rng: Rng) -> Files:
    ahead = {
        number: [f"{TITAN} - INFO - [GC] Performing periodic GC collection took 0.06 seconds"]
        for number in range(50, 600, 50)
    }
    run = WrittenRun(vary(rng, step_of_llama() * 1.1, 600, 0.02), ahead=ahead, every=10)
    return [put(folder, "run.log", run.write(logs.torchtitan))]


@case("")
def clean_nemo(folder: Path, rng: Rng) -> Files:
    return [put(folder, "run.log", WrittenRun(vary(rng, step_of_llama() * 0.97, 120, 0.03)).write(logs.nemo))]


@case("")
def clean_nanotron_with_samples(folder: Path, rng: Rng) -> Files:
    clocks = np.full((200, 8), 1755.0) * np.exp(rng.normal(0, 0.015, (200, 8))) * rng.normal(1, 0.004, 8)
    run = WrittenRun(vary(rng, step_of_llama() * 1.02, 150))
    masks = np.where(rng.random((200, 8)) < 0.8, 0x4, 0)
    return [
        put(folder, "run.log", run.write(logs.nanotron)),
        put(folder, "samples.csv", logs.write_query(clocks, masks)),
    ]


@case("")
def clean_deepspeed(folder: Path, rng: Rng) -> Files:
    words = (
        "[2026-04-06 00:41:17,848] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
    )
    ahead = {number: [words] for number in (1, 2, 3, 70)}
    return [put(folder, "run.log", WrittenRun(vary(rng, step_of_llama(), 300), ahead=ahead).write(logs.deepspeed))]


@case("")
def clean_trainer(folder: Path, rng: Rng) -> Files:
    return [put(folder, "run.log", logs.write_trainer(WrittenRun(vary(rng, step_of_llama(), STEPS, 0.03))))]


@case("", FSDP)
def clean_traces(folder: Path, rng: Rng) -> Files:
    return write_ranks(folder, rng, "fsdp", (0, 1, 2))


@case("", EXPERTS)
def clean_trace_of_experts(folder: Path, rng: Rng) -> Files:
    return write_ranks(folder, rng, "experts", (0, 1, 2, 3))


@case("", FSDP)
def clean_links(folder: Path, rng: Rng) -> Files:
    return [put(folder, "links.txt", write_links(rng, 1.1))]
