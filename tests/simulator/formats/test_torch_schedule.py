"""CSV files of torch's schedules: read, written, played, and equal to torch's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.experiments.render.terminal.schedules import export_csv
from meshcast.hardware.errors import PlanError, ScheduleError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.formats.torch_schedule import parse_csv, read_csv, write_csv
from meshcast.simulator.scheduling.schedule import Action, OverlappedPasses, ScheduleItem
from meshcast.validation.pipelines.cases import answer
from tests.draws import drawn

GOOD = "0F0,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n"

ACTIONS = st.builds(Action, st.integers(0, 9), st.sampled_from(["F", "BW", "B", "W"]), st.integers(0, 99), st.just(0))
PAIRS = st.builds(
    OverlappedPasses,
    st.builds(Action, st.integers(0, 9), st.just("F"), st.integers(0, 99), st.just(0)),
    st.builds(Action, st.integers(0, 9), st.sampled_from(["BW", "B"]), st.integers(0, 99), st.just(0)),
)


# ---------------------------------------------------------------------------------------- read and written


def test_a_file_assigns_actions_to_ranks() -> None:
    found = parse_csv(GOOD)
    assert [[str(turn) for turn in order] for order in found.orders] == [
        ["0F0", "0F1", "0BW0", "0BW1"],
        ["1F0", "1BW0", "1F1", "1BW1"],
    ]
    assert (found.devices, found.chunks, found.microbatches) == ([0, 1], 1, 2)
    assert write_csv(found.rows) == GOOD


@given(st.lists(st.lists(st.none() | ACTIONS | PAIRS, min_size=2, max_size=12), min_size=1, max_size=6))
def test_a_written_file_is_read_again(rows: list[list[ScheduleItem | None]]) -> None:
    if not any(turn for row in rows for turn in row):
        return
    text = write_csv(rows)
    assert parse_csv(text).rows == rows
    assert write_csv(parse_csv(text).rows) == text


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_csv(tmp_path / "nothing.csv")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(PlanError, match="not UTF-8 text"):
        read_csv(tmp_path / "picture.csv")


WITHOUT = {"bpipe": "does not have an action", "seq1f1b": "does not have an action", "chimera": "one chain"}
WITHOUT |= {"pipedream": "a flush at the end of every step"}


@pytest.mark.parametrize(("name", "words"), WITHOUT.items())
def test_actions_that_torch_does_not_have_are_not_exported(name: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        export_csv(name, 4, 8, None)


# ------------------------------------------------------------------------------------ an order from a file

SHAPES = [
    ("gpipe", 4, 6, None),
    ("1f1b", 4, 8, None),
    ("interleaved-1f1b", 2, 4, 3),
    ("zb-h1", 3, 7, None),
    ("zb-v", 3, 6, None),
]


@pytest.mark.parametrize(("name", "p", "m", "v"), SHAPES)
def test_an_order_from_a_file_is_played_as_the_schedule_itself(
    name: str, p: int, m: int, v: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_bytes(export_csv(name, p, m, v).encode())
    common = {"p": p, "m": m, "t_f": 1, "t_b": 1.25, "t_w": 0.75, "order": True}
    direct = answer({"schedule": name, **common, **({"v": v} if v else {})})
    assert direct["status"] == "played"
    assert answer({"schedule": "from-file", "path": str(path), **common}) == direct
    assert export_csv(str(path), None, None, None) == path.read_bytes().decode()


def job(path: str, **plan: Any) -> dict[str, Any]:
    entry = {"use": "pipeline/from-file", "over": "pp", "path": path, **plan.pop("options", {})}
    return {
        "model": {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "batch": {"global": plan.pop("batch", 8)},
        "plan": {"mesh": {"pp": 4}, "schemes": [entry], **plan},
    }


def test_a_job_takes_its_order_from_a_file_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1f1b.csv").write_text(export_csv("1f1b", 4, 8, None))
    loaded = load_job(job("orders/1f1b.csv"), base=tmp_path)
    plain = job("") | {"plan": {"pp": 4}}
    found = simulate(loaded).to_dict()
    assert found["step_time_s"] == simulate(plain).to_dict()["step_time_s"]
    assert found["memory"] == simulate(plain).to_dict()["memory"]
    # The answer's job finds the file from here.
    assert simulate(found["job"]).to_dict()["step_time_s"] == found["step_time_s"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 12}, ["micro-batches per replica is 12", "4 ranks with 1 stages each and 8", "= 8 would work"]),
        ({"options": {"chunks": 2}}, ["plan.chunks is 2", "Leave chunks out"]),
        ({"options": {"path": "none.csv"}}, ["none.csv", "cannot be read"]),
        ({"options": {"path": 3}}, ["path"]),
    ],
)
def test_a_file_that_does_not_fit_the_plan_is_refused(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "s.csv").write_text(export_csv("1f1b", 4, 8, None))
    with pytest.raises(PlanError) as refused:
        simulate(load_job(job("s.csv", **changes), base=tmp_path))
    for word in words:
        assert word in str(refused.value)


def test_an_order_that_deadlocks_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="deadlocks") as refused:
        export_csv(str(path), None, None, None)
    assert "0F0 >0BW0< 0F1 0BW1" in str(refused.value) and ">1F1<" in str(refused.value)


# --------------------------------------------------------------------------------------- torch's own files


def stages(p: int, v: int, rank: int = 0) -> list[Any]:
    """Returns the attributes of torch's stages that its schedules read."""
    sizes = {"group_size": p, "group_rank": rank, "num_stages": p * v, "stage_index_to_group_rank": {}}
    flags = {"is_first": False, "is_last": False, "has_backward": True, "submod": None}
    return [SimpleNamespace(**sizes, **flags, stage_index=rank + i * p) for i in range(v)]


def of_torch(name: str, p: int, m: int, v: int, file: Path) -> str:
    """The file that torch writes for a schedule; for schedules of one stage per rank the order alone."""
    import csv

    from torch.distributed.pipelining import schedules

    if name in ("gpipe", "1f1b"):
        kind = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
        order = kind._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
        rows = [[action for action in order[rank] if "REDUCE" not in str(action)] for rank in range(p)]
        if name == "1f1b":
            # torch 2.13 numbers the forward passes of the last rank from 1 here, though it runs them from 0: that it
            # does is asked in tests/validation/distributed.
            assert next(str(action) for action in rows[-1] if action) == f"{p - 1}F1"
            for at, action in enumerate(rows[-1]):
                if action and "F" in str(action):
                    rows[-1][at] = action._replace(microbatch_index=action.microbatch_index - 1)
        with file.open("w", newline="") as out:
            csv.writer(out).writerows(rows)
        return file.read_bytes().decode()
    kind = {
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zb-v": schedules.ScheduleZBVZeroBubble,
    }[name]
    schedule = kind(stages(p, v), m, loss_fn=lambda *_: None)
    schedule._dump_csv(str(file), format="compute_only")
    return file.read_bytes().decode()


EQUAL = [
    *[("gpipe", p, m, 1) for p in (2, 4) for m in (1, 4, 7)],
    *[("1f1b", p, m, 1) for p in (2, 3, 4, 8) for m in (8, 13)],
    *[(f"interleaved-{end}", p, m, v) for end in ("1f1b", "zb") for p, m in ((2, 4), (4, 8), (3, 9)) for v in (2, 3)],
    *[("zb-v", p, m, 2) for p in (2, 3, 4) for m in (2, 5, 8, 12)],
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "p", "m", "v"), drawn(EQUAL, keep=3))
def test_written_files_equal_those_of_torch(name: str, p: int, m: int, v: int, tmp_path: Path) -> None:
    """Except for idle steps, which our orders do not have."""
    pytest.importorskip("torch")
    theirs = of_torch(name, p, m, v, tmp_path / "theirs.csv")
    found = parse_csv(theirs)
    assert write_csv(found.rows) == theirs, "read and written again, torch's own file is the same to the byte"
    assert write_csv(found.orders) == export_csv(name, p, m, v if "interleaved" in name else None)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("interleaved-1f1b", 2, 4, 2), ("zb-v", 2, 6, 2), ("hanayo", 2, 4, 2)]
)
def test_torch_reads_the_written_file(name: str, p: int, m: int, v: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    file = tmp_path / "ours.csv"
    file.write_bytes(export_csv(name, p, m, v).encode())
    theirs = _PipelineScheduleRuntime(stages(p, v), m, loss_fn=lambda *_: None)
    theirs._load_csv(str(file), format="compute_only")
    theirs._dump_csv(str(tmp_path / "again.csv"), format="compute_only")
    assert (tmp_path / "again.csv").read_bytes() == file.read_bytes()
