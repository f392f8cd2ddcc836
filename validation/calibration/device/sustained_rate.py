"""Measures the sustained rate of kernels in a training step on this machine, against kernels measured alone.

In a step operands are not in the caches, which hold what other kernels left, and a GPU reaches its power limit. A small
model, of sizes that no preset has, is trained for some steps; its trace shows the time of GEMMs and attention.
Their rate against that of the kernels alone is what `Calibration.sustained_rate` reads.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshcast.simulator.formats import kineto
from meshcast.validation.distributed.measure import measure
from meshcast.validation.measurements.forecasts import Forecaster
from meshcast.validation.traces.comparison import compare_step

MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 3, "hidden": 448, "ffn": 1216, "heads": 7, "kv_heads": 7, "vocab": 5120, "seq": 192},
    "cuda": {"layers": 6, "hidden": 2816, "ffn": 7552, "heads": 22, "kv_heads": 22, "vocab": 40960, "seq": 3072},
}
"""Models of the llama family, by kind of device."""

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"framework": {"name": "reference", "set": {"launch_s": 0.0}}, "precision": "fp32"},
    "cuda": {"framework": "reference", "precision": "bf16"},
}
"""What else a job of each kind of device states."""

STEPS = {"cpu": (15, 4), "cuda": (20, 130)}
"""Timed and untimed steps. A GPU draws its full power for some seconds before its limiter settles: an H200 that runs a
billion parameters for 15 s does so at 1,725 of 1,980 MHz, and after a second still at nearly the full clock."""

GEMM_KINDS = ("gemm", "attention")
SIGMA = 0.05
"""Between steps of different models on a machine, as in `simulator/costs/calibration/steps.yaml`."""


def measure_sustained_rate(kind: str, gpu: str, out: Path) -> dict[str, Any]:
    """Returns the entry of this architecture in ``steps.yaml``.

    gpu: its name in the catalog, or its file. out: the folder with the calibration of its kernels.
    """
    job = {
        "model": {"name": "calibration", "gated": True, "norm": "rmsnorm", "positions": "rope", **MODELS[kind]},
        "cluster": {"gpu": gpu, "gpus": 1},
        "batch": {"global": 2, "micro": 1, "sequence": MODELS[kind]["seq"]},
        "plan": {"zero": 0},
        **SETTINGS[kind],
    }
    with TemporaryDirectory() as name:
        place = Path(name)
        trace = place / "trace.json"
        measured = measure(
            job, kind, place / "step.json", *STEPS[kind], out, check=False, trace=trace, progress=lambda line: None
        )
        forecaster = Forecaster("calibration", job, out)
        seen = compare_step(kineto.read(trace), forecaster.report)
    lines = [line for line in seen.lines if line.kind in GEMM_KINDS]
    real = sum(line.real for line in lines)
    simulated = sum(line.simulated for line in lines)
    return {
        "sustained": {
            "value": float(f"{forecaster.sustained_rate * simulated / real:.4g}"),
            "sigma": SIGMA,
            "rows": 1,
            "meaning": "rate of GEMMs and attention in a training step against the same kernel alone",
            "source": f"meshcast calibrate --device {kind} on {measured.machine.name}, a step of a small model",
        },
    }
