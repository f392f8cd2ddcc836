"""What is known of a run: its forecast, its log, traces of its ranks, samples of its GPUs, tests of its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from meshcast.experiments.diagnosis.ranks import TracedRun
from meshcast.experiments.diagnosis.steps import StepTimes
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.gpu_samples import GPUSample
from meshcast.simulator.formats.launch.table import Stated
from meshcast.simulator.report.report import Report

if TYPE_CHECKING:
    from meshcast.validation.measurements.measurement import Measurement

LEAST_SHARE = 0.01
"""Share of a step that a cause takes at least to be named."""


@dataclass(frozen=True)
class RunEvidence:
    """What is known of a run.

    Attributes:
        report: forecast of its job; None: no job is named.
        program: name of its training program, of its launch file or log; empty: unknown.
        settings: of its launch file, by normalised names.
        checkpoints: ``run.checkpoints`` as its launch file states them.
        steps: of its log.
        traced: steps of ranks that were traced.
        samples: of its GPUs.
        links: runs of nccl-tests with their forecasts.
    """

    report: Report | None = None
    program: str = ""
    settings: Mapping[str, Stated] = field(default_factory=dict)
    checkpoints: Mapping[str, object] = field(default_factory=dict)
    steps: StepTimes | None = None
    traced: TracedRun | None = None
    samples: tuple[GPUSample, ...] = ()
    links: tuple[Measurement, ...] = ()

    @cached_property
    def step(self) -> float:
        """Time of a measured step without pauses, of the log before that of traces [s]; 0: none is measured."""
        if self.steps is not None:
            return self.steps.steady
        return self.traced.step if self.traced is not None else 0.0

    @property
    def least(self) -> float:
        """Seconds of a step below which a cause is not named."""
        return LEAST_SHARE * (self.step or (self.report.step_time if self.report is not None else 0.0))

    def find_period(self, *names: str) -> tuple[int, str]:
        """Returns the value of the first of some settings of the launch file that is a period in steps, and where it is
        stated; 0: it states none."""
        for name in names:
            stated = self.settings.get(name)
            word = str(stated.value) if stated is not None else ""
            if stated is not None and word.isdecimal() and int(word) > 0:
                return int(word), stated.where
        return 0, ""
