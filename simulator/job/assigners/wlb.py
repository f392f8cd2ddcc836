"""WLB-LLM: documents are packed to micro-batches of equal work, whose lengths may differ.

A step has N micro-batches. Its documents, from the longest to the shortest, go to the micro-batch with the least work
so far; if that has no room for as many tokens, to the shortest; if that has none either, to the next step. Documents
above some lengths (outliers) wait in a queue for each length until there are N of them, one for every micro-batch. The
work of a document of d tokens is that of its attention and, linear in d, of everything else: here its FLOPs.

References: Wang et al. 2025 (OSDI), arXiv 2503.17924, section 4 and algorithm 1. The paper takes work from profiles,
and the lengths of outliers from a search over a sample of the data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence


class WlbPacker:
    """Packs the documents of one step after another; what a step has no room for comes with the next."""

    def __init__(self, most: int, outliers: Sequence[int], work: Callable[[int], float]) -> None:
        """Makes a packer without documents.

        most: tokens of a micro-batch.
        outliers: lengths from which documents wait for others, rising.
        work: of a document of some tokens, in any unit.
        """
        self.most, self.outliers, self.work = most, tuple(outliers), work
        self.queues = [deque[int]() for _ in outliers]
        self.left: list[int] = []

    def pack(self, lengths: Sequence[int], count: int) -> list[list[int]]:
        """Returns the lengths of the documents in each of `count` micro-batches of a step; one may be empty.

        lengths: of the documents that are new [tokens].
        """
        documents = self.left + self._release(lengths, count)
        works, tokens = [0.0] * count, [0] * count
        packed = [list[int]() for _ in range(count)]
        self.left = []
        for length in sorted(documents, reverse=True):
            fits = (i for i in (works.index(min(works)), tokens.index(min(tokens))) if tokens[i] + length <= self.most)
            at = next(fits, None)
            if at is None:
                self.left.append(length)
                continue
            packed[at].append(length)
            works[at] += self.work(length)
            tokens[at] += length
        return packed

    def _release(self, lengths: Sequence[int], count: int) -> list[int]:
        """Returns the documents that do not wait, new ones and those of which there are enough."""
        released = list[int]()
        for length in lengths:
            level = bisect_right(self.outliers, length)
            (self.queues[level - 1] if level else released).append(length)
        for queue in self.queues:
            if len(queue) >= count:
                released += [queue.popleft() for _ in range(count)]
        return released
