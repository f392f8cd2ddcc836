"""Python files that are found by their path: schemes, and files of plug-ins."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from meshcast.hardware.errors import PlanError

Kind = TypeVar("Kind")


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a file as a module of this name. Raises PlanError for one that cannot be imported."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the code of somebody's file raises
        line = error.lineno if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1].lineno
        rule = f"this file cannot be imported: {type(error).__name__}: {error}"
        raise PlanError(f"{path}:{line}", rule, "Correct the file, or take it out of the folder") from error
    return module


def classes_of(module: ModuleType, base: type[Kind]) -> list[type[Kind]]:
    """Returns the classes that a module defines of a base class."""
    classes = (each for _, each in inspect.getmembers(module, inspect.isclass))
    return [each for each in classes if issubclass(each, base) and each.__module__ == module.__name__]
