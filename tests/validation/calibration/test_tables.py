"""Tables of measurements: one answer a row in the file's order, errors by cells, mistakes in one sentence."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.validation.calibration.kernels.sample import describe_cell
from meshcast.validation.calibration.tables import summary as summaries
from meshcast.validation.calibration.tables.rows import RowForecasts, SampleComparison
from meshcast.validation.calibration.tables.table import expand_source, read


@dataclass(frozen=True)
class Rows:
    index: np.ndarray
    seconds: np.ndarray
    gpu: str = "h100-sxm"
    operation: str = "gemm"
    library: str = "cublas"
    kind: str = "bf16"
    classes: dict = field(default_factory=dict)

    def shape(self, at):
        return f"row {self.index[at]}"


class Plain:
    """Reads tables of `size` and `time_us`; a size below 1 has no price."""

    COLUMNS = (frozenset({"size", "time_us"}),)

    @staticmethod
    def read(table):
        good = table["size"].to_numpy() >= 1
        index = np.flatnonzero(good)
        return [Rows(index, table["time_us"].to_numpy()[index] * 1e-6)], {
            int(at): "a size is at least 1" for at in np.flatnonzero(~good)
        }


class Finer:
    """Reads the same tables with a column more."""

    COLUMNS = (frozenset({"size", "time_us", "layout"}),)

    @staticmethod
    def read(table):
        return [], dict.fromkeys(range(len(table)), "finer")


def held(rows, ratio=1.0, sigma=0.1, least=0.0, borrowed=1.0):
    seconds, flat = rows.seconds * ratio, np.ones(len(rows.index))
    return SampleComparison(rows, RowForecasts(seconds, 0 * flat, sigma * flat), rows.seconds * borrowed, least * flat)


def sized(count, **more):
    return Rows(np.arange(count), np.full(count, 1e-4), **more)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text("size,time_us,source\n4,100,AIC sglang 1.0\n0,50,AIC sglang 1.0\n8,200,somebody\n")
    return path


def test_answers_stand_in_the_order_of_the_file(file):
    table = read(file, [Finer, Plain])
    rows = table.answers([held(table.samples[0], ratio=1.1)])
    assert [row["line"] for row in rows] == [1, 2, 3] and all(row["file"] == str(file) for row in rows)
    assert [row["status"] for row in rows] == ["predicted", "refused", "predicted"]
    assert rows[1]["reason"] == "a size is at least 1" and rows[1]["predicted_us"] is None
    assert rows[0]["predicted_us"] == pytest.approx(110) and rows[0]["error"] == pytest.approx(0.1)
    low, high = rows[0]["interval_90_us"]
    assert low == pytest.approx(110 * np.exp(-0.1645)) and high == pytest.approx(110 * np.exp(0.1645))
    assert [row["measured_us"] for row in rows] == [100, 50, 200]


def test_the_reader_of_most_columns_reads(tmp_path):
    path = tmp_path / "layouts.csv"
    path.write_text("size,time_us,layout\n4,100,tn\n")
    assert read(path, [Plain, Finer]).refused == {0: "finer"}


def test_compressed_tables_are_read(tmp_path):
    path = tmp_path / "kernels.csv.gz"
    with gzip.open(path, "wt") as out:
        out.write("size,time_us\n4,100\n")
    assert len(read(path, [Plain]).samples[0].index) == 1


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("", "cannot be read"), ("a,b\n1,2\n", "no format of measurements")]
)
def test_a_file_that_is_no_table(tmp_path, text, words):
    path = tmp_path / "odd.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=words) as caught:
        read(path, [Plain])
    assert caught.value.to_dict()["value"] == str(path)


def test_a_damaged_archive_is_reported(tmp_path):
    path = tmp_path / "odd.csv.gz"
    path.write_bytes(gzip.compress(b"size,time_us\n1,2\n")[:-9])
    with pytest.raises(PlanError, match=r"cannot be read \(compressed and incomplete\)"):
        read(path, [Plain])


def test_sources_name_their_repository(file):
    table = read(file, [Plain])
    assert table.source(table.samples[0]).startswith("ai-dynamo/aiconfigurator @095f58a51c4c")
    assert table.source(table.samples[0]).endswith("somebody") and expand_source("somebody") == "somebody"


def test_figures_of_known_errors():
    rows = sized(100)
    ratio = np.linspace(0.9, 1.1, 100)
    got = summaries.figures([held(rows, ratio, sigma=0.05 / 1.645, borrowed=1.3)])
    assert got["rows"] == 100 and got["median"] == pytest.approx(0.05, abs=2e-3)
    assert got["p90"] == pytest.approx(0.09, abs=2e-3) and got["bias"] == pytest.approx(0, abs=1e-9)
    assert got["inside_90"] == pytest.approx(0.5, abs=0.02) and got["borrowed"] == pytest.approx(0.3)


def test_a_cell_is_held_against_its_goal_when_it_has_rows_enough():
    def classes(count):
        return {"large": np.arange(count) < count // 2, "none": np.zeros(count, bool)}

    goals = {("gemm", "bf16", "large"): (0.05, 0.2)}
    many, few = (held(sized(n, classes=classes(n)), ratio=1.02) for n in (100, 20))
    (cell,) = summaries.cells([many], goals)
    assert cell["class"] == "large" and cell["rows"] == 50 and cell["met"] is True
    (cell,) = summaries.cells([held(sized(100, classes=classes(100)), ratio=1.2)], goals)
    assert cell["met"] is False
    (cell,) = summaries.cells([few], goals)
    assert cell["met"] is None and cell["rows"] == 10


def test_samples_of_a_cell_are_added_up():
    parts = [held(sized(10, library=name, classes={"all": np.ones(10, bool)})) for name in ("a", "b")]
    (cell,) = summaries.cells(parts, {})
    assert cell["rows"] == 20 and [row["library"] for row in summaries.libraries(parts)] == ["a", "b"]


def test_the_farthest_row_is_named():
    rows = sized(5)
    (one,) = summaries.worst([held(rows, np.array([1, 1, 3.0, 1, 0.9]))])
    assert one["shape"] == "row 2" and one["error"] == pytest.approx(2.0)


def test_rows_faster_than_the_hardware_are_counted():
    rows = sized(4)
    assert summaries.summary([held(rows, least=2e-4)], 6, {})["impossible"] == 4
    got = summaries.summary([held(rows, least=0.5e-4)], 6, {})
    assert got["impossible"] == 0 and got["refused"] == 2


def test_nothing_at_all():
    got = summaries.summary([], 3, {})
    assert got["predicted"] == 0 and got["refused"] == 3 and got["median"] is None


def test_rows_that_nothing_can_be_read_of_keep_their_place(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text("time_us,size,note\n100,4,\n\n50,many,\n,8,\n20,1e16,\n10,0,\n5,2,a,b\n200,8,\n")
    table = read(path, [Plain])
    assert list(table.samples[0].index) == [0, 6] and len(table.frame) == 7
    reasons = {1: "'many'", 2: "time_us is missing", 3: "above 1e+15", 4: "at least 1", 5: "4 fields"}
    assert table.refused.keys() == reasons.keys() and all(word in table.refused[at] for at, word in reasons.items())
    rows = table.answers([held(table.samples[0])])
    assert [row["line"] for row in rows] == list(range(1, 8)) and rows[2]["measured_us"] is None


def test_each_row_goes_to_the_reader_of_its_columns(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text("size,time_us,layout\n4,100,tn\n8,200,\n2,50,\n")
    table = read(path, [Plain, Finer])
    assert table.refused == {0: "finer"} and list(table.samples[0].index) == [1, 2]


def test_long_reasons_are_cut(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text(f"size,time_us\n{'long ' * 100},1\n")
    assert len(read(path, [Plain]).refused[0]) <= 160


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size\ttime_us\n1\t2\n", "separated by tabs"),
        ("size,size,time_us\n1,2,3\n", "given twice"),
        ('size,time_us\n"1,2\n', "line 2"),
        ("size\n1\n", "no format"),
        ("time_us,layout,length\n1,2,3\n", "add size"),
    ],
)
def test_an_unreadable_file_is_reported(tmp_path, text, words):
    path = tmp_path / "odd.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        read(path, [Plain, Finer])


def test_rows_of_tables_count_refused_ones(file):
    got = summaries.summary([held(sized(4))], 6, {})
    assert (got["rows"], got["predicted"], got["refused"]) == (6, 4, 2)


def test_an_empty_cell_is_called_empty() -> None:
    assert [describe_cell(figure) for figure in (float("nan"), 0.0, 2.5)] == ["is empty", "is 0", "is 2.5"]
