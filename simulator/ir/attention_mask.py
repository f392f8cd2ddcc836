"""Which scores of attention are computed at one time, where ranks hold parts of the queries and of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Case:
    """What some of the ranks compute of a block of scores: a share `rows` of their queries against a share `columns`
    of the keys, and of those pairs the share `pairs`, and so many diagonals `more`, that the mask leaves.

    ranks: their share of all. A mask along the diagonal of a block counts half of that diagonal.
    """

    ranks: Fraction
    rows: Fraction = Fraction(1)
    columns: Fraction = Fraction(1)
    pairs: Fraction = Fraction(1)
    more: Fraction = Fraction(0)

    def area(self, n: int) -> Fraction:
        """Pairs that are computed, as a share of all n x n."""
        return self.rows * self.columns * self.pairs + self.more / n


@dataclass(frozen=True)
class Block:
    """A block of scores, the queries of every rank against the keys of one, that is computed by itself.

    Ranks may do different parts of it; those that no case names do none of it.
    """

    cases: tuple[Case, ...]

    def laden(self, n: int) -> Case:
        """Who computes most of n queries against n keys."""
        return max(self.cases, key=lambda case: case.area(n))

    def mean(self, n: int) -> Fraction:
        """What ranks compute on average, as a share of all pairs."""
        return sum((case.ranks * case.area(n) for case in self.cases), Fraction())

    @property
    def rows(self) -> tuple[Fraction, float]:
        """The mean share of queries that take part, and the pace of the rank with most of them."""
        return _mean_and_pace([(case.ranks, case.rows) for case in self.cases])

    @property
    def columns(self) -> tuple[Fraction, float]:
        """The same of keys."""
        return _mean_and_pace([(case.ranks, case.columns) for case in self.cases])


def _mean_and_pace(shares: Sequence[tuple[Fraction, Fraction]]) -> tuple[Fraction, float]:
    mean = sum((ranks * share for ranks, share in shares), Fraction())
    return mean, float(max(share for _, share in shares) / mean)


DIAGONAL = Block((Case(Fraction(1), pairs=Fraction(1, 2)),))
"""A rank's queries against its own keys, under a causal mask."""

WHOLE = Block((Case(Fraction(1)),))
"""All queries against all keys."""
