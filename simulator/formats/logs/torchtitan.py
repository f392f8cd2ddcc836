"""Lines of torchtitan (``torchtitan/components/metrics.py`` of b5bcd76c6)::

    step: 10  loss:  4.32018  grad_norm:  1.1230  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%

A line states no time but the throughput of a GPU (`Iteration.tokens_per_s`), from which the time of a step follows with
its tokens and the number of GPUs. Time and throughput are means since the previous line.
"""

from __future__ import annotations

import re
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.logs.training_log import (
    NUMBER,
    REMEDY,
    Iteration,
    LogFormat,
    find_moment,
    parse_number,
    parse_positive,
)

STEP = re.compile(r"(?<!validate )\bstep:\s*(\d{1,15})\s+(?=loss:)")
TPS = re.compile(rf"\b(?:tps|wps): {NUMBER}(?=\s+\w+:)")
FIELDS = {
    "loss": re.compile(rf"\bloss:\s*{NUMBER}\s"),
    "tflops": re.compile(rf"\btflops: {NUMBER}\s"),
    "mfu": re.compile(rf"\bmfu: {NUMBER}%"),
    "reserved": re.compile(rf"\bmemory:\s*{NUMBER}GiB"),
    "reserved_share": re.compile(rf"\bmemory:\s*[\d.,]++GiB\({NUMBER}%\)"),
}


class TorchtitanLog(LogFormat):
    """Logs of torchtitan. Time since the line before counts, that of checkpoints and of garbage collection, too."""

    name = "torchtitan"
    program = "torchtitan"
    form = "step: N  loss: ...  tps: ..."
    hint = "step:"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        begin = STEP.search(line)
        if not begin:
            return None
        rate = TPS.search(line)
        if not rate:
            raise PlanError(where, "a step without `tps: ...` and the fields after it, as if it was cut off", REMEDY)
        parts = {name: form.search(line) for name, form in FIELDS.items()}
        fields: dict[str, Any] = {name: parse_number(part[1]) for name, part in parts.items() if part}
        for name in ("mfu", "reserved_share"):
            if fields.get(name) is not None:
                fields[name] /= 100
        if (gib := fields.pop("reserved", None)) is not None and gib > 0:
            fields["reserved"] = gib * 2**30
        moment, resolution = find_moment(line)
        tokens_per_s = parse_positive(rate[1], where)
        return Iteration(int(begin[1]), where, None, tokens_per_s, moment=moment, resolution=resolution, **fields)
