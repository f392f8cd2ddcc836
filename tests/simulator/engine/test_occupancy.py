"""Intervals in which a stream is busy, of copies that follow each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.engine.occupancy import _repeat_intervals


@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4),
    times=st.integers(1, 5),
    gap=st.integers(0, 8),
)
def test_every_repetition_is_busy_where_the_first_is(lengths: list[tuple[int, int]], times: int, gap: int) -> None:
    """At each moment of a grid, but shifted; intervals are apart from each other."""
    ends = np.cumsum([length for pair in lengths for length in pair]).astype(float)
    begin, end = ends[::2] - ends[0], ends[1::2] - ends[0]
    later = end[-1] + gap
    moments = np.arange(0.5, times * later)
    first, repeated = (begin, end), _repeat_intervals(begin, end, times, later)
    busy = [((starts <= at) & (at < stops)).any() for starts, stops in (repeated,) for at in moments]
    assert busy == [((first[0] <= at % later) & (at % later < first[1])).any() for at in moments]
