"""``meshcast measure``, ``import``, and ``validate`` of their files: mistakes end in one message."""

import json
from pathlib import Path

import pytest

from meshcast.validation.measurements import campaign
from meshcast.validation.measurements.measurement import ForecastValue, Machine, Measurement, MeasurementRow, read
from tests.experiments.cli.samples import run

JOB = """
model: gpt2-124m
cluster: {gpu: cpu-core, gpus: 2}
framework: reference
precision: fp32
plan: {tp: 2}
"""


JOB_IN_LINE = JOB.strip().replace("\n", ", ")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, "utf-8")
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    forecasts = {"catalog": ForecastValue(value=1.1, low=1.0, high=1.3)}
    rows = [
        MeasurementRow(name="step", group="tp 2", forecasts=forecasts, samples=(1.0, 1.0, 1.1)),
        MeasurementRow(
            name="rank 0 peak allocated",
            group="tp 2",
            quantity="bytes",
            samples=(3e9,),
            forecasts={"catalog": ForecastValue(value=3.1e9, low=3.1e9, high=3.1e9)},
        ),
    ]
    measurement = Measurement(
        kind="distributed",
        title="gpt2",
        machine=Machine(device="cpu", name="a processor"),
        versions={},
        command="",
        forecast_written="then",
        measured="now",
        rows=tuple(rows),
    )
    return measurement.write(tmp_path / "steps.json")


def test_without_torch_the_message_names_the_package(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.experiments.cli.measured_files.find_spec", lambda name: None)
    for words in (("measure", "kernels", job), ("calibrate", "--device", "cpu", "--out", job.parent / "mine")):
        result = run(*words)
        assert result.exit_code == 2 and "it is not installed" in result.stderr


def test_a_measurement_is_held_against_its_forecast(measured: Path, tmp_path: Path) -> None:
    result = run("validate", "distributed", measured, "--json", "--plot", tmp_path / "m.png")
    answer = json.loads(result.stdout)
    assert answer["rows"][0]["error"]["catalog"] == pytest.approx(0.1) and (tmp_path / "m.png").stat().st_size > 5000
    page = run("validate", "distributed", measured).stdout
    assert "rank 0 peak allocated" in page and "+10.0" in page


@pytest.mark.parametrize(("kind", "words"), [("distributed", "rank 0 peak allocated"), ("collectives", ": 2 rows")])
def test_what_was_measured_is_shown_and_of_collectives_counted(
    kind: str, words: str, job: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshcast.experiments.cli.measure.find_measuring", lambda kind: lambda *_, **__: read(measured))
    result = run("measure", kind, job, "--out", measured)
    assert result.exit_code == 0 and words in result.output
    assert ("+10.0" in result.output) == (kind == "distributed")


def test_files_of_another_kind_are_called_by_their_name(measured: Path, tmp_path: Path) -> None:
    result = run("validate", "stages", measured)
    assert result.exit_code == 2 and "of kind distributed" in result.stderr
    table = tmp_path / "t.csv"
    table.write_text("a,b\n1,2\n", "utf-8")
    assert "cannot be mixed" in run("validate", "kernels", measured, table).stderr


def test_a_file_named_twice_is_refused(measured: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(measured)
    for kind in ("distributed", "kernels"):
        twice = run("validate", kind, measured, "--data", measured)
        assert twice.exit_code == 2 and "it is named twice. Name each file once" in twice.stderr
    assert (
        f"it is the same file as {measured}" in run("validate", "distributed", measured, tmp_path / "link.json").stderr
    )
    assert "takes no such option" in run("validate", "distributed", measured, "--jobs", "2").stderr


def test_a_log_is_imported_and_forecast(job: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    line = " iteration {}/ 100 | consumed samples: 8 | elapsed time per iteration (ms): {} | global batch size: 1 |\n"
    log.write_text("".join(line.format(i, 500.0 + i) for i in range(1, 9)), "utf-8")
    out = tmp_path / "steps.json"
    result = run("import", "megatron-log", log, "--job", job, "--out", out, "--skip", "2")
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text("utf-8"))
    assert len(found["rows"][0]["samples"]) == 6 and found["rows"][0]["forecasts"]["catalog"]["value"] > 0


def test_a_campaign_with_a_failed_run_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = "[{name: a, measure: kernels, job: one}, {name: b, measure: kernels, job: one}]"
    (tmp_path / "one.yaml").write_text(
        f"title: t\ndevice: cpu\njobs:\n  one: {{{JOB_IN_LINE}}}\nruns: {runs}\n", "utf-8"
    )
    why = campaign.Unmeasured("failed: OSError: No space left on device (whole error in a.error.txt)")
    left_out = campaign.Unmeasured("not measured: it needs 4 GPUs, and this machine has 2", failed=False)

    def run_all(planned: campaign.Campaign, *_: object) -> list[object]:
        return [*zip(planned.runs, (why, left_out), strict=True)]

    monkeypatch.setattr(campaign, "run_all", run_all)
    done = run("measure", "campaign", tmp_path / "one.yaml", "--out", tmp_path / "out", "--json")
    assert done.exit_code == 2 and json.loads(done.stdout)["failed"] == ["a"]
    assert "1 of 2 runs failed: a; of a: failed: OSError: No space left" in done.stderr
