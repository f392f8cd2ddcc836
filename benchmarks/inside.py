"""CPU seconds of work inside of a process, without its imports: a grid of jobs or a forecast::

    python -m benchmarks.inside grid JOBS.json
    python -m benchmarks.inside forecast JOB.yaml [FIELD=VALUE ...]

Prints ``cpu_s`` and, of a grid, how many of its jobs are ``answered``, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.simulator import load_job, simulate
from meshcast.simulator.batch.grid import Answered, forecast_jobs


def count_answers(jobs: Sequence[SomeFields]) -> int:
    """Counts the jobs that are answered by step time and memory, as in a search."""
    return sum(isinstance(answer, Answered) for answer in forecast_jobs(jobs))


def main(what: str, file: Path, changes: list[str]) -> dict[str, float]:
    """Returns the figures that are printed."""
    jobs = json.loads(file.read_text()) if what == "grid" else []
    if len(jobs) > 1:
        # Imports what forecasts need, as the peers' grids do; of a job that is refused that is less.
        next(answer for answer in forecast_jobs(jobs) if isinstance(answer, Answered))
    begin = time.process_time()
    answered = count_answers(jobs) if jobs else len([simulate(load_job(file, changes)).to_dict()])
    return {"cpu_s": time.process_time() - begin, "answered": answered}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
