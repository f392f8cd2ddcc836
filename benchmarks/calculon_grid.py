"""Calculon (Isaev et al. 2023, "Calculon: a Methodology and Tool for High-Level Co-Design of Systems and Large Language
Models") on a grid of plans. Run by the Python that has its packages, with its checkout and a file of executions::

    python benchmarks/calculon_grid.py CHECKOUT EXECUTIONS.json

Prints as JSON the CPU time of the grid [s], and for every execution whether Calculon answers. Memory is unlimited: a
plan that does not fit is answered like any other, as meshcast answers it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

UNLIMITED_GIB = 1e6


def answers(checkout: Path, executions: list[dict[str, Any]]) -> list[bool]:
    """Whether Calculon answers each of `executions`."""
    from calculon import System
    from calculon.llm import Llm

    application = json.loads((checkout / "models" / "gpt3-175B.json").read_text())
    hardware = json.loads((checkout / "systems" / "a100_80g.json").read_text())
    hardware["mem1"]["GiB"] = UNLIMITED_GIB
    answered = []
    for execution in executions:
        try:
            model, system = Llm(Llm.Application(application), logging.getLogger()), System(hardware)
            model.compile(system, Llm.Execution.from_json(execution))
            model.run(system)
            answered.append(True)
        except (AssertionError, Llm.Error):
            answered.append(False)
    return answered


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path.insert(0, str(folder))
    answers(folder, wanted[:1])  # imports Calculon
    begin = time.process_time()
    valid = answers(folder, wanted)
    print(json.dumps({"cpu_s": time.process_time() - begin, "valid": valid}))
