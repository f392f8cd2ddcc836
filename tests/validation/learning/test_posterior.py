"""A calibration learnt from measurements: it finds what rows show, keeps what they do not, and harms by no chance."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.check import read_checked
from meshcast.validation.learning.files import read_evidence
from meshcast.validation.learning.learn import learn_files
from meshcast.validation.learning.posterior import deal, learn
from meshcast.validation.learning.tables import list_evidence, make_evidence

SHIPPED = Calibration.shipped()
SIZES = [int(2 ** (k / 2)) for k in range(44, 66)]
ROW = {
    "gpu": "h100", "interconnect": "NVLink4+NVSwitch", "op": "all_reduce", "gpus": 8, "nodes": 1,
    "source": "AIC h100_sxm nccl-tests (half)",
}  # fmt: skip
GEMM = {"gpu": "h100", "dtype": "bfloat16", "n": 8192, "k": 4096, "source": "AIC sglang 0.5.14 (sglang_torch_linear)"}


def write_rows(path: Path, rows: list[dict[str, Any]], times: np.ndarray | None = None) -> Path:
    pd.DataFrame(rows).assign(time_us=1.0 if times is None else times).to_csv(path, index=False)
    return path


def evidence_of(path: Path) -> Any:
    ((file, section, pairs),) = list_evidence([read_evidence(path, None)])
    return make_evidence(SHIPPED, file, section, pairs)


def write_priced(
    path: Path, rows: list[dict[str, Any]], noise: float = 0.0, seed: int = 0, library: str = "", **moved: float
) -> Path:
    """Writes rows with the times of the catalog's coefficients, some of them replaced."""
    evidence = evidence_of(write_rows(path, rows))
    known = evidence.known
    if library:
        known = replace(known, libraries={library: known.libraries[library] | moved})
    else:
        known = replace(known, values=known.values | moved)
    (sample,) = evidence.samples
    scatter = np.exp(np.random.default_rng(seed).normal(0, noise, len(rows)))
    return write_rows(path, rows, evidence.price(sample, known).seconds * scatter * 1e6)


@pytest.mark.parametrize(
    ("rows", "library", "name", "value", "kept"),
    [
        ([{**ROW, "op": "all_gather", "bytes": b} for b in SIZES], "", "simple_share", 0.7, "nvls_share"),
        ([{**ROW, "bytes": b} for b in SIZES], "", "nvls_share", 0.55, "simple_share"),
        ([{**GEMM, "m": m} for m in range(512, 16384, 512)], "sglang", "peak_share", 0.7, "split_overhead"),
    ],
)
def test_rows_move_what_they_show_and_nothing_else(
    tmp_path: Path, rows: list[dict[str, Any]], library: str, name: str, value: float, kept: str
) -> None:
    path = write_priced(tmp_path / "rows.csv", rows, 0.01, library=library, **{name: value})
    learnt = learn(evidence_of(path))
    after = {move.name: move.after for move in learnt.moves}
    assert after[name] == pytest.approx(value, rel=0.05) and kept not in after
    assert learnt.after is not None and learnt.after < learnt.before / 3


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_agree_with_the_catalog_change_nothing(tmp_path: Path, seed: int) -> None:
    rows = [{**ROW, "bytes": b} for b in SIZES]
    learnt = learn(evidence_of(write_priced(tmp_path / "rows.csv", rows, 0.05, seed)))
    assert not learnt.moves and not learnt.data and learnt.after is not None


def test_too_few_rows_are_no_evidence(tmp_path: Path) -> None:
    rows = [{**ROW, "bytes": b} for b in SIZES[-3:]]
    learnt = learn(evidence_of(write_priced(tmp_path / "rows.csv", rows, nvls_share=0.4)))
    assert (learnt.rows, learnt.after, learnt.moves) == (3, None, ()) and learnt.before > 0.3


def test_a_learnt_file_prices_as_the_fit_and_keeps_all_other_libraries(tmp_path: Path) -> None:
    rows = [{**GEMM, "m": m} for m in range(512, 16384, 512)]
    path = write_priced(tmp_path / "rows.csv", rows, 0.01, library="sglang", peak_share=0.7)
    answer = learn_files([path], tmp_path / "mine", SHIPPED)
    (file,) = answer["files"]
    shipped, data = SHIPPED.sections("h100-sxm"), read_checked(Path(file))
    assert {name: section for name, section in data.items() if name != "gemm"} == {
        name: section for name, section in shipped.items() if name != "gemm"
    }
    assert data["gemm"]["libraries"]["vllm"] == shipped["gemm"]["libraries"]["vllm"]
    mine = Calibration.from_folder(tmp_path / "mine")
    ((name, section, pairs),) = list_evidence([read_evidence(path, None)])
    evidence = make_evidence(mine, name, section, pairs)
    errors = [np.abs(evidence.price(s, evidence.known).seconds / s.seconds - 1) for s in evidence.samples]
    assert float(np.median(np.concatenate(errors))) < 0.015
    assert learn(evidence).moves == ()  # what is learnt is known


@pytest.mark.parametrize(
    ("rows", "rate", "file"),
    [
        ([{**GEMM, "gpu": "h20", "m": m} for m in range(512, 16384, 512)], 148e12 * 0.6 / (2 * 8192 * 4096), "h20"),
        ([{**ROW, "gpu": "mi300x", "interconnect": "Infinity Fabric", "bytes": b} for b in SIZES], 8e10, "infinity"),
    ],
)
def test_hardware_without_a_file_of_its_own_learns_from_what_it_borrows(
    tmp_path: Path, rows: list[dict[str, Any]], rate: float, file: str
) -> None:
    times = np.array([row.get("m", row.get("bytes")) for row in rows]) / rate + 3e-5
    path = write_rows(tmp_path / "rows.csv", rows, times * 1e6)
    assert learn_files([path], tmp_path / "mine", SHIPPED)["files"] == [str(tmp_path / "mine" / f"{file}.yaml")]
    read_checked(tmp_path / "mine" / f"{file}.yaml")
    mine = Calibration.from_folder(tmp_path / "mine")
    after, before = (float(np.median(forecast_errors(known, path))) for known in (mine, SHIPPED))
    assert after < 0.1 < before
    # What was learnt of some kernels makes no measured GPU: intervals stay those of a borrowed one.
    gpu = load("gpus", "h20")
    assert mine.find_distance(gpu) == SHIPPED.find_distance(gpu) == "generation"


def test_a_few_rows_do_not_narrow_the_interval(tmp_path: Path) -> None:
    """Eight rows of one machine, all within 0.1 %, say little about how far other rows lie from the cost model."""
    rows = [{**ROW, "op": "all_gather", "bytes": b} for b in SIZES[-8:]]
    path = write_priced(tmp_path / "rows.csv", rows, 0.001, simple_share=0.6)
    data = learn(evidence_of(path)).data
    before = SHIPPED.sections("nvlink4")["ring"]["unnamed"]["any"]["sigma"]
    assert data["unnamed"]["any"]["sigma"] > 0.7 * before  # type: ignore[index]


def test_rows_are_dealt_into_parts_of_all_sizes() -> None:
    sample: Any = type("Sample", (), {"seconds": np.array([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])})
    (parts,) = deal([sample], 3)
    assert sorted(np.bincount(parts)) == [2, 2, 2]
    assert {tuple(sorted(sample.seconds[parts == part])) for part in range(3)} == {(1, 4), (2, 5), (3, 6)}


@pytest.mark.slow
def test_learning_never_hurts(tables: Any, tmp_path: Path) -> None:
    """200 draws: of a source of a table some rows are learnt from, all others are forecast. These are forecast no worse
    than by the catalog in 95 % of the draws, and never by more than a point of the median error."""
    if not tables.whole:
        pytest.skip("draws need the whole tables of measurements (make test-all beside them)")
    names = sorted(path.name for path in tables.folder.glob("*.csv.gz") if path.name != "moe_alltoall.csv.gz")
    rng, changes = random.Random(60), list[float]()
    frames = {name: pd.read_csv(tables.folder / name, low_memory=False) for name in names}
    while len(changes) < 200:
        frame = frames[rng.choice(names)]
        if not {"gpu", "source"} <= {*frame.columns}:
            continue
        index = [*rng.choice([*frame.groupby(["gpu", "source"]).groups.values()])]
        if len(index) < 8:
            continue
        index = rng.sample(index, min(len(index), 1000))
        count = min(rng.choice([5, 10, 20, 50, 100]), len(index) // 2)
        frame.loc[index[:count]].to_csv(tmp_path / "seen.csv", index=False)
        frame.loc[index[count:]].to_csv(tmp_path / "held.csv", index=False)
        change = learn_and_compare(tmp_path)
        if change is not None:
            changes.append(change)
    worse = [change for change in changes if change > 0]
    assert len(worse) <= 0.05 * len(changes) and max(changes) < 0.01, sorted(worse)


def learn_and_compare(folder: Path) -> float | None:
    """Returns by how much the median error of the rows held back has changed; None where none can be forecast."""
    calibration = SHIPPED
    with np.errstate(all="ignore"):
        for file, section, pairs in list_evidence([read_evidence(folder / "seen.csv", None)]):
            learnt = learn(make_evidence(calibration, file, section, pairs))
            if learnt.data:
                sections = {**calibration.sections(learnt.file), section: dict(learnt.data)}
                calibration = calibration.with_file(learnt.file, sections)
        before, after = (forecast_errors(known, folder / "held.csv") for known in (SHIPPED, calibration))
    return float(np.median(after) - np.median(before)) if len(before) else None


def forecast_errors(calibration: Calibration, path: Path) -> np.ndarray:
    errors = [np.zeros(0)]
    for file, section, pairs in list_evidence([read_evidence(path, None)]):
        evidence = make_evidence(calibration, file, section, pairs)
        errors += [np.abs(evidence.price(s, evidence.known).seconds / s.seconds - 1) for s in evidence.samples]
    return np.concatenate(errors)
