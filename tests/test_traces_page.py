"""The commands of docs/traces.md run in an empty folder, and their output has the excerpts of the page."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.excerpts import BLOCK, follow_page, run_command

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "traces.md").read_text("utf-8")


def test_every_command_and_every_excerpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow_page(PAGE) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "step.json.gz", "ranks", "memory.pickle"}
    assert len(list((tmp_path / "ranks").iterdir())) == 2
    check_table_of_perfetto(Path("step.json.gz"))


def check_table_of_perfetto(written: Path) -> None:
    """The table states the kernels of the trace."""
    trace = json.loads(gzip.decompress(written.read_bytes()))
    lengths = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            lengths[str(event["args"]["stream"])].append(event["dur"])
    ours = {stream: (f"{len(found):,}", f"{sum(found) / 1e3:,.3f}") for stream, found in lengths.items()}
    rows = re.findall(r"^\| (\d+) \| [a-z-]+ \| ([\d,]+) \| ([\d,.]+) \|$", PAGE, re.MULTILINE)
    assert {stream: (number, ms) for stream, number, ms in rows} == ours


def test_the_table_of_hta_states_the_figures_of_the_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((name, _, text),) = [found.groups() for found in BLOCK.finditer(PAGE) if found[1]]
    Path(name).write_text(text, "utf-8")
    answer = json.loads(run_command("meshcast predict job.yaml --json"))
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
