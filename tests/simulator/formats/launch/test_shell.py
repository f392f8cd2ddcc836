"""What is read out of a shell script, and the words of single settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.formats.launch.launch_file import parse_launch_text
from meshcast.simulator.formats.launch.programs.megatron import read_launch_arguments, write_flag
from meshcast.simulator.formats.launch.programs.megatron_plan import fill_inner_stages, read_layout, write_layout
from meshcast.simulator.formats.launch.table import Stated, read_switch


def read_arguments(text: str) -> dict[str, Stated]:
    return read_launch_arguments(parse_launch_text(text, "run.sh", ".sh"))


def arguments(text: str) -> dict[str, object]:
    return {name: stated.value for name, stated in read_arguments(text).items()}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("python a.py --x 1 --y=2 --z", {"x": "1", "y": "2", "z": True}),
        ("python a.py --x 1 \\\n  --y a b", {"x": "1", "y": ["a", "b"]}),
        ("N=4\npython a.py --x $N --y ${N} --z ${M:-7}", {"x": "4", "y": "4", "z": "7"}),
        ("A=3; B=$((A * 4 + 2))\npython a.py --x $B", {"x": "14"}),
        ("A=(--x 1)\nA+=(--y 2)\npython a.py ${A[@]}", {"x": "1", "y": "2"}),
        ('A=(\n  --x 1  # one\n  # --z 3\n  "--y 2"\n)\npython a.py "${A[@]}"', {"x": "1", "y": "2"}),
        ('A="--x 1 --y 2"\npython a.py $A', {"x": "1", "y": "2"}),
        ('T=fp8\nif [[ "$T" == "fp8" ]]; then\n A="--x 8"\nelse\n A="--x 16"\nfi\npython a.py $A', {"x": "8"}),
        ('T=bf16\nif [ "$T" = fp8 ]; then A="--x 8"; else A="--x 16"; fi\npython a.py $A', {"x": "16"}),
        ('N=4\nif [ $N -gt 2 ]; then A="--x 1"; fi\npython a.py $A', {"x": "1"}),
        ('if [ -n "$UNSET" ]; then A="--x 1"; fi\npython a.py $A --y 2', {"y": "2"}),
        ("A=1 python a.py --x $UNKNOWN", {"x": "$UNKNOWN"}),
        ("echo --x 1\npython a.py --y 1 --z 2", {"y": "1", "z": "2"}),
        ("--x 1\n--y 2", {"x": "1", "y": "2"}),
        ("python a.py --pattern 'M-M*|M' --split '1,2'", {"pattern": "M-M*|M", "split": "1,2"}),
        ("#SBATCH --nodes=4\npython a.py --x 1", {"sbatch_nodes": "4", "x": "1"}),
        ('torchrun a.py --bf16 "$@" --x 2 $*', {"bf16": True, "x": "2"}),  # those of the script are no values
    ],
)
def test_arguments_of_a_script(script: str, found: dict[str, object]) -> None:
    assert arguments(script) == found


def test_every_argument_has_its_line() -> None:
    stated = read_arguments("A=(\n--x 1\n--y 2\n)\npython a.py \\\n ${A[@]} --z 3")
    places = {name: setting.place for name, setting in stated.items()}
    assert places == {"x": "run.sh:2", "y": "run.sh:3", "z": "run.sh:6"}


WORDS = st.one_of(st.just(True), st.integers(0, 10**9), st.text("abcdefg|()*,.+- EtmL", min_size=1, max_size=12))


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=8).filter(lambda name: name[0] != "_"), WORDS, max_size=6))
def test_flags_are_read_as_they_were_written(settings: dict[str, object]) -> None:
    settings = {name: value for name, value in settings.items() if not str(value).startswith("-") and value != " "}
    text = "python a.py \\\n" + " \\\n".join(write_flag(name, value) for name, value in settings.items())
    assert arguments(text) == {name: value if value is True else str(value) for name, value in settings.items()}


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for stated in read_arguments(text).values():
        assert stated.shown


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 2))
def test_layouts_of_stages(stages: list[int], mtp: int) -> None:
    assert read_layout(write_layout(tuple(stages), mtp)) == tuple(stages)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*6tmL", (3, *[2] * 6, 1)),
        ("Ettt,ttt|tt|L", (6, 2, 0)),
        ("E|x|L", None),
        ("E" + "(" * 9 + "t|" + ")*999" * 9 + "L", None),
    ],
)
def test_layouts_of_megatron(layout: str, stages: tuple[int, ...] | None) -> None:
    assert read_layout(layout) == stages


FILLED = {(2, 0, 0): (1, 1, 0), (0, 0, 2): (0, 1, 1), (0, 3, 0, 0, 1): (0, 1, 1, 1, 1)}
FILLED |= {(0, 2, 1): (0, 2, 1), (1, 0, 0, 0): (1, 0, 0, 0)}


@pytest.mark.parametrize(("stages", "filled"), FILLED.items())
def test_empty_stages_inside_take_a_layer(stages: tuple[int, ...], filled: tuple[int, ...]) -> None:
    assert fill_inner_stages(stages) == filled


def test_a_switch_is_true_or_false() -> None:
    words = {True: True, "true": True, "False": False, "no": False}
    assert {word: read_switch(Stated(word, "--x")) for word in words} == words and read_switch(Stated(1, "--x"))
