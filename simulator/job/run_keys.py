"""The keys of ``run`` that ``meshcast run`` simulates; a forecast of a step reads the size of evaluations alone.

Durations are in the unit that the name of a key ends with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from meshcast.hardware.errors import nearest
from meshcast.hardware.load import catalog
from meshcast.hardware.reliability import Loss, Unit
from meshcast.hardware.schemas import AfterValidator, BeforeValidator, Field, model_validator
from meshcast.simulator.job.batch import Count, JobPart, Length

Seconds = Annotated[float, Field(strict=True, ge=0, le=1e8, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e12, allow_inf_nan=False)]
MAX_PROCESSES = 1_000
"""Most kinds of failures, and of slow episodes: each is a process of every simulated run."""

Whole = Annotated[int, Field(strict=True, ge=0, le=1_000_000_000)]

CheckpointKind = Literal["none", "full", "sharded", "asynchronous", "in-memory", "just-in-time"]
ElasticPolicy = Literal["none", "fewer-replicas", "templates", "reroute", "redundant", "quorum"]
Distribution = Literal["normal", "lognormal", "exponential"]


def _in_catalog(kind: str) -> AfterValidator:
    """Refuses names that a catalog does not have."""

    def check(name: str) -> str:
        if name != "none" and name not in catalog(kind):
            raise ValueError(f"not in the catalog of {kind}. {nearest(name, catalog(kind))}")
        return name

    return AfterValidator(check)


def short_for(key: str, types: Any) -> BeforeValidator:
    """Returns the validator for which a single word is short for a mapping with that key. types: of both forms."""
    return BeforeValidator(
        lambda value: {key: value} if isinstance(value, str) else value, json_schema_input_type=types
    )


class FailingComponent(JobPart):
    """Parts of a cluster that fail, in place of those of the catalog or beside them."""

    per: Unit
    """What fails: a GPU, a network port, a node, a leaf switch, or the job as a whole."""
    mtbf_hours: Positive
    """Mean time between failures of each."""
    shape: Annotated[float, Field(strict=True, ge=0.2, le=20)] = 1.0
    """Shape of the Weibull distribution of that time; 1: exponential. All are new when the run begins."""
    loses: Loss = "node"
    """What a failure takes: the node, until it is repaired, or nothing: the same nodes start again."""
    nodes: Count | None = None
    """Nodes that a failure takes. Default: those behind a switch, else 1."""


class Failures(JobPart):
    """How often parts of the cluster fail."""

    rates: Annotated[str, _in_catalog("reliability")] = "llama3-405b"
    """Entry of the catalog with observed rates; none: only `components` fail."""
    components: Annotated[dict[str, FailingComponent], Field(max_length=MAX_PROCESSES)] = {}
    """Further kinds of failures by name, or other rates for those of the entry."""
    mtbf_factor: Positive = 1.0
    """Factor on every mean time between failures."""
    nodes_per_switch: Count = 32
    """Nodes behind a leaf switch."""
    log: str | None = None
    """CSV file of failures to replay, in place of drawn ones."""


class Checkpoints(JobPart):
    """How and when the states of training are saved."""

    kind: CheckpointKind = "asynchronous"
    """full: a single rank writes all. sharded: every node writes its part, and training waits. asynchronous: training
    waits for the copy into host memory alone. in-memory: also to the host memory of other nodes. just-in-time: by
    healthy replicas when a failure has happened."""
    every_steps: Count | None = None
    """Steps from a checkpoint to the next; of in-memory: of copies in host memory, 1 by default."""
    every_s: Annotated[float, Field(strict=True, gt=0, le=1e8, allow_inf_nan=False)] | None = None
    """The same in seconds. Default: the best by Daly's formula."""
    store: Annotated[str, _in_catalog("stores")] | None = None
    """Store of the catalog."""
    write_gb_per_s: Positive | None = None
    """Rate at which all nodes together write to the store [1e9 bytes/s]. Default: that of `store`."""
    read_gb_per_s: Positive | None = None
    """The same of reading. Default: as fast as writing."""
    bandwidth_factor: Positive = 1.0
    """Factor on both."""
    bytes_per_parameter: Positive | None = None
    """Size of a checkpoint. Default: the weights that the optimizer updates, and its moments."""
    stall_s: Seconds | None = None
    """Time for which training waits at a checkpoint. Default: follows from sizes and rates, as the next two."""
    write_s: Seconds | None = None
    """Time from its beginning until a checkpoint can be used."""
    load_s: Seconds | None = None
    """Time to load it after a failure."""
    copies: Count = 2
    """Of in-memory: nodes that hold each part, that of the part included."""
    store_every_s: Annotated[float, Field(strict=True, gt=0, le=1e8, allow_inf_nan=False)] = 10_800.0
    """Of in-memory and just-in-time: time between checkpoints in the store, for failures of more nodes at once."""

    @model_validator(mode="after")
    def _check_interval(self) -> Checkpoints:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError("an interval is stated once. Give `every_steps` or `every_s`")
        if self.kind in ("none", "just-in-time") and (self.every_steps or self.every_s):
            raise ValueError(f"checkpoints of kind {self.kind} have no interval. Leave it out, or choose another kind")
        return self


class Recovery(JobPart):
    """What happens after a failure; what is not stated is that of the entry `failures.rates`."""

    detection_s: Seconds | None = None
    """From a failure until it is known and its node is identified."""
    scheduling_s: Seconds | None = None
    """Until all processes run again, without loading a checkpoint."""
    warm_up_s: Seconds | None = None
    """From the loaded checkpoint to the first step of usual duration."""
    spares: Whole | None = None
    """Spare nodes that wait, and are paid for. Default: another node is there whenever a node fails, and costs
    nothing."""
    repair_hours: Positive | None = None
    """Until a node that failed is back, as a spare; the mean of an exponential distribution."""
    elastic: ElasticPolicy = "none"
    """What to do while nodes are missing. none: wait. fewer-replicas: restart from a checkpoint with fewer replicas, or
    ones of another depth. templates: pipelines that lost nodes go on with fewer stages. reroute: micro-batches of
    missing ranks go to their peers in other replicas. redundant: the neighbour computes the stage of a missing node;
    with more of them the run goes on with fewer replicas. quorum: the other replicas go on with their own
    micro-batches, and a replica that is back fetches the states from one of them."""
    reconfigure_s: Seconds = 60.0
    """Pause in which templates, reroute, redundant and quorum adapt."""
    redundancy_overhead: Annotated[float, Field(strict=True, ge=0, le=10)] = 0.0
    """Of redundant: share by which every step is longer."""
    most_lost_replicas: Count = 4
    """Replicas, or the nodes of so many, that may be missing; with more the run waits for repairs."""


class SlowEpisode(JobPart):
    """Times in which a part of the cluster is slow, and all wait for it."""

    per: Unit = "node"
    every_hours: Positive
    """Mean time between the beginnings of such times at each of the parts."""
    minutes: Positive = 10.0
    """Mean duration, exponentially distributed."""
    slowdown: Annotated[float, Field(strict=True, ge=1, le=1000)] = 1.0
    """Factor on the duration of steps meanwhile; of several the largest counts."""
    pause_s: Seconds = 0.0
    """Time for which training stops when it begins, as when a network port comes up again."""


class RunStragglers(JobPart):
    """How the durations of steps vary."""

    jitter: Annotated[float, Field(strict=True, ge=0, le=2)] = 0.0
    """Standard deviation of the duration of a step on a rank; of its logarithm with lognormal."""
    distribution: Distribution = "lognormal"
    """Of that duration. A step takes as long as on the slowest rank."""
    ranks: Count | None = None
    """Ranks that vary independently. Default: all GPUs."""
    episodes: Annotated[dict[str, SlowEpisode], Field(max_length=MAX_PROCESSES)] = {}
    """Slow nodes and links, throttling, flapping ports, by name."""


class Evaluation(JobPart):
    """Evaluations between steps: how long they pause training, and how many sequences they run at once."""

    every_steps: Count | None = None
    seconds: Seconds | None = None
    micro: Count | None = None
    """Sequences of a micro-batch of a replica; with it the memory of an evaluation is forecast, too. `predict` reads
    it, and `sequence`."""
    sequence: Length | None = None
    """Tokens of each of them. Default: `batch.sequence`."""

    @model_validator(mode="after")
    def _check_pause(self) -> Evaluation:
        if (self.every_steps is None) != (self.seconds is None):
            raise ValueError("a pause needs every_steps and seconds. Give both, or `micro` alone for its memory")
        if self.every_steps is None and self.micro is None:
            raise ValueError("an evaluation needs every_steps and seconds, or micro")
        if self.sequence is not None and self.micro is None:
            raise ValueError("sequence is that of the micro-batches of an evaluation. Give micro, too")
        return self

    @property
    def pause(self) -> tuple[int, float] | None:
        """Steps from an evaluation to the next, and its duration [s]; None without pauses."""
        return None if self.every_steps is None or self.seconds is None else (self.every_steps, self.seconds)


class DataStalls(JobPart):
    """Times in which training waits for data."""

    every_hours: Positive
    """Mean time between two of them."""
    seconds: Seconds
    """Their mean duration, exponentially distributed."""


def refuse_two_lengths(run: Mapping[str, Any]) -> None:
    """Raises ValueError if a run has several lengths; `days` may end it early."""
    if run.get("tokens") is not None and run.get("steps") is not None:
        raise ValueError("a run has one length, and tokens and steps are given. Keep one of them")
