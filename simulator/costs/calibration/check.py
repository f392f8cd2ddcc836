"""Calibrations that meshcast does not ship: what no law can be made of ends in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware.errors import CatalogError, nearest
from hardware.load import catalog, load, read_yaml
from simulator.costs.calibration.cost_models import EVERY, family
from simulator.costs.coefficients import coefficients

STEPS = "steps"
"""The file, written by hand, of what a training step takes off the rates of kernels."""
ASSUMED = "assumed"
"""The file, written by hand, of coefficients that no table tells."""
DEVICE = "device.yaml"
"""The description of a measured device that is in no catalog, beside its calibration."""
WIDEST = 300.0
"""A spread beyond it makes intervals that are no numbers."""
ROUNDING = 1e-3
"""Files hold four digits of a value."""
SHAPE = "a section has common, libraries and unnamed, as meshcast calibrate writes them"


def check_folder(folder: Path) -> None:
    """Refuses a folder of calibrations that laws cannot be made of, or that nothing would ask for."""
    files = sorted(file for file in folder.glob("*.yaml") if file.name != DEVICE)
    if not files:
        rule = "there is no calibration (*.yaml) in this folder"
        raise CatalogError("calibration", rule, "Name the --out of meshcast calibrate", str(folder))
    known = {*catalog("gpus"), *map(family, catalog("links")), STEPS}
    if (folder / DEVICE).is_file():
        known.add(load("gpus", str(folder / DEVICE)).name)
    for file in files:
        if file.stem not in known:
            rule = "no GPU and no kind of links has this name"
            raise CatalogError(str(file), rule, nearest(file.stem, known), file.stem)
        read_checked(file)


def read_checked(file: Path) -> dict[str, Any]:
    """The calibration in a file that meshcast does not ship. Raises CatalogError where no laws can be made of it."""
    read = read_yaml(file, str(file)).data
    data = {} if read is None else _mapping(read, str(file))
    for name, given in data.items():
        where = f"{file} {name}"
        section = _mapping(given, where)
        if file.stem == STEPS:
            entry = _mapping(section.get("sustained"), f"{where}.sustained")
            for key, most in (("value", 10.0), ("spread", WIDEST)):
                _number(entry.get(key), 0.0, most, f"{where}.sustained.{key}")
            continue
        if name not in EVERY:
            raise CatalogError(where, "there is no such section", nearest(str(name), EVERY), name)
        parts = {key: _mapping(section.get(key), f"{where}.{key}") for key in ("common", "libraries", "unnamed")}
        _sound_values(EVERY[name], parts["common"], f"{where}.common")
        for key, library in parts["libraries"].items():
            _sound_values(EVERY[name], _mapping(library, f"{where}.libraries.{key}"), f"{where}.libraries.{key}")
            _sound_spreads(library, f"{where}.libraries.{key}")
            if library.get("format") not in ("fp8", "bf16", "any"):
                rule = "a format is fp8, bf16 or any"
                raise CatalogError(f"{where}.libraries.{key}.format", rule, "Write one of them", library.get("format"))
        if not parts["unnamed"]:
            raise CatalogError(f"{where}.unnamed", "it names no number format", f"Calibrate again: {SHAPE}")
        for form, spreads in parts["unnamed"].items():
            _sound_spreads(_mapping(spreads, f"{where}.unnamed.{form}"), f"{where}.unnamed.{form}")
    return data


def _sound_values(law: type, part: Mapping[str, Any], where: str) -> None:
    known = coefficients(law)
    for name, given in _mapping(part.get("coefficients"), f"{where}.coefficients").items():
        if name not in known:
            raise CatalogError(f"{where}.coefficients", "there is no such coefficient", nearest(str(name), known), name)
        place = f"{where}.coefficients.{name}"
        value = _mapping(given, place).get("value")
        _number(value, known[name].low, known[name].high, f"{place}.value")


def _sound_spreads(part: Mapping[str, Any], where: str) -> None:
    kinds = _mapping(part.get("kinds", {}), f"{where}.kinds")
    every = [(where, part), *((f"{where}.kinds.{kind}", own) for kind, own in kinds.items())]
    for place, own in every:
        for key in ("spread", "spread_short"):
            _number(_mapping(own, place).get(key), 0.0, WIDEST, f"{place}.{key}")


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise CatalogError(where, "must be a mapping", f"Calibrate again: {SHAPE}", data)
    return dict(data)


def _number(value: Any, low: float, high: float, where: str) -> None:
    """Refuses what is no number between `low` and `high`, rounding aside."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (plain and low - ROUNDING * abs(low) <= value <= high + ROUNDING * abs(high)):
        rule = f"must be a number from {low:g} to {high:g}"
        raise CatalogError(where, rule, "Correct it, or calibrate again", value)
