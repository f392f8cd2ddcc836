"""Lines of nanotron (``train_step_logs`` of ``src/nanotron/trainer.py``, 2411b022)::

    11/30/2024 09:54:02 [INFO|DP=0|PP=0|TP=0]: iteration: 10 / 100 | consumed_tokens: 20.5M | time_per_iteration_ms:
    1.2K | tokens_per_sec: 1.75M | tokens_per_sec_per_gpu: 218K | global_batch_size: 2.1M | lm_loss: 7.2 | ...

It stands on one line. Numbers have three digits and K, M, B or T (``human_format`` of its ``logging/base.py``). Older
versions write ``elapsed_time_per_iteration_ms``. ``global_batch_size`` is of tokens today and was of samples, so tokens
follow from the throughput.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.logs.training_log import Iteration, LogFormat, parse_number, parse_positive

HUMAN = r"([-+]?\d[\d.]*+(?:[eE][-+]?\d++)?)([KMBTPE]?)"
ITERATION = re.compile(r"\biteration: (\d{1,15}) / \d+ \|")
SECONDS = re.compile(rf"\b(?:elapsed_)?time_per_iteration_ms: {HUMAN}(?: \||$)")
TOKENS = re.compile(rf"\btokens_per_sec: {HUMAN}(?: \||$)")
LOSS = re.compile(rf"\blm_loss: {HUMAN}(?: \||$)")
SIZES = ("", "K", "M", "B", "T", "P", "E")


class NanotronLog(LogFormat):
    """Logs of nanotron."""

    name = "nanotron"
    program = "nanotron"
    form = "iteration: N / M | time_per_iteration_ms: ... | tokens_per_sec: ..."
    hint = "time_per_iteration_ms"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        begin, elapsed = ITERATION.search(line), SECONDS.search(line)
        if not begin or not elapsed:
            return None
        seconds = parse_positive(elapsed[1], where) * _scale(elapsed) * 1e-3
        rate, loss = TOKENS.search(line), LOSS.search(line)
        tokens = parse_positive(rate[1], where) * _scale(rate) * seconds if rate else None
        return Iteration(
            int(begin[1]),
            where,
            seconds,
            tokens=tokens,
            loss=(parse_number(loss[1]) or 0.0) * _scale(loss) if loss else None,
        )


def _scale(stated: re.Match[str]) -> float:
    return 1000.0 ** SIZES.index(stated[2])
