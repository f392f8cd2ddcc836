"""Lines of DeepSpeed (edaa72212): of the engine's throughput timer (``deepspeed/utils/timer.py``), and of the pipeline
engine (``deepspeed/runtime/pipe/engine.py``)::

    [2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step=199/global_step=199,
    RunningAvgSamplesPerSec=58.73, CurrSamplesPerSec=61.35304005128382, MemAllocated=6.01GB, MaxMemAllocated=19.52GB
    steps: 10 loss: 7.1234 iter time (s): 1.234 samples/sec: 12.966

Each stands on one line. The first states samples/s of all GPUs (`Iteration.samples_per_s`), of its last step alone.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.logs.training_log import (
    NUMBER,
    Iteration,
    LogFormat,
    find_moment,
    parse_number,
    parse_positive,
)

# "0/20, RunningAvgSamplesPerSec=232.7, ..." in versions of 2022.
THROUGHPUT = re.compile(
    rf"(?:global_step=|\b\d{{1,9}}/)(\d{{1,15}}), RunningAvgSamplesPerSec=[^,]++, CurrSamplesPerSec={NUMBER}"
)
PIPELINE = re.compile(
    rf"\bsteps: (\d{{1,15}}) loss: {NUMBER} (?:\w{{1,40}}: \S+ ){{0,8}}iter time \(s\): {NUMBER} samples/sec: {NUMBER}"
)


class DeepspeedLog(LogFormat):
    """Logs of DeepSpeed."""

    name = "deepspeed"
    program = "DeepSpeed"
    form = "global_step=N, RunningAvgSamplesPerSec=..., CurrSamplesPerSec=..."
    hint = "amples"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        moment, resolution = find_moment(line)
        if stated := THROUGHPUT.search(line):
            rate = parse_positive(stated[2], where)
            return Iteration(int(stated[1]), where, samples_per_s=rate, moment=moment, resolution=resolution)
        if stated := PIPELINE.search(line):
            seconds, rate = (parse_positive(word, where) for word in (stated[3], stated[4]))
            loss = parse_number(stated[2])
            return Iteration(int(stated[1]), where, seconds, samples=round(rate * seconds) or None, loss=loss)
        return None
