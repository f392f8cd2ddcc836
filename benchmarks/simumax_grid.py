"""SimuMax (MooreThreads/SimuMax: "a static analytical model for LLM distributed training") on a grid of plans. Run by
the Python that has its packages, with its checkout and a file of strategies::

    python benchmarks/simumax_grid.py CHECKOUT STRATEGIES.json

Prints as JSON the CPU time of the grid [s], and for every strategy whether SimuMax answers. Its caches of profiles stay
off, as they are by default: on this grid they cost more time than they save. Memory is not asked to fit: a plan that
does not is answered like any other, as meshcast answers it. The system is its shipped one of A100s, 8 a node.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def answers(checkout: Path, strategies: list[dict[str, Any]]) -> list[bool]:
    """Whether SimuMax answers each of `strategies` with the cost and the memory of a step."""
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    model = ModelConfig.init_from_config_file(str(checkout / "configs" / "models" / "gpt3-175b.json"))
    system = SystemConfig.init_from_config_file(str(checkout / "configs" / "system" / "a100_pcie.json"))
    forecaster, answered = PerfLLM(), []
    for strategy in strategies:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
                given = StrategyConfig.init_from_dict(strategy)
                forecaster.configure(strategy_config=given, model_config=model, system_config=system)
                forecaster.run_estimate()
                forecaster.analysis_cost()
                forecaster.analysis_mem()
            answered.append(True)
        except (AssertionError, ValueError, RuntimeError):
            answered.append(False)
    return answered


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path.insert(0, str(folder))
    warnings.simplefilter("ignore")
    if len(wanted) > 1:
        answers(folder, wanted[:1])  # imports SimuMax
    begin = time.process_time()
    valid = answers(folder, wanted)
    print(json.dumps({"cpu_s": time.process_time() - begin, "valid": valid}))
