"""What the error of a forecast depends on: the shares of its kinds of work, its model and its sizes."""

from __future__ import annotations

from meshcast.simulator.costs.step_posterior import StepFeatures
from meshcast.simulator.program.categories import EXPOSED, HOST
from meshcast.simulator.report.metrics import Metrics

WAITING = ("bubble", "idle")
"""Parts of a step in which a device does nothing."""


def find_features(metrics: Metrics) -> StepFeatures:
    """Returns the features of a forecast: of its slowest device, with the constant time of the framework."""
    parts, job, mesh = metrics.parts, metrics.job, metrics.play.plan.mesh
    waiting, step, model = sum(parts[name] for name in WAITING), sum(parts.values()), job.model
    work = {
        f"gemm {metrics.linear_format}": parts["gemm"],
        "attention": parts["attention"],
        "memory": parts["memory_bound"] + parts["optimizer"],
        **{f"communication {axis}": parts[axis] for axis in EXPOSED},
        HOST: parts[HOST],
    }
    shares = {kind: seconds / (step - waiting) for kind, seconds in work.items() if seconds}
    experts = f", {model.moe.experts} experts" if model.moe else ""
    sizes = {
        "gpus": job.cluster.gpus,
        **{axis: mesh.size(axis) for axis in ("tp", "pp", "cp", "ep")},
        "micro": job.batch.micro or 1,
        "sequence": job.batch.sequence or model.seq,
    }
    return StepFeatures(
        shares | {"bubble": waiting / step},
        f"hidden {model.hidden}, feed-forward {model.ffn}{experts} on {job.cluster.gpu.name}",
        sizes,
    )
