"""Blocks of attention scores under context parallelism: which share of a block each rank computes.

Ranks hold parts of the queries and of the keys. A block is the scores of every rank's queries against the keys of a
rank; the causal mask leaves ranks different shares of it, depending on how positions are ordered over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from meshcast.hardware.records import dataclass


@dataclass(frozen=True)
class RankShare:
    """The share of a block of scores that some of the ranks compute.

    ranks: share of all ranks that this holds for.
    queries: share of their queries that take part.
    keys: share of the keys that take part.
    pairs: share of the pairs of these queries and keys that the mask leaves.
    diagonals: number of diagonals computed in addition; a mask along the diagonal of a block counts half of it.
    tile: queries and keys of a tile of the kernel, which computes a tile whole if the mask leaves any pair of it; where
        there is a mask along the diagonal. None: the pairs alone.
    """

    ranks: Fraction
    queries: Fraction = Fraction(1)
    keys: Fraction = Fraction(1)
    pairs: Fraction = Fraction(1)
    diagonals: Fraction = Fraction(0)
    tile: tuple[int, int] | None = None

    def computed_share(self, n: int) -> Fraction:
        """Returns the computed pairs as a share of all n x n."""
        if self.tile is not None and self.pairs < 1:
            return self.queries * self.keys * share_of_tiles(n, *self.tile)
        return self.queries * self.keys * self.pairs + self.diagonals / n


@cache
def share_of_tiles(n: int, queries: int, keys: int) -> Fraction:
    """Returns the share of n x n pairs that are in tiles of so many queries and keys on or below the diagonal."""
    pairs = 0
    for begin in range(0, n, queries):
        end = min(begin + queries, n)
        pairs += (end - begin) * min(-(-end // keys) * keys, n)
    return Fraction(pairs, n * n)


@dataclass(frozen=True)
class ScoreBlock:
    """A block of scores, the queries of every rank against the keys of a rank, computed by a separate kernel.

    shares: what the ranks compute of it; ranks that no share covers compute nothing.
    """

    shares: tuple[RankShare, ...]

    def most_loaded(self, n: int) -> RankShare:
        """Returns the share of the rank that computes most of n queries against n keys."""
        return max(self.shares, key=lambda share: share.computed_share(n))

    def mean_share(self, n: int) -> Fraction:
        """Returns the mean over ranks of the computed pairs, as a share of all n x n."""
        return sum((share.ranks * share.computed_share(n) for share in self.shares), Fraction())

    @property
    def queries(self) -> tuple[Fraction, float]:
        """The mean over ranks of the share of queries that take part, and the largest share over that mean."""
        return _mean_and_pace([(share.ranks, share.queries) for share in self.shares])

    @property
    def keys(self) -> tuple[Fraction, float]:
        """The mean over ranks of the share of keys that take part, and the largest share over that mean."""
        return _mean_and_pace([(share.ranks, share.keys) for share in self.shares])


def _mean_and_pace(shares: Sequence[tuple[Fraction, Fraction]]) -> tuple[Fraction, float]:
    mean = sum((ranks * share for ranks, share in shares), Fraction())
    return mean, float(max(share for _, share in shares) / mean)


DIAGONAL = ScoreBlock((RankShare(Fraction(1), pairs=Fraction(1, 2)),))
"""The queries of a rank against its keys, under a causal mask."""

WHOLE = ScoreBlock((RankShare(Fraction(1)),))
"""All queries against all keys."""
