"""Folders of users, whose files are read beside ours: what a name means that ours do not have.

A plug-in is a folder, or an installed package, with the folders of `FOLDERS`, whose files are written like ours::

    gpus/my-gpu.yaml            links/ nodes/ clusters/ reliability/ stores/ prices/ machines/ likewise
    models/my-model-7b.yaml     frameworks/my-framework.yaml
    schemes/pipeline/my_schedule.py     and the other families
    planners/my_planner.py      programs/my_program.py

It is named by ``MESHCAST_PLUGINS`` (folders, separated as in ``PATH``), by ``plugins: [folder, ...]`` of the user's
``meshcast/meshcast.toml`` in the folder of configurations, by the entry point of an installed package (group
``meshcast.plugins``), or by a ``meshcast.toml`` beside a job. A job may come from a stranger, so Python files that only
the last one names are not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from meshcast.hardware.errors import CatalogError, MeshcastError, PlanError, nearest
from meshcast.hardware.records import dataclass

VARIABLE = "MESHCAST_PLUGINS"
FILE = "meshcast.toml"
GROUP = "meshcast.plugins"
"""Entry points of packages that are plug-ins: each names a package, whose folder is read."""

FOLDERS = (
    *("gpus", "links", "nodes", "clusters", "reliability", "stores", "prices", "machines"),
    *("models", "frameworks", "schemes", "planners", "programs"),
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Plugin:
    """A folder whose files are read beside ours.

    folder: absolute.
    named_by: who names it, for errors.
    runs: whether its Python files may be run.
    """

    folder: Path
    named_by: str
    runs: bool


_plugins: list[Plugin] | None = None
"""Those that are in use; None: the user's are not looked up yet."""

_installed = False
"""Whether installed packages were looked up."""

_look_ups: list[Callable[[], None]] = []
"""Forget what `remember_names` keeps."""


def remember_names(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keeps what a function of names returns, until a plug-in is added."""
    known = cache(func)
    _look_ups.append(known.cache_clear)
    return known  # type: ignore[return-value]


def list_plugins() -> tuple[Plugin, ...]:
    """Returns the plug-ins that are in use."""
    global _plugins
    if _plugins is None:
        _plugins = []
        for word in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
            _add(Path(word).expanduser(), VARIABLE, runs=True)
        configuration = find_configuration()
        if configuration.is_file():
            _read(configuration, runs=True)
    return tuple(_plugins)


def find_configuration() -> Path:
    """Returns the file that names the user's plug-ins; it need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "meshcast" / FILE


def add_plugin(folder: Path | str, named_by: str = "") -> None:
    """Adds the folder of a user, whose Python files may be run. Raises PlanError for what is no such folder."""
    list_plugins()
    _add(Path(folder), named_by or str(folder), runs=True)


def add_plugins_beside(folder: Path) -> None:
    """Adds the plug-ins that a ``meshcast.toml`` in the folder of a job names; their Python files are not run unless
    the user names them, too."""
    file = folder / FILE
    with suppress(OSError, ValueError):  # what no folder can be called is refused by whoever reads the job
        status = file.stat()
        _read_beside(file.absolute(), status.st_mtime_ns)


@cache
def _read_beside(file: Path, changed_ns: int) -> None:
    """Adds the plug-ins that a file beside a job names, once as long as it is unchanged."""
    list_plugins()
    _read(file, runs=False)


def add_installed() -> bool:
    """Adds the packages that are plug-ins, once; returns whether there are some that were not in use."""
    global _installed
    if _installed:
        return False
    _installed = True
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    before = list_plugins()
    for point in entry_points(group=GROUP):
        spec = find_spec(point.module)
        places = [*(spec.submodule_search_locations or ())] if spec is not None else []
        if not places:
            rule = f"the entry point {point.name} of {GROUP} names no package that is installed as a folder"
            raise PlanError(point.value, rule, "Name the package whose folder holds schemes/, gpus/ and others")
        _add(Path(places[0]), f"the package {point.module}", runs=True)
    return list_plugins() != before


def with_installed(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Calls a function once more with the packages that are plug-ins if it refuses what it is given. Looking for
    packages takes longer than reading a job, and few jobs have names that only a package knows."""

    @wraps(func)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return func(*args, **kwargs)
        except MeshcastError:
            if not add_installed():
                raise
        return func(*args, **kwargs)

    return call


def find_files(kind: str, ending: str, ours: Collection[str]) -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of what they describe.

    kind: a folder of `FOLDERS`, of schemes with the family. ending: of the files.
    ours: names that meshcast has itself.
    Raises CatalogError for a name that there is twice.
    """
    files = dict[str, Path]()
    for plugin in list_plugins():
        for path in sorted((plugin.folder / kind).glob(f"*{ending}")):
            name = path.stem.replace("_", "-") if ending == ".py" else path.stem
            if path.stem == "__init__":
                continue
            other = "meshcast" if name in ours else str(files.get(name, ""))
            if other:
                raise CatalogError(str(path), f"{other} has this name for another of {kind}", "Rename the file", name)
            files[name] = path
    return files


def may_run(path: Path) -> bool:
    """Returns whether a Python file may be run: unless it is of a plug-in that only a file beside a job names."""
    plugins = [plugin for plugin in list_plugins() if path.is_relative_to(plugin.folder)]
    return not plugins or any(plugin.runs for plugin in plugins)


def check_runs(path: Path, where: str) -> None:
    """Raises PlanError for a Python file that may not be run. where: what needs it."""
    if not may_run(path):
        plugins = [plugin for plugin in list_plugins() if path.is_relative_to(plugin.folder)]
        rule = f"its file {path} is code, and only {plugins[0].named_by} names it, which may be a stranger's"
        remedy = f"Read it, then name its folder yourself: {VARIABLE}={plugins[0].folder}, or in {find_configuration()}"
        raise PlanError(where, rule, remedy)


def list_plugin_files() -> list[tuple[str, Path]]:
    """Returns all files of plug-ins with their names: what forecasts depend on beside the installation."""
    return [
        (f"{number}/{path.relative_to(plugin.folder).as_posix()}", path)
        for number, plugin in enumerate(list_plugins())
        for folder in FOLDERS
        for path in sorted((plugin.folder / folder).rglob("*"))
        if path.suffix in (".py", ".yaml")
    ]


def _add(folder: Path, named_by: str, runs: bool) -> None:
    """Adds a folder, once; one that may not be run and is named by the user as well may be run."""
    assert _plugins is not None
    folder = folder.absolute()
    if not folder.is_dir() or not any((folder / name).is_dir() for name in FOLDERS):
        rule = "a plug-in is a folder with some of " + ", ".join(FOLDERS) if folder.is_dir() else "no such folder"
        raise PlanError(named_by, rule, "Name the folder that holds them", str(folder))
    same = next((plugin for plugin in _plugins if plugin.folder == folder), None)
    if same is None or (runs and not same.runs):
        _plugins[:] = [*(plugin for plugin in _plugins if plugin is not same), Plugin(folder, named_by, runs)]
        for forget in _look_ups:
            forget()


def _read(file: Path, runs: bool) -> None:
    """Adds the plug-ins that a file names. Raises PlanError for a mistake in it."""
    import tomllib

    from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, read_text

    try:
        data = tomllib.loads(read_text(file, DESCRIPTION))
    except Unreadable as error:
        raise error.error(PlanError, str(file), 'Write plugins = ["folder"]') from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(str(file), f"this is no TOML: {error}", 'Write plugins = ["folder"]') from None
    for key in data.keys() - {"plugins"}:
        raise PlanError(f"{file} {key}", "no such key", nearest(key, ["plugins"]), data[key])
    folders = data.get("plugins", [])
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise PlanError(f"{file} plugins", "it is a list of folders", 'Write plugins = ["folder"]', folders)
    for folder in folders:
        _add(file.parent / Path(folder).expanduser(), str(file), runs)
