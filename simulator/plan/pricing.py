"""Prices that a plan is resolved with: `JobPricing` says what they are, `simulator.forecast.planning` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.plan.partition import LayerCosts
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import SliceDuration


class SavedTensors(NamedTuple):
    """Tensors that an op writes in every layer of a stage and that are saved together.

    nbytes: of a micro-batch, in all layers of the stage.
    seconds: of computing them again; infinite where no op of the layer does.
    """

    names: tuple[str, ...]
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class StageTensors:
    """The saved tensors of a stage, and how fast they move.

    pass_s: of the shorter of its passes [s].
    device_s: of a byte to every device [s]; infinite to the stage's device.
    host_s: of a byte to the host, or back [s].
    own_links: whether every pair of devices has separate links, so that stripes move at the same time.
    """

    tensors: tuple[SavedTensors, ...]
    pass_s: float
    device_s: tuple[float, ...]
    host_s: float
    own_links: bool


class JobPricing(Protocol):
    """Tells durations and memory of a plan of the job that is not resolved to its end yet."""

    def price_layers(self, plan: Plan) -> Sequence[LayerCosts]:
        """Returns the costs of the layers on every stage [s]; the plan needs no layers yet."""

    def price_work(self, plan: Plan, work: Work) -> float:
        """Returns the duration of some work on the first device of a plan [s]."""

    def price_slices(self, plan: Plan) -> SliceDuration:
        """Returns the durations of slices of sequences; the plan has layers, and needs no slices yet."""

    def play_step(self, plan: Plan) -> float:
        """Returns the duration of the step of a plan with layers and slices [s]."""

    def measure_peaks(self, plan: Plan) -> Sequence[float]:
        """Returns the peak memory of every device of a plan with layers and slices [bytes]."""

    def price_tensors(self, plan: Plan) -> Sequence[StageTensors]:
        """Returns the saved tensors of every stage of a plan with layers and slices."""
