"""``advise --write``: the written file is forecast, by ``predict``, as it was announced; others stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.draws import drawn
from tests.experiments.advice.files import LAUNCHES
from tests.experiments.cli.samples import answer, run


def read_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("name", drawn(list(LAUNCHES), keep=lambda name: name in ("megatron", "llamafactory")))
def test_the_written_file_is_forecast_as_announced(folder: Path, name: str) -> None:
    launch, kept = LAUNCHES[name], read_files(folder)
    changes = [word for change in launch.changes for word in ("--set", change)]
    written = launch.name.replace(".", ".new.")
    advice: dict[str, Any] = answer("advise", launch.name, *changes, "--write", written)
    best = advice["best"]
    assert advice["patched"] == written and kept.items() <= read_files(folder).items()
    given = [word for change in launch.changes for word in ("--set", change) if not change.startswith("batch.")]
    forecast = answer("predict", written, *(given if name != "deepspeed" else changes))
    assert forecast["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)
    assert forecast["memory"]["peak_allocated_gib"] == pytest.approx(best["peak_allocated_gib"], rel=1e-9)
    assert forecast["memory"]["fits_probability"] == pytest.approx(best["fits_probability"], rel=1e-9)
    assert "these edits is forecast as the job is" in advice["read_back"]
    added = {line[1:] for line in advice["diff"] if line.startswith("+") and not line.startswith("+++")}
    texts = [text for name, text in read_files(folder).items() if name not in kept]
    assert added and all(any(line in text for text in texts) for line in added if "deepspeed:" not in line)


def test_settings_of_a_file_that_is_read_are_written_beside_it(folder: Path) -> None:
    changes = [word for change in LAUNCHES["llamafactory"].changes for word in ("--set", change)]
    done = run("advise", "run.yaml", *changes, "--write", "run.new.yaml")
    assert done.exit_code == 0 and "wrote run.new.yaml, engine.new.json" in done.stderr.replace(f"{folder}/", ""), (
        done.stderr
    )
    assert "deepspeed: engine.new.json" in (folder / "run.new.yaml").read_text("utf-8")
    again = run("advise", "run.yaml", *changes, "--write", "run.new.yaml")
    assert again.exit_code == 2 and "engine.new.json exists already" in again.stderr


def test_of_a_job_file_the_changed_job_is_written(folder: Path) -> None:
    job = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:1", "batch": {"global": 16}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | {"plan": {"tp": 4, "recompute": "full"}}), "utf-8")
    best = answer("advise", "job.yaml", "--write", "job.new.yaml")["best"]
    assert answer("predict", "job.new.yaml")["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)


def test_the_page_has_the_edits_and_no_file_without_write(folder: Path) -> None:
    kept = read_files(folder)
    done = run("advise", "run.sh")
    assert done.exit_code == 0 and read_files(folder) == kept
    for words in ("what to change", "in the words of Megatron-LM", " together:", "--- run.sh", "+++ run.sh"):
        assert words in done.stdout, done.stdout
    assert all(len(line) <= 110 for line in done.stdout.partition("--- run.sh")[0].splitlines())
