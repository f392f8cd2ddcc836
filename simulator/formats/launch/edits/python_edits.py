"""Edits settings of a configuration that a function of a Python file returns: by assignments before it returns."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise

from meshcast.hardware.documents.input_file import split_lines
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.quoting import quote_python

SECTIONS = ("training", "parallelism", "compile")
"""Sections whose settings are assigned as they are."""

POLICIES = {"selective": "SelectiveAC", "full": "FullAC", "none": ""}
"""Classes of torchtitan by modes of activation checkpointing."""

POLICY_MODULE = "torchtitan.distributed.activation_checkpoint"


def edit_python(file: LaunchFile, changes: Sequence[SettingChange]) -> str:
    """Returns the content of a file whose function assigns what changes before it returns its configuration.

    Raises PlanError for a setting that no assignment changes, and where no function of the file ends with the
    configuration as a variable.
    """
    lines, last = split_lines(file.text), _find_return(file)
    for change in reversed(changes):
        if last is None or not isinstance(last.value, ast.Name):
            raise change.refuse()
        statements = _write_statements(last.value.id, change)
        lines[last.lineno - 1 : last.lineno - 1] = [f"{' ' * last.col_offset}{line}" for line in statements]
    return "\n".join(lines) + "\n"


def name_argument(change: SettingChange) -> str:
    """Returns the argument of torchtitan that overrides a setting of a configuration: a flag, or the word that chooses
    what is recomputed; empty without."""
    section, _, name = change.name.partition(".")
    if section == "activation_checkpoint" and name in ("", "mode") and change.after in POLICIES:
        return f"activation-checkpoint:{change.after}"
    return f"--{change.name}" if section in SECTIONS and name and change.after is not None else ""


def _find_return(file: LaunchFile) -> ast.Return | None:
    """Returns the end of the function that ``--config`` names, or of the only one that ends with a variable."""
    words = file.options.arguments
    named = next((after for word, after in pairwise(words) if word == "--config"), "")
    functions = [node for node in ast.parse(file.text).body if isinstance(node, ast.FunctionDef)]
    ends = {node.name: node.body[-1] for node in functions if not node.name.startswith("_")}
    found = [
        end
        for name, end in ends.items()
        if named in ("", name) and isinstance(end, ast.Return) and isinstance(end.value, ast.Name)
    ]
    return found[0] if len(found) == 1 and (named or len(ends) == 1) else None


def _write_statements(variable: str, change: SettingChange) -> list[str]:
    """Returns the statements that change a setting of a configuration."""
    section, _, name = change.name.partition(".")
    if section == "activation_checkpoint" and change.after in POLICIES and name in ("", "mode"):
        policy = POLICIES[change.after]
        imported = [f"from {POLICY_MODULE} import {policy}"] if policy else []
        return [*imported, f"{variable}.activation_checkpoint = {policy + '.Config()' if policy else None}"]
    if section not in SECTIONS or not name or change.after is None:
        raise change.refuse()
    return [f"{variable}.{change.name} = {quote_python(change.after)}"]
