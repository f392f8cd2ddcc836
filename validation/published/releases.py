"""The month of the code that a published run ran."""

from __future__ import annotations

import re

from meshcast.hardware.errors import PlanError
from meshcast.simulator.job.framework import framework_versions
from meshcast.simulator.job.release import find_month
from meshcast.validation.published.rows import PublishedRun

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip

MLPERF_ROUNDS = {
    "v30": "2023-05", "v31": "2023-10", "v40": "2024-05", "v41": "2024-10", "v50": "2025-05", "v51": "2025-10"
}  # fmt: skip
"""Months in which results of MLPerf Training were due (mlcommons.org, Training results and rules of each round). The
containers that its submitters name are often those of an older round: code and container come with the round."""

TABLE_MONTHS = {
    "refs/a100_80gb.csv": "2025-01",  # requirements.txt: Transformers 4.48.1, PEFT 0.13.2
    "refs/a100_80gb_granite.csv": "2024-09",  # requirements_granite.txt: Transformers 4.45.2, PEFT 0.12.0
    "refs/a100_80gb_liger.csv": "2024-09",  # requirements_liger.txt: Transformers 4.45.2, PEFT 0.13.2
}
"""Months of tables whose rows name no release, by the path that rows cite: foundation-model-stack/fms-acceleration
@876e2ed, scripts/benchmarks/refs; all with PyTorch 2.4.1."""

NAMED_MONTH = re.compile(rf"\b({'|'.join(MONTHS)}) (20\d\d)\b")
RELEASE = re.compile(
    r"(?<![\d.])(20\d\d-\d\d(?:-\d\d)?|\d\d\.(?:0[1-9]|1[0-2])(?:\.\d\d)?|(?:core_)?[rv]\d+\.\d+)(?!\d)"
)


def month_of(run: PublishedRun, framework: str) -> str | None:
    """Returns the month YYYY-MM of the code of a run; None if the run does not say it.

    framework: profile of the run, which may date versions.
    """
    if round_ := re.match(r"mlperf-(v\d\d)-", run.id):
        return MLPERF_ROUNDS.get(round_[1])
    text = run.spec.stack_version or ""
    if named := NAMED_MONTH.search(text):
        return f"{named[2]}-{MONTHS.index(named[1]) + 1:02d}"
    if not text:
        return next((month for table, month in TABLE_MONTHS.items() if table in str(run.cited)), None)
    for release in (text, *RELEASE.findall(text)):
        try:
            return find_month(release, framework_versions(framework), "stack_version")
        except PlanError:  # a version that the profile does not date
            continue
    return None
