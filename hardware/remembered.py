"""Decorators for methods whose results are kept, by each object; and stores that several objects share, the entries of
which are forgotten where they are not used for long."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, MutableMapping
from functools import wraps
from inspect import signature
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Instance = TypeVar("Instance")
P = ParamSpec("P")
Result = TypeVar("Result")
Key = TypeVar("Key")

LOOK_UP = """
def look_up({instance}, {names}):
    __key = {key}
    try:
        return {instance}.{store}[__key]
    except (AttributeError, KeyError):
        pass
    __result = __method({instance}, {names})
    {instance}.__dict__.setdefault("{store}", {{}})[__key] = __result
    return __result
"""
"""Has the parameters of the method itself, which is as fast as a look-up by hand: with `*args` it would take half as
long again. Arguments by name or by default make no other key."""


def remember(
    store: MutableMapping[Key, Result], key: Key, make: Callable[[], Result], most: int | None = None
) -> Result:
    """Returns what a store has under a key, computed where it has nothing. A store of `most` entries is emptied
    before."""
    try:
        return store[key]
    except KeyError:
        pass
    result = make()
    if most is not None and len(store) >= most:
        store.clear()
    store[key] = result
    return result


class AgingStore(Protocol):
    """A store of any results that forgets those which are not used."""

    nbytes: float

    def age(self) -> None:
        """Drops results that were not used since the last call."""

    def __len__(self) -> int:
        """Counts the results that were used since."""


class RecentResults(dict[Key, Result]):
    """A store of results from which `age` drops those that were not used since it was called last.

    Results are looked up by `remember` or by index; `in` and `get` see those alone that were used since.

    nbytes: of the results that were used since.
    """

    def __init__(self, count_bytes: Callable[[Result], float]) -> None:
        """Makes an empty store. count_bytes: of a result and of what is computed from it and kept with it."""
        self._count_bytes, self.nbytes = count_bytes, 0.0
        self._before: dict[Key, Result] = {}

    def __missing__(self, key: Key) -> Result:
        self[key] = result = self._before.pop(key)
        return result

    def __setitem__(self, key: Key, result: Result) -> None:
        self.nbytes += self._count_bytes(result)
        super().__setitem__(key, result)

    def __reduce__(self) -> tuple[type[dict[Key, Result]], tuple[dict[Key, Result]]]:
        return dict, ({**self},)  # pickled as what was used last, which nothing adds to

    def age(self) -> None:
        """Drops results that were not used since the last call."""
        self._before, self.nbytes = dict(self), 0.0
        super().clear()

    def clear(self) -> None:
        """Drops all results."""
        self.age()
        self._before = {}


def remembered(method: Callable[Concatenate[Instance, P], Result]) -> Callable[Concatenate[Instance, P], Result]:
    """Returns `method` with its results kept as long as the object, by its arguments, which are hashable; results of
    calls that raise are not kept.

    They lie in the `__dict__` of the object, each method's in a separate store: pickled and copied with it, but not
    carried over by `dataclasses.replace`.
    """
    _, *names = signature(method).parameters
    return _keep_results(method, names[0] if len(names) == 1 else f"({', '.join(names)})")


def remembered_by(
    key: Callable[..., Hashable],
) -> Callable[[Callable[Concatenate[Instance, P], Result]], Callable[Concatenate[Instance, P], Result]]:
    """Returns a decorator like `remembered` for a method whose result depends on `key` of its arguments alone."""

    def decorate(method: Callable[Concatenate[Instance, P], Result]) -> Callable[Concatenate[Instance, P], Result]:
        return _keep_results(method, f"__key_of({', '.join(signature(method).parameters)})", key)

    return decorate


def _keep_results(
    method: Callable[Concatenate[Instance, P], Result], key: str, key_of: Callable[..., Hashable] | None = None
) -> Callable[Concatenate[Instance, P], Result]:
    """Makes the look-up of a method. key: as source text, of the parameters."""
    instance, *names = signature(method).parameters
    store = re.sub(r"\W+", "_", f"_results_of_{method.__qualname__}")
    scope: dict[str, Callable[Concatenate[Instance, P], Result]] = {}
    source = LOOK_UP.format(instance=instance, names=", ".join(names), key=key, store=store)
    exec(source, {"__method": method, "__key_of": key_of}, scope)
    look_up = scope["look_up"]
    look_up.__defaults__ = method.__defaults__  # type: ignore[attr-defined]
    return wraps(method)(look_up)
