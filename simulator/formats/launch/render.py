"""The text of an imported job file: every key with the setting behind it, and lists of what was not understood."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from meshcast.hardware.errors import to_line
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.quoting import quote_yaml
from meshcast.simulator.formats.launch.verdicts import TakenSetting
from meshcast.simulator.job.plan_keys import PLAN_KEYS

WIDTH = 118


def render_job(imported: ImportedJob) -> str:
    """Returns a job file, YAML with comments."""
    origin = f"# Made from {to_line(imported.where)} by meshcast import {imported.form}."
    lines = [f"{origin} A comment names the setting behind a key."]
    if imported.assumed:
        lines += ["#", "# Assumed, because the file does not state it:"]
        for key, why in imported.assumed.items():
            lines += _wrap(f"{key}: {why}")
    body = [line for key, value in imported.job.items() for line in _render(key, value, key, imported.comments, 0)]
    if imported.checkpoints:
        setting = to_line(imported.comments["run.checkpoints.every_steps"])
        body += [] if "run" in imported.job else ["# run:"]
        body.append(
            f"  # checkpoints: {quote_yaml(imported.checkpoints)}  # {setting}; meshcast run reads it from the file"
        )
    for title, entries in _list_settings(imported, body):
        if entries:
            lines += ["#", f"# {title}:", *(line for entry in entries for line in _wrap(entry))]
    return "\n".join([*lines, "", *body]) + "\n"


def _list_settings(imported: ImportedJob, body: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the classes of settings, each with a line for every setting, or for all of the same reason.

    body: the lines of the job, whose comments name settings already.
    """
    findings = imported.findings
    yield "Open, and assumed", [str(question) for question in findings.questions]
    whys = [(entry, f"; {entry.errs}" if entry.errs else "") for entry in findings.approximated]
    yield "Approximated", [f"{entry.shown}: {entry.why}{errs}" for entry, errs in whys]
    comments = {line.rpartition("# ")[2] for line in body if "# " in line}
    comments |= {comment.partition(": ")[2] for comment in comments}  # of a plan in long form
    taken = [entry for entry in findings.taken if to_line(entry.shown) not in comments]
    yield "Taken, beside those that stand behind a key", [", ".join(map(_describe_taken, taken))] if taken else []
    reasons: dict[str, list[str]] = {}
    for entry in findings.ignored:
        reasons.setdefault(entry.why, []).append(entry.shown)
    yield "Without influence on time and memory", [f"{', '.join(names)}: {why}" for why, names in reasons.items()]


def _describe_taken(entry: TakenSetting) -> str:
    """Returns a setting with the first key that it states."""
    key = next(iter(entry.keys), None)
    return entry.shown if key is None else f"{entry.shown} ({key} {quote_yaml(entry.keys[key])})"


def _wrap(text: str) -> list[str]:
    """Returns comment lines of at most `WIDTH` letters."""
    return textwrap.wrap(
        to_line(text),
        WIDTH,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _render(key: str, value: Any, path: str, comments: Mapping[str, str], depth: int) -> list[str]:
    margin = "  " * depth
    if (
        isinstance(value, Mapping)
        and value
        and "use" not in value
        and (depth == 0 or len(str(value)) > 50 or any(name.startswith(f"{path}.") for name in comments))
    ):
        lines = [f"{margin}{quote_yaml(key)}:"]
        if "mesh" in value:  # in long form a key says what several settings do
            said = {
                name.removeprefix("plan."): comment
                for name, comment in comments.items()
                if name.startswith("plan.") and "default of" not in comment
            }
            lines += [f"{margin}  # {name}: {to_line(comment)}" for name, comment in said.items() if name not in value]
        for inner, member in value.items():
            lines += _render(inner, member, f"{path}.{inner}", comments, depth + 1)
        return lines
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [f"{margin}{quote_yaml(key)}:", *(f"{margin}  - {quote_yaml(entry)}" for entry in value)]
    comment = to_line(comments.get(_behind(path), ""))
    line = f"{margin}{quote_yaml(key)}: {quote_yaml(value)}"
    return [f"{line}  # {comment}" if comment else line]


def _behind(path: str) -> str:
    """Returns the key of an import behind a key of a job file."""
    section, _, key = path.removesuffix(".use").partition(".")
    return f"plan.{PLAN_KEYS[key].flat}" if section == "plan" and key in PLAN_KEYS else path
