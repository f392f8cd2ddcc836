"""Communication that the plan hides behind computation, and that is not hidden in the trace."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.causes.slow_communication import measure_slowness
from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.report.formatting import format_seconds

LEAST_DIFFERENCE = 0.15
"""Difference between the exposed shares of communication, traced and forecast, from which on an overlap is missing."""

FLAGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("megatron", "data"): ("overlap_grad_reduce", "overlap_param_gather"),
    ("megatron", "tensor"): ("tp_comm_overlap",),
    ("megatron", "pipeline"): ("overlap_p2p_communication",),
    ("deepspeed", "data"): ("zero_optimization.overlap_comm", "overlap_comm"),
}
"""Settings that ask for an overlap, by program and stream."""


class MissingOverlap(Detector):
    """Communication of a parallelism of which a larger share is exposed than the plan has it."""

    name = "missing overlap"
    words = {
        "megatron": "--overlap-grad-reduce and --overlap-param-gather with --use-distributed-optimizer; "
        "--tp-comm-overlap with --sequence-parallel; CUDA_DEVICE_MAX_CONNECTIONS=1 where Megatron asks for it",
        "deepspeed": "zero_optimization.overlap_comm: true, with buckets that are smaller than the gradients",
        ANY: "the program's option for this overlap; that the collectives have a stream of their own, and the host is "
        "not late",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it for every parallelism."""
        if run.traced is None or run.report is None:
            return
        for stream in run.traced.streams:
            slow = measure_slowness(run.traced, run.report, stream)[0]
            busy, worst = run.traced.measure_busy(stream), 0.0
            words = ""
            for device, (exposed, hidden_forecast) in run.traced.measure_exposed(stream).items():
                measured, forecast = busy[device]
                if not measured or not forecast:
                    continue
                share, planned = exposed / measured, hidden_forecast / forecast
                seconds = exposed - hidden_forecast - slow
                if share - planned >= LEAST_DIFFERENCE and seconds > worst:
                    worst = seconds
                    words = (
                        f"{share:.0%} of {stream} communication ({format_seconds(measured)}) runs without computation "
                        f"beside it, forecast {planned:.0%}"
                    )
            if worst >= run.least:
                yield self.make(run, worst, words, *self._list_flags(run, stream))

    def _list_flags(self, run: RunEvidence, stream: str) -> Iterable[str]:
        """Yields the settings of the launch file that ask for the overlap and do not act."""
        for name in FLAGS.get((run.program, stream), ()):
            stated = run.settings.get(name)
            if stated is not None and stated.value not in (False, "false"):
                yield f"{stated.where} asks for it and does not act"
