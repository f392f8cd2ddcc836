"""Exported Megatron-LM scripts start: flags come with those that `validate_args` demands, and with the environment.

The demands are those of NVIDIA/Megatron-LM @d98e8a64dd, megatron/training/arguments.py, and of its
OptimizerParamScheduler, which takes no learning rate of None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.formats.launch.changed_settings import list_changed_settings
from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.launch_file import parse_launch_text
from meshcast.simulator.formats.launch.programs.registry import FORMATS
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from tests.launch_files import export

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

SHAPE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
SCRIPT = f"""\
#!/bin/bash
export {CONNECTIONS}=1
torchrun --nproc-per-node 8 pretrain_gpt.py {SHAPE} --vocab-size 32000 --use-distributed-optimizer \\
    --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 32 --bf16
"""


def make_job(cluster: str = "dgx-h100:1", **plan: Any) -> Job:
    return load_job({"model": "llama3-8b", "cluster": cluster, "batch": {"global": 64}, "plan": plan})


def write(job: Job) -> str:
    return export(job, "megatron").text


def test_offloading_comes_with_its_optimizer() -> None:
    assert "--use-precision-aware-optimizer" in write(make_job(offload=["optimizer"]))
    assert "--use-precision-aware-optimizer" not in write(make_job())


def test_fsdp_comes_with_its_checkpoints_and_queues() -> None:
    for plan in ({"fsdp": True, "tp": 2}, {"zero": 2}):
        text = write(make_job(**plan))
        assert "--ckpt-format fsdp_dtensor" in text and f"\nunset {CONNECTIONS}\n" in text
    assert "--ckpt-format" not in write(make_job(tp=2))


@pytest.mark.parametrize(
    ("cluster", "plan", "single"),
    [
        ("dgx-h100:1", {"tp": 2}, True),
        ("dgx-h100:1", {"cp": 2, "cp_scheme": "megatron-cp"}, True),
        ("dgx-h100:1", {"pp": 2}, False),
        ("dgx-b200:1", {"tp": 2}, False),
    ],
)
def test_kernels_of_tensor_and_context_parallelism_start_in_turn(
    cluster: str, plan: dict[str, Any], single: bool
) -> None:
    assert (f"\nexport {CONNECTIONS}=1\n" in write(make_job(cluster, **plan))) is single


def test_weights_are_gathered_only_where_something_is_sharded() -> None:
    assert "--overlap-param-gather" in write(make_job())
    plain = write(make_job(zero=0))
    assert "--overlap-param-gather" not in plain and "overlap.updated_weights" not in plain


def test_a_script_says_what_it_is() -> None:
    text = write(make_job())
    assert "It is a benchmark script: learning rate and data are not in a job" in text and "--against" in text
    assert "--rotary-base is not in a job either" in text and "--lr 1e-4" in text
    assert "run the script with --train-iters" in text and text.endswith('"$@"\n')
    learned = write(load_job({"model": "gpt2", "cluster": "dgx-h100:1", "run": {"tokens": 1e9}}))
    assert "--rotary-base" not in learned


def test_the_environment_of_a_functional_test() -> None:
    text = f"ENV_VARS:\n  {CONNECTIONS}: 1\nMODEL_ARGS:\n  --num-layers: 8\n"
    file = parse_launch_text(text, "config.yaml", ".yaml")
    found = FORMATS["megatron"].read_variable(file, CONNECTIONS)
    assert found is not None and (found.value, found.place) == ("1", "config.yaml:2")


@pytest.mark.parametrize(
    ("script", "plan", "printed"),
    [
        (SCRIPT, {"fsdp": True}, [f"run.sh:2  environment {CONNECTIONS}: leave it out"]),
        (SCRIPT, {"tp": 4}, []),
        (SCRIPT.replace("=1\n", "=32\n", 1), {"tp": 4}, [f"run.sh:2  environment {CONNECTIONS}: 32 -> 1"]),
        (SCRIPT.replace("=1\n", "=32\n", 1), {"fsdp": True}, []),
        # Another place sets what the script needs already.
        (SCRIPT.replace(f"export {CONNECTIONS}=1\n", ""), {"tp": 4}, []),
        (SCRIPT.replace("--tensor-model-parallel-size 2", "").replace(f"export {CONNECTIONS}=1\n", ""),)
        + ({"tp": 4}, [f"new  environment {CONNECTIONS}: add 1"]),
    ],
)
def test_the_environment_of_a_script_that_exists(script: str, plan: dict[str, Any], printed: list[str]) -> None:
    found = import_text(script, "run.sh", "megatron", "dgx-h100:1", folder=Path())
    after = load_job({**found.job, "plan": plan})
    file = parse_launch_text(script, "run.sh", ".sh")
    changes = list_changed_settings(found, file, load_job(found.job), after)
    assert [str(change) for change in changes if "environment" in str(change)] == printed
