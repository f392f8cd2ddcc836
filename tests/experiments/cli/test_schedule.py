"""``meshcast list schedule`` and ``meshcast export schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from meshcast.experiments.render.terminal.schedules import page, play_in_slots
from meshcast.experiments.views import palette
from tests.experiments.cli.test_app import answer, run

TABLE = """\
1f1b: 2 devices, 3 micro-batches, 2 stages

          0  1  2  3  4  5  6  7  8  9  10 11
device 0  F0 F1       BW0·· F2 BW1··    BW2··
device 1     F0 BW0·· F1 BW1·· F2 BW2··

12 slots, bubble 25.0%, chunks in flight 2 1
"""


def test_the_table_of_a_schedule() -> None:
    found = run("list", "schedule", "1f1b", "--p", 2, "--m", 3)
    assert found.exit_code == 0 and found.stdout == TABLE


def test_stages_are_numbered_and_overlapped_passes_share_a_cell() -> None:
    interleaved = run("list", "schedule", "interleaved-1f1b", "--p", 2, "--m", 4, "--v", 2).stdout
    assert "device 1      1F0 1F1 3F0 3BW0··· 3F1 3BW1··· 1F2 1BW0···" in interleaved
    assert "0F3+7BW5" in run("list", "schedule", "dualpipe", "--p", 4, "--m", 8).stdout


def test_activation_transfers_have_a_row_of_their_own() -> None:
    lines = run("list", "schedule", "bpipe", "--p", 4, "--m", 8).stdout.splitlines()
    transfers = [line.split() for line in lines if line.startswith("  transfers")]
    assert transfers[0][:4] == ["transfers", "0E1", "0E2", "0L1"]
    assert transfers[1][:4] == ["transfers", "0K1", "0K2", "0G1"]


def test_a_table_that_nobody_reads_is_refused_at_once() -> None:
    found = run("list", "schedule", "1f1b", "--p", 4, "--m", 1_000_000)
    said = "--m is 1000000: p x m x v is 4,000,000, and at most 100,000 are shown. Show fewer micro-batches"
    assert found.exit_code == 2 and said in found.stderr


def test_a_wide_table_continues_below() -> None:
    found = run("list", "schedule", "gpipe", "--p", 3, "--m", 40)
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    numbers = [line.split() for line in lines if line.startswith("   ")]
    heads = [[int(word) for word in words] for words in numbers]
    assert [slot for head in heads for slot in head] == list(range(3 * 42)), "every slot stands once"
    assert sum(line.startswith("device 0") for line in lines) == len(heads) > 2


def test_every_kind_has_its_colour() -> None:
    run_ = play_in_slots("zb-h1", 2, 3, None)
    console = Console(file=None, record=True, width=120, force_terminal=True, quiet=True)
    console.print(page("zb-h1", run_))
    styles: dict[str, set[str]] = {}
    for line in page("zb-h1", run_).renderables:  # type: ignore[attr-defined]
        assert isinstance(line, Text)
        for span in line.spans:
            word = line.plain[span.start : span.end].strip().strip("·")
            if word[:1] in ("F", "B", "W"):
                styles.setdefault(word[0], set()).add(str(span.style))
    inks = {"F": "white", "B": "black", "W": "black"}
    assert styles == {kind: {f"{ink} on {palette.ACTIONS[kind].colour}"} for kind, ink in inks.items()}


def test_the_table_as_json() -> None:
    found = answer("list", "schedule", "zb-h1", "--p", 4, "--m", 8, "--json")
    assert (found["slots"], found["in_flight_b"]) == (27, [4, 3, 2, 1])
    assert found["rows"][3][:3] == [
        {"action": "3F0", "begin": 3, "end": 4},
        {"action": "3B0", "begin": 4, "end": 5},
        {"action": "3F1", "begin": 5, "end": 6},
    ]


def test_a_file_is_shown_and_written_again(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    found = run("export", "schedule", "1f1b", "--p", 2, "--m", 3, "--out", file)
    assert found.exit_code == 0 and f"wrote {file}" in found.stderr and found.stdout == ""
    assert file.read_bytes() == b"0F0,0F1,0B0,0F2,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n"
    stages_to_show = run("list", "schedule", file)
    assert stages_to_show.stdout.splitlines()[1:] == TABLE.splitlines()[1:]
    assert stages_to_show.stdout.startswith(f"{file.name}: 2 devices, 3 micro-batches, 2 stages")
    assert run("export", "schedule", file).stdout_bytes == file.read_bytes()


def test_a_deadlock_is_shown_in_the_order(tmp_path: Path) -> None:
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    found = run("list", "schedule", file)
    assert found.exit_code == 2 and found.stdout == ""
    assert "the marked actions wait for each other" in found.stderr
    assert "  device 0: 0F0 >0BW0< 0F1 0BW1\n  device 1: 1F0 >1F1< 1BW0 1BW1" in found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "schedule"), "NAME: the name of a schedule is missing"),
        (("list", "schedule", "1f1b"), "--p: a schedule is for a number of devices"),
        (("list", "schedule", "1f1b", "--p", 4), "--m: a schedule is for"),
        (("list", "schedule", "1f2b", "--p", 4, "--m", 8), "Did you mean '1f1b'"),
        (("list", "schedule", "1f1b", "--p", 4, "--m", 8, "--v", 2), "has one chunk a device"),
        (("list", "schedule", "1f1b", "--p", 5000, "--m", 8), "schedule p is 5000: must be at most 4096"),
        (("export", "schedule", "1f1b", "--p", 4, "--m", 10**30), "schedule m is 1000"),
        (("export", "schedule", "interleaved-1f1b", "--p", 2, "--m", 4, "--v", 2000), "schedule v is 2000: must be at"),
        (
            ("list", "schedule", "1f1b", "--p", 4096, "--m", 4096),
            "p x m x v is 16,777,216, and at most 100,000 are shown",
        ),
        pytest.param(
            ("list", "schedule", "1f1b", "--p", 1, "--m", 40_000),
            "1 rows of 120,000 slots, and a page shows at most",
            marks=pytest.mark.slow,
        ),
        (("list", "schedule", "none.csv"), "none.csv: it cannot be read"),
        (("list", "gpus", "h100-sxm"), "NAME is 'h100-sxm': list gpus takes no such argument"),
        (("list", "gpus", "--p", 4), "--p is 4"),
        (("export", "job"), "there is no export of this kind. Valid: schedule"),
        (("export", "schedule", "bpipe", "--p", 4, "--m", 8), "does not have an action"),
        (("export", "schedule", "1f1b", "--p", 2, "--m", 2, "--out", "/nowhere/order.csv"), "--out"),
    ],
)
def test_mistakes_end_in_one_message(words: tuple[Any, ...], message: str) -> None:
    found = run(*words)
    assert found.exit_code == 2 and found.stdout == ""
    assert message in found.stderr and found.stderr.count("\n") == 1


def test_a_schedule_file_determines_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    run("export", "schedule", "gpipe", "--p", 2, "--m", 2, "--out", file)
    assert run("list", "schedule", file, "--p", 2, "--m", 2).exit_code == 0
    wrong = run("list", "schedule", file, "--m", 3)
    assert wrong.exit_code == 2 and "--m is 3" in wrong.stderr and "is for 2" in wrong.stderr
