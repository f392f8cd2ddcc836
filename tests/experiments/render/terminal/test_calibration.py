"""``meshcast validate kernels|collectives`` and ``calibrate``: every row answered in its place, mistakes in a line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.experiments.render.terminal import calibration as measured
from meshcast.hardware.errors import MeshcastError
from meshcast.validation.calibration.kernels import tables as kernels
from tests.draws import drawn_grid
from tests.experiments.cli.samples import run
from tests.experiments.render.terminal.tables import KIND, ROWS, put
from tests.strategies import examples

ODD = ["", "nan", "-1", "0", "abc", "inf", "1e300", "1e-300", "1e400", "9" * 30, "1.5", "1", "3", "7", "131072", "True"]
ODD += ["H100", "mi300x", "v100", "h100-nvl", "fp8", "nvfp4", "BF16", "fp4", "power_law_400", "p2p", "1_000", "é", '"']
ODD += [
    "RoCE 0x0G",
    "9999999x9999999999G InfiniBand",
    "EFA " + "9" * 400 + "G per GPU",
    "Slingshot 3.2.1 Tb/s per node",
]


def answer(kind: str, *files: Path) -> dict:
    result = run("validate", kind, "--json", *files)
    assert result.exit_code == 0, result.output

    def never(name: str) -> None:
        raise AssertionError(f"{name} is no number of JSON")

    return json.loads(result.stdout, parse_constant=never)


def sound(validated: dict, count: int) -> None:
    """One answer for each row, in order, and sums that are right."""
    rows, summary = validated["rows"], validated["summary"]
    assert [row["line"] for row in rows] == list(range(1, count + 1))
    for row in rows:
        if row["status"] == "predicted":
            low, high = row["interval_90_us"]
            assert 0 < low <= row["predicted_us"] <= high and row["measured_us"] > 0 and row["reason"] is None
        else:
            assert row["status"] == "refused" and row["reason"] and row["predicted_us"] is None
    predicted = sum(row["status"] == "predicted" for row in rows)
    assert (summary["rows"], summary["predicted"], summary["refused"]) == (count, predicted, count - predicted)
    assert summary["impossible"] == 0 and sum(summary["refusals"].values()) == count - predicted
    json.dumps(validated, allow_nan=False)


@pytest.fixture
def table(tmp_path):
    """A small table of products."""
    return put(tmp_path / "gemm.csv", ROWS["gemm"])


@pytest.mark.parametrize("name", ROWS)
def test_every_format_is_forecast(tmp_path, name):
    validated = answer(KIND[name], put(tmp_path / "table.csv", ROWS[name]))
    sound(validated, len(ROWS[name]))
    assert validated["summary"]["refused"] == 0


@pytest.mark.parametrize("name", ROWS)
def test_order_and_further_columns_do_not_count(tmp_path, name):
    rows = [row | {"v": "x", "qk": "", "shared": "yes", "index": 3, "library_version": "1"} for row in ROWS[name]]
    plain = answer(KIND[name], put(tmp_path / "a.csv", ROWS[name]))
    turned = answer(KIND[name], put(tmp_path / "b.csv", rows[::-1], reversed(rows[0])))
    sound(turned, len(rows))
    for one, other in zip(plain["rows"], reversed(turned["rows"]), strict=True):
        assert one["predicted_us"] == pytest.approx(other["predicted_us"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "column"),
    [(name, "source") for name in ROWS] + [("collectives", "algo"), ("calls", "sms"), ("calls", "nodes")],
)
def test_columns_that_a_table_may_lack(tmp_path, name, column):
    kept = [each for each in ROWS[name][0] if each != column]
    validated = answer(KIND[name], put(tmp_path / "table.csv", ROWS[name], kept))
    sound(validated, len(ROWS[name]))
    assert validated["summary"]["refused"] == 0


@pytest.mark.parametrize(
    ("gpu", "name"),
    drawn_grid(
        ["mi300x", "h20", "a100-sxm-40", "v100", "H100", "gb300", "h100_pcie"],
        ["gemm", "attention", "experts", "calls", "elementwise", "collectives"],
    ),
)
def test_gpus_that_no_table_has(tmp_path, name, gpu):
    validated, _ = measured.validate_tables(
        KIND[name], [put(tmp_path / "a.csv", [r | {"gpu": gpu} for r in ROWS[name]])], None
    )
    sound(validated, len(ROWS[name]))
    if gpu in ("mi300x", "h20", "H100"):
        assert validated["summary"]["predicted"] > 0


def test_odd_rows_are_refused_with_the_reason(tmp_path):
    good = ROWS["gemm"][0]
    changes = {
        "m": ("many", "1e300", "inf", "1_000", "-4", ""),
        "time_us": ("0", "-1", "nan", "soon"),
        "gpu": ("abacus", ""),
        "dtype": ("fp3", "fp4"),
    }
    odd = [good | {name: value} for name, values in changes.items() for value in values]
    odd.append(good | {"gpu": "a100", "dtype": "fp8"})
    validated = answer("kernels", put(tmp_path / "odd.csv", [good, *odd, good]))
    sound(validated, len(odd) + 2)
    assert [row["status"] == "predicted" for row in validated["rows"]] == [True, *[False] * len(odd), True]
    reasons = " / ".join(row["reason"] or "" for row in validated["rows"])
    for word in ("m is 'many'", "1e+300", "'inf'", "'1_000'", "m is missing", "'soon'", "abacus", "gpu is missing"):
        assert word in reasons
    assert "other reasons" not in run("validate", "kernels", tmp_path / "odd.csv").output


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("attention", {"heads": 6}, "cannot share"),
        ("attention", {"head_dim": 0}, "width of heads"),
        ("grouped", {"groups": 0}, "groups is 0"),
        ("experts", {"ep": 256}, "cannot be divided evenly"),
        ("experts", {"topk": 129}, "more than 128 experts"),
        ("experts", {"num_experts": 10**9}, "above 4096"),
        ("experts", {"distribution": "power_law_300"}, "not known"),
        ("calls", {"topk": 300}, "do not go together"),
        ("calls", {"op": "prepare", "gpu": "v100"}, "has a section prepare"),
        ("calls", {"nodes": "two"}, "'two'"),
        ("streams", {"TBps": -1}, "-1"),
        ("elementwise", {"bytes_read": -5}, "-5"),
        ("collectives", {"gpus": 10**9}, "above 131072"),
        ("collectives", {"interconnect": "carrier pigeons", "gpus": 16, "nodes": 2}, "not stated"),
    ],
)
def test_shapes_that_cannot_be(tmp_path, name, change, words):
    validated = answer(KIND[name], put(tmp_path / "a.csv", [ROWS[name][0] | change, ROWS[name][0]]))
    sound(validated, 2)
    assert words in validated["rows"][0]["reason"] and validated["rows"][1]["status"] == "predicted"


def test_rows_of_several_formats_in_one_table(tmp_path):
    names = ("gemm", "attention", "training", "experts", "elementwise", "calls", "passes", "grouped")
    rows = [row for some in zip(*(ROWS[name][:2] for name in names), strict=True) for row in some]
    columns = dict.fromkeys(column for row in rows for column in row)
    validated = answer("kernels", put(tmp_path / "mixed.csv", rows, columns))
    sound(validated, len(rows))
    assert validated["summary"]["refused"] == 0
    for name in names:
        alone = answer("kernels", put(tmp_path / "alone.csv", ROWS[name][:2]))["rows"]
        mixed = [validated["rows"][names.index(name) + len(names) * at]["predicted_us"] for at in range(2)]
        assert mixed == pytest.approx([row["predicted_us"] for row in alone], rel=1e-9)


def test_how_files_are_written_does_not_count(tmp_path, table):
    text = table.read_text()
    (tmp_path / "crlf.csv").write_bytes(text.replace("\n", "\r\n").encode())
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "empty-lines.csv").write_text(text.replace("\n", "\n\n"))
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "packed.csv").write_bytes(gzip.compress(text.encode()))
    files = [table, *sorted(set(tmp_path.iterdir()) - {table})]
    validated = answer("kernels", *files)
    parts = [[row | {"file": ""} for row in validated["rows"] if row["file"] == str(file)] for file in files]
    assert len(files) == 6 and all(part == parts[0] for part in parts)
    assert [row["file"] for row in validated["rows"]] == [str(file) for file in files for _ in ROWS["gemm"]]
    assert run("validate", "kernels", "--json", *files).stdout == run("validate", "kernels", "--json", *files).stdout


def test_rows_of_too_many_or_too_few_fields_keep_their_place(table):
    table.write_text(table.read_text() + "h100,bfloat16\nh100,bfloat16,1,2,3,4,AIC,more,still\n")
    rows = answer("kernels", table)["rows"]
    assert [row["status"] for row in rows[-3:]] == ["predicted", "refused", "refused"]
    assert rows[-2]["reason"] == "m is missing" and rows[-1]["reason"] == "the row has 9 fields, the header 7"


def test_a_table_without_rows_has_no_answers(table, tmp_path):
    table.write_text(table.read_text().splitlines()[0])
    validated = answer("kernels", table)
    assert validated["rows"] == [] and validated["summary"]["rows"] == 0 and validated["summary"]["median"] is None
    result = run("validate", "kernels", table, "--plot", tmp_path / "a.png")
    assert result.exit_code == 0 and "nothing is drawn" in result.output and not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("cut", [3, 40, -9])
def test_a_damaged_archive_is_reported(tmp_path, table, cut):
    packed = gzip.compress(table.read_bytes())
    path = tmp_path / "cut.csv.gz"
    for content in (packed[:cut], packed[:20] + b"\xff" * 12 + packed[32:]):
        path.write_bytes(content)
        result = run("validate", "kernels", path)
        assert result.exit_code == 2 and "cannot be read" in result.output


def test_figures(tmp_path, table):
    for place in ("a.png", "a.svg", "folder/"):
        assert run("validate", "kernels", table, "--plot", f"{tmp_path}/{place}").exit_code == 0
    for file in ("a.png", "a.svg", "folder/errors.png", "folder/ratios.png"):
        assert (tmp_path / file).stat().st_size > 1000


# ---------------------------------------------------------------------------------------- calibrations


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Streams of two GPUs, and their calibrations."""
    folder = tmp_path_factory.mktemp("fitted")
    rows = [row | {"gpu": gpu, "TBps": 1.5 + 0.01 * i} for gpu in ("h100", "a100") for i in range(4) for row in STREAMS]
    file = put(folder / "streams.csv", rows)
    result = run("calibrate", "kernels", file, "--out", folder / "out", "--json")
    assert result.exit_code == 0, result.output
    return file, folder / "out", json.loads(result.stdout)


STREAMS = ROWS["streams"]


def test_calibrations_are_written_and_used(fitted):
    file, out, fit = fitted
    assert [one["name"] for one in fit["calibrated"]] == ["a100-sxm-80", "h100-sxm"] and fit["missing"] == []
    assert sorted(path.name for path in out.iterdir()) == ["a100-sxm-80.yaml", "h100-sxm.yaml"]
    own, _ = measured.validate_tables("kernels", [file], out)
    assert own["summary"]["median"] < 0.03 < measured.validate_tables("kernels", [file], None)[0]["summary"]["median"]


def test_two_libraries_are_fitted_each_without_the_other(tmp_path):
    rows = [row | {"source": source} for source in ("BabelStream", "vidur") for row in STREAMS * 4]
    fit = measured.calibrate_tables("kernels", [put(tmp_path / "a.csv", rows)], tmp_path / "out", (), True)
    libraries = fit["calibrated"][0]["libraries"]
    assert len(libraries) == 2 and all(one["blind_median"] is not None for one in libraries)


def test_a_gpu_is_calibrated_alone(tmp_path, fitted):
    file = fitted[0]
    result = run("calibrate", "kernels", file, "--out", tmp_path / "out", "--only", "h100")
    assert result.exit_code == 2 and "Did you mean 'h100-sxm'" in result.stderr and not (tmp_path / "out").exists()
    assert run("calibrate", "kernels", file, "--out", tmp_path / "one", "--only", "h100-sxm").exit_code == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["h100-sxm.yaml"]


def test_an_interrupt_leaves_whole_files(tmp_path, fitted, monkeypatch):
    file, out, _ = fitted

    def stopped(calibration, tables, name, leave_out):
        if name == "h100-sxm":
            raise KeyboardInterrupt
        return fit(calibration, tables, name, leave_out)

    fit = kernels.calibrate
    monkeypatch.setattr(kernels, "calibrate", stopped)
    result = run("calibrate", "kernels", file, "--out", tmp_path / "out")
    assert result.exit_code == 130 and "not fitted: h100-sxm" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a100-sxm-80.yaml"]
    assert (tmp_path / "out" / "a100-sxm-80.yaml").read_bytes() == (out / "a100-sxm-80.yaml").read_bytes()


def test_folders_of_calibrations(tmp_path, table):
    for folder, words in ((tmp_path / "no", "no such folder"), (tmp_path, "no calibration (*.yaml)")):
        assert words in " ".join(run("validate", "kernels", table, "--calibration", folder).output.split())
    (tmp_path / "h100.yaml").write_text("")
    assert "'h100-sxm'" in run("validate", "kernels", table, "--calibration", tmp_path).output
    (tmp_path / "h100.yaml").rename(tmp_path / "h100-sxm.yaml")
    assert run("validate", "kernels", table, "--calibration", tmp_path).exit_code == 0


def test_a_calibration_of_rings_alone_hides_no_other_cost_model(tmp_path):
    """Links have three cost models: models that no file of the folder has come from meshcast."""
    sigmas = "{any: {sigma: 0.1, sigma_short: 0.1}}"
    for name in ("nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie"):
        text = f"ring: {{common: {{coefficients: {{}}}}, libraries: {{}}, unnamed: {sigmas}}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    validated, _ = measured.validate_tables("collectives", [put(tmp_path / "a.csv", ROWS["collectives"])], tmp_path)
    assert validated["summary"]["refused"] == 0


# ---------------------------------------------------------------------------------------- anything else


@st.composite
def corrupted(draw):
    """A format, and its rows in any number with some cells changed."""
    name = draw(st.sampled_from(sorted(ROWS)))
    rows = [dict(row) for row in draw(st.lists(st.sampled_from(ROWS[name]), min_size=1, max_size=4))]
    for _ in range(draw(st.integers(0, 4))):
        row, cell = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from(sorted(rows[0])))
        rows[row][cell] = draw(st.sampled_from(ODD) | st.text(max_size=4))
    return name, rows, draw(st.permutations(sorted(rows[0])))


@examples(150)
@given(corrupted())
def test_corrupted_tables_are_answered_row_by_row(tmp_path_factory, case):
    name, rows, columns = case
    path = put(tmp_path_factory.getbasetemp() / "corrupted.csv", rows, columns)
    binary = any("\0" in str(cell) for row in rows for cell in row.values())
    try:
        validated, _ = measured.validate_tables(KIND[name], [path], None)
    except MeshcastError as error:  # a file that is no text, or quotes that never end
        assert re.search(r"line \d+: a NUL character" if binary else "cannot be read", str(error))
        return
    assert not binary
    sound(validated, len(rows))
