"""Lines of NeMo: of its progress printer (``nemo/lightning/pytorch/callbacks/progress_printer.py`` of 8cfedd7203), and
of Lightning's progress bar, whose updates are separated by carriage returns::

    Training epoch 0, iteration 5/99 | lr: 1.5e-06 | global_batch_size: 512 | global_step: 5 |
    reduced_train_loss: 11.03 | train_step_timing in s: 12.21 | consumed_samples: 3072
    Epoch 0: :  5%|▌   | 5/100 [01:05<20:43, reduced_train_loss=10.9, global_step=4.000, train_step_timing in s=12.2]

Both stand on one line. ``global_step`` counts from 0.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.logs.training_log import (
    NUMBER,
    Iteration,
    LogFormat,
    find_moment,
    parse_count,
    parse_number,
    parse_positive,
)

STEP = re.compile(rf"\bglobal_step[:=]\s?{NUMBER}")
SECONDS = re.compile(rf"\btrain_step_timing in s[:=]\s?{NUMBER}")
SAMPLES = re.compile(rf"\bglobal_batch_size[:=]\s?{NUMBER}")
LOSS = re.compile(rf"\breduced_train_loss[:=]\s?{NUMBER}")


class NemoLog(LogFormat):
    """Logs of NeMo."""

    name = "nemo"
    program = "NeMo"
    form = "Training epoch E, iteration N/M | global_step: N | train_step_timing in s: ..."
    hint = "train_step_timing in s"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        seconds, step = SECONDS.search(line), STEP.search(line)
        if not seconds or not step:
            return None
        samples, loss = SAMPLES.search(line), LOSS.search(line)
        moment, resolution = find_moment(line)
        return Iteration(
            parse_count(step[1]) + 1,
            where,
            parse_positive(seconds[1], where),
            samples=(parse_count(samples[1]) if samples else 0) or None,
            loss=parse_number(loss[1]) if loss else None,
            moment=moment,
            resolution=resolution,
        )
