"""Checks of calibration files that do not ship with meshcast: a faulty file ends in a single error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import CatalogError, nearest
from meshcast.hardware.load import catalog, load, read_yaml
from meshcast.simulator.costs.calibration.cost_models import COST_MODELS, family
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.step_posterior import GROUPS, SIZES

STEPS = "steps"
"""The file, written by hand, of what a training step takes off the rates of kernels."""
ASSUMED = "assumed"
"""The file, written by hand, of coefficients that no table shows."""
LEARNT_STEPS = "learnt-steps"
"""The file of measured steps, which ``meshcast learn`` writes."""
DEVICE = "device.yaml"
"""The description of a measured device that is in no catalog, beside its calibration."""
LARGEST_SIGMA = 300.0
"""A larger sigma makes intervals that are no numbers."""
RATES = {"sustained": (1e-3, 10.0), "sustained_fp8": (1e-3, 10.0), "power_per_multiprocessor": (0.1, 1e3)}
"""Ranges of the values in `steps.yaml`."""
STEP_SECONDS = 1e-7, 1e8
"""Range of seconds of a step."""
ROUNDING = 1e-3
"""Files hold four digits of a value."""
SHAPE = "a section has common, libraries and unnamed, as meshcast calibrate writes them"

KEYS = {
    "section": {"common", "libraries", "unnamed"},
    "common": {"rows", "source", "coefficients", "learnt"},
    "library": {"format", "rows", "source", "sigma", "sigma_short", "kinds", "coefficients", "tuned"},
    "sigmas": {"sigma", "sigma_short", "kinds"},
    "coefficient": {"value", "sigma", "meaning", "before"},
    "architecture": {"sustained", "sustained_fp8", "power_per_multiprocessor"},
    "rate": {"value", "sigma", "rows", "meaning", "source"},
    "steps": {"rows", "confirmed", "held_back"},
    "step": {"name", "source", "measured_s", "forecast_s", "model", "shares", "sizes"},
}
"""Keys of the mappings in a file, by what they describe; architecture and rate are those of `steps.yaml`."""

RENAMED = {"spread": "sigma", "spread_short": "sigma_short", "pair": "all_to_all", "message": "p2p"}
"""Keys of files that meshcast wrote before, and what they are called now."""


def check_folder(folder: Path) -> None:
    """Raises CatalogError for a folder of calibrations that yield no cost model, or that nothing would use."""
    files = sorted(file for file in folder.glob("*.yaml") if file.name != DEVICE)
    if not files:
        rule = "there is no calibration (*.yaml) in this folder"
        raise CatalogError("calibration", rule, "Name the --out of meshcast calibrate", str(folder))
    known = {*catalog("gpus"), *map(family, catalog("links")), STEPS, LEARNT_STEPS}
    if (folder / DEVICE).is_file():
        known.add(load("gpus", str(folder / DEVICE)).name)
    for file in files:
        if file.stem not in known:
            rule = "no GPU and no kind of links has this name"
            raise CatalogError(str(file), rule, nearest(file.stem, known), file.stem)
        read_checked(file)


def read_checked(file: Path) -> dict[str, Any]:
    """Returns the data of a calibration file. Raises CatalogError where it yields no cost models."""
    read = read_yaml(file, str(file)).data
    data = {} if read is None else _mapping(read, str(file))
    if file.stem == LEARNT_STEPS:
        _check_steps(data, str(file))
        return data
    for name, content in data.items():
        where = f"{file} {name}"
        section = _mapping(content, where, "architecture" if file.stem == STEPS else "section")
        if file.stem == STEPS:
            for part in ("sustained", *(KEYS["architecture"] & section.keys())):
                entry = _mapping(section.get(part), f"{where}.{part}", "rate")
                for key, (least, most) in (("value", RATES[part]), ("sigma", (0.0, LARGEST_SIGMA))):
                    _check_number(entry, key, least, most, f"{where}.{part}")
            continue
        if name not in COST_MODELS:
            remedy = _new_name(name) or nearest(str(name), COST_MODELS)
            raise CatalogError(where, "there is no such section", remedy, name)
        parts = {key: _mapping(section.get(key), f"{where}.{key}") for key in ("common", "libraries", "unnamed")}
        _check_values(COST_MODELS[name], _mapping(parts["common"], f"{where}.common", "common"), f"{where}.common")
        for key, library in parts["libraries"].items():
            place = f"{where}.libraries.{key}"
            _check_values(COST_MODELS[name], _mapping(library, place, "library"), place)
            _check_sigmas(library, place)
            if library.get("format") not in ("fp8", "bf16", "any"):
                rule = "a format is fp8, bf16 or any"
                raise CatalogError(f"{place}.format", rule, "Write one of them", library.get("format"))
        if not parts["unnamed"]:
            raise CatalogError(f"{where}.unnamed", "it names no number format", f"Calibrate again: {SHAPE}")
        for form, sigmas in parts["unnamed"].items():
            _check_sigmas(_mapping(sigmas, f"{where}.unnamed.{form}", "sigmas"), f"{where}.unnamed.{form}")
    return data


def _check_steps(data: Mapping[str, object], where: str) -> None:
    """Raises CatalogError for measured steps that nothing follows from."""
    steps = _mapping(data.get("steps"), f"{where} steps", "steps")
    if not isinstance(steps.get("confirmed"), bool):
        raise CatalogError(f"{where} steps.confirmed", "must be true or false", "Learn again", steps.get("confirmed"))
    rows = steps.get("rows")
    if not isinstance(rows, list) or not rows:
        raise CatalogError(f"{where} steps.rows", "must be a list of measured steps", "Learn again", rows)
    for number, content in enumerate(rows):
        place = f"{where} steps.rows.{number}"
        row = _mapping(content, place, "step")
        for key in ("measured_s", "forecast_s"):
            _check_number(row, key, *STEP_SECONDS, place)
        for key in ("name", "source", "model"):
            if not isinstance(row.get(key), str):
                raise CatalogError(f"{place}.{key}", "must be a text", "Learn again", row.get(key))
        shares = _mapping(row.get("shares"), f"{place}.shares")
        for kind in shares:
            if not isinstance(kind, str) or kind.partition(" ")[0] not in GROUPS:
                raise CatalogError(f"{place}.shares", "there is no such kind of work", nearest(str(kind), GROUPS), kind)
            _check_number(shares, kind, 0.0, 1.0, f"{place}.shares")
        sizes = row.get("sizes")
        if not isinstance(sizes, Mapping) or set(sizes) != set(SIZES):
            raise CatalogError(f"{place}.sizes", f"has {', '.join(SIZES)}", "Learn again", sizes)
        for name in SIZES:
            _check_number(sizes, name, 1.0, 1e12, f"{place}.sizes")


def _check_values(model: type, part: Mapping[str, Any], where: str) -> None:
    """Raises CatalogError for a coefficient that the cost model does not have, or whose value is out of range."""
    known = coefficients(model)
    for name, content in _mapping(part.get("coefficients"), f"{where}.coefficients").items():
        if name not in known:
            remedy = f"{nearest(str(name), known)}. Files of an older release: calibrate again"
            raise CatalogError(f"{where}.coefficients", "there is no such coefficient", remedy, name)
        place = f"{where}.coefficients.{name}"
        entry = _mapping(content, place, "coefficient")
        _check_number(entry, "value", known[name].low, known[name].high, place)
        _check_number({"sigma": 0.0, **entry}, "sigma", 0.0, LARGEST_SIGMA, place)


def _check_sigmas(part: Mapping[str, Any], where: str) -> None:
    kinds = _mapping(part.get("kinds", {}), f"{where}.kinds")
    every = [(where, part)]
    every += [
        (place, _mapping(sigmas, place, "sigmas"))
        for kind, sigmas in kinds.items()
        for place in [f"{where}.kinds.{kind}"]
    ]
    for place, sigmas in every:
        for key in ("sigma", "sigma_short"):
            _check_number(sigmas, key, 0.0, LARGEST_SIGMA, place)


def _mapping(data: Any, where: str, kind: str = "") -> dict[str, Any]:
    """Returns `data` as a dict. Raises CatalogError for anything else, for keys that are called otherwise now, and
    for keys that none of its kind has.

    kind: a key of `KEYS`; "": any key is valid.
    """
    if not isinstance(data, Mapping):
        shape = f"its keys are {', '.join(sorted(KEYS[kind]))}" if kind else SHAPE
        raise CatalogError(where, "must be a mapping", f"Calibrate again: {shape}", data)
    for key in ("spread", "spread_short"):
        if key in data:
            raise CatalogError(f"{where}.{key}", "this key has another name", _new_name(key), key)
    for key in data:
        if kind and key not in KEYS[kind]:
            raise CatalogError(f"{where}.{key}", "no such key", nearest(str(key), KEYS[kind]))
    return dict(data)


def _new_name(key: Any) -> str:
    """Says what to write for a key of an older release; "" for others."""
    return f"Write {RENAMED[key]}, or calibrate again" if key in RENAMED else ""


def _check_number(data: Mapping[str, Any], key: str, low: float, high: float, where: str) -> None:
    """Raises CatalogError if `data` has no number between `low` and `high` under `key`, rounding aside."""
    value: Any = data.get(key)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (plain and low - ROUNDING * abs(low) <= value <= high + ROUNDING * abs(high)):
        rule = f"must be a number from {low:g} to {high:g}"
        raise CatalogError(f"{where}.{key}", rule, "Correct it, or calibrate again", value)
