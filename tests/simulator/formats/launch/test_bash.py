"""Shell scripts that are followed by bash's grammar, and the starts of training programs in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.bash import grammar
from meshcast.simulator.formats.launch.bash.records import LostPlace
from meshcast.simulator.formats.launch.bash.script import run_script
from meshcast.simulator.formats.launch.launches import Launch, choose_launch, find_launches
from tests.strategies import examples

BASH = shutil.which("bash")


def launch(text: str, folder: Path | None = None, **options: object) -> Launch:
    run = run_script(text, "run.sh", *([folder] if folder else []), **options)  # type: ignore[arg-type]
    chosen = choose_launch(find_launches(run, "run.sh", *([folder] if folder else [])))
    assert chosen is not None
    return chosen


def values(text: str, folder: Path | None = None, **options: object) -> dict[str, object]:
    return {name: stated.value for name, stated in launch(text, folder, **options).arguments.items()}


# ------------------------------------------------------------------------------------------- the same as bash

SET = """A=7; B='a b'; E=; F=dir/x.tar.gz; N=3; X=; Y=; V=
L=(p 'q r' '' s); declare -A M=([k]=v [m]='w x'); set -- one 'two 2' three; R=N
"""
NAMES = st.sampled_from(["A", "B", "E", "F", "N"])
LITERALS = st.text("abx1./_-=:,", min_size=1, max_size=4)


def build(form: str, *parts: list[str] | st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    """Draws texts of a form, which has a pair of braces for each part."""
    return st.builds(form.format, *(st.sampled_from(part) if isinstance(part, list) else part for part in parts))


WORD = "${{{}{}{}}}"
PLAIN = [
    *["${F^^}", "${F,}", "$((A * N + 2))", "$(( (A+1)/2 % 3 ))", "$((A>N?1:0))", "${L[1]}", "${L[@]}"],
    *["${L[*]}", "${#L[@]}", "${L[@]:1:2}", "${M[k]}", "${M[m]}", "$@", "$2", "${3:-z}", "$#", "${*:2}"],
    *["${@:1:1}", "$(echo $A x)", "$(basename $F .gz)", "$(dirname $F)", "`echo b`/"],
    *["$(printf '%s-%02d' a 5)", "$(seq 2 4)", "$(echo 6*7 | bc)", "'$A  b'", "a\\ b", "\\$A", "$'a\\tb'", "''"],
    *["${L[-1]}", "${!R}", "${!L[@]}", "${U+x}", "${A+x $B}", "${#U[@]}", "${E-d}", "${A:?d}", "${B@U}${B@L}${B@Q}"],
    *["${F/#dir/D}", "${F/%gz/D}", "${F/#x/D}", "${F/%x/D}", "${F//i}", "${F/x/$A}", "${F: -2}", "${F: -99}"],
    *["${F:1:-2}", "${F:$((N)):2}", "$((0x1F + 010 + 2#101))", "$((2**3, -7/2))", "$((-7 % 3 ^ 1<<4 | ~5 & 3))"],
    *["$((1 < 2 && 3 >= 3 || !N))", "$(printf '%3d|%5s%%' 7 ab)", "$(printf '%s,' a b)", "$(printf 'x\\ty')"],
    *["$(echo -e 'a\\x41\\t')", "$(echo -n a)", "$'\\x41\\101\\'b'", "${A}_$B.c", "$(pwd | { read x; })"],
]
FORMS = st.one_of(
    LITERALS,
    build("${}/", NAMES),
    build("${{{}}}", NAMES),
    build(WORD, NAMES | st.just("U"), [":-", "-", ":+", "+"], ["d", "$A", '"x y"', "x y", ""]),
    build(WORD, NAMES, ["#", "##", "%", "%%"], ["*/", ".*", "?", "*", "[a-d]"]),
    build("${{{}{}{}/{}}}", NAMES, ["/", "//"], ["a", "?", " ", "[.]"], ["", "Z", "$A"]),
    build("${{{}:{}:{}}}", NAMES, st.integers(0, 5), st.integers(0, 3)),
    build("${{#{}}}", NAMES),
    st.sampled_from(PLAIN),
)
QUOTED = FORMS.filter(lambda text: not any(sign in text for sign in ("'", '"', "`", "\\ "))).map('"{}"'.format)
BRACES = [
    "{08..12}",
    "{3..-01}",
    "{c..a}",
    "{1..3}",
    "x{a,b}c",
    "{5..1..2}/y",
    "{a,b}{1,2}",
    "{a,{b,c}}",
    "{a,$N}",
    '{"$A",${B}}x',
    "{a,{$N}}",
]
WORDS = st.lists(FORMS | QUOTED, min_size=1, max_size=3).map("".join) | st.sampled_from(BRACES)
WHOLE = r"""
X=$((N+=2)),$((N-=1)),$((N*=2)),$((N/=3)),$((N%=3)),$((++N)),$((N--)),$((--N)),$((N<<=2)),$((0 ? (N=9) : 4)),$N

K='A + 1'; A=5; J=; X+=$((K * 2 + J)); let 'A *= 2' N=3; let A=0 || X+=zero

L[1]=c; L[5]=d; L[1]+=e; M[xy]=1; M[xy]+=2; X+="${!L[*]}${M[xy]}"; D=([2]=a b [0]=c); X+="${D[*]}/${!D[*]}"

T=TP; export "$T=3"; declare -x B=1; readonly C=2; typeset D=1; X+=$TP$B$C$D; g() { local "$1=5"; X+=$A; }; g A

for i in 1 2; do for j in 1 2 3; do [ $j = 2 ] && continue 2; X+=$i$j; done; done; while :; do X+=a; break; done

for i in 1 2; do for j in 1 2 3; do [ $j = 2 ] && break 2; X+=$i$j; done; done; until ((N>=5)); do ((N++)); done

for ((i=0;i<5;i++)) { ((i==1)) && continue; ((i==3)) && break; X+=$i; }; for i; do X+=$i; done; (exit 0); X+=$i

g() { :; }; h() { g; local A=9; X+=$A; }; h; h; X+=$A

g() { [ $1 = 1 ] && return 1; X+=$1; return; }; g 1 || g 2 && X+=y; h() (X=1); h

if ! [ a = b ]; then X+=1; fi; ! true || X+=2; [ a = a -a b = c -o d = d ] && X+=3; test a && X+=4; test || X+=5

[[ ! a == b && (b > a || c) && ! a > b ]] && X+=1; [[ $A = 7 && $B = x ]] && X+=2; [[ -v A && ! -v U ]] && X+=3

[[ -n $A && 7a =~ ^[0-9]+$ ]] && X+=1; [[ a =~ '.' ]] || X+=2
P=^7; [[ 70 =~ $P && '' -eq 0 && N+1 -eq 4 && ! x -lt 0 ]] && X+=3

[ $((010)) -eq 8 ] && X+=1; [ 010 -eq 10 -a 08 -ge 8 ] && X+=2
[[ ! $A == *'b'* ]] && X+=3; [[ c < b || ( a != a ) || ! x ]] || X+=4

case 7 in [!0-5[:space:]]) X+=1;; esac; case A in [[:upper:]x]) X+=2;; esac
P='[]^a-b]'; [[ ^ == $P && a == [a-c] && c != $P && a$P != \[ && b == [^a] ]] && X+=3

g() { while getopts 'ab:c' o; do X+=$o${OPTARG-}; done; shift $((OPTIND-1)); X+=$*; }; g -ac -b 3 -b4 rest -a

set -- z a b; shift; X+=$1; command true && builtin : || X+=b; A=1 B=$A; A+=2; unset A B; X+=${A-unset}
A=7 B=b
X+=$(cat <<-'Y'
	a $B
	Y
); X+=$(cat <<Y | cat
1$A
Y
); A=1 B=2
Y=3 D=4
A=5 :
""".strip().split("\n\n")
"""Statements of the kinds that the drawn ones lack."""

STATEMENTS = st.one_of(
    st.sampled_from(WHOLE),
    build("X={}; Y=$X", WORDS),
    build("L+=({} {})", WORDS, WORDS),
    build("for i in {} {}; do N=$((N + 1)); B+=$i; done", WORDS, WORDS),
    build("if [[ {} == {} ]]; then A=1; else A=2; fi", QUOTED, QUOTED),
    build("if [ {} {} {} ]; then A=3; fi", QUOTED, ["=", "!="], QUOTED),
    build("case {} in a*|7) A=4 ;; *x*) A=5 ;; *) A=6 ;; esac", QUOTED),
    build("g() {{ local A=$1; shift; B=$A$#; }}; g {} {}", WORDS, WORDS),
    build(': "${{E:={}}}"; while (( N < 6 )); do N=$((N + 1)); E+=.; done', LITERALS),
    build("[[ -z ${} ]] && A=8 || B=9", NAMES),
    build("V=$(cat <<X\n{} $B\nX\n)", LITERALS),
)


HELPERS = """set -f
basename() { local n=${1##*/}; echo "${n%$2}"; }
dirname() { echo "${1%/*}"; }
bc() { read x; echo 42; }
seq() { local i; for ((i=$1; i<=$2; i++)); do echo $i; done; }
cat() { while IFS= read -r l; do echo "$l"; done; }
show() { printf '%s\\0' "$@"; }
"""
"""Functions in place of programs, which are out of bash's reach."""


@pytest.mark.skipif(BASH is None, reason="there is no bash on this machine")
@settings(
    max_examples=examples(320).max_examples,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(st.lists(STATEMENTS, max_size=3), st.lists(WORDS, min_size=1, max_size=3))
@example(WHOLE, [*PLAIN, *BRACES])
@example([], ["$A/b_$B.c", '"${A} ${B}"', "--x=${U-}$N"])
@example([], ["{a,{b,$N}}", "${N}{1..2}", "{1..$N}", "'{a,b}'{c,d}", "\\{a,$N}", 'k={"a b",$(echo x,y)}', "{a,{b,c}"])
@example([], ["${U:-$(( (N + 1) / 2 ))}", '"${U:-$(( (N) - -2 ))}"', "${U:-$(( ${N} * ( ${N} + 1 ) ))}"])
def test_expansions_are_those_of_bash(statements: list[str], words: list[str]) -> None:
    lines = [*statements, f"show {' '.join(words)} $X $Y ${{L[@]}} $A $B $V"]
    body = SET + "\n".join(lines)
    arguments = [str(BASH), "--norc", "--noprofile", "-r", "-c", HELPERS + body]
    done = subprocess.run(arguments, env={"PATH": ""}, capture_output=True, timeout=20)
    run = run_script(body, "run.sh")
    if not done.stderr:  # no mistake, at which bash stops
        shown = [word.text for word in run.commands[-1].words[1:]]
        assert "\0".join(shown) == done.stdout.decode().removesuffix("\0"), body


# ------------------------------------------------------------------------------------------------- starts of programs


@pytest.mark.parametrize(
    ("script", "launchers", "entry", "arguments"),
    [
        (": ${N:=2}\nsrun --mpi=pmix python -m torch.distributed.run --nproc_per_node 8 t.py --x $N --y 2",
         "srun, python -m torch.distributed.run", "t.py", "x=2 y=2"),
        ('run() { torchrun --nproc_per_node=$1 t.py "${@:2}"; }\nrun 8 --x 1', "torchrun", "t.py", "x=1"),
        ('export N=4\nsrun -N 2 bash -c "cd /w && torchrun \\\n t.py --x \\$N"', "srun, torchrun", "t.py", "x=4"),
        ("docker run --gpus all --rm -it -v a:b -e X=1 i:1 bash -c 'python -m a.b --x $X'", "docker", "a.b", "x=1"),
        ('for i in 0 1; do ssh h$i "torchrun --node_rank $i t.py --x 1" & done', "ssh, torchrun", "t.py", "x=1"),
        ('CMD="accelerate launch --multi_gpu t.py --x 1"\neval "$CMD --y 2"', "accelerate launch", "t.py", "x=1 y=2"),
        ('A="$(cat <<X\n--x 1\n--y 2\nX\n)"\ndeepspeed --num_gpus 8 t.py $A', "deepspeed", "t.py", "x=1 y=2"),
        ('sbatch -N 2 --wrap "srun t.py --x 1"', "sbatch, srun", "t.py", "x=1"),
        ("bash <<X\npython t.py --x 1\nX", "", "t.py", "x=1"),
        ("NPROC_PER_NODE=8 swift sft --x 1", "", "swift sft", "x=1"),
        ("tune run --nproc_per_node 4 full --x 1", "tune run", "tune run full", "x=1"),
        ("python prepare_data.py --a 1 --b 2\npython t.py --x 1", "", "t.py", "x=1"),
        ('srun $UNSET "${NONE[@]}" torchrun t.py --x 1', "srun, torchrun", "t.py", "x=1"),
        ('X="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nA=" --x 1\n --y 2"\ntorchrun t.py $A',
         "torchrun", "t.py", "x=1 y=2"),
    ],
)  # fmt: skip
def test_a_start_behind_its_launchers(script: str, launchers: str, entry: str, arguments: str) -> None:
    chosen = launch(script)
    assert ", ".join(launcher.name for launcher in chosen.launchers) == launchers
    stated = " ".join(f"{name}={argument.value}" for name, argument in chosen.arguments.items())
    assert (chosen.entry, stated) == (entry, arguments)
    assert not chosen.lost and not chosen.command.lost


def test_quotes_inside_of_quotes_do_not_divide_an_assignment() -> None:
    script = 'A=1\nB=2\nexport CMD=" --o "n=$A,m=$B,u=$A" --d 3"\ntorchrun train.py $CMD\n'
    assert values(script) == {"o": "n=1,m=2,u=1", "d": "3"}
    assert values(script.replace("export ", "")) == {"o": "n=1,m=2,u=1", "d": "3"}


def test_signs_around_quotes_are_one_pattern() -> None:
    script = 'if [[ "$*" == *"--help"* ]]; then exit 0; fi\ntorchrun train.py --a 1\n'
    assert values(script, arguments=("--model", "x")) == {"a": "1"}


def test_a_command_that_a_comment_cuts_goes_on_as_it_was_meant() -> None:
    cut = launch("torchrun train.py \\\n  # size\n  --a 1 \\\n  # rate\n  --b 2\n")
    assert {name: stated.value for name, stated in cut.arguments.items()} == {"a": "1", "b": "2"}
    why = "the command in front ends before --a: a comment or a space behind \\ cuts it"
    assert [place.why for place in cut.command.lost] == [why]


def test_overrides_and_files_belong_to_no_option() -> None:
    chosen = launch("python -m a.b c.yaml x.y=1 +z=2 --f g h.i=3 --cfg-options j=4 k=5 --bf16 $EXTRA_ARGS")
    assert [word.value for word in chosen.positional] == ["c.yaml", "x.y=1", "+z=2", "h.i=3", "$EXTRA_ARGS"]
    arguments = {name: stated.value for name, stated in chosen.arguments.items()}
    assert arguments == {"f": "g", "cfg_options": ["j=4", "k=5"], "bf16": True}
    assert chosen.positional[-1].unknown == ("EXTRA_ARGS",)


def test_arguments_and_variables_come_from_outside() -> None:
    script = "TP=$1\nwhile [[ $# -gt 1 ]]; do case $2 in --pp) PP=$3; shift 2;; *) shift;; esac; done\n"
    script += "t.py --tp $TP --pp ${PP:-1} --n $N"
    assert values(script, arguments=["4", "--pp", "8"], environment={"N": "2"}) == {"tp": "4", "pp": "8", "n": "2"}
    assert run_script(script, "run.sh").positional == ("$1",)
    assert launch(script).arguments["tp"].unknown == ("$1",)


def test_files_beside_a_script_are_followed(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("TP=$1\n")
    (tmp_path / "start.sh").write_text("torchrun t.py --tp $TP $1\n")
    script = 'source "$(dirname "$0")/env.sh" 4\nexport TP\nbash start.sh --bf16'
    assert values(script, tmp_path) == {"tp": "4", "bf16": True}
    assert launch(script, tmp_path).arguments["tp"].place == "start.sh:1"
    assert run_script("source /etc/passwd\nsource ../../../../etc/passwd", "run.sh", tmp_path).variables == {}


def test_what_a_script_writes_is_kept() -> None:
    run = run_script(
        'Z=3\ncat > ds.json <<X\n{"stage": $Z}\nX\necho "a: 1" >> c.yaml\necho "b: 2" | tee -a c.yaml', "run.sh"
    )
    assert run.files == {"ds.json": ('{"stage": 3}\n', 3), "c.yaml": ("a: 1\nb: 2\n", 5)}


FILLED = {"s/N/3/": '{"n": 3, "N": 1}\n', "s|N|a/b|g": '{"n": a/b, "a/b": 1}\n', "s/N*/3/": None, "s/$U/3/": None}


@pytest.mark.parametrize(("program", "printed"), FILLED.items())
def test_templates_are_filled_by_sed(program: str, printed: str | None) -> None:
    write = 'cat > t.json <<X\n{"n": N, "N": 1}\nX\n'
    piped = run_script(f'{write}sed "{program}" t.json > ds.json', "run.sh").files
    assert piped.get("ds.json", (None,))[0] == printed
    assert run_script(f'{write}sed -i "{program}" t.json', "run.sh").files.get("t.json", (None,))[0] == printed


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("IFS=, read -r A B <<< '8,4 x,1'; echo $A/$B", "8/4 x,1"),
        ("OLD=$IFS; IFS=, read -r A B C <<< '8,,1'; IFS=$OLD; read -r D E <<< '2 3'; echo $A/$B/$C/$D/$E", "8//1/2/3"),
        ("IFS= read -r A <<< ' x  y'; echo \"[$A]\"", "[ x  y]"),
        ("while IFS=: read -r A B; do N=$B$A; done <<X\np:1\nq:2\nX\necho $N", "2q"),
        ('G=16; T=2; echo "${U:=$((G / (T * 2)))}"', "4"),
        ('G=16; echo "${U:-$((G / 4))}$((G/(2*4)))"', "42"),
        ("if getopts ab 2>/dev/null; then echo 1; else echo 2; fi", "2"),
        (
            "echo 'a,b' | awk -F, '{ print $2 }'; echo '3 4' | awk '{print $2;}'; echo '3 4' | awk '{print $0}'",
            "b\n4\n3 4",
        ),
        (
            "seq 3 | wc -l; seq 5 -2 1 | head -n 2; seq 9 | head -1; seq 30 | head | wc -l; echo a b | wc -w",
            "3\n5\n3\n1\n10\n2",
        ),
        (
            "echo aB | tr A-Z a-z; echo aB | tr '[:lower:]' '[:upper:]'; echo a-b | tr - _; echo 'a b' | tr -d ' '",
            "ab\nAB\na_b\nab",
        ),
        (
            "echo a,b | cut -d, -f2; echo a:b | cut -f 1 -d :; echo a,b | cut -d , -f 9; echo ab | cut -d, -f2",
            "b\na\n\nab",
        ),
        (
            "dirname a/b/; dirname a; dirname /a; basename a/b/; basename a.sh .sh; basename .sh .sh",
            "a\n.\n/\nb\na\n.sh",
        ),
        ("expr 7 / 2 + '(' 2 '*' 3 ')'; echo 1 2 | xargs; printf '%s %d\\n' a; X=1; X=2 : ; echo $X", "9\n1 2\na 0\n1"),
    ],
)
def test_values_are_computed_as_bash_does(script: str, printed: str) -> None:
    assert values(f'show() {{ {script}; }}\nV=$(show)\ntrain.py --v "$V"\n')["v"] == printed
    if BASH is not None:
        assert subprocess.run([BASH, "-c", script], capture_output=True, text=True).stdout == f"{printed}\n"


def test_what_is_not_computed_stays_as_it_is_written() -> None:
    commands = "printf; printf %x 1; printf %2d $U; printf %d a; seq 1 0 3; seq a; basename; basename $U; dirname a b; "
    commands += "echo a | tr a-c d; echo a | cut -c1; echo a | awk '{print}'; echo a | awk -F, '{print $1} $2'; expr; "
    commands += "echo a | head -c 3; echo a | wc; expr a + 1; expr 1 / 0; echo a | bc; echo -e $U; python3 x.py | tee f"
    formulas = ["1 << 70", "2 ** -1", "1 +", "(1", "U", "1**" * 200 + "1", "-" * 200 + "1", "B=" * 200 + "1", "9" * 30]
    formulas += ["2 ** 63", "16#x", "1 / 0", "08"]
    scripts = [
        *["A=${U:?no}", "L=(1); A=${L[@]:U}", "cd $U; A=$PWD", "L[$(x)]=1; L=([$(x)]=2 [$(y)]=3); A=${L[1]}"],
        *["if test 1 2 3 || command -v x; then A=1; fi", "case $(x) in a) A=1;; esac", "for ((;U;)); do A=1; done"],
        *[
            "for ((A=0; A<1; A=U)); do A=$U; done",
            "export $(x); [ $(x) = a ] && A=1",
            f"B={'a' * 1000}; A=${{B/a*a/b}}",
        ],
        *(f"A=$({command})" for command in commands.split("; ")),
        *(f"F='{text}'; A=$((F))" for text in formulas),
    ]
    for script in scripts:
        assert launch(f'{script}\ntrain.py --v "$A"').arguments["v"].unknown, script


def test_every_line_that_a_loop_reads_starts_a_program() -> None:
    script = "while IFS=: read -r TP PP; do\n    torchrun train.py --tp $TP --pp $PP\ndone <<X\n8:1\n8:1\n4:2\nX\n"
    started = [[word.text for word in command.words[3::2]] for command in run_script(script, "run.sh").commands]
    assert started == [["8", "1"], ["8", "1"], ["4", "2"]]


def test_slurm_sets_variables_by_its_directives(tmp_path: Path) -> None:
    head = "#SBATCH -t 0:30:00 --nodes=4 --ntasks-per-node=8\n#SBATCH --gres=gpu:a100:2 # each\n"
    names = ["SLURM_NNODES", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"]
    script = f"{head}t.py --x {' '.join('$' + name for name in names)}"
    assert values(script) == {"x": ["4", "32", "2"]}  # --gpus-per-node is not stated
    assert values(script, environment={"SLURM_NNODES": "9"})["x"] == ["9", "32", "2"]
    (tmp_path / "job.sh").write_text(script)
    assert values("sbatch --nodes=3 job.sh", tmp_path)["x"] == ["3", "24", "2"]


def test_a_test_of_a_file_starts_nothing() -> None:
    assert not run_script("if [ ! -f train.py ]; then exit 1; fi\nt.py --x 1", "run.sh").lost
    assert run_script("if [ ! -f a ]; then python train.py; fi\nt.py --x 1", "run.sh").lost


def test_what_nothing_sets_is_no_second_value_and_placeholders_are_one_word() -> None:
    assert values('t.py --pp 1 $MAYBE --tp $TP\neval "u.py --pp 1"') == {"pp": "1", "tp": "$TP"}
    filled = values('sh -c "t.py --dir <PATH TO DATA> --vocab <VOCAB FILE> --fp16 --x 1"')
    assert filled["fp16"] is True and filled["x"] == "1"
    assert values("t.py --x 1 --z 3 <IN >OUT") == {"x": "1", "z": "3"}


@pytest.mark.parametrize(
    ("script", "line", "why"),
    [
        ("t.py --x 1 \\\n # note \\\n --y 2", 3, "ends before --y"),
        ('A="--x 1\nt.py $A\n--y 2', 3, "quote is open"),
        ("t.py 'a\n --x 1'", 1, "several lines"),
        ('t.py --x 1 "$@"', 1, "--args"),
        ("if [ -d /d ]; then A=--bf16; else A=; fi\nt.py $A --y", 1, "what A holds depends"),
        ("f() { return $(python n.py); }\nif f; then A=--bf16; fi\nt.py $A", 2, "what A holds depends"),
        ("if nvidia-smi; then t.py --x 1; torchrun t.py; fi", 1, "which command is started"),
    ],
)
def test_a_reader_that_is_lost_says_where(script: str, line: int, why: str) -> None:
    run = run_script(script, "run.sh")
    places = [*run.lost, *(place for command in run.commands for place in command.lost)]
    assert any(place.line == line and re.search(why, place.why) for place in places), places


# --------------------------------------------------------------------------------------------------------- limits


def test_every_script_ends_soon() -> None:
    """Within its limits (tests/refusals/launch_files.yaml)."""
    start = time.process_time()
    with pytest.raises(PlanError, match="more than 50,000 steps"):
        run_script("for a in {1..999}; do for b in {1..999}; do A=$a$b; done; done", "run.sh")
    assert time.process_time() - start < 3


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
: "${TP:=4}"
ARGS=(--num-layers 8 "--lr 1e-4" # note
  --tp $TP)
if [[ -n "$X" ]]; then ARGS+=(--bf16); elif [ "$TP" -gt 2 ]; then ARGS+=(--fp16); else exit 1; fi
case $TP in 4|8) N=$((TP * 2)) ;; *) N=1 ;; esac
for i in {1..3}; do M="$M ${i}"; done
cat > ds.json <<EOF
{"stage": $N}
EOF
run() { local n=$1; shift; srun bash -c "torchrun --nproc_per_node $n t.py ${ARGS[*]} $*"; }
run 8 --n "$N" \\
  --m '$M' "$@" 2>&1 | tee log
"""


SIGNS = ("'", '"', "`", "$(", "${", "((", "))", "}", "\\", "<<X", "|", "&", ";", "\0", "é")


@examples(480)
@given(st.data())
def test_a_damaged_script_is_read_or_refused(data: st.DataObject) -> None:
    """Lines are dropped, doubled or cut, and quotes and brackets are put in their place."""
    lines = SCRIPT.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.integers(0, len(lines) - 1))
        place, sign = data.draw(st.integers(0, len(lines[row]))), data.draw(st.sampled_from(SIGNS))
        cut, rest = lines[row][:place], lines[row][place:]
        changed = [[], [lines[row]] * 2, [cut], [cut + sign + rest], [cut + sign + rest[1:]]]
        lines[row : row + 1] = data.draw(st.sampled_from(changed))
        lines = lines or [""]
    try:
        run = run_script("\n".join(lines), "run.sh")
        launches = find_launches(run, "run.sh")
    except PlanError:
        return
    assert all(word.line <= len(lines) for launch in launches for word in launch.command.words)


def test_places_beyond_the_grammar_are_told_once_each_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [place.line for place in run_script("\n".join(["x ( y"] * 50), "run.sh").lost] == [1]
    places = [LostPlace(line, f"why {line % 30}") for line in range(1, 90)]
    monkeypatch.setattr(grammar, "_list_errors", lambda _: iter(places))
    told = [*grammar.find_errors(grammar.parse("x", "run.sh"))]
    assert told[:-1] == places[: grammar.MAX_TOLD] and told[-1].why.endswith("this and 19 places below")
