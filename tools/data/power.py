"""Fits the power of a GPU to measured training steps: ``python -m tools.data.power``.

Each measured step is a row. Its forecast says how long kernels are busy and which share of the tensor cores' peak and
of the memory bandwidth they use, all over the measured duration; the row's power is the highest reading of nvidia-smi
during the steps, a mean over a second on Hopper. Steps at the power limit say only that the model must reach it. What
a single GPU does not show stays: energy of memory traffic, communication and waiting (`simulator/costs/power.yaml`).
Printed are the coefficients, every row's error, and its error by a fit without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from meshcast.hardware.load import load
from meshcast.simulator.costs.power import power_model
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import COMPUTE, Op
from meshcast.simulator.report.report import Report
from meshcast.validation.measurements.measurement import Measurement, read

MEASURED = Path(str(resources.files("meshcast.validation"))) / "measured"
"""Measurement files that ship with meshcast."""

BOUNDS = (0.0, 2.0)
"""Range of a fitted coefficient, a share of the power limit."""


class PowerRow(NamedTuple):
    """A measured training step.

    busy: share of the step in which kernels run. tensor: FLOPs over the peak of the step's duration. rest: power of
    idling and of memory traffic, over the power limit. power: measured, over the power limit.
    """

    name: str
    gpu: str
    busy: float
    tensor: float
    rest: float
    power: float


def read_rows(folder: Path = MEASURED) -> list[PowerRow]:
    """Reads the steps of a single GPU in the measurement files of a folder whose power is known."""
    rows = []
    for file in sorted(folder.glob("*/step-*.json")):
        measured = read(file)
        state, step = measured.machine.states.get("during"), measured.rows[0].median
        if measured.machine.device == "cuda" and state is not None and state.power and step:
            rows.append(_make_row(file.stem, measured, state.power, step))
    return rows


def _make_row(name: str, measured: Measurement, power: float, step: float) -> PowerRow:
    report = simulate(measured.job)
    model = power_model(report.job.cluster.gpu)
    busy = tensor = memory = 0.0
    for op, seconds, count in _count_ops(report):
        if op.stream == COMPUTE and op.work is not None and seconds > 0:
            kind, share = model.utilisation(op.work, seconds)
            used = count * seconds
            busy += used
            tensor += used * share if kind != "memory" else 0.0
            memory += used * share if kind == "memory" else 0.0
    rest = model.idle + model.memory * memory / step
    return PowerRow(name, model.gpu.name, min(busy / step, 1.0), tensor / step, rest, power / model.limit)


def _count_ops(report: Report) -> list[tuple[Op, float, float]]:
    """Lists every op of a step with its seconds and the number of times that it runs."""
    ops = []
    for task, turns in report.play.program.turns():
        for part in task.parts:
            ops += [
                (op, seconds, float(turns * part.count))
                for op, seconds in zip(part.block.ops, part.seconds, strict=True)
            ]
        for side in (*task.ahead, *task.behind):
            ops += [(op, seconds, float(turns)) for op, seconds in zip(side.ops, side.seconds.tolist(), strict=True)]
    return ops


def forecast_power(row: PowerRow, busy: float, tensor: float) -> float:
    """Returns the power of a step over the limit, by the model of `simulator.costs.power`."""
    return min(row.rest + busy * row.busy + tensor * row.tensor, 1.0)


def fit(rows: Sequence[PowerRow]) -> tuple[float, float]:
    """Returns the coefficients `busy` and `tensor` with the least squares of log(measured / forecast)."""

    def errors(coefficients: np.ndarray) -> list[float]:
        busy, tensor = coefficients.tolist()
        forecasts = (forecast_power(row, busy, tensor) for row in rows)
        return [float(np.log(min(row.power, 1.0) / forecast)) for row, forecast in zip(rows, forecasts, strict=True)]

    fitted = least_squares(errors, (0.4, 0.7), bounds=BOUNDS).x
    return float(fitted[0]), float(fitted[1])


def describe_fit(rows: Sequence[PowerRow], architecture: str) -> str:
    """Returns the page that is printed. rows: of all GPUs of an architecture."""
    busy, tensor = fit(rows)
    lines = [f"{architecture}: busy {busy:.3f}, gemm and attention {tensor:.3f} of the limit; {len(rows)} rows"]
    lines.append(f"{'step':28}{'GPU':>10}{'busy':>7}{'tensor':>8}{'rest':>8}{'power':>7}{'error':>8}{'without':>9}")
    squares = []
    for number, row in enumerate(rows):
        measured = min(row.power, 1.0)
        error = forecast_power(row, busy, tensor) / measured - 1
        without = forecast_power(row, *fit([*rows[:number], *rows[number + 1 :]])) / measured - 1
        squares.append(without**2)
        lines.append(
            f"{row.name:28}{row.gpu:>10}{row.busy:7.3f}{row.tensor:8.3f}{row.rest:8.3f}{row.power:7.3f}"
            f"{error:8.1%}{without:9.1%}"
        )
    free = [square for square, row in zip(squares, rows, strict=True) if row.power < LIMITED]
    every, below = (float(np.sqrt(np.mean(errors))) for errors in (squares, free))
    lines.append(f"root mean square without the row {every:.1%}; below the limit {below:.1%}")
    return "\n".join(lines)


LIMITED = 0.98
"""Power over the limit from which on a step is limited by it."""


def main() -> None:
    """Fits every architecture with measured steps, and prints it."""
    rows = read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED)
    of = {row.gpu: load("gpus", row.gpu).architecture for row in rows}
    for architecture in dict.fromkeys(of.values()):
        print(describe_fit([row for row in rows if of[row.gpu] == architecture], architecture))


if __name__ == "__main__":
    main()
