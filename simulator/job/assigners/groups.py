"""Groups of ranks and the samples that they are assigned, and the batch that these make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.batch import Batch, MicrobatchClass


@dataclass
class SampleGroup:
    """Neighbouring ranks that share the samples of their micro-batches.

    degree: number of its ranks.
    microbatches: numbers of the samples of each, in the order in which they run.
    """

    degree: int
    microbatches: list[list[int]] = field(default_factory=list)


Round = Sequence[SampleGroup]
"""The groups of all ranks, in the order of ranks; all wait for each other at its end."""


def batch_of_rounds(rounds: Sequence[Round], lengths: Sequence[int], multiple: int, tensor: int) -> Batch:
    """Returns the batch of rounds of samples: classes of micro-batches, and those of every group.

    Several samples of a micro-batch lie behind each other in one sequence, and attention stays within each.

    lengths: of all samples [tokens].
    multiple: to which the tokens of a sequence are padded; also to two equal parts for each rank of a group, and the
        share of a rank to its tensor-parallel ranks.
    tensor: number of those.
    """
    numbers: dict[tuple[int, int, int | None], int] = {}
    tokens = defaultdict[int, list[int]](list)

    def find_class(samples: Sequence[int], degree: int) -> int:
        real = [lengths[sample] for sample in samples]
        grain = int(np.lcm(multiple, (2 * degree if degree > 1 else 1) * tensor))
        padded = -(-sum(real) // grain) * grain
        document = round(sum(length * length for length in real) / sum(real))
        document = -(-document // multiple) * multiple
        key = padded, degree, document if len(real) > 1 and document < padded else None
        number = numbers.setdefault(key, len(numbers))
        tokens[number].append(sum(real))
        return number

    # The largest groups first, so that each begins at a multiple of its size, as process groups do.
    in_order = [sorted(groups, key=lambda group: -group.degree) for groups in rounds]
    orders = tuple(
        tuple(tuple(find_class(samples, group.degree) for samples in group.microbatches) for group in groups)
        for groups in in_order
    )
    classes = tuple(
        MicrobatchClass(sequence=padded, cp=degree, documents=document, tokens=float(np.mean(tokens[number])))
        for (padded, degree, document), number in numbers.items()
    )
    return Batch(lengths=classes, rounds=orders)
