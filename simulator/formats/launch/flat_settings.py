"""Settings of files with sections, by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshcast.hardware.documents.input_file import Unreadable, parse_json
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import line_of
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.table import Stated


def flatten_settings(data: object, text: str, where: str, prefix: str = "") -> dict[str, Stated]:
    """Returns the settings of nested mappings, by their dotted names behind a prefix."""
    flat: dict[str, Stated] = {}

    def walk(path: tuple[str, ...], value: object) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk((*path, str(key)), inner)
        elif path:
            name = ".".join(path)
            line = line_of(text, path) if text else None
            flat[prefix + name] = Stated(value, name, f"{where}:{line}" if line else where)

    walk((), data)
    return flat


def flatten_file(file: LaunchFile, prefix: str = "", example: str = "key: value") -> dict[str, Stated]:
    """Returns the settings of a YAML or JSON file. Raises PlanError for a file that holds no mapping."""
    if not isinstance(file.data, Mapping):
        raise PlanError(file.where, "such a file is a mapping of keys to values", f"Start with {example}")
    return flatten_settings(file.data, file.text, file.where, prefix)


def split_objects(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings with JSON objects among their values taken apart, as Hugging Face's argument parser does."""
    split: dict[str, Stated] = {}
    for name, stated in settings.items():
        value = stated.value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                inner = flatten_settings(parse_json(value, constants=True, repeated=True), "", "", f"{name}.")
            except Unreadable:
                inner = {}
            split |= {key: replace(stated, value=part.value) for key, part in inner.items()}
            if inner:
                continue
        split[name] = stated
    return split
