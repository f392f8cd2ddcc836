"""Measurement files: written whole, read strictly, compared with the earlier forecast."""

import json

import pytest
from jsonschema import Draft202012Validator

from meshcast.experiments.schema import schema
from meshcast.hardware.errors import PlanError
from meshcast.validation.measurements import row_errors
from meshcast.validation.measurements.measurement import (
    ForecastValue,
    Machine,
    Measurement,
    MeasurementRow,
    read,
    to_json,
)
from meshcast.validation.measurements.recording import record


def value(x: float) -> ForecastValue:
    return ForecastValue(value=x, low=0.8 * x, high=1.2 * x)


def rows() -> list[MeasurementRow]:
    step = MeasurementRow(name="step", group="tp 2", forecasts={"catalog": value(1.2), "calibration": value(0.95)})
    memory = {"catalog": ForecastValue(value=2.0**30, low=2.0**30, high=2.0**30)}
    return [step, MeasurementRow(name="rank 0 peak allocated", group="tp 2", quantity="bytes", forecasts=memory)]


@pytest.fixture
def begun() -> Measurement:
    return Measurement(
        kind="distributed",
        title="a model on two cores",
        machine=Machine(device="cpu", name="a processor"),
        versions={"torch": "2.13"},
        command="meshcast measure distributed job.yaml",
        forecast_written="2026-11-21T12:00:00+00:00",
        rows=tuple(rows()),
    )


def measured(begun: Measurement) -> Measurement:
    step, memory = begun.rows
    filled = [
        step.model_copy(update={"samples": (1.1, 0.9, 1.0)}),
        memory.model_copy(update={"samples": (2.0**30 * 1.01,)}),
    ]
    return begun.with_samples(filled, ("quiet",))


def test_a_file_reads_back_and_fits_its_schema(begun, tmp_path) -> None:
    done = measured(begun)
    assert read(done.write(tmp_path / "new" / "m.json")) == done
    Draft202012Validator(schema("measurement")).validate(json.loads(to_json(done)))
    assert done.notes == ("quiet",) and done.measured is not None and begun.measured is None


def test_the_forecast_stays_as_it_was_written(begun) -> None:
    done = measured(begun)
    assert [row.forecasts for row in done.rows] == [row.forecasts for row in begun.rows]
    assert done.forecast_written == begun.forecast_written


def test_a_row_is_one_line(begun) -> None:
    lines = to_json(measured(begun)).splitlines()
    assert sum('"samples"' in line for line in lines) == 2 and all(len(line) < 400 for line in lines)


def test_errors_are_of_the_median_and_counted_by_forecast(begun) -> None:
    found = row_errors.row_answers([("m.json", measured(begun))])
    assert found[0]["measured"] == 1.0 and found[0]["error"] == pytest.approx({"catalog": 0.2, "calibration": -0.05})
    errors = {(one["quantity"], one["by"]): one for one in row_errors.summarize(found)["forecasts"]}
    assert set(errors) == {("time", "catalog"), ("time", "calibration"), ("memory", "catalog")}
    assert errors["time", "catalog"]["worst"] == pytest.approx(0.2) and errors["time", "catalog"]["bias"] > 0
    assert errors["time", "calibration"]["inside_90"] == 1.0 and errors["memory", "catalog"]["inside_90"] is None


def test_unmeasured_rows_are_not_counted(begun) -> None:
    found = row_errors.row_answers([("m.json", begun)])
    assert [row["measured"] for row in found] == [None, None]
    assert row_errors.summarize(found) == {"rows": 2, "measured": 0, "forecasts": [], "classes": []}


def test_scatter_leaves_out_the_outermost_samples() -> None:
    even = MeasurementRow(name="x", samples=tuple(1 + 0.01 * i for i in range(11)))
    assert even.median == pytest.approx(1.05) and even.scatter == pytest.approx(0.04 / 1.05)
    assert MeasurementRow(name="x", samples=(1.0, 2.0)).scatter == 0.0


def test_a_row_without_a_name_has_no_class(begun) -> None:
    row = begun.rows[0].model_copy(update={"name": " "})
    assert row_errors.row_class(row) == "" and row_errors.row_class(begun.rows[0]) == "step"


@pytest.mark.parametrize(
    ("error", "note"), [(KeyboardInterrupt(), "interrupted: "), (PlanError("a", "b", "c"), "not finished: ")]
)
def test_a_measurement_that_stops_says_why_and_keeps_its_rows(begun, tmp_path, error, note) -> None:
    with pytest.raises(type(error)), record(begun, tmp_path / "m.json") as recording:
        recording.rows.append(begun.rows[0].model_copy(update={"samples": (1.0,)}))
        raise error
    done = read(tmp_path / "m.json")
    assert done.notes[-1].startswith(note) and [row.samples for row in done.rows] == [(1.0,), ()]
