"""What a training step takes off the rates of kernels that were measured alone, on the machine at hand.

In a step operands come from far, weights above all, caches hold what others left, and a GPU draws all its power. A
small model, of sizes that no other has, is trained for some steps; a trace of one says how much of it was products and
attention. Their rate against that of the kernels alone is what `Calibration.sustained_rate` reads.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simulator.bridges import kineto
from simulator.costs.calibration.calibration import Calibration
from validation.distributed.measure import measure
from validation.measurements.forecasts import Forecaster
from validation.traces.comparison import compare_step

MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 3, "hidden": 448, "ffn": 1216, "heads": 7, "kv_heads": 7, "vocab": 5120, "seq": 192},
    "cuda": {"layers": 6, "hidden": 2816, "ffn": 7552, "heads": 22, "kv_heads": 22, "vocab": 40960, "seq": 3072},
}
"""Of the llama family, by kind of device."""

PRODUCTS = ("gemm", "attention")
SPREAD = 0.05
"""Between steps of different models on one machine: as of `simulator/costs/calibration/steps.yaml`."""


def stepped(kind: str, gpu: str, architecture: str, out: Path) -> dict[str, Any]:
    """The entry of this architecture in ``steps.yaml``.

    gpu: its name in the catalog, or its file. out: the folder with the calibration of its kernels.
    """
    job = {
        "model": {"name": "calibration", "gated": True, "norm": "rmsnorm", "positions": "rope", **MODELS[kind]},
        "cluster": {"gpu": gpu, "gpus": 1},
        "framework": {"name": "reference", "set": {"launch_s": 0.0}} if kind == "cpu" else {"name": "reference"},
        "precision": "fp32" if kind == "cpu" else "bf16",
        "batch": {"global": 2, "micro": 1, "sequence": MODELS[kind]["seq"]},
        "plan": {"zero": 0},
    }
    with TemporaryDirectory() as name:
        place = Path(name)
        trace = place / "trace.json"
        found = measure(
            job, kind, place / "step.json", 15, 4, out, check=False, trace=trace, progress=lambda line: None
        )
        seen = compare_step(kineto.read(trace), Forecaster("calibration", job, out).report)
    products = [line for line in seen.lines if line.kind in PRODUCTS]
    real = sum(line.real for line in products)
    simulated = sum(line.simulated for line in products)
    old = Calibration.from_folder(out).sustained_rate(architecture)
    told = f"meshcast calibrate --device {kind} on {found.machine.name}, a step of a small model"
    return {
        "sustained": _entry(old * simulated / real, "rate of GEMMs and attention in a training step", told),
    }


def _entry(value: float, what: str, source: str) -> dict[str, Any]:
    return {
        "value": float(f"{value:.4g}"),
        "spread": SPREAD,
        "rows": 1,
        "meaning": f"{what} against the same kernel alone",
        "source": source,
    }
