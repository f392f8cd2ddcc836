"""Finds the code of a model that has no reader, and keeps what its trace says: a trace takes some ten seconds, and what
was kept needs neither torch nor transformers.

Run is the code of installed packages alone: `transformers` for a config, and the package that a job names by
``module: package.file:function``. Code that comes with a checkpoint is not run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.hardware.documents.output_file import user_caches, write_file
from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.model import explain_errors
from meshcast.simulator.models.trace.reading import read_record
from meshcast.simulator.models.trace.record import Record

if TYPE_CHECKING:
    from meshcast.simulator.models.trace.folding import ModuleTrace

FORMAT = 1
"""Number of the format of records; others are not read."""

PACKAGES = ("torch", "transformers")
"""Packages of the extra `trace`."""

INSTALL = "pip install 'meshcast[trace]'"

DEFAULT_SEQ = 2048
"""Tokens of a sequence where a config does not say how many its positions are."""

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "max_sequence_length")
"""Keys of configs for the longest sequence."""


def has_extra() -> bool:
    """Returns whether the packages of the extra are installed."""
    return all(find_spec(name) is not None for name in PACKAGES)


def trace_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns the fields of the model of a Hugging Face config by a trace of its code; None if it was not traced before
    and the extra is not installed.

    Raises ModelError for a type that the installed transformers lacks, or whose code cannot be traced.
    """

    def run() -> ModuleTrace:
        from meshcast.simulator.models.trace.transformers_types import trace_type

        return trace_type(config, where)

    record = _remember(name_config(config), PACKAGES, run)
    text = config.get("text_config")
    lengths = [part.get(key) for part in (config, text if isinstance(text, Mapping) else {}) for key in LENGTHS]
    seq = next((length for length in lengths if isinstance(length, int) and length > 0), DEFAULT_SEQ)
    return None if record is None else read_record(record, seq)


def name_config(config: Mapping[str, Any]) -> str:
    """Returns the name of the record of a config, without releases."""
    return _name_record(str(config["model_type"]), json.dumps(config, sort_keys=True, default=str))


def trace_module(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of the model that a function of an installed package makes.

    Raises ModelError where there is no such function, or where the extra is not installed.
    """
    name, seq = spec["module"], spec.get("seq")
    package, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not package or not function:
        rule = "it names a function that makes the model"
        raise ModelError(f"{where}.module", rule, "Write package.file:function", name)
    if not isinstance(seq, int) or seq < 1:
        rule = "a module does not say how long the sequences of its training are"
        raise ModelError(f"{where}.seq", rule, "Add `seq: ...` [tokens]", seq)
    code = _find_code(package, f"{where}.module", name)

    def run() -> ModuleTrace:
        from meshcast.simulator.models.trace.modules import trace_function

        return trace_function(package, function, f"{where}.module")

    record = _remember(_name_record(name.replace(":", "."), code), ("torch",), run)
    if record is None:
        rule = "a module is traced with torch, which is not installed"
        raise ModelError(f"{where}.module", rule, f"Install the extra: {INSTALL}", name)
    with explain_errors(where):
        return {"name": name, **read_record(record, seq)}


def _find_code(package: str, where: str, name: str) -> str:
    """Returns the text of the file of a module. Raises ModelError if it is in no installed package."""
    if package.partition(".")[0] in sys.stdlib_module_names:
        raise ModelError(where, "the standard library makes no models", "Write package.file:function", name)
    try:
        spec = find_spec(package)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        rule = "no installed package has this module, and code beside a job is not run"
        remedy = "Install the package that has it (pip install -e its folder), or correct the name"
        raise ModelError(where, rule, remedy, name)
    return Path(spec.origin).read_text("utf-8")


# -------------------------------------------------------------------------------------------- what is kept


def _remember(name: str, packages: tuple[str, ...], run: Callable[[], ModuleTrace]) -> Record | None:
    """Returns the record that is kept for what `name` says, or makes it; None if a package is not installed.

    Without the packages the record of any of their releases counts.
    """
    releases = "-".join(_release(package) for package in packages)
    folder, file = traces_folder(), f"{name}-{releases}.json"
    missing = [package for package in packages if find_spec(package) is None]
    candidates = sorted(folder.glob(f"{name}-*.json")) if missing and folder.is_dir() else [folder / file]
    for candidate in reversed(candidates):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Record.from_json(candidate.read_text("utf-8"))
    if missing:
        return None
    from meshcast.simulator.models.trace.folding import fold

    record = fold(run())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / file, record.to_json())
    return record


def traces_folder() -> Path:
    """Returns the folder of records: that of the user's caches."""
    return user_caches() / "traces"


def _name_record(title: str, content: str) -> str:
    """Returns the name of the record of a content, which begins with a title as far as names of files may have it."""
    digest = hashlib.sha256(f"{FORMAT} {title} {content}".encode("utf-8", "surrogatepass")).hexdigest()[:20]
    return f"{re.sub(r'[^a-zA-Z0-9_.-]', '_', title)[:60]}-{digest}"


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"
