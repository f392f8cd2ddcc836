"""The quick reader of plain YAML: what it answers is what the parser of the whole language answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hardware.plain import BRACKETS, DEPTH, read_plain

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [path for room in ("hardware", "simulator", "examples") for path in sorted((ROOT / room).rglob("*.yaml"))]


def parsed(text: str) -> Any:
    """What the parser of the whole language says, as text, so that 1, 1.0 and True differ."""
    try:
        return repr(YAML(typ="safe", pure=True).load(text))
    except Exception as error:
        return error


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_plain(path: Path) -> None:
    text = path.read_text("utf-8")
    assert repr(read_plain(text)) == parsed(text)


PLAIN = [
    "a: 1\nb: -2.5e-3\nc: 1e12\nd: true\ne: null\nf:\ng: 2026-11-21\nh: 1f1b\n",
    'a: {b: 80 GiB, c: [1, two, 3.0, []], d: {}, e: "x # y: {z}"} # why\n# and why not\nf: dgx-h100:64\n',
    "a:\n  b:\n    c: 1\n  d: yes\n\ne: https://x.org/a, page 3 (b)\n",
    *("8", "-1.5e12", "true", "words: 1 # why", "words, and words", "[2, 2] # why", "{tp: 8}", '"8"', "dgx-a100:2"),
    '{"a": 1, "b": [true, null, 1.5], "c": {"d": "x"}}\n',
]


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_plain(text: str) -> None:
    assert repr(read_plain(text)) == parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "a\nb", '"a\nb"', "... a", "...", "- a", "a #b\nc", "*a", "[1, 2"),
        *("- a\n", "a:1\n", "  a: 1\n", "a: 1\n b: 2\n", "a:\n  b: 1\n c: 2\n", "a: x\n  y\n", "\ta: 1\n"),
        *("a: 1\na: 1\n", "a: {b: 1, b: 2}\n", '{"a": 1, "a": 2}', "null: 1\n", "1: 2\n", "a: 1\n---\nb: 1\n"),
        *("a: &x 1\n", "a: *x\n", "a: !t x\n", "a: |\n  x\n", "a: 'x'\n", 'a: "\\n"\n', 'a: "x" y\n', "<<: 1\n"),
        *("a: 0x10\n", "a: 0o7\n", "a: 010\n", "a: 1_0\n", "a: +1\n", "a: .5\n", "a: .inf\n", "a: 2026-13-45\n"),
        *("a: [1, 2\n", "a: [1, 2]]\n", "a: [1, ]\n", "a: [,]\n", "a: {b}\n", "a: {b: }\n", "a: [b: 1]\n", "a: [1}\n"),
        *("a: é\n", "a: x\r\n", "a: b: c\n", "a: x #y\nb\n", "%YAML 1.1\n---\na: 1\n", '{"a": NaN}', '{"a": 1} x'),
        *(f"a: 1{'0' * 5000}\n", f"a: {'[' * (DEPTH + 1)}{']' * (DEPTH + 1)}\n"),
        '{"a":' * BRACKETS + "{}" + "}" * BRACKETS,
    ],
)  # fmt: skip
def test_what_is_left_to_the_whole_parser(text: str) -> None:
    assert read_plain(text) is None


def test_a_slip_of_the_keyboard_is_read_as_the_whole_parser_reads_it() -> None:
    dice = random.Random(0)
    texts = PLAIN + [path.read_text("utf-8") for path in SHIPPED]
    keys = [
        *" \n:#,[]{}\"'-+.019eEx_~|>&*!%?=/()",
        ": ",
        " #",
        "- ",
        "null",
        "1e5",
        "2026-01-01",
        "0x",
        "{a: 1}",
        "[1]",
    ]
    told = 0
    for _ in range(3000):
        lines = dice.choice(texts).split("\n")
        at = dice.randrange(len(lines))
        text = "\n".join(lines[at : at + dice.randint(1, 4)])
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(text) + 1)
            text = text[:at] + (dice.choice(keys) if dice.random() < 0.6 else "") + text[at + dice.randint(0, 2) :]
        data = read_plain(text)
        if data is not None:
            told += 1
            assert repr(data) == parsed(text), text
    assert told > 500
