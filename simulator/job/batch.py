"""What a step trains on: sizes of the batch and lengths of sequences, of micro-batches that are alike or unlike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)]
"""A parallel degree, a batch size, a number of tokens. The ceiling is far above any job and catches typing errors."""

Documents = Count | tuple[Count, ...]
"""Tokens of documents, one length or a sample of lengths."""

ClassOrder = tuple[Annotated[int, Field(strict=True, ge=0, lt=1_000_000)], ...]
"""Classes of micro-batches, by their number in `Batch.lengths`, in the order in which they run."""


class JobPart(BaseModel):
    """Base class of the parts of a job; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MicrobatchClass(JobPart):
    """Micro-batches of one size: so many sequences of so many tokens."""

    samples: Count = 1
    """Sequences of a micro-batch of one replica; with `plan.stages`, of all data-parallel ranks of a stage together."""
    sequence: Count
    """Tokens of each of them, padding included."""
    documents: Documents | None = None
    """See `Batch.documents`."""
    tokens: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Tokens of a micro-batch that are no padding, in the mean. Default: all."""

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


class Batch(JobPart):
    """Batch sizes in sequences (global batch of a step, micro-batch of a replica), and tokens of a sequence."""

    total: Count | None = Field(default=None, alias="global")
    """Default: one micro-batch per replica; with a pipeline four per stage."""
    micro: Count = 1
    """Sequences of a micro-batch of one replica; with `plan.stages`, of all data-parallel ranks of a stage together."""
    microbatches: Count | None = None
    """Micro-batches of a step, in place of `micro`: of each replica, or with `plan.stages` of the pipeline."""
    sequence: Count | None = None
    """Default: the sequence length of the model."""
    documents: Documents | None = None
    """Tokens of the documents packed into a sequence, one length or a sample of lengths: attention stays within a
    document. Default: one document a sequence."""
    lengths: tuple[MicrobatchClass, ...] = ()
    """Classes of micro-batches of unlike length, in place of `micro`, `sequence` and `documents`."""
    order: ClassOrder = ()
    """Classes of the micro-batches of a replica, in the order in which they run. Default: every class once."""

    @property
    def document(self) -> int | None:
        """Length of the documents that have as many pairs of tokens: the mean over tokens; None: whole sequences."""
        if self.documents is None:
            return None
        lengths = self.documents if isinstance(self.documents, tuple) else (self.documents,)
        cut = [min(length, self.sequence or length) for length in lengths]
        return round(sum(length * length for length in cut) / sum(cut))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of a step."""
        assert self.sequence is not None
        return max((one.sequence for one in self.lengths), default=self.sequence)

    def to_dict(self) -> dict[str, Any]:
        """The batch with every default filled, without what it does not use."""
        found = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        unused = ("micro", "sequence", "documents") if self.lengths else ("lengths", "order")
        return {key: value for key, value in found.items() if key not in unused and (key != "order" or value)}

    def of_class(self, number: int, replicas: int) -> Batch:
        """The batch of one class alone: as many micro-batches as of all classes. replicas: that run them."""
        one = self.lengths[number]
        total = len(self.order) * one.samples * replicas
        sizes = {"total": total, "micro": one.samples, "sequence": one.sequence, "documents": one.documents}
        return self.model_copy(update={**sizes, "lengths": (), "order": ()})

    def with_share(self, ranks: int) -> Batch:
        """The batch of one of `ranks` data-parallel ranks, which share every micro-batch."""
        lengths = tuple(one.model_copy(update={"samples": one.samples // ranks}) for one in self.lengths)
        return self.model_copy(update={"micro": self.micro // ranks, "lengths": lengths})

    def with_order(self, order: Sequence[int]) -> Batch:
        """The batch of a replica that runs micro-batches of these classes."""
        return self.model_copy(update={"order": tuple(order)})
