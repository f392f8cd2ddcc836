"""Units that a scheme makes from those that schemes further in have lowered, once for all stages and plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import Fragment


class DerivedUnits:
    """Fragments by those that they were made from, with which they are dropped, and by all else that they depend on.
    Whoever adds to one copies it (`Fragment.copy`)."""

    def __init__(self) -> None:
        self._fragments: WeakKeyDictionary[Fragment, dict[Hashable, Fragment]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[DerivedUnits], tuple[()]]:
        return DerivedUnits, ()  # pickled without what it holds, which is made again

    def derive(self, fragment: Fragment, key: Hashable, make: Callable[[], Fragment]) -> Fragment:
        """Returns what is made from a fragment; `make` must neither return nor hold the fragment itself."""
        return remember(self._fragments.setdefault(fragment, {}), key, make)
