"""Lines of Megatron-LM, its forks, and what is built on it (``training_log`` of d98e8a64dd)::

[2024-04-06 02:59:36] iteration      122/  250000 | consumed samples: 124928 | elapsed time per iteration (ms): ...
"""

from __future__ import annotations

import re

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.logs.training_log import (
    NUMBER,
    REMEDY,
    Iteration,
    LogFormat,
    find_moment,
    parse_count,
    parse_number,
    parse_positive,
)

ITERATION = re.compile(r"\biteration\s+(\d{1,15})/\s*\d+ \|")
ELAPSED = re.compile(rf"elapsed time per iteration \((ms|s)\): {NUMBER} \|")
FIELDS = {
    "samples": re.compile(rf"global batch size:\s*{NUMBER} \|"),
    "loss": re.compile(rf"\blm loss: {NUMBER} \|"),
    # "throughput per GPU (TFLOP/s/GPU): 239.8" today, "TFLOPs: 33.65" in forks.
    "tflops": re.compile(rf"(?:\(TFLOP/s/GPU\)|TFLOPs): {NUMBER} \|"),
}
SKIPPED = re.compile(r"number of (?:skipped|nan) iterations:\s*(\d{1,15}) \|")


class MegatronLog(LogFormat):
    """Logs of Megatron-LM. The timer of an iteration stands still while checkpoints are saved and while the model is
    evaluated; older versions let it run."""

    name = "megatron"
    program = "Megatron-LM"
    form = "iteration N/M | elapsed time per iteration (ms): ..."
    hint = "iteration"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        begin = ITERATION.search(line)
        if not begin:
            return None
        elapsed = ELAPSED.search(line)
        if not elapsed:
            raise PlanError(
                where, "an iteration without `elapsed time per iteration (ms): ... |`, as if it was cut off", REMEDY
            )
        seconds = parse_positive(elapsed[2], where) * (1e-3 if elapsed[1] == "ms" else 1.0)
        fields = {name: parse_number(part[1]) for name, form in FIELDS.items() if (part := form.search(line))}
        samples = fields.get("samples")
        moment, resolution = find_moment(line)
        return Iteration(
            int(begin[1]),
            where,
            seconds,
            samples=round(samples) if samples else None,
            skipped=sum(map(parse_count, SKIPPED.findall(line))),
            moment=moment,
            resolution=resolution,
            loss=fields.get("loss"),
            tflops=fields.get("tflops"),
        )
