"""Valid files, from which the malformed ones are made."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps.grid import load_sweep
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import run as run_sweep
from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
from meshcast.validation.measurements.measurement import to_json
from tests.experiments.cli.samples import JOB, ROOT
from tests.simulator.formats.samples import event, kernel, launch
from tests.simulator.formats.test_nccl_tests import TABLE
from tests.validation.calibration.test_recorded import file as write_collectives
from tools.inputs.corpus import load_corpus

Seeds = Callable[[Path], list[bytes]]
"""Makes the valid files; its argument is the working folder."""

PART = "0000000.parquet"
CALIBRATIONS = "simulator/costs/calibration"
MEASURED = ROOT / "validation/measured/cpu"
MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 96, "seq": 32}
SMALL: dict[str, Any] = {"model": MODEL, "cluster": "dgx-h100:2", "batch": {"global": 16}, "plan": {"tp": 2, "pp": 2}}
GROUPED = {**MODEL, "kv_heads": 4, "head_dim": 8}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "first_dense": 1, "capacity": 1.25}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 8}
FIGURE = {"value": 8, "kind": "assumed", "source": "a test"}
NODE = {
    "gpu": "a100-sxm-80",
    "gpus": FIGURE,
    "scale_up": {"link": "nvlink3", "domain": {**FIGURE, "value": 4}},
    "nics": {"link": "infiniband-hdr", "count": FIGURE, "rail_optimised": {**FIGURE, "value": True}},
}

JOBS: list[dict[str, Any]] = [
    {
        "id": "short",
        "model": {**GROUPED, "gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm", "dropout": 0.1},
        "cluster": "dgx-h100:2",
        "framework": "torchtitan",
        "batch": {"global": 16, "micro": 1, "sequence": 32},
        "precision": "fp8-delayed",
        "plan": {"tp": 2, "pp": 2, "dp": 4, "cp": 1, "chunks": 2, "zero": 1, "recompute": "selective"},
        "run": {"tokens": 1e9, "price_per_gpu_hour": 2.5},
    },
    {
        "model": {**GROUPED, "moe": EXPERTS, "window": 16, "full_every": 2, "mtp": 1},
        "cluster": {"gpu": "h100-sxm", "gpus": 16, "gpus_per_node": 8, "inter": {"kind": "roce", "gbps_per_gpu": 400}},
        "framework": {
            "name": "megatron-core",
            "release": "0.12",
            "set": {"overlap": {"dp": False}, "bucket": {"elements": 1000}, "rates": {"kernel": 1.1}, "launch_s": 1e-6},
        },
        "batch": {"global": 32, "micro": 2},
        "precision": {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32", "moments": "bf16"},
        "optimizer": "adam",
        "plan": {
            "mesh": {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
            "views": {"experts": {"edp": 2, "ep": 4, "etp": 1}},
            "schemes": [
                {"use": "pipeline/1f1b", "over": "pp"},
                {"use": "data/fsdp", "over": ["dp"]},
                {"use": "sequence/all-gather", "over": "cp"},
                {"use": "tensor/megatron-sp", "over": "tp"},
                {"use": "expert/all-to-all", "over": ["ep"]},
                {"use": "memory/recompute-selective", "modules": ["core_attn", "moe"]},
            ],
            "partition": [2, 2],
        },
    },
    {
        "model": {"preset": "gpt2-124m", "layers": 4, "mla": LATENT, "positions": "rope"},
        "cluster": {
            "groups": [{"node": NODE, "nodes": 2}, {"node": "dgx-h100", "nodes": 1}],
            "fabric": {"levels": [{"nodes": 2}, {"oversubscription": 2}], "hop_latency": {**FIGURE, "value": "1 us"}},
        },
        "plan": {"pp": 2, "schedule": "gpipe", "fsdp": True, "recompute": "full", "partition": "even"},
    },
]
"""Jobs in short and in long form, on GPUs and on nodes of several kinds, with fields of every kind."""

LAPTOP: dict[str, Any] = {
    "model": {**MODEL, "tied": True, "dropout": 0.0}, "cluster": {"gpu": "cpu-core", "gpus": 2},
    "framework": "reference", "precision": "fp32", "batch": {"global": 4, "micro": 1, "sequence": 32},
    "plan": {"pp": 2},
}  # fmt: skip
"""A job that the reference trainer runs."""


def place_schemes(*schemes: str, **options: Any) -> list[dict[str, Any]]:
    """Returns the schemes of a plan in long form, written `name axis`; the last one has these options."""
    entries: list[dict[str, Any]] = [{"use": use, "over": over} for use, over in map(str.split, schemes)]
    return [*entries[:-1], {**entries[-1], **options}]


def route(routing: dict[str, str]) -> dict[str, Any]:
    """Returns a job whose experts' tokens are counted in a file beside it."""
    schemes = place_schemes("data/ddp dp", "expert/all-to-all ep", routing=routing)
    model = {**MODEL, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}
    plan = {"mesh": {"dp": 8}, "views": {"experts": {"edp": 2, "ep": 4}}, "schemes": schemes}
    return {"model": model, "cluster": "dgx-h100:1", "plan": plan}


FROM_FILE: dict[str, Any] = {
    **SMALL, "batch": {"global": 8, "micro": 1},
    "plan": {
        "mesh": {"pp": 2, "dp": 4, "tp": 2},
        "schemes": place_schemes("data/ddp dp", "tensor/megatron tp", "pipeline/from-file pp", path="given.csv"),
    },
}  # fmt: skip
"""A job whose schedule is a file beside it."""
SWEEP: dict[str, Any] = {
    "job": SMALL, "vary": {"plan.tp": {"powers": [1, 4]}, "batch.micro": [1, 2]}, "where": ["plan.tp * plan.pp <= 8"],
}  # fmt: skip
SEARCH: list[dict[str, Any]] = [
    {**SMALL, "plan": {"tp": "auto", "pp": [1, 2], "chunks": "auto", "zero": [0, 1]}},
    {**SMALL, "batch": {"global": 16, "micro": [1, 2]}, "plan": {"tp": 2, "recompute": "auto", "partition": "auto"}},
]
"""Jobs with open fields of the plan."""
HETEROGENEOUS: dict[str, Any] = {
    **SMALL, "cluster": {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]},
    "batch": {"global": 8, "micro": [4]}, "plan": {"tp": [8], "pp": [2], "schedule": "1f1b", "recompute": "none"},
}  # fmt: skip
"""A job of heterogeneous nodes with open fields."""
EPISODES = {"slow": {"per": "node", "every_hours": 50.0, "minutes": 5.0, "slowdown": 1.5}}
RUN: dict[str, Any] = {
    **SMALL,
    "run": {
        "steps": 200, "seeds": 2, "price_per_gpu_hour": 2.0,
        "failures": {"components": {"gpu": {"per": "gpu", "mtbf_hours": 5000.0, "loses": "node"}}},
        "checkpoints": {"kind": "asynchronous", "every_s": 30.0, "write_gb_per_s": 10.0},
        "recovery": {"spares": 1, "elastic": "none", "detection_s": 5.0},
        "stragglers": {"jitter": 0.1, "episodes": EPISODES},
    },
}  # fmt: skip
"""A training run."""
KINDS = {"kind": ["asynchronous", "in-memory"], "every_s": "auto"}
SEARCH_RUNS: dict[str, Any] = {**SMALL, "plan": {"tp": [1, 2]}, "run": {"steps": 200, "seeds": 1, "checkpoints": KINDS}}
"""A job with open fields of its plan and of its run."""
LENGTHS = "tokens\n" + "20\n9\n" * 8
PRICES = {
    "title": "a seller",
    "offers": [{"node": "dgx-h100", "region": "a", "value": 2, "kind": "peak", "source": "b"}],
}
FAILURES = "time_h,component,nodes,repair_h,remark\n0.5,gpu,1,24,replaced\n2.25,software,,,NCCL\n5,end,,,\n"
SCRIPT = """#!/bin/bash
TP=${TP:-2}
GPUS=${GPUS:-8}
if [[ "$MODE" == "full" ]]; then ARGS="--recompute-activations"; fi
for i in 1 2; do MICRO=$((i * ${1:-1})); done
torchrun --nproc_per_node $GPUS pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers 4 --hidden-size 64 \\
  --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --micro-batch-size $MICRO \\
  --global-batch-size $(($GPUS * 4)) --vocab-size 96 --bf16 $ARGS "${@:2}"
"""
VARIABLES = ("2 TP=4 GPUS=8 MODE=full", "1 GPUS=16 ARGS=--use-distributed-optimizer", "--bf16 MODE=full TP=1")
"""Arguments of the script, and variables of its shell."""
CLAIM_OF_CASE = {
    "id": "a", "says": "one", "source": "s", "provenance": "checked", "relation": "even", "measure": "bubble_rate",
    "value": 0.2, "tolerance": 0.01,
}  # fmt: skip
CLAIM_OF_JOBS = {
    "id": "b", "says": "two", "source": "s", "provenance": "recalled", "relation": "base / more", "at_least": 0.1,
    "jobs": {"more": {"from": "base", "set": {"plan.tp": 4}}}, "assumed": {"batch.micro": [1, 2]},
}  # fmt: skip
CLAIMS = {
    "system": "GPipe", "family": "pipeline", "paper": "arXiv", "jobs": {"base": SMALL},
    "cases": {"even": {"schedule": "gpipe", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1}},
    "claims": [CLAIM_OF_CASE, CLAIM_OF_JOBS],
}  # fmt: skip
CAMPAIGN = {
    "title": "a test", "device": "cpu", "calibrate": {"processes": 2, "refresh": True},
    "jobs": {"a": {**SMALL, "cluster": {"gpu": "cpu-core", "gpus": 2}, "precision": "fp32", "plan": {"tp": 2}}},
    "runs": [
        {"name": "k", "measure": "kernels", "job": "a", "options": {"tps": [1, 2]}},
        {"name": "d", "measure": "distributed", "job": "a", "set": {"plan": {"tp": 1}}, "options": {"steps": 2}},
    ],
}  # fmt: skip
STARTED = {
    "title": "a campaign that was interrupted", "device": "cpu", "jobs": {"a": LAPTOP},
    "runs": [{"name": "step", "measure": "distributed", "job": "a"}],
}  # fmt: skip
TRACE = {
    "traceEvents": [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("_RMSNorm", "cpu_op", 10, 20),
        launch(12, 1),
        launch(30, 2),
        kernel("void gemm", 20, 30, 1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 10, 2, stream=20),
    ],
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
    "distributedInfo": {"rank": 0, "world_size": 16},
}
COMPUTE_ONLY = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
COUNTS = [3, 1, 2, 2]


def prepare(folder: Path) -> None:
    """Writes the valid files that commands take besides the malformed one."""
    (folder / "job.yaml").write_text(JOB, "utf-8")
    (folder / "plain.yaml").write_text("model: gpt2-124m\ncluster: dgx-h100:2\n", "utf-8")
    on_core = {**LAPTOP, "cluster": {"gpu": "machine/device.yaml", "gpus": 2}}
    others = {
        "small": SMALL,
        "laptop": LAPTOP,
        "on-core": on_core,
        "experts": route({"counts": "counts.json"}),
        "from-file": FROM_FILE,
        "started": STARTED,
        "search": SEARCH[0],
        "heterogeneous": HETEROGENEOUS,
        "run": RUN,
        "logged": {**RUN, "run": {"steps": 1000, "seeds": 1, "failures": {"log": "failures.csv"}}},
        "samples": {**SMALL, "batch": {"sequence": 32, "samples": {"file": "lengths.csv", "join": "padding"}}},
        "table": route({"counts": "counts.csv"}),
        "steps": route({"trace": "trace-counts.json"}),
        "claims": CLAIMS,
        "prices": PRICES,
    }
    for name, job in {**others, "sweep": SWEEP}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job), "utf-8")
    (folder / "named.yaml").write_text(yaml.safe_dump({**SWEEP, "job": "given.yaml"}), "utf-8")
    (folder / "jobs.jsonl").write_text(json.dumps(SMALL) + "\n", "utf-8")
    (folder / "schedule.csv").write_text(COMPUTE_ONLY, "utf-8")
    (folder / "log.txt").write_text(TABLE, "utf-8")
    for name in ("run.sh", "started.sh"):
        (folder / name).write_text(SCRIPT, "utf-8")
    (folder / "trace.json").write_text(json.dumps(TRACE), "utf-8")
    (folder / "runs.jsonl").write_bytes(of_files("tests/data/published_runs.jsonl", 4)(folder)[0])
    (folder / "kernels.csv").write_bytes(of_files("tests/data/gemm_h100.csv", 8)(folder)[0])
    (folder / "calibration").mkdir()
    (folder / "calibration" / "v100-sxm2-32.yaml").write_bytes(of_files(f"{CALIBRATIONS}/v100-sxm2-32.yaml")(folder)[0])
    (folder / "out").mkdir()
    (folder / "plugin" / "gpus").mkdir(parents=True)
    shutil.copytree(MEASURED / "calibration", folder / "machine", ignore=shutil.ignore_patterns("measured.json"))
    shutil.copytree(folder / "machine", folder / "started" / "calibration")
    shutil.copytree(MEASURED / "calibration", folder / "measured" / "calibration")


# -------------------------------------------------------------------------------------------- formats


def as_json(*documents: Any) -> Seeds:
    return lambda folder: [json.dumps(one, indent=1).encode() for one in documents]


def as_yaml(*documents: Any) -> Seeds:
    return lambda folder: [yaml.safe_dump(one, sort_keys=False).encode() for one in documents]


def as_lines(*rows: Any) -> Seeds:
    return lambda folder: ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def as_text(*texts: str) -> Seeds:
    return lambda folder: [text.encode() for text in texts]


def as_words(*commands: str) -> Seeds:
    """One word of a command a line; words are separated by blanks."""
    return lambda folder: ["\n".join(command.split()).encode() for command in commands]


def of_files(pattern: str, lines: int | None = None) -> Seeds:
    """The first lines of files of the repository."""
    return lambda folder: [
        b"".join(path.read_bytes().splitlines(keepends=True)[:lines]) for path in sorted(ROOT.glob(pattern))
    ]


def of_measured(pattern: str, rows: int = 12) -> Seeds:
    """Measurement files that ship, with their first rows only."""

    def shorten(path: Path) -> bytes:
        found = json.loads(path.read_bytes())
        return json.dumps({**found, "rows": found["rows"][:rows]}, indent=1).encode()

    return lambda folder: [shorten(path) for path in sorted(MEASURED.glob(pattern))]


OTHER_NAMES = {"llamafactory": "llama-factory", "trainer": "hf-trainer", "megatron-swift": "ms-swift"}
"""Names of programs in the corpus, where they are not those of their formats."""


def suffix_of_program(program: str) -> str:
    """The ending of most of the launch files of a program."""
    name = OTHER_NAMES.get(program, program)
    return Counter(Path(entry.path).suffix for entry in load_corpus() if entry.program == name).most_common(1)[0][0]


def of_corpus(program: str = "", suffix: str = "", most: int = 40) -> Seeds:
    """Launch files of a program, or of an ending, with those beside them."""

    def write(folder: Path) -> list[bytes]:
        ending, name = suffix or suffix_of_program(program), OTHER_NAMES.get(program, program)
        entries = [one for one in load_corpus() if one.path.endswith(ending) and name in ("", one.program)]
        for entry in entries:
            for beside, text in entry.states_beside.items():
                (folder / beside).parent.mkdir(parents=True, exist_ok=True)
                (folder / beside).write_text(text, "utf-8")
        return [entry.states.encode() for entry in entries[:: -(-len(entries) // most)]]

    return write


# ----------------------------------------------------------------------------- files that commands write


def make_measurement(folder: Path) -> list[bytes]:
    """A measurement file of collectives."""
    path = folder / "log.txt"
    path.write_text(TABLE, "utf-8")
    return [to_json(import_nccl_tests(path, SMALL)).encode()]


def write_links(folder: Path) -> list[bytes]:
    """A measurement file of collectives with enough rows for a fit."""
    return [write_collectives(folder / "links.json").read_bytes()]


def stop_sweep(folder: Path) -> list[bytes]:
    """The part of a sweep that was stopped before its parts were joined."""

    def stop(done: int, points: int) -> None:
        if done == points:
            raise KeyboardInterrupt

    (folder / "parts.yaml").write_text(yaml.safe_dump(SWEEP), "utf-8")
    with suppress(KeyboardInterrupt):
        run_sweep(load_sweep(folder / "parts.yaml"), folder / "stopped.parquet", workers=1, watch=stop)
    return [path.read_bytes() for path in parts_folder(folder / "stopped.parquet").glob(PART)]


def note_sweep(folder: Path) -> list[bytes]:
    """The note about its inputs that a stopped sweep keeps beside its parts."""
    stop_sweep(folder)
    return [(parts_folder(folder / "stopped.parquet") / "_sweep.json").read_bytes()]


def of_commands(*commands: str, out: str = "") -> Seeds:
    """The file that commands write in the working folder, or what the last of them prints."""

    def write(folder: Path) -> list[bytes]:
        with chdir(folder):
            results = [CliRunner().invoke(app, command.split(), catch_exceptions=False) for command in commands]
        assert not any(result.exit_code for result in results), [result.output for result in results]
        return [(folder / out).read_bytes() if out else results[-1].stdout_bytes]

    return write


finish_sweep = of_commands("sweep sweep.yaml --out finished.parquet --workers 1 --json", out="finished.parquet")
finish_shards = of_commands(
    *(f"sweep sweep.yaml --out shard-{n}.parquet --workers 1 --shard {n}/2 --json" for n in (1, 0)),
    out="shard-0.parquet",
)
finish_search = of_commands("search search.yaml --out finished-plans.parquet --json", out="finished-plans.parquet")
finish_runs = of_commands("run run.yaml --out finished-runs.parquet --workers 1 --json", out="finished-runs.parquet")
answer_forecast, answer_search = of_commands("predict small.yaml --json"), of_commands("search search.yaml --json")
