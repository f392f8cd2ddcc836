"""What people brought and got another plan for, each read as the job that it is, with the memory that they read off.

Files of single programs are in readings/: torchtitan's two stacks of checkpointing and its rule on key/value heads,
Axolotl's degrees, defaults and arguments of scripts of Megatron-LM.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.explain.assumed_fields import assumed_fields
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, current_options, reading_launch_files
from meshcast.simulator.loading.load import load_job
from tests.launch_files import read_launch


@pytest.mark.parametrize(("launch", "zero"), [("accelerate", {}), ("trainer on deepspeed", {"stage": 3})])
def test_what_a_file_states_is_not_called_unstated(launch: str, zero: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_launch(launch, files={"z.json": {"zero_optimization": zero}})
    unstated = {field.name for field in assumed_fields(simulate(found.job))}
    assert not unstated & {key for entry in found.findings.taken for key in entry.keys}
    assert ("framework.set.bucket.elements" in unstated) <= (not zero)


CASES = Path(__file__).resolve().parents[5] / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this copy")

SEVEN = "cluster={node: hgx-a800, nodes: 1, gpus: 7}"
TITAN = {"plan.data": "fsdp", "plan.dp": 8, "batch.global": 64}
COMMANDS: dict[str, dict[str, Any]] = {
    f'01-lf-qwen32b-7xa800.yaml --set "{SEVEN}"': {"plan.data": "zero-3", "plan.dp": 7, "plan.recompute": "full"},
    "03-titan-llama7b-full.toml --set cluster=grand-teton-h100:1 --set model=llama2-7b": {
        **TITAN,
        "plan.recompute": "full",
    },
    "03-titan-llama7b-sac.toml --set cluster=grand-teton-h100:1 --set model=llama2-7b": {
        **TITAN,
        "plan.recompute": "operators",
    },
    "05-titan-dsv3-16b.toml": {"plan.data": "fsdp", "plan.ep": 8, "plan.recompute": "operators", "batch.micro": 4},
    "13-trl-qwen3-8b-1m.yaml": {"plan.data": "fsdp", "plan.cp": 8, "plan.recompute": "full", "batch.global": 1},
    "19-axolotl-qwen3-8b-tp-cp.yaml": {"plan.data": "fsdp", "plan.dp": 2, "plan.tp": 2, "plan.cp": 2},
    "27-slurm-colon-default.sbatch": {"plan.tp": 4, "plan.pp": 2, "batch.micro": 1, "batch.global": 288},
    '28-positional.sh --args "dsw 8B 1 64 4096 2 1"': {"plan.data": "zero-1", "plan.tp": 2, "batch.global": 64},
    "29-script-dir.sh": {"plan.data": "zero-1", "plan.tp": 2, "precision.compute": "bf16", "batch.global": 64},
    "36-lf-qwen7b-zero2-a100-40.yaml --set cluster=dgx-a100-40:1": {
        **{"plan.data": "zero-2", "plan.recompute": "full", "precision.compute": "fp16", "batch.sequence": 512}
    },
    "38-trainer-args.sh --set model=qwen2.5-32b": {"plan.data": "zero-3", "batch.global": 16, "batch.sequence": 1024},
}
"""What `meshcast predict` forecasts of public reports, by what stands behind it."""


@needs_cases
@pytest.mark.parametrize(("command", "expected"), COMMANDS.items())
def test_a_case_that_was_brought_gives_its_plan(command: str, expected: dict[str, Any]) -> None:
    name, *options = shlex.split(command)
    pairs = [*zip(options[::2], options[1::2], strict=True)]
    arguments = tuple(dict(pairs).get("--args", "").split())
    with reading_launch_files(LaunchOptions(arguments=arguments)):
        keys = flatten_job(load_job(CASES / name, [value for option, value in pairs if option == "--set"]))
    assert {key: keys.get(key) for key in expected} == expected


ULYSSES = "26-ulysses-or-tp-7b.yaml --set plan.zero=2 --set framework.set.attention=flash --set precision=fp16"
QWEN = (
    "17-titan-qwen3-30b-scaling.yaml --set cluster=dgx-b200:{n} --set plan.mesh.dp={gpus}"
    " --set plan.views.experts.edp={n}"
)
MEMORY: dict[str, tuple[str, float]] = {
    ULYSSES: ("peak_device", 43.8),  # its script states --fp16 and --use-flash-attn-triton
    f"{ULYSSES} --set plan.recompute=none": ("peak_device", 62.3),
    '09-gpt2-774m-v100.sh --set "cluster={gpu: v100-sxm2-32, gpus: 1}"': ("peak_device", float("inf")),
    "05-titan-dsv3-16b.toml": ("peak_reserved", 73.32),
    "05-titan-dsv3-16b.toml --set batch.micro=8 --set batch.global=64": ("peak_reserved", float("inf")),
    QWEN.format(n=1, gpus=8): ("peak_reserved", 167.93),
    QWEN.format(n=2, gpus=16): ("peak_reserved", 138.75),
    QWEN.format(n=16, gpus=128): ("peak_reserved", 114.78),
    "13-trl-qwen3-8b-1m.yaml --set plan.offload=[activations]": ("peak_allocated", 52.3),  # the file does not say so
}
"""Memory of a GPU that people read off, that the allocator reserved, or that tensors took [GiB]; infinite: the run was
out of memory."""


@needs_cases
@pytest.mark.parametrize(("command", "measured"), MEMORY.items())
def test_a_case_that_was_brought_needs_its_memory(command: str, measured: tuple[str, float]) -> None:
    name, *options = shlex.split(command)
    report, (counter, gib) = simulate(load_job(CASES / name, options[1::2])), measured
    assert report.fits == (gib < float("inf"))
    assert not report.fits or getattr(report, counter) / 2**30 == pytest.approx(gib, rel=0.06)


@needs_cases
def test_a_case_that_its_program_refuses_is_refused() -> None:
    with pytest.raises(PlanError, match="4 tensor ranks do not divide 2 key/value heads"):
        load_job(CASES / "18-titan-kv-heads.toml", ["model=qwen2.5-3b"])


def test_options_end_with_their_block() -> None:
    outer, inner = (LaunchOptions(arguments=(word,)) for word in ("outer", "inner"))
    with reading_launch_files(outer):
        with reading_launch_files(inner):
            assert current_options() is inner
        assert current_options() is outer
    assert current_options() == LaunchOptions()
