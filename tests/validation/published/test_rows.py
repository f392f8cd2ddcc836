"""Files of published runs: a malformed line is reported with its place, and no line is lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.models.flops import megatron_2021
from meshcast.simulator.models.load import load_model
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.rows import PublishedRun, UnreadableLine, read, read_files, read_shipped

GOOD = {"id": "a-1", "spec": {"class": "dense", "stack": "nemo"}, "measured": {"step_time_s": 2}, "notes": "prose"}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def test_lines_that_are_no_runs_keep_their_place(tmp_path: Path) -> None:
    path = write(
        tmp_path / "runs.jsonl",
        GOOD,
        "",
        "{not json",
        "[1]",
        GOOD | {"spec": {"class": "dense"}},
        GOOD | {"spec": GOOD["spec"] | {"recompte": {}}},  # type: ignore[operator]
        GOOD | {"spec": GOOD["spec"] | {"gpus": "eight"}},  # type: ignore[operator]
        GOOD | {"measured": {"step_time_s": 0}},
        {"id": 7},
        '{"id": "a-1", "measured": {"mfu": NaN}}',
        GOOD | {"measured": {"step_times_s": 2}},
        '{"id": "a-2", "id": "a-3"}',
        GOOD,
        GOOD | {"id": "a-2"},
    )
    found = read(path)
    assert [isinstance(run, PublishedRun) for run in found] == [True, *[False] * 11, True]
    reasons = [(run.id, run.reason) for run in found if isinstance(run, UnreadableLine)]
    words = ["JSON", "object", "stack", "recompute", "gpus", "step_time_s", "id", "NaN", "Did you mean 'step_time_s'"]
    words += ["'id' is given twice", "runs.jsonl:1 has this id"]
    for (name, reason), line, word in zip(reasons, range(3, 14), words, strict=True):
        assert f"runs.jsonl:{line}" in reason and word in reason
        assert name == ("a-1" if line in (5, 6, 7, 8, 11, 13) else None)


def test_an_id_in_two_files_is_refused_with_both_places(tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", GOOD | {"id": "b-1"}, "", GOOD)
    second = write(tmp_path / "second.jsonl", GOOD | {"id": "b-2"}, GOOD)
    assert len(read_files([first])) == len(read_files([second])) == 2
    both = {
        r"second.jsonl:2 id .*first.jsonl:3 has": [first, second],
        r"first.jsonl:3 id .*second.jsonl:2 has": [second, first],
    }
    for places, paths in both.items():
        with pytest.raises(PlanError, match=places) as refused:
            read_files(paths)
        assert "\n" not in str(refused.value) and f"is '{GOOD['id']}'" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read(tmp_path / "absent.jsonl")


def test_the_source_is_the_id_up_to_its_first_dash() -> None:
    names = {"mbridge-25.09-x": "mbridge", "alone": "alone", "vtrain-multi-0001": "vtrain-multi"}
    for name, source in names.items():
        assert PublishedRun.model_validate(GOOD | {"id": name}).source == source


def test_throughput_stands_in_for_a_step_time() -> None:
    spec = GOOD["spec"] | {"gpus": 8, "batch": {"global": 16, "seq": 1024}}  # type: ignore[operator]
    rate = PublishedRun.model_validate(GOOD | {"spec": spec, "measured": {"tokens_per_s_per_gpu": 512.0}})
    assert rate.step_time == 16 * 1024 / (8 * 512)
    assert PublishedRun.model_validate(GOOD | {"measured": {"tokens_per_s_per_gpu": 512.0}}).step_time is None
    assert PublishedRun.model_validate(GOOD).step_time == 2
    assert PublishedRun.model_validate(GOOD | {"measured": {}}).step_time is None


def test_shipped_rows_are_the_papers_tables() -> None:
    runs = read_shipped()
    count = Counter(run.source for run in runs)
    assert (count["narayanan"], count["korthikanti"], count["smith"]) == (10, 8, 3)
    assert len({run.id for run in runs}) == len(runs)
    for run in runs:
        mesh = run.spec.mesh
        assert run.step_time and mesh.dp and mesh.tp and mesh.pp
        assert mesh.dp * mesh.tp * mesh.pp == run.spec.gpus


def test_times_of_table_1_follow_from_its_teraflops() -> None:
    for run in read_shipped():
        if run.source == "narayanan":
            model = load_model(map_run(run).job["model"])
            batch, rate = run.spec.batch, run.measured.tflops_per_gpu or 0.0
            flops = megatron_2021(model, 2048) * 2048 * (batch.total or 0)
            assert run.step_time == pytest.approx(flops / ((run.spec.gpus or 0) * rate * 1e12), rel=1e-4), run.id
