"""A training of the reference trainer on two processes, with a cause planted in it: real gloo, real traces, a log in
the lines of a training program.

``python -m torch.distributed.run ... processes.py FOLDER`` runs a rank of it; `run_processes` starts both.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = {
    "model": {"layers": 3, "hidden": 192, "heads": 4, "ffn": 768, "vocab": 512, "seq": 128},
    "cluster": {"gpu": "cpu-core", "gpus": 2},
    "framework": {"name": "reference", "set": {"bucket": {"elements": 400_000, "elements_per_rank": 0}}},
    "precision": dict.fromkeys(("compute", "gradients", "main_weights", "moments"), "fp32"),
    "batch": {"global": 16, "micro": 8, "sequence": 128},
    "plan": {"mesh": {"dp": 2}, "schemes": [{"use": "data/ddp", "over": "dp"}]},
}
STEPS, TRACED = 30, 5
PERIOD = 10


def run_processes(folder: Path, plant: str, seed: int = 0) -> list[Path]:
    """Runs the training, and returns its log and the traces of both ranks. plant: name of a cause; empty: none."""
    from meshcast.validation.distributed.launch import environment

    (folder / "task.json").write_text(json.dumps({"plant": plant, "seed": seed}), "utf-8")
    run = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *run, __file__, str(folder)], env=environment("cpu"), capture_output=True, timeout=500
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [folder / "run.log", folder / "rank-0.json", folder / "rank-1.json"]


# ------------------------------------------------------------------------------------------ a rank


def make_loader(plant: str, step: float) -> Any:
    """Returns torch's DataLoader; where `plant` says so its samples take a while."""
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, number: int) -> int:
            if plant == "data loading":
                time.sleep(0.4 * step)
            return number

    return iter(DataLoader(Samples(), batch_size=1))


def plant_slow_link(module: Any) -> None:
    """Makes gradients travel twenty times: the link has a twentieth of its bandwidth."""
    import torch
    import torch.distributed as dist

    def send_often(group: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        long = torch.cat([buffer] * 20)
        work = dist.all_reduce(long, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0][: buffer.numel()] / dist.get_world_size(group))

    send_often.__annotations__.clear()  # torch compares them with its own types, not with their names
    module.register_comm_hook(dist.group.WORLD, send_often)


def collect_garbage() -> float:
    """Collects a million objects in cycles, and returns how long it took [s]."""
    for _ in range(250_000):
        cycle: list[Any] = []
        cycle.append([cycle])
    begin = time.monotonic()
    gc.collect()
    return time.monotonic() - begin


def save_checkpoint(folder: Path, trainer: Any) -> None:
    """Saves weights and moments some times, each on the disk."""
    import torch

    for _ in range(6):
        with (folder / f"checkpoint-{os.environ['RANK']}.pt").open("wb") as file:
            torch.save([param.detach() for param in trainer.parameters().values()] * 4, file)
            file.flush()
            os.fsync(file.fileno())


def train(folder: Path) -> None:
    """Trains as the task in the folder says."""
    import torch
    import torch.distributed as dist

    from meshcast.simulator.forecast.planning import resolve_plan
    from meshcast.simulator.loading.load import load_job
    from meshcast.validation.distributed.process_groups import make_process_groups
    from meshcast.validation.distributed.trainer import Trainer
    from meshcast.validation.measurements.device import Device

    task = json.loads((folder / "task.json").read_text("utf-8"))
    plant, rank = task["plant"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(task["seed"])
    dist.init_process_group("gloo")
    job = JOB
    if plant == "missing overlap":  # one bucket of all gradients, whose sum begins when the last is there
        job = JOB | {"framework": {"name": "reference", "set": {"bucket": {"elements": 10**9, "elements_per_rank": 0}}}}
    trainer = Trainer(resolve_plan(load_job(job)), make_process_groups(resolve_plan(load_job(job)), Device.of("cpu")))
    if plant == "slow communication":
        plant_slow_link(trainer.passes.module)  # type: ignore[attr-defined]
    if plant != "garbage collection":
        gc.disable()
    usual = min(time_step(trainer, number) for number in range(4))
    loader, extra = make_loader(plant, usual), torch.randn(512, 512)
    if plant == "host pauses":
        update = trainer.optimizer.step

        def update_later() -> None:
            time.sleep(0.3 * usual)
            update()

        trainer.optimizer.step = update_later  # type: ignore[method-assign]

    def step(number: int) -> None:
        next(loader)
        if plant == "slow rank" and rank == 1:
            end = time.monotonic() + 0.4 * usual
            while time.monotonic() < end:
                torch.mm(extra, extra)
        trainer.step(trainer.make_inputs(number))

    with (folder / f"rank-{rank}.log").open("w", encoding="utf-8") as log:
        for line in run_steps(folder, plant, trainer, step):
            log.write(line + "\n")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=TRACED, repeat=1)

    def export(profile: Any) -> None:
        profile.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    with torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=export) as profile:
        for number in range(TRACED + 1):
            step(STEPS + number)
            profile.step()
    if rank == 0:
        (folder / "rank-0.log").rename(folder / "run.log")
    dist.barrier()
    os._exit(0)  # gloo's threads may still be running


def time_step(trainer: Any, number: int) -> float:
    """Returns the seconds of a step."""
    begin = time.monotonic()
    trainer.step(trainer.make_inputs(number))
    return time.monotonic() - begin


def run_steps(folder: Path, plant: str, trainer: Any, step: Any) -> Iterator[str]:
    """Runs the steps and yields the lines of a log of Megatron-LM."""
    import torch.distributed as dist

    dist.barrier()
    at = time.monotonic()
    for number in range(1, STEPS + 1):
        step(number)
        if plant == "garbage collection" and number % PERIOD == 0:
            took = collect_garbage()
            yield f"{datetime.now()} - root - INFO - [GC] Performing periodic GC collection took {took:.2f} seconds"
        dist.barrier()
        now = time.monotonic()
        yield (
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {number:8d}/{STEPS:8d} | consumed samples: "
            f"{16 * number:12d} | elapsed time per iteration (ms): {1e3 * (now - at):.1f} | learning rate: 8.6E-06 | "
            "global batch size:    16 | lm loss: 6.1E+00 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |"
        )
        at = time.monotonic()
        if plant == "checkpoint saves" and number % PERIOD == 0:
            yield f"saving checkpoint at iteration {number:7d} to {folder} in torch format"
            save_checkpoint(folder, trainer)
            dist.barrier()
            at = time.monotonic()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
