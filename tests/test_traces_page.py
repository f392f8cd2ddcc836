"""The commands of docs/traces.md run in an empty folder, and their output has the excerpts of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_tutorial import DOCS, blocks, run, words

PAGE = (DOCS / "traces.md").read_text("utf-8")


def test_every_command_and_every_excerpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, seen = "", 0
    for name, language, text in blocks(PAGE):
        if name:
            Path(name).write_text(text, "utf-8")
        elif language == "sh":
            output = "\n".join(run(line) for line in text.splitlines() if line.startswith("meshcast "))
        elif language == "text":
            seen += 1
            for line in text.splitlines():
                assert words(line) in words(output), f"{line}\nis not in\n{output}"
    assert seen == 3
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "step.json.gz", "ranks", "memory.pickle"}
    assert len(list((tmp_path / "ranks").iterdir())) == 2


def test_the_table_of_hta_states_the_figures_of_the_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((name, _, text),) = [block for block in blocks(PAGE) if block[0]]
    Path(name).write_text(text, "utf-8")
    answer = json.loads(run("meshcast predict job.yaml --json"))
    parts, compute = answer["breakdown_s"], answer["breakdown_s"]["compute"]
    shown = {}
    for cells in re.findall(r"^\| `(.*?)\| ([\d.,]+) \| ([\d.,]+) \|", PAGE, re.MULTILINE):
        shown[re.split(r"`", cells[0])[0]] = float(cells[2].replace(",", ""))
    overhead = answer["step_time_s"] - shown["kernel_time"] * 1e-3
    ours = {
        "kernel_time": answer["step_time_s"] - 0.035,
        "compute_time": sum(compute.values()) + parts["optimizer"],
        "non_compute_time": sum(parts["exposed"].values()),
        "idle_time": parts["bubble"] + parts["host"] - 0.035,
        "gemm(...)": compute["gemm"],
    }
    assert overhead == pytest.approx(0.035, abs=1e-6)
    for key, seconds in ours.items():
        assert shown[key] == pytest.approx(1e3 * seconds, abs=6e-4), key
