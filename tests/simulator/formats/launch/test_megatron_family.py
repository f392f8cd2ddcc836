"""Files of Megatron-LM, its forks and the programs on Megatron-Core: their settings, recipes and routing of tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.launch.convert import SHAPE_OF_FILE
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.python_text import OpenValue, PythonText
from meshcast.simulator.formats.launch.reading import SAME_WITHOUT
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model
from tests.draws import drawn
from tests.launch_files import PRIMUS, SHAPE, keys_of, read_launch

RICH = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 4096"
    " --max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 2 --global-batch-size 128 --bf16"
    " --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    " --overlap-grad-reduce --overlap-param-gather --num-layers-per-virtual-pipeline-stage 4 --recompute-granularity"
    " selective --recompute-modules core_attn mlp --attention-backend flash --lr 1e-4 --train-iters 50"
    " --save-interval 10 --deterministic-mode --log-throughput --clip-grad 1.0 --tokenizer-type NullTokenizer"
)
SAME_AS_DEFAULT = (
    *("--attention-backend", "--attention-dropout", "--group-query-attention", "--save-interval"),
    "--max-position-embeddings",
)
"""Flags of `RICH` that state the default, or count for whole runs alone; rotary positions have no table of them."""


def test_every_understood_flag_is_listed_as_taken_or_as_idle_here() -> None:
    findings = read_launch("megatron", command=f"torchrun pretrain_gpt.py {RICH}").findings
    taken = {entry.shown for entry in findings.taken}
    flags = set(re.findall(r"--[\w-]+", RICH))
    others = {entry.shown for entry in (*findings.ignored, *findings.approximated)}
    assert flags == (taken | others) & flags and not findings.questions
    understood = flags - {"--lr", "--deterministic-mode", "--log-throughput", "--clip-grad", "--tokenizer-type"}
    idle = {entry.shown for entry in findings.ignored if entry.why == SAME_WITHOUT}
    assert understood <= taken | idle and idle <= {"--attention-dropout", "--group-query-attention"}


@pytest.mark.parametrize(("cp", "read"), [(1, 2), (4, 4)])
def test_hybrid_context_parallelism_asks_for_the_lengths_of_samples(cp: int, read: int) -> None:
    """Groups are of the dp x cp ranks, whatever cp is; what batch sizes count follows from the lengths."""
    flags = f"--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 2048 --context-parallel-size {cp}"
    command = f"torchrun pretrain_gpt.py {RICH} {flags}".replace("--pipeline-model-parallel-size 2", "")
    command = command.replace("--num-layers-per-virtual-pipeline-stage 4", "")
    with pytest.raises(OpenQuestions, match="the lengths of samples are in the data"):
        read_launch("megatron", command=command)
    lengths = "batch.samples.distribution={kind: uniform},batch.samples.count=64"
    found = read_launch("megatron", command=command, set=[lengths])
    assert found.job["batch"] == {"sequence": 4096, "samples": {"join": "hybrid-cp", "rank_tokens": 2048}}
    plan = found.job["plan"]
    assert plan.get("mesh", plan)["cp"] == read


def test_a_packing_scheduler_asks_for_the_lengths_of_samples() -> None:
    flags = "--sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 4096 --context-parallel-size 2"
    command = f"torchrun pretrain_gpt.py {RICH} {flags}"
    with pytest.raises(OpenQuestions, match="the lengths of samples are in the data"):
        read_launch("megatron", command=command)
    found = read_launch("megatron", command=command, set=["batch.samples.file=lengths.csv"])
    assert found.job["batch"] == {"sequence": 4096, "samples": {"join": "dp-balanced", "tokens": 8192}}
    with pytest.raises(OpenQuestions, match="does not know the scheduler 'other'"):
        read_launch("megatron", command=command.replace("dp_balanced", "other"))


@pytest.mark.parametrize("flag", drawn(re.findall(r"--[a-z][^-]*(?:-[a-z][^-]*)*", RICH), keep=14))
def test_a_flag_that_is_dropped_changes_the_job_or_had_no_influence(flag: str) -> None:
    """Of the shape, plan or batch nothing is read from elsewhere: without its flag the job is another one, or asked."""
    whole = read_launch("megatron", command=f"torchrun pretrain_gpt.py {RICH}")
    try:
        without = read_launch("megatron", command=f"torchrun pretrain_gpt.py {RICH}".replace(flag, "", 1))
    except (OpenQuestions, ValueError):
        return
    listed = {entry.shown for entry in (*whole.findings.ignored, *whole.findings.approximated)}
    name = flag.split()[0]
    assert without.job != whole.job or name in listed or name in SAME_AS_DEFAULT


# ----------------------------------------------------------------------------------------- recipes


def read_claimed_size(name: str) -> float | None:
    """Returns the parameters that the name of a recipe claims, in billions; none for experts."""
    match = re.search(r"_(\d+)x\d+b|_e16|_(\d+(?:[._p]\d)?)(b|m)(?:_|$|\.)", name)
    if match is None or match[2] is None:
        return None
    return float(re.sub("[_p]", ".", match[2])) / (1 if match[3] == "b" else 1000)


@pytest.mark.parametrize("program", ["nemo", "megatron_bridge"])
def test_recipes_have_models_of_the_size_that_their_names_claim(program: str) -> None:
    recipes = load_recipes(program)
    sizes = {name: size for name in recipes.recipes if (size := read_claimed_size(name)) is not None}
    for name, row in recipes.recipes.items():
        model = load_model(row["model"])
        assert name not in sizes or model.parameters / 1e9 == pytest.approx(sizes[name], rel=0.35), name
        assert row.get("expert_model_parallel_size", 1) == 1 or model.moe is not None
    assert len(sizes) > 0.6 * len(recipes.recipes) and len(recipes.recipes) > 150
    assert set(recipes.aliases.values()) <= set(recipes.recipes)
    assert "@" in recipes.source


OVER = "train: {}\nmodel: {}\nddp: {}\nlogger: {log_interval: 1}\n"


@pytest.mark.parametrize("name", drawn(load_recipes("megatron_bridge").recipes, keep=25))
def test_a_recipe_of_megatron_bridge_is_a_job(name: str) -> None:
    keys = keys_of(read_launch("any", command=OVER, name="over.yaml", args=f"--recipe {name}"))
    row = load_recipes("megatron_bridge").recipes[name]
    assert keys["batch.global"] == row["global_batch_size"]
    assert keys["plan.tp"] == row.get("tensor_model_parallel_size", 1)
    assert keys["plan.recompute"] == row.get("recompute_granularity", "none")


@pytest.mark.parametrize("name", drawn(load_recipes("nemo").recipes, keep=20))
def test_a_recipe_of_nemo_is_a_job(name: str) -> None:
    model, kind, *variants = name.split(".")
    arguments = {"full": "peft_scheme=None", "performance": "performance_mode=True"}
    call = f"llm.{model}.{kind}_recipe({', '.join(arguments[variant] for variant in variants)})"
    keys = keys_of(read_launch("any", command=f"from nemo.collections import llm\nrecipe = {call}\n", name="run.py"))
    row = load_recipes("nemo").recipes[name]
    assert keys["batch.global"] == row["global_batch_size"]
    assert keys["plan.pp"] == row.get("pipeline_model_parallel_size", 1)
    assert keys.get("train.mode", "full") == row.get("peft", "full")


@pytest.mark.parametrize("name", drawn(load_recipes("primus").models, keep=15))
def test_models_of_primus_have_the_size_of_their_names(name: str) -> None:
    model = load_job(read_launch("any", name="exp.yaml", command=PRIMUS.replace("llama3.1_8B", name)).job).model
    if claimed := re.search(r"_(\d+(?:\.\d+)?)B(?:_A|$)", name):
        output = 0 if model.tied else model.vocab * model.hidden  # Primus has them apart in every model
        assert model.parameters - output == pytest.approx(float(claimed[1]) * 1e9, rel=0.35)


def import_untuned(name: str, more: str = "") -> dict[str, Any]:
    text = f"torchrun --nproc_per_node 8 scripts/training/run_recipe.py --recipe {name} {more}"
    return read_launch("any", command=text, name="run.sh", form="megatron-bridge", cluster="dgx-h100:1").job


def test_an_untuned_recipe_is_told_from_a_tuned_one() -> None:
    """One that nobody tuned rotates queries and keys in many kernels, and its interval is wider."""
    untuned = import_untuned("qwen3_8b_sft_4gpu_h100_bf16_config")
    changes = untuned["framework"]["set"]
    assert changes["regime"] == "family" and changes["eager"] == {"rope": {"fused": False}}
    assert untuned["batch"]["documents"] == 200  # of SQuAD
    mixture = import_untuned("qwen3_8b_sft_4gpu_h100_bf16_config", "--dataset tulu3")
    assert mixture["batch"]["documents"] == 370
    fused = {**untuned, "framework": {**untuned["framework"], "set": {}}}
    assert forecast_step(load_job(untuned)).step_time > 1.01 * forecast_step(load_job(fused)).step_time
    assert "eager" not in import_untuned("llama3_8b_sft_2gpu_h100_bf16_config")["framework"].get("set", {})
    tuned = import_untuned("qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config")["framework"]
    assert "regime" not in (tuned if isinstance(tuned, dict) else {}).get("set", {})


def test_a_preset_that_only_the_shape_tells_is_named_so() -> None:
    found = read_launch("any", command="{llama3}", name="run.sh", form="megatron")
    assert (found.job["model"], found.comments["model"]) == ("llama3-8b", SHAPE_OF_FILE)
    stated = read_launch("any", command="{llama3}", name="run.sh", form="megatron", model="llama3-8b")
    assert "model" not in stated.comments


# ------------------------------------------------------------------------------------ Python files


def test_nothing_of_a_python_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"open({str(mark)!r}, 'w').write('x')\nimport os\nos.system('touch {mark}')\nx = 2 ** 99999\n"
    text += "y = 'a' * 10**9\nz = 'a'\nfor i in [1] * 90:\n    z = z + z\nc = m.Config()\nc.self = c\n"
    followed = PythonText(text + "d = '%999999999d' % 1\nwhile True:\n    pass\n", "run.py")
    followed.follow()
    assert all(isinstance(followed.names[name], OpenValue) for name in "xyzd")
    assert not mark.exists()


FOLLOWED = """
import typing
a = ' Ab '
b = a.strip().lower() + a.upper()
c, (d, [e]) = 1, (-2, [not 3])
f = [n * 2 for n in [c, d] if True] if c is None else [n * 2 for n in [c, d]]
g = {'x': c, **{}, 'y': {'z': f[-1]}}
g['w'] = g['y']['z'] if c < 2 and d != c else 0
h = (c and d) or e, c in [1, 2], 'x' not in g, 2**5 // 3 % 4, 7 / 2, (c or x) and 'w', c is not None
for n in [1, 2, 3, 4]:
    if n == 2:
        continue
    if n >= 4:
        break
    f.append(n)
f.extend([8, 9])
with typing.nothing() as i:
    j: int = 3
try:
    j += 1
except ValueError:
    pass
else:
    j *= 10
finally:
    j -= 2
def m(p, q=2, *, r=3, **s):
    if p > 3:
        return s.get('t', 4)
    return [p, q, r, s]
k = [m(1), m(2, r=5, t=6), m(4, t=7), m(5), m(1, **{'q': 9}), typing.cast(int, 8), int('7'), str(1.5), bool(0)]
o = [isinstance(c, int), isinstance(a, list), len(f), list((1, 2)), tuple([c]), float(2), dict(u=1), f'{a}-{c}']
"""
OPEN = """a.strip('A'); int('x'); 1 / 0; 'a' + 1; x.y if x.z else 2; f[99]; f[x.y]; [n for n in x.z]; lambda: 1; not x.y
-x.y; [1][0:1]; {n: n for n in f}; '%9d' % 1; endless(1); refuse(1)""".replace("\n", "; ").split("; ")
BRANCHES = """
class C: pass
def endless(n): return endless(n)
def refuse(n): raise ValueError(n)
import x
t, u, v, w = 1, 1, 1, 1
l = x.Config(z=C)
if x.flag():
    l.tp, t = 2, 2
elif x.other:
    u: int = 2
while x.goes_on():
    v += 1
for n in range(9):
    w += n
"""


def test_values_of_a_python_file_are_those_of_python() -> None:
    """What nobody knows is open, with all that it decides."""
    followed = PythonText(FOLLOWED + BRANCHES + "".join(f"X{n} = {text}\n" for n, text in enumerate(OPEN)), "run.py")
    followed.follow()
    names: dict[str, Any] = {"x": None}
    exec(FOLLOWED.replace("typing.nothing()", "open('/dev/null')"), names)
    lists = json.loads(json.dumps({name: value for name, value in names.items() if name in "abcdefghjko"}))
    assert {name: followed.names[name] for name in lists} == lists
    opened = {f"X{n}": text for n, text in enumerate(OPEN)} | dict.fromkeys("tuvw", "")
    assert {name: text for name, text in opened.items() if not isinstance(followed.names[name], OpenValue)} == {}
    assert isinstance(followed.names["l"].fields["tp"], OpenValue)


# ----------------------------------------------------------------------------------------- routing

EXPERTS = f"torchrun pretrain_gpt.py {SHAPE} --num-layers 4 --num-experts 8 --moe-router-topk 2"
EXPERTS += " --moe-token-dispatcher-type alltoall --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "routing"),
    [
        ("--data-path corpus", "natural"),
        ("--data-path corpus --moe-router-enable-expert-bias", "loss-free"),
        ("--data-path corpus --moe-router-force-load-balancing", "balanced"),
        ("--mock-data", "balanced"),
    ],
)
def test_experts_on_data_are_chosen_by_a_trained_router(flags: str, routing: str) -> None:
    """Its step is the longer the less even it is, and no longer where every rank holds all experts."""

    def read(more: str, *changes: str) -> dict[str, Any]:
        return read_launch("megatron", command=f"{EXPERTS} {more}", set=changes).job

    job = load_job(read(f"{flags} --expert-model-parallel-size 8"))
    entry = next(entry for entry in job.plan.schemes if entry.use == "expert/all-to-all")
    stated = (entry.model_extra or {}).get("routing", "balanced")
    assert (stated if isinstance(stated, str) else stated["trained"]) == routing
    even = load_job(read("--expert-model-parallel-size 8 --mock-data"))
    balanced, routed = forecast_step(even), forecast_step(job)
    assert (routed.step_time > 1.001 * balanced.step_time) is (routing != "balanced")
    assert routed.peak_allocated == pytest.approx(balanced.peak_allocated, rel=1e-5)
    assert ("load of the busiest rank" in job.framework.sigmas) is (routing != "balanced")
    whole = load_job(read(f"--expert-model-parallel-size 1 {flags}"))
    assert not any(scheme.use.startswith("expert/") for scheme in whole.plan.schemes)
    for change in ("plan={ep: 8}", "plan.ep=[1, 8]"):  # ranks that only the user gives them
        stated = read(flags, change)["model"].get("moe", {}).get("routing") or "balanced"
        assert (stated in ("natural", "loss-free")) is (routing != "balanced")
