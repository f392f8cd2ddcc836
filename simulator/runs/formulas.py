"""Closed forms of checkpoints and failures, under exponential times between failures.

Symbols: M mean time between failures of the job, d time for which training waits at a checkpoint, R time of a restart
(in which failures may happen, too), t time of training between two checkpoints, all in seconds.

References: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (9), 1974;
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (3), 2006, equations 20 and 37.
"""

from __future__ import annotations

import math


def young_interval(d: float, mtbf: float) -> float:
    """Computes Young's best interval, sqrt(2 d M) [s]."""
    return math.sqrt(2 * d * mtbf)


def daly_interval(d: float, mtbf: float) -> float:
    """Computes Daly's best interval [s]: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d, and M from d = 2M on."""
    if d >= 2 * mtbf:
        return mtbf
    ratio = d / (2 * mtbf)
    return math.sqrt(2 * d * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d


def expected_slowdown(t: float, d: float, restart: float, mtbf: float) -> float:
    """Computes Daly's expected duration of a run over its training time: M e^(R/M) (e^((t+d)/M) - 1) / t.

    restart: from the failure to the first step after it [s].
    """
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((t + d) / mtbf) / t
    except OverflowError:
        return math.inf


def expected_goodput(t: float, d: float, restart: float, mtbf: float) -> float:
    """Returns the share of the duration of a run that is training which is kept."""
    return 1 / expected_slowdown(t, d, restart, mtbf)
