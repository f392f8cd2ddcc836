"""What a step trains on: sizes of the batch and lengths of sequences, of micro-batches that are alike or differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from meshcast.simulator.job.counts import read_length

Count = Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)]
"""A parallel degree, a batch size, a number of tokens. The ceiling is far above any job and catches typing errors."""

Length = Annotated[Count, BeforeValidator(read_length, json_schema_input_type=Count | str)]
"""Tokens of a sequence, also as text such as ``8k``."""

Documents = Count | tuple[Count, ...]
"""Tokens of documents, a length or a sample of lengths."""

ClassOrder = tuple[Annotated[int, Field(strict=True, ge=0, lt=1_000_000)], ...]
"""Classes of micro-batches, by their number in `Batch.lengths`, in the order in which they run."""


class JobPart(BaseModel):
    """Base class of the parts of a job; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class MicrobatchClass(JobPart):
    """Micro-batches of equal size: so many sequences of so many tokens."""

    samples: Count = 1
    """Sequences of a micro-batch of a replica; with `plan.stages`, of all data-parallel ranks of a stage together."""
    sequence: Length
    """Tokens of each of them, padding included. k is 1,024."""
    documents: Documents | None = None
    """See `Batch.documents`."""
    tokens: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Tokens of a micro-batch that are no padding, in the mean. Default: all."""
    cp: Count | None = None
    """With `rounds`: context-parallel ranks that share each of its sequences. Default: those of the plan."""
    skew: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 1.0
    """Pairs of tokens of the context-parallel rank that has most over their mean, where ranks divide whole sequences of
    documents (`sharding` of sequence/all-gather)."""

    @model_validator(mode="after")
    def _check_padding(self) -> MicrobatchClass:
        if self.real_tokens > self.padded_tokens:
            rule = f"it has samples x sequence = {self.padded_tokens:,} tokens with padding"
            raise ValueError(f"{rule}, and {self.real_tokens:,g} without")
        return self

    @property
    def padded_tokens(self) -> int:
        """Tokens of a micro-batch, padding included."""
        return self.samples * self.sequence

    @property
    def real_tokens(self) -> float:
        """Tokens of a micro-batch that are no padding."""
        return float(self.padded_tokens) if self.tokens is None else self.tokens


class LogNormal(JobPart):
    """Lengths whose logarithm is normally distributed: most are short, few are long."""

    kind: Literal["lognormal"]
    mean: Annotated[float, Field(strict=True, ge=1, le=1e9)]
    """Mean of all lengths, before they are cut [tokens]."""
    sigma: Annotated[float, Field(strict=True, ge=0, le=10)]
    """Standard deviation of the logarithm."""
    min: Count = 1
    """The shortest length: shorter ones are lengthened."""
    max: Count | None = None
    """The longest length: longer ones are cut. Default: `batch.sequence`."""


class Quantiles(JobPart):
    """Lengths of a data set of which some quantiles are known; between two of them the logarithm of the length is
    linear in the share of samples."""

    kind: Literal["quantiles"]
    at: dict[Annotated[float, Field(ge=0, le=1)], Count] = Field(min_length=1)
    """By share of the samples, the length that so many do not exceed: ``{0.5: 600, 0.99: 8000}``. A single token at
    share 0 and `batch.sequence` at share 1, unless stated."""

    @model_validator(mode="after")
    def _check_rising(self) -> Quantiles:
        lengths = [length for _, length in sorted(self.at.items())]
        if lengths != sorted(lengths):
            raise ValueError("a larger share of samples has at least as large a length")
        return self


class Uniform(JobPart):
    """Lengths that are equally likely between two."""

    kind: Literal["uniform"]
    min: Count = 1
    max: Count | None = None
    """Default: `batch.sequence`."""


class Samples(JobPart):
    """Samples of a step, by their lengths, and how they are joined to micro-batches."""

    file: str | None = None
    """CSV file with the tokens of a sample in the first cell of every row; a header row may be above them."""
    histogram: bool = False
    """Whether the second cell of a row is the number, or the share, of samples of that length: samples are then drawn
    by it, with repetition."""
    distribution: Annotated[LogNormal | Uniform | Quantiles, Field(discriminator="kind")] | None = None
    """Distribution of the lengths, in place of `file`."""
    count: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] | None = None
    """Samples of a step, of all replicas; drawn from the file without repetition. Default: all of the file."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0
    """Seed of lengths, of the samples drawn from a file, and of the order of micro-batches."""
    batches: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """Batches that are drawn, with this seed and those after it; the step is their mean."""
    join: Literal["packing", "padding", "shortest-step", "dp-balanced", "wlb", "hybrid-cp", "flexsp"]
    """packing: behind each other in sequences of `batch.sequence` tokens. padding: samples of similar length are
    padded to the longest of their micro-batch, as many as `tokens` admits. shortest-step: as padding, as many as make
    the step shortest (DynaPipe). dp-balanced: as packing, in the order of samples, up to `tokens`, and as many
    sequences for each replica (`dp_balanced` of Megatron-Core). wlb: sequences of up to `tokens`, filled so that all
    have equal FLOPs (WLB-LLM); what has no room comes with the next of `batches`. hybrid-cp: every sample is a
    micro-batch of as few context-parallel ranks as hold it, in balanced rounds (`--hybrid-context-parallel` of
    Megatron-Core). flexsp: in every micro-batch groups of the degrees, and with the samples, that end first (FlexSP).
    """
    rank_tokens: Count | None = None
    """hybrid-cp, flexsp: tokens of a micro-batch on a rank at most. Default: `batch.sequence` over the plan's cp."""
    half_rate_tokens: Count = 256
    """shortest-step: tokens of a micro-batch at which matrix products reach half of their rate, in the estimate by
    which micro-batches are chosen."""
    largest_group: Count | None = None
    """flexsp: ranks of a group at most, as heads to share there are. Default: all."""
    outliers: tuple[Count, ...] = ()
    """wlb: rising lengths; samples that reach one wait until there are as many as micro-batches, of each length apart.
    With several `batches`."""
    tokens: Count | None = None
    """Most tokens of a micro-batch, padding included. Default: `batch.sequence`."""
    multiple: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] = 8
    """Padded lengths are a multiple of it; with packing the lengths of documents by which micro-batches are told
    apart. Few classes of micro-batches are forecast faster."""
    across_samples: bool = False
    """Packing without a mask: attention is of whole sequences. Default: it stays within a sample."""
    equal_replicas: bool = False
    """All replicas run micro-batches of the same size at a time, as schemes need that meet in every micro-batch.
    Default: micro-batches are dealt to replicas so that all have about as many FLOPs."""

    @model_validator(mode="after")
    def _check_source(self) -> Samples:
        if (self.file is None) == (self.distribution is None):
            raise ValueError("lengths are those of a file, or of a distribution: give one of them")
        if self.distribution is not None and self.count is None:
            raise ValueError("a distribution needs count, the samples of a step")
        if self.histogram and (self.file is None or self.count is None):
            raise ValueError("a histogram is that of a file, and needs count, the samples of a step")
        if self.batches > 1 and self.count is None:
            raise ValueError("all samples of a file make one batch: several need count, the samples of each")
        return self


class Batch(JobPart):
    """Batch sizes in sequences (global batch of a step, micro-batch of a replica), and tokens of a sequence."""

    total: Count | None = Field(default=None, alias="global")
    """Default: a micro-batch per replica; with a pipeline four per stage."""
    micro: Count = 1
    """Sequences of a micro-batch of a replica; with `plan.stages`, of all data-parallel ranks of a stage together."""
    microbatches: Count | None = None
    """Micro-batches of a step, in place of `micro`: of each replica, or with `plan.stages` of the pipeline."""
    sequence: Length | None = None
    """Tokens of a sequence, k is 1,024: 8k. Default: the sequence length of the model."""
    documents: Documents | None = None
    """Tokens of the documents packed into a sequence, a length or a sample of lengths: attention stays within a
    document. Default: each sequence is a document."""
    lengths: tuple[MicrobatchClass, ...] = ()
    """Classes of micro-batches of different lengths, in place of `micro`, `sequence` and `documents`."""
    order: ClassOrder = ()
    """Classes of the micro-batches of a replica, in the order in which they run. Default: every class once."""

    rounds: tuple[tuple[ClassOrder, ...], ...] = ()
    """By round, classes of the micro-batches of every group of ranks, in place of `order`: groups may have different
    context-parallel degrees. Ranks wait for each other at the end of a round."""
    samples: Samples | None = None
    """Lengths of the samples of a step, from which classes and orders of micro-batches are made, in place of both."""

    @property
    def document(self) -> int | None:
        """Length of the documents that have as many pairs of tokens: the mean over tokens; None: whole sequences."""
        if self.documents is None:
            return None
        lengths = self.documents if isinstance(self.documents, tuple) else (self.documents,)
        cut = [min(length, self.sequence or length) for length in lengths]
        return round(sum(length * length for length in cut) / sum(cut))

    @property
    def is_skewed(self) -> bool:
        """Whether some context-parallel ranks have more pairs of tokens than others."""
        return any(kind.skew > 1 for kind in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of a step."""
        assert self.sequence is not None
        return max((kind.sequence for kind in self.lengths), default=self.sequence)

    def to_dict(self) -> dict[str, Any]:
        """Returns the batch with every default filled, without what it does not use."""
        fields = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        for kind in fields["lengths"]:
            if kind["skew"] == 1:
                del kind["skew"]
        unused = ["micro", "sequence", "documents"] if self.lengths else ["lengths"]
        unused += [key for key in ("order", "rounds") if not fields[key] or (key == "order" and self.rounds)]
        return {key: value for key, value in fields.items() if key not in unused}

    def of_class(self, number: int, replicas: int) -> Batch:
        """Returns the batch of a class alone: as many micro-batches as of all classes.

        number: of the class.
        replicas: that run the micro-batches.
        """
        kind = self.lengths[number]
        total = len(self.order) * kind.samples * replicas
        sizes = {"total": total, "micro": kind.samples, "sequence": kind.sequence, "documents": kind.documents}
        return self.model_copy(update={**sizes, "lengths": (), "order": (), "rounds": ()})

    def with_share(self, ranks: int) -> Batch:
        """Returns the batch of a single rank of `ranks` data-parallel ranks, which share every micro-batch."""
        lengths = tuple(kind.model_copy(update={"samples": kind.samples // ranks}) for kind in self.lengths)
        return self.model_copy(update={"micro": self.micro // ranks, "lengths": lengths})

    def degree_of(self, number: int, usual: int) -> int:
        """Returns the context-parallel degree of a class. usual: of the plan."""
        return self.lengths[number].cp or usual

    def with_order(self, order: Sequence[int]) -> Batch:
        """Returns the batch of a replica that runs micro-batches of these classes."""
        return self.model_copy(update={"order": tuple(order)})
