"""``meshcast list schedule`` and ``meshcast export schedule``; their pages: `tests/snapshots/list.txt`."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from meshcast.experiments.render.terminal.schedules import page, play_in_slots
from meshcast.experiments.views import palette
from tests.experiments.cli.samples import answer, run


def test_the_table_of_a_schedule() -> None:
    """1F1B on two devices by hand: a forward pass of 1 slot, a backward pass of 2."""
    printed = run("list", "schedule", "1f1b", "--p", 2, "--m", 3).stdout.splitlines()
    assert printed[3:5] == [
        "device 0  F0 F1       BW0·· F2 BW1··    BW2··",
        "device 1     F0 BW0·· F1 BW1·· F2 BW2··",
    ]
    assert printed[6] == "12 slots, bubble 25.0%, chunks in flight 2 1"


def test_a_wide_table_continues_below() -> None:
    lines = run("list", "schedule", "gpipe", "--p", 3, "--m", 40).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if line.startswith("   ")]
    assert [int(slot) for head in heads for slot in head] == list(range(3 * 42)), "every slot stands once"
    assert sum(line.startswith("device 0") for line in lines) == len(heads) > 2


def test_every_kind_has_its_colour() -> None:
    styles: dict[str, set[str]] = {}
    for line in page("zb-h1", play_in_slots("zb-h1", 2, 3, None)).renderables:  # type: ignore[attr-defined]
        assert isinstance(line, Text)
        for span in line.spans:
            word = line.plain[span.start : span.end].strip().strip("·")
            if word[:1] in ("F", "B", "W"):
                styles.setdefault(word[0], set()).add(str(span.style))
    inks = {"F": "white", "B": "black", "W": "black"}
    assert styles == {kind: {f"{ink} on {palette.ACTIONS[kind].colour}"} for kind, ink in inks.items()}


def test_the_table_as_json() -> None:
    table = answer("list", "schedule", "zb-h1", "--p", 4, "--m", 8)
    assert (table["slots"], table["in_flight_b"]) == (27, [4, 3, 2, 1])
    assert [tuple(cell.values()) for cell in table["rows"][3][:3]] == [("3F0", 3, 4), ("3B0", 4, 5), ("3F1", 5, 6)]


def test_a_file_is_shown_and_written_again(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    written = run("export", "schedule", "1f1b", "--p", 2, "--m", 3, "--out", file)
    assert written.exit_code == 0 and f"wrote {file}" in written.stderr and written.stdout == ""
    assert file.read_bytes() == b"0F0,0F1,0B0,0F2,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n"
    shown = run("list", "schedule", file, "--p", 2, "--m", 3).stdout.splitlines()
    assert shown[0].startswith(f"{file.name}: 2 devices, 3 micro-batches, 2 stages")
    assert shown[1:] == run("list", "schedule", "1f1b", "--p", 2, "--m", 3).stdout.splitlines()[1:]
    assert run("export", "schedule", file).stdout_bytes == file.read_bytes()
