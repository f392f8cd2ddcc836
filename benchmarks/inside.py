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

from meshcast.simulator import load_job, simulate
from meshcast.simulator.batch.grid import Answered, forecast_jobs


def count_answers(jobs: Path) -> int:
    """Counts the jobs of a file that are answered by step time and memory, as in a search."""
    return sum(isinstance(answer, Answered) for answer in forecast_jobs(json.loads(jobs.read_text())))


def main(what: str, file: Path, changes: list[str]) -> dict[str, float]:
    """Returns the figures that are printed."""
    begin = time.process_time()
    answered = count_answers(file) if what == "grid" else len([simulate(load_job(file, changes)).to_dict()])
    return {"cpu_s": time.process_time() - begin, "answered": answered}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
