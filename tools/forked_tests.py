"""Tests of changed code in forks of one process, which has imported and collected them once.

`ForkedTests` is a plugin of pytest. In place of running what pytest collects it notes, file by file and in a fork,
which tests run which changed statement and how long they take. Then it forks for every change, gives the functions of
the module their changed code there, and runs the tests of the statement until one fails.
"""

from __future__ import annotations

import ast
import builtins
import gc
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest

from meshcast.simulator.ir.registry import find_scheme, scheme_names

MEMORY = 12 * 2**30
"""Bytes of data that the tests of a change may hold, so that a loop without an end fails before the machine is full."""


LEAST_SECONDS, SLOWER = 30, 3
"""Seconds of a processor that the tests of a change may take at least, and over those that they take without it."""

Place = tuple[Any, ...]
"""Where a function stands in a file."""


class Change(NamedTuple):
    """One module with other code.

    Attributes:
        key: a name for it.
        path: the file of the module, from the root.
        line: line of the change in the module as it is, from 1.
        code: the whole changed file.
    """

    key: str
    path: str
    line: int
    code: str


class Outcome(NamedTuple):
    """What the tests said of a change.

    Attributes:
        key: the change's.
        test: the first test that failed; empty where none did.
        tests: how many run the changed statement, or stand in a file with such a test.
        seconds: of the clock.
        imported: whether the changed function was called before the change, while modules were imported or tests
            collected: values that it made then are those of the unchanged code.
    """

    key: str
    test: str
    tests: int
    seconds: float
    imported: bool


class _TestsOfFile(NamedTuple):
    """Tests of a file that pass.

    Attributes:
        hits: they run a changed statement.
        rest: the others.
        seconds: of the hits.
        whole: seconds of all.
    """

    hits: list[pytest.Item]
    rest: list[pytest.Item]
    seconds: float
    whole: float


class _TestsOfChange(NamedTuple):
    """The tests of a change, in their order, and the seconds of a processor that they may take."""

    items: list[pytest.Item]
    limit: int


class ForkedTests:
    """A plugin that tries changes on the tests that are collected.

    changes: what to try. tell: is called with each outcome. seconds: of a processor that the tests of a change may
    take, or ten times as many of the clock.
    """

    def __init__(self, root: Path, changes: Iterable[Change], tell: Callable[[Outcome], None], seconds: int) -> None:
        self._root, self._changes, self._tell, self._seconds = root, list(changes), tell, seconds
        self._called: dict[int, CodeType] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Notes the functions that are called while modules are imported."""
        sys.setprofile(self._note_call)
        for name in scheme_names():  # whose files are imported by path
            find_scheme(name)
        for path in {change.path for change in self._changes}:
            import_module("meshcast." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/meshcast/" in frame.f_code.co_filename:
            self._called[id(frame.f_code)] = frame.f_code

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries the changes, one fork each; no test runs in this process."""
        sys.setprofile(None)
        if session.testsfailed:
            raise pytest.UsageError("tests cannot be collected")
        gc.unfreeze()  # what a conftest froze is not listed
        functions = _list_functions(self._root, {change.path for change in self._changes})
        gc.freeze()
        tests = self._list_tests(session, functions)
        for change in self._changes:
            self._tell(self._try(session, change, functions[change.path], tests.get(change.key, _TestsOfChange([], 0))))
        return True

    def _list_tests(
        self, session: pytest.Session, functions: Mapping[str, Sequence[FunctionType]]
    ) -> dict[str, _TestsOfChange]:
        """Returns the tests that run each changed statement, by the change's key, quick files first; then the rest of
        these files, whose tests may use what an earlier test left in a fixture or a cache."""
        by_path: dict[str, list[Change]] = defaultdict(list)
        for change in self._changes:
            by_path[change.path].append(change)
        probes = [
            (function, code)
            for path, changes in by_path.items()
            for codes in [_add_probes(self._root / path, changes)]
            for function in functions[path]
            for code in [codes[_find_place(function.__code__)]]
        ]
        by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            by_file[item.nodeid.partition("::")[0]].append(item)
        tests: dict[str, list[_TestsOfFile]] = defaultdict(list)
        for items in by_file.values():
            lines = self._fork(partial(_note_tests, session, items, probes), self._seconds).splitlines()
            runs = [(item, *json.loads(line)) for item, line in zip(items, lines, strict=False)]
            for key in {key for _, _, _, keys in runs for key in keys}:
                hits = [(item, seconds) for item, seconds, passed, keys in runs if passed and key in keys]
                rest = [item for item, _, passed, keys in runs if passed and key not in keys]
                seconds, whole = sum(seconds for _, seconds in hits), sum(row[1] for row in runs)
                tests[key].append(_TestsOfFile([item for item, _ in hits], rest, seconds, whole))
        for files in tests.values():
            files.sort(key=attrgetter("seconds"))
        return {
            key: _TestsOfChange(
                [item for file in files for item in file.hits] + [item for file in files for item in file.rest],
                LEAST_SECONDS + SLOWER * math.ceil(sum(file.whole for file in files)),
            )
            for key, files in tests.items()
        }

    def _try(
        self, session: pytest.Session, change: Change, functions: Sequence[FunctionType], tests: _TestsOfChange
    ) -> Outcome:
        imported = any(
            id(code) in self._called and change.line in _list_lines(code)
            for function in functions
            for code in _walk_codes(function.__code__)
        )
        begin = time.monotonic()
        try:
            codes = _pair_codes(self._root / change.path, change.code)
        except ValueError:
            return Outcome(change.key, "", len(tests.items), 0.0, imported=True)
        changed = [(function, codes[_find_place(function.__code__)]) for function in functions]
        test = "-"
        if tests.items:
            test = self._fork(partial(_find_failure, session, tests.items, changed), min(tests.limit, self._seconds))
        return Outcome(
            change.key, {"": "no end", "-": ""}.get(test, test), len(tests.items), time.monotonic() - begin, imported
        )

    def _fork(self, run: Callable[[int], None], seconds: int) -> str:
        """Returns what `run` writes to the file descriptor that it is given, in a process of its own with limits."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                run(write)
            except BaseException as error:  # a test that ends the process, memory
                os.write(write, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(write)
        parts, end = [], time.monotonic() + 10 * seconds
        try:
            while select.select([read], [], [], max(0.0, end - time.monotonic()))[0] and (part := os.read(read, 2**16)):
                parts.append(part)
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return b"".join(parts).decode()


Swap = tuple[FunctionType, CodeType]
"""A function and the code that it gets."""


def _swap_codes(swaps: Iterable[Swap]) -> None:
    for function, code in swaps:
        function.__code__ = code


def _run_tests(session: pytest.Session, tests: Sequence[pytest.Item]) -> Iterator[tuple[float, bool]]:
    """Yields the seconds of each test, and whether it passes."""
    failed: list[str] = []

    class Reports:
        @staticmethod
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.register(Reports())
    for test, following in zip(tests, [*tests[1:], None], strict=True):
        begin = time.perf_counter()
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        yield time.perf_counter() - begin, test.nodeid not in failed


def _note_tests(session: pytest.Session, tests: Sequence[pytest.Item], probes: Iterable[Swap], write: int) -> None:
    """Writes a line for each test: its seconds, whether it passes, and the keys of the probes that it runs."""
    hit: set[str] = set()
    setattr(builtins, PROBE, hit.add)
    _swap_codes(probes)
    for took, passed in _run_tests(session, tests):
        os.write(write, (json.dumps([took, passed, sorted(hit)]) + "\n").encode())
        hit.clear()


def _find_failure(session: pytest.Session, tests: Sequence[pytest.Item], changed: Iterable[Swap], write: int) -> None:
    """Writes the first test that fails, or ``-``."""
    _swap_codes(changed)
    runs = zip(tests, _run_tests(session, tests), strict=True)
    os.write(write, next((test.nodeid for test, (_, passed) in runs if not passed), "-").encode())


PROBE = "_note_change"
"""Name of what probes call."""


def _add_probes(path: Path, changes: Sequence[Change]) -> dict[Place, CodeType]:
    """Returns the code of each function of a file with a probe before each changed statement, by the function's
    place."""
    tree = ast.parse(path.read_text("utf-8"))
    bodies = [
        body
        for node in ast.walk(tree)
        for name in ("body", "orelse", "finalbody")
        if isinstance(body := getattr(node, name, None), list)
    ]
    for change in changes:
        body, place = min(
            (
                (body, place)
                for body in bodies
                for place, statement in enumerate(body)
                if statement.lineno <= change.line <= (statement.end_lineno or 0)
            ),
            key=lambda pair: (pair[0][pair[1]].end_lineno or 0) - pair[0][pair[1]].lineno,
        )
        probe = ast.parse(f"{PROBE}({change.key!r})").body[0]
        body.insert(place, ast.copy_location(probe, body[place]))
    return _pair_codes(path, ast.fix_missing_locations(tree))


def _list_functions(root: Path, paths: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Returns the functions that live, by the file of their code."""
    names = {str(root / folder / path): path for path in paths for folder in ("meshcast", ".")}
    functions: dict[str, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in names:
            functions[names[thing.__code__.co_filename]].append(thing)
    return functions


def _pair_codes(path: Path, changed: str | ast.Module) -> dict[Place, CodeType]:
    """Returns the changed code of each function of a file, by the function's place.

    Raises:
        ValueError: the changed file has other functions, or they have other variables of the functions around them.
    """
    old, new = (list(_walk_codes(compile(text, path, "exec"))) for text in (path.read_text("utf-8"), changed))
    if [(code.co_name, code.co_freevars) for code in old] != [(code.co_name, code.co_freevars) for code in new]:
        raise ValueError(f"{path}: other functions")
    return {_find_place(code): changed for code, changed in zip(old, new, strict=True)}


def _walk_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_codes(constant)


def _find_place(code: CodeType) -> Place:
    """Returns where a function stands: its name, its first line, and the lines and columns of what it does."""
    return code.co_qualname, code.co_firstlineno, tuple(code.co_positions())


def _list_lines(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}
