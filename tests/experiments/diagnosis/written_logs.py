"""Writes logs as training programs write them, line by line: the sources of the forms are named in
`simulator.formats.logs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np

BEGIN = datetime(2026, 4, 6, 2, 0, 0)


@dataclass
class WrittenRun:
    """A run that is written as a log.

    seconds: of every step on the program's clock. between: seconds after a step, by its number, in which that clock
    stands still. ahead, behind: lines before and after the line of a step, by its number. reserved: share of memory.
    """

    seconds: Sequence[float]
    between: Mapping[int, float] = field(default_factory=dict)
    ahead: Mapping[int, Sequence[str]] = field(default_factory=dict)
    behind: Mapping[int, Sequence[str]] = field(default_factory=dict)
    samples: int = 128
    tokens: int = 128 * 4096
    gpus: int = 16
    every: int = 1
    reserved: float = 0.62
    skipped: Mapping[int, int] = field(default_factory=dict)

    def write(self, line: Callable[[WrittenRun, int, float, datetime], str]) -> str:
        """Returns the log; `line` makes that of the steps since the line before, from its number, mean and moment."""
        rows: list[str] = []
        moment, sum_, steps = BEGIN, 0.0, 0
        for number, seconds in enumerate(self.seconds, 1):
            moment += timedelta(seconds=seconds)
            sum_, steps = sum_ + seconds, steps + 1
            rows += self.ahead.get(number, ())
            if number % self.every == 0 or number == 1:
                rows.append(line(self, number, sum_ / steps, moment))
                sum_, steps = 0.0, 0
            rows += self.behind.get(number, ())
            moment += timedelta(seconds=self.between.get(number, 0.0))
        return "\n".join(rows) + "\n"


def megatron(run: WrittenRun, number: int, seconds: float, moment: datetime) -> str:
    """A line of ``training_log``."""
    return (
        f" [{moment:%Y-%m-%d %H:%M:%S.%f}] iteration {number:8d}/{len(run.seconds):8d} | consumed samples: "
        f"{number * run.samples:12d} | elapsed time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): {2000 / seconds:.1f} | learning rate: 8.600000E-06 | global batch size: {run.samples:5d} | lm "
        f"loss: {1.8 + 5 / number:.6E} | loss scale: 1.0 | grad norm: 1.426 | number of skipped iterations: "
        f"{run.skipped.get(number, 0):3d} | number of nan iterations:   0 |"
    )


def torchtitan(run: WrittenRun, number: int, seconds: float, moment: datetime) -> str:
    """A line of ``MetricsProcessor.log``."""
    stamp = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"
    return (
        f"[rank0]:[titan] {stamp} - root - INFO - step: {number:2}  loss: {1.8 + 5 / number:8.5f}  grad_norm:  1.1230  "
        f"memory: {79.1 * run.reserved:5.2f}GiB({100 * run.reserved:.2f}%)  tps: "
        f"{round(run.tokens / run.gpus / seconds):,}  tflops: {2000 / seconds:,.2f}  mfu: {200 / seconds:.2f}%"
    )


def nemo(run: WrittenRun, number: int, seconds: float, moment: datetime) -> str:
    """A line of ``ProgressPrinter``."""
    return (
        f"Training epoch 0, iteration {number - 1}/{len(run.seconds) - 1} | lr: 1.5e-06 | global_batch_size: "
        f"{run.samples} | global_step: {number - 1} | reduced_train_loss: {1.8 + 5 / number:.4} | "
        f"train_step_timing in s: {seconds:.4} | consumed_samples: {number * run.samples}"
    )


def nanotron(run: WrittenRun, number: int, seconds: float, moment: datetime) -> str:
    """A line of ``LoggerWriter.add_scalars_from_list``."""
    rate = run.tokens / seconds
    return (
        f"{moment:%m/%d/%Y %H:%M:%S} [INFO|DP=0|PP=0|TP=0]: iteration: {number} / {len(run.seconds)} | "
        f"consumed_tokens: {human_format(number * run.tokens)} | "
        f"time_per_iteration_ms: {human_format(seconds * 1e3)} | tokens_per_sec: "
        f"{human_format(rate)} | tokens_per_sec_per_gpu: {human_format(rate / run.gpus)} | global_batch_size: "
        f"{human_format(run.tokens)} | lm_loss: 2.1 | lr: 0.0003 | model_tflops_per_gpu: 310 | eta: 0:10:00"
    )


def deepspeed(run: WrittenRun, number: int, seconds: float, moment: datetime) -> str:
    """A line of ``ThroughputTimer.stop``."""
    stamp = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"
    return (
        f"[{stamp}] [INFO] [timer.py:264:stop] epoch=0/micro_step={number * 4}/global_step={number}, "
        f"RunningAvgSamplesPerSec={run.samples / seconds}, CurrSamplesPerSec={run.samples / seconds}, "
        "MemAllocated=4.32GB, MaxMemAllocated=38.49GB"
    )


def human_format(number: float) -> str:
    """A number as nanotron's ``human_format`` has it: three digits."""
    number, size = float(f"{number:.3g}"), 0
    while abs(number) >= 1000:
        number, size = number / 1000, size + 1
    return f"{number:f}".rstrip("0").rstrip(".") + ("", "K", "M", "B", "T")[size]


def write_trainer(run: WrittenRun) -> str:
    """Returns the log of a Trainer: the updates of tqdm's bar, and what is printed between."""
    rows, at, total = "", 0.0, len(run.seconds)
    for number, seconds in enumerate(run.seconds, 1):
        at += seconds
        minutes, rest = divmod(int(at), 60)
        share = f"{100 * number // total:3d}%|{'█' * (10 * number // total):10}"
        rows += "".join(f"{line}\n" for line in run.ahead.get(number, ()))
        rows += f"\r{share}| {number}/{total} [{minutes:02d}:{rest:02d}<10:00, {seconds:5.2f}s/it]"
        if number % 10 == 0:
            rows += f"\n{{'loss': 1.9, 'grad_norm': 1.2, 'learning_rate': 2e-05, 'epoch': {number / total:.2f}}}\n"
        rows += "".join(f"\n{line}\n" for line in run.behind.get(number, ()))
        at += run.between.get(number, 0.0)
    return rows + "\n"


def vary(rng: np.random.Generator, step: float, steps: int, noise: float = 0.01, first: float = 6.0) -> np.ndarray:
    """Steps of a run: lognormal noise of which a half lasts some steps, a first step that is `first` times as long."""
    white, lasting = rng.normal(0, noise, steps), np.zeros(steps)
    for i in range(1, steps):
        lasting[i] = 0.8 * lasting[i - 1] + rng.normal(0, noise / 3)
    seconds = step * np.exp(white + lasting)
    seconds[0] *= first
    return seconds


def write_dmon(clocks: np.ndarray) -> str:
    """Returns what ``nvidia-smi dmon`` prints of GPUs with these clocks [MHz]: a row a second, a column a GPU."""
    head = (
        "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk\n"
        "# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz\n"
    )
    rows = []
    for second, of_gpus in enumerate(clocks):
        rows += [head.rstrip("\n")] if second % 20 == 0 else []
        rows += [
            f"{gpu:5d} {650:6d} {62:6d} {88:6d} {97:6d} {40:6d}      0      0      0      0 {2619:6d} {clock:6.0f}"
            for gpu, clock in enumerate(of_gpus)
        ]
    return "\n".join(rows) + "\n"


def write_query(clocks: np.ndarray, reasons: np.ndarray) -> str:
    """Returns the CSV of ``nvidia-smi --query-gpu`` of GPUs with these clocks [MHz] and masks of reasons."""
    rows = [
        "timestamp, index, clocks.current.sm [MHz], clocks.max.sm [MHz], power.draw [W], temperature.gpu, "
        "utilization.gpu [%], clocks_event_reasons.active"
    ]
    for second, (of_gpus, masks) in enumerate(zip(clocks, reasons, strict=True)):
        moment = BEGIN + timedelta(seconds=second)
        rows += [
            f"{moment:%Y/%m/%d %H:%M:%S}.123, {gpu}, {clock:.0f} MHz, 1980 MHz, 643.12 W, 62, 97 %, 0x{int(mask):016x}"
            for gpu, (clock, mask) in enumerate(zip(of_gpus, masks, strict=True))
        ]
    return "\n".join(rows) + "\n"
