"""CPU seconds of work inside of a process, without its imports: a grid of jobs or a forecast::

    python -m benchmarks.inside grid JOBS.json
    python -m benchmarks.inside forecast JOB.yaml [FIELD=VALUE ...]

Prints ``cpu_s`` and, of a grid, how many of its jobs are ``answered``, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from meshcast.hardware.errors import PlanError
from meshcast.simulator import SharedWork, load_job, simulate
from meshcast.simulator.forecast.step import forecast_step


def count_answers(jobs: Path) -> int:
    """Counts the jobs of a file that are answered by step time and memory, as in a search."""
    shared, answered = SharedWork(), 0
    for job in json.loads(jobs.read_text()):
        try:
            forecast_step(load_job(job), shared)
            answered += 1
        except PlanError:
            pass
    return answered


def main(what: str, file: Path, changes: list[str]) -> dict[str, float]:
    """Returns the figures that are printed."""
    begin = time.process_time()
    answered = count_answers(file) if what == "grid" else len([simulate(load_job(file, changes)).to_dict()])
    return {"cpu_s": time.process_time() - begin, "answered": answered}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
