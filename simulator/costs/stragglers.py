"""GPUs of one kind differ in their pace, and a synchronous step waits for the slowest of them.

    pace(N) = 1 + SPREAD (m(N) - m(REFERENCE)),   m(n) = z((n - 3/8) / (n + 1/4))

with the expected maximum m of n standard normal values (Blom 1958), z the quantile of the normal distribution: 1.6 %
for 512 GPUs, 2.2 % for 4,096. Up to `REFERENCE` GPUs there is nothing to add: rates of kernels in steps were fitted
with the stragglers of a node or more.
"""

from __future__ import annotations

from statistics import NormalDist

SPREAD = 0.01
"""Standard deviation of the pace of GPUs of one kind. Fitted on some 560 published runs of dense models on 8 to 10,752
GPUs, whose error falls with the number of GPUs: 0.5 to 2 % fit alike. Across five clusters of GPUs single GEMMs vary by
8 % on average from best to worst, from manufacturing and temperature (Sinha et al. 2022, "Not All GPUs Are Created
Equal", SC22, arXiv 2208.11035)."""

REFERENCE = 8
"""GPUs whose slowest one has the pace to which rates refer."""


def slowest_pace(gpus: int) -> float:
    """Time of the slowest of so many GPUs over that of the slowest of `REFERENCE`; 1 for fewer."""
    return 1.0 + SPREAD * (expected_maximum(gpus) - expected_maximum(REFERENCE)) if gpus > REFERENCE else 1.0


def expected_maximum(count: int) -> float:
    """Expected maximum of so many standard normal values, within 0.03."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
