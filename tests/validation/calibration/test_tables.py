"""Tables of measurements: one answer a row in the file's order, errors by cells, mistakes in one sentence."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.validation.calibration.kernels.sample import describe_cell
from meshcast.validation.calibration.tables import summary as summaries
from meshcast.validation.calibration.tables.rows import RowForecasts, SampleComparison
from meshcast.validation.calibration.tables.table import LibraryTable, expand_source, read


@dataclass(frozen=True)
class Rows:
    index: np.ndarray
    seconds: np.ndarray
    gpu: str = "h100-sxm"
    operation: str = "gemm"
    library: str = "cublas"
    kind: str = "bf16"
    classes: dict[str, Any] = field(default_factory=dict)

    def shape(self, at: int) -> str:
        return f"row {self.index[at]}"


class Plain:
    """Reads tables of `size` and `time_us`; a size below 1 has no price."""

    COLUMNS = (frozenset({"size", "time_us"}),)

    @staticmethod
    def read(table: Any) -> Any:
        good = table["size"].to_numpy() >= 1
        index = np.flatnonzero(good)
        refused = {int(at): "a size is at least 1" for at in np.flatnonzero(~good)}
        return [Rows(index, table["time_us"].to_numpy()[index] * 1e-6)], refused


class Finer:
    """Reads the same tables with a column more."""

    COLUMNS = (frozenset({"size", "time_us", "layout"}),)

    @staticmethod
    def read(table: Any) -> Any:
        return [], dict.fromkeys(range(len(table)), "finer")


def held(rows: Any, ratio: Any = 1.0, sigma: float = 0.1, least: float = 0.0, borrowed: float = 1.0) -> Any:
    seconds, flat = rows.seconds * ratio, np.ones(len(rows.index))
    return SampleComparison(rows, RowForecasts(seconds, 0 * flat, sigma * flat), rows.seconds * borrowed, least * flat)


def sized(count: int, **more: Any) -> Rows:
    return Rows(np.arange(count), np.full(count, 1e-4), **more)


Reads = Callable[..., LibraryTable]


@pytest.fixture
def read_text(tmp_path: Path) -> Reads:
    """Reads the table of a text, or of bytes."""

    def read_file(text: str | bytes, *readers: Any, name: str = "kernels.csv") -> LibraryTable:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read(path, readers or (Plain,))

    return read_file


SOURCES = "size,time_us,source\n4,100,AIC sglang 1.0\n0,50,AIC sglang 1.0\n8,200,somebody\n"


def test_answers_stand_in_the_order_of_the_file(read_text: Reads, tmp_path: Path) -> None:
    table = read_text(SOURCES, Finer, Plain)
    rows = table.answers([held(table.samples[0], ratio=1.1)])
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert {row["file"] for row in rows} == {str(tmp_path / "kernels.csv")}
    assert [row["status"] for row in rows] == ["predicted", "refused", "predicted"]
    assert rows[1]["reason"] == "a size is at least 1" and rows[1]["predicted_us"] is None
    assert rows[0]["predicted_us"] == pytest.approx(110) and rows[0]["error"] == pytest.approx(0.1)
    assert rows[0]["interval_90_us"] == pytest.approx([110 * np.exp(-0.1645), 110 * np.exp(0.1645)], rel=1e-4)
    assert [row["measured_us"] for row in rows] == [100, 50, 200]
    of_rates = replace(table, frame=table.frame.drop(columns="time_us"))
    assert [row["measured_us"] for row in of_rates.answers([held(table.samples[0])])] == pytest.approx([100, None, 200])


def test_each_row_goes_to_the_reader_of_most_of_its_columns(read_text: Reads) -> None:
    assert read_text("size,time_us,layout\n4,100,tn\n", Plain, Finer).refused == {0: "finer"}
    table = read_text("size,time_us,layout\n4,100,tn\n8,200,\n2,50,\n", Plain, Finer)
    assert table.refused == {0: "finer"} and list(table.samples[0].index) == [1, 2]


def test_compressed_tables_are_read(read_text: Reads) -> None:
    packed = gzip.compress(b"size,time_us\n4,100\n")
    assert len(read_text(packed, name="kernels.csv.gz").samples[0].index) == 1
    with pytest.raises(PlanError, match=r"cannot be read \(compressed and incomplete\)"):
        read_text(packed[:-9], name="odd.csv.gz")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("a,b\n1,2\n", "no format of measurements"),
        ("size\ttime_us\n1\t2\n", "separated by tabs"),
        ("size,size,time_us\n1,2,3\n", "given twice"),
        ('size,time_us\n"1,2\n', "line 2"),
        ("size\n1\n", "no format"),
        ("time_us,layout,length\n1,2,3\n", "add size"),
    ],
)
def test_a_file_that_is_no_table(read_text: Reads, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        read_text(text, Plain, Finer)
    assert caught.value.to_dict()["value"] == str(tmp_path / "kernels.csv")
    with pytest.raises(PlanError, match="cannot be read"):
        read(tmp_path / "absent.csv", [Plain])


def test_sources_name_their_repository(read_text: Reads) -> None:
    table = read_text(SOURCES)
    source = table.source(table.samples[0])
    assert source.startswith("ai-dynamo/aiconfigurator @095f58a51c4c") and source.endswith("somebody")
    assert expand_source("somebody") == "somebody"


def test_rows_that_nothing_can_be_read_of_keep_their_place(read_text: Reads) -> None:
    table = read_text("time_us,size,note\n100,4,\n\n50,many,\n,8,\n20,1e16,\n10,0,\n5,2,a,b\n200,8,\n")
    assert list(table.samples[0].index) == [0, 6] and len(table.frame) == 7
    reasons = {1: "'many'", 2: "time_us is missing", 3: "above 1e+15", 4: "at least 1", 5: "4 fields"}
    assert table.refused.keys() == reasons.keys() and all(word in table.refused[at] for at, word in reasons.items())
    rows = table.answers([held(table.samples[0])])
    assert [row["line"] for row in rows] == list(range(1, 8)) and rows[2]["measured_us"] is None
    assert len(read_text(f"size,time_us\n{'long ' * 100},1\n").refused[0]) <= 160


# ----------------------------------------------------------------------------------------- errors by cells


def test_figures_of_known_errors() -> None:
    sample = held(sized(100), np.linspace(0.9, 1.1, 100), sigma=0.05 / 1.645, borrowed=1.3)
    figures = summaries.figures([sample])
    assert figures["rows"] == 100 and figures["median"] == pytest.approx(0.05, abs=2e-3)
    assert figures["p90"] == pytest.approx(0.09, abs=2e-3) and figures["bias"] == pytest.approx(0, abs=1e-9)
    assert figures["inside_90"] == pytest.approx(0.5, abs=0.02) and figures["borrowed"] == pytest.approx(0.3)


@pytest.mark.parametrize(("rows", "ratio", "met"), [(100, 1.02, True), (100, 1.2, False), (20, 1.02, None)])
def test_a_cell_is_held_against_its_goal_when_it_has_rows_enough(rows: int, ratio: float, met: bool | None) -> None:
    classes = {"large": np.arange(rows) < rows // 2, "none": np.zeros(rows, bool)}
    sample = held(sized(rows, classes=classes), ratio=ratio)
    (cell,) = summaries.cells([sample], {("gemm", "bf16", "large"): (0.05, 0.2)})
    assert (cell["class"], cell["rows"], cell["met"]) == ("large", rows // 2, met)


def test_samples_of_a_cell_are_added_up() -> None:
    parts = [held(sized(10, library=name, classes={"all": np.ones(10, bool)})) for name in ("a", "b")]
    (cell,) = summaries.cells(parts, {})
    assert cell["rows"] == 20 and [row["library"] for row in summaries.libraries(parts)] == ["a", "b"]


def test_the_farthest_row_is_named() -> None:
    (worst,) = summaries.worst([held(sized(5), np.array([1, 1, 3.0, 1, 0.9]))])
    assert worst["shape"] == "row 2" and worst["error"] == pytest.approx(2.0)


def test_a_summary_counts_refused_rows_and_those_faster_than_the_hardware() -> None:
    for least, impossible in ((2e-4, 4), (0.5e-4, 0)):
        answer = summaries.summary([held(sized(4), least=least)], 6, {})
        counts = {"rows": 6, "predicted": 4, "refused": 2, "impossible": impossible}
        assert answer | counts == answer
    nothing = summaries.summary([], 3, {})
    assert nothing | {"predicted": 0, "refused": 3, "median": None} == nothing


def test_an_empty_cell_is_called_empty() -> None:
    assert [describe_cell(figure) for figure in (float("nan"), 0.0, 2.5)] == ["is empty", "is 0", "is 2.5"]
