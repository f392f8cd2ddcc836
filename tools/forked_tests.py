"""Tests of changed code in forks of one process, which has imported and collected them once.

`ForkedTests` is a plugin of pytest. In place of running what pytest collects it forks for every change, gives the
functions of a module their changed code there, and runs tests until one fails.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest

MEMORY = 12 * 2**30
"""Bytes of data that the tests of a change may hold, so that a loop without an end fails before the machine is full."""


Place = tuple[Any, ...]
"""Where a function stands in a file."""


class Change(NamedTuple):
    """One module with other code.

    Attributes:
        key: a name for it.
        path: the file of the module, from the root.
        line: line of the change in the module as it is, from 1.
        code: the whole changed file.
        near: test files that are run first, from the root.
    """

    key: str
    path: str
    line: int
    code: str
    near: tuple[str, ...]


class Outcome(NamedTuple):
    """What the tests said of a change.

    Attributes:
        key: the change's.
        test: the first test that failed; empty where none did.
        seconds: of the clock.
        imported: whether the changed function was called before the change, while modules were imported or tests
            collected: values that it made then are those of the unchanged code.
    """

    key: str
    test: str
    seconds: float
    imported: bool


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
        for path in {change.path for change in self._changes}:
            import_module("meshcast." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/meshcast/" in frame.f_code.co_filename:
            self._called[id(frame.f_code)] = frame.f_code

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries the changes, one fork each; no test runs in this process."""
        sys.setprofile(None)
        if session.testsfailed:  # while collecting
            return False
        gc.unfreeze()  # what a conftest froze is not listed
        functions = _list_functions(self._root, {change.path for change in self._changes})
        gc.freeze()
        for change in self._changes:
            self._tell(self._try(session, change, functions[change.path]))
        return True

    def _try(self, session: pytest.Session, change: Change, functions: Sequence[FunctionType]) -> Outcome:
        begin = time.monotonic()
        try:
            codes = _pair_codes(self._root / change.path, change.code)
        except ValueError:
            return Outcome(change.key, "", 0.0, imported=True)
        imported = any(
            id(code) in self._called and change.line in _list_lines(code)
            for function in functions
            for code in _walk_codes(function.__code__)
        )
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            self._run_child(session, change, codes, functions, write)
        os.close(write)
        try:
            ready, _, _ = select.select([read], [], [], 10 * self._seconds)
            test = os.read(read, 10_000).decode() if ready else ""
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return Outcome(change.key, {"": "no end", "-": ""}.get(test, test), time.monotonic() - begin, imported)

    def _run_child(
        self,
        session: pytest.Session,
        change: Change,
        codes: dict[Place, CodeType],
        functions: Sequence[FunctionType],
        write: int,
    ) -> None:
        """Writes the test that fails, ``-`` if none does, nothing if it is killed; never returns."""
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (self._seconds, self._seconds))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            for function in functions:
                function.__code__ = codes[_find_place(function.__code__)]
            os.write(write, (_find_failure(session, change.near) or "-").encode())
        except BaseException as error:  # a test that ends the process, memory
            os.write(write, f"{type(error).__name__}".encode())
        finally:
            os._exit(0)


def _find_failure(session: pytest.Session, near: Sequence[str]) -> str:
    """Returns the first test that fails, or an empty text."""
    failed: list[str] = []

    class Reports:
        @staticmethod
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.register(Reports())
    items = sorted(session.items, key=lambda item: item.nodeid.partition("::")[0] not in near)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            return failed[0]
    return ""


def _list_functions(root: Path, paths: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Returns the functions that live, by the file of their code."""
    names = {os.path.join(str(root), "meshcast", path): path for path in paths}
    functions: dict[str, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in names:
            functions[names[thing.__code__.co_filename]].append(thing)
    return functions


def _pair_codes(path: Path, changed: str) -> dict[Place, CodeType]:
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
