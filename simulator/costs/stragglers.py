"""GPUs of a kind differ in their clocks, and a synchronous step waits for the slowest of them.

    pace(n) = 1 + SPREAD (m(n) - m(REFERENCE)),   m(n) = z((n - 3/8) / (n + 1/4)),   m(1) = 0

with the expected maximum m of n standard normal values (Blom 1958), z the quantile of the normal distribution: 1.6 %
for 512 GPUs, 2.2 % for 4,096. Sustained rates of kernels were fitted with the stragglers of a node, so fewer GPUs are
faster: four by 0.4 %, two by 0.8 %, and a single GPU, which waits for no other, by 1.4 %.

It is the pace of GEMMs and attention, which run at the clock that power and temperature leave. Kernels that memory
limits run at the clock of the memory, which all GPUs have in common.
"""

from __future__ import annotations

from statistics import NormalDist

SPREAD = 0.01
"""Standard deviation of the pace of GPUs of a kind. Held against some 670 published runs on 1 to 4 and on 16 to
10,752 GPUs: their mean error is 6.5 % at 0, 6.3 % from 1 to 2.5 %; of the 99 on 1 to 4 alone 3.3 % at 0, 3.1 to 3.2 %
from 1 to 2 %. Across five clusters of GPUs single GEMMs vary by 8 % on average from best to worst, from manufacturing
and temperature (Sinha et al. 2022, "Not All GPUs Are Created Equal", SC22, arXiv 2208.11035)."""

REFERENCE = 8
"""GPUs whose slowest has the pace to which rates refer."""


def slowest_pace(gpus: int) -> float:
    """Returns the time of GEMMs and attention on the slowest of so many GPUs over that on the slowest of
    `REFERENCE`."""
    return 1.0 + SPREAD * (expected_maximum(gpus) - expected_maximum(REFERENCE))


def expected_maximum(count: int) -> float:
    """Returns the expected maximum of so many standard normal values, within 0.03; 0 of a single value."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
