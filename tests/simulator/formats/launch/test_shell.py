"""What is read out of a shell script, and the words of single settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.launch.launch_file import parse_launch_text
from meshcast.simulator.formats.launch.programs.megatron import read_launch_arguments, write_flag
from meshcast.simulator.formats.launch.programs.megatron_plan import read_layout, write_layout
from meshcast.simulator.formats.launch.table import Stated, read_count, read_switch

SHAPE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 "
SHAPE += "--micro-batch-size 1 --bf16 "


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
    settings = {name: one for name, one in settings.items() if not str(one).startswith("-") and one != " "}
    text = "python a.py \\\n" + " \\\n".join(write_flag(name, one) for name, one in settings.items())
    wanted = {name: one if one is True else str(one) for name, one in settings.items()}
    assert arguments(text) == wanted


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for stated in read_arguments(text).values():
        assert stated.shown


def test_arguments_of_the_script_are_no_values() -> None:
    found = read_arguments('torchrun pretrain_gpt.py --bf16 "$@" --tensor-model-parallel-size 2 $*')
    assert found["bf16"].value is True and found["tensor_model_parallel_size"].value == "2"


def test_no_script_grows_without_end() -> None:
    with pytest.raises(PlanError, match=r"run.sh:\d+: the variable A grows beyond 1,000,000 letters"):
        read_arguments("A=abcdefgh\n" + 'A="$A$A"\n' * 40 + "python a.py --x $A")
    freq = SHAPE + "--num-experts 8 --moe-layer-freq '([0]*99999*99999*99999)'"
    with pytest.raises(OpenQuestions, match=r"--moe-layer-freq.*no list of the layers"):
        import_text(freq, "run.sh", "megatron")
    assert read_layout("E" + "(" * 9 + "t|" + ")*999" * 9 + "L") is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 2))
def test_layouts_of_stages(stages: list[int], mtp: int) -> None:
    assert read_layout(write_layout(tuple(stages), mtp)) == tuple(stages)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*6tmL", (3, *[2] * 6, 1)),
        ("Ettt,ttt|tt|L", (6, 2, 0)),
        ("E|x|L", None),
    ],
)
def test_layouts_of_megatron(layout: str, stages: tuple[int, ...] | None) -> None:
    assert read_layout(layout) == stages


@pytest.mark.parametrize("value", ["two", "0", "-3", "1.5", True, None])
def test_a_count_is_a_whole_number(value: object) -> None:
    with pytest.raises(PlanError, match=r"run.sh:3 --x.*it takes a"):
        read_count(Stated(value, "--x", "run.sh:3"))


def test_a_switch_is_true_or_false() -> None:
    assert [read_switch(Stated(word, "--x")) for word in (True, "true", "False", "no", 1)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    with pytest.raises(PlanError, match="it takes true or false"):
        read_switch(Stated("maybe", "--x"))


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("--expert-model-parallel-size 4", {"zero": 0}),
        ("--num-experts 8 --expert-model-parallel-size 4", {"ep": 4, "zero": 0, "ep_scheme": "all-gather-dispatch"}),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", {"shard": 4, "zero": 1}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}),
        ("--use-megatron-fsdp", {"fsdp": True}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            {"zero": 0, "recompute": "full", "recompute_layers": 3},
        ),
        ("--recompute-activations", {"zero": 0, "recompute": "selective"}),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            {"pp": 2, "zero": 0, "chunks": 2},
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
            {"pp": 4, "zero": 0, "partition": [2, 2, 2, 2]},
        ),
        ("--tensor-model-parallel-size 2", {"tp": 2, "zero": 0, "sequence_parallel": False}),
    ],
)
def test_what_flags_of_megatron_mean(flags: str, plan: dict[str, object]) -> None:
    assert import_text(SHAPE + flags, "run.sh", "megatron", "dgx-h100:1").job["plan"] == plan


def test_a_model_of_megatron_is_a_preset_where_there_is_one() -> None:
    flags = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    flags += (
        " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    )
    flags += " --untie-embeddings-and-output-weights --hidden-dropout 0 --seq-length 8192 --micro-batch-size 1"
    flags += " --vocab-size 128256"
    assert import_text(flags, "run.sh", "megatron").job["model"] == "llama3-8b"
    without_experts = import_text(flags.replace("128256", "128000"), "run.sh", "megatron").job["model"]
    assert without_experts["vocab"] == 128000
