"""Which scores of attention are computed at one time, where ranks hold parts of the queries and of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class RankShare:
    """What some of the ranks compute of a block of scores: a share `queries` of their queries against a share `keys`
    of the keys, and of those pairs the share `pairs`, and so many diagonals `diagonals`, that the mask leaves.

    ranks: their share of all. A mask along the diagonal of a block counts half of that diagonal.
    """

    ranks: Fraction
    queries: Fraction = Fraction(1)
    keys: Fraction = Fraction(1)
    pairs: Fraction = Fraction(1)
    diagonals: Fraction = Fraction(0)

    def computed_share(self, n: int) -> Fraction:
        """Pairs that are computed, as a share of all n x n."""
        return self.queries * self.keys * self.pairs + self.diagonals / n


@dataclass(frozen=True)
class ScoreBlock:
    """A block of scores, the queries of every rank against the keys of one, that is computed by itself.

    Ranks may do different parts of it; those that no case names do none of it.
    """

    shares: tuple[RankShare, ...]

    def most_loaded(self, n: int) -> RankShare:
        """Who computes most of n queries against n keys."""
        return max(self.shares, key=lambda case: case.computed_share(n))

    def mean_share(self, n: int) -> Fraction:
        """What ranks compute on average, as a share of all pairs."""
        return sum((case.ranks * case.computed_share(n) for case in self.shares), Fraction())

    @property
    def queries(self) -> tuple[Fraction, float]:
        """The mean share of queries that take part, and the pace of the rank with most of them."""
        return _mean_and_pace([(case.ranks, case.queries) for case in self.shares])

    @property
    def keys(self) -> tuple[Fraction, float]:
        """The same of keys."""
        return _mean_and_pace([(case.ranks, case.keys) for case in self.shares])


def _mean_and_pace(shares: Sequence[tuple[Fraction, Fraction]]) -> tuple[Fraction, float]:
    mean = sum((ranks * share for ranks, share in shares), Fraction())
    return mean, float(max(share for _, share in shares) / mean)


DIAGONAL = ScoreBlock((RankShare(Fraction(1), pairs=Fraction(1, 2)),))
"""A rank's queries against its own keys, under a causal mask."""

WHOLE = ScoreBlock((RankShare(Fraction(1)),))
"""All queries against all keys."""
