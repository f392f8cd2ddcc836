"""Programs on Hugging Face's Trainer: what is said of their settings, and what is written back."""

from __future__ import annotations

import pytest

from meshcast.simulator.formats.launch.programs.deepspeed import write_settings
from tests.launch_files import LAUNCHES, export, keys_of, read_launch


def test_how_gradients_are_reduced_is_written() -> None:
    keys = {"plan.data": "zero-2", "framework.name": "deepspeed", "framework.set.bucket.buffers": 0}
    keys |= {"framework.set.bucket.elements": 2e8, "framework.set.bucket.sequence_format": "bf16"}
    written = write_settings(keys | {"batch.global": 8, "batch.micro": 1, "precision.compute": "bf16"})
    assert written["zero_optimization.contiguous_gradients"] is False
    assert written["seq_parallel_communication_data_type"] == "bf16"


def test_one_unit_of_fsdp_has_a_second_forecast() -> None:
    findings = read_launch("trainer", settings={"fsdp": "full_shard"}).findings
    assert [entry.other for entry in findings.approximated if entry.shown == "fsdp"] == [{"plan.data.reshard": False}]


def test_a_training_of_some_layers_has_a_second_forecast() -> None:
    frozen = read_launch("llamafactory", settings={"finetuning_type": "freeze"}).findings.approximated
    assert [entry.other for entry in frozen if entry.shown == "finetuning_type"] == [{"train.mode": "lora"}]


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("llamafactory", {"stage": "dpo", "finetuning_type": "lora"}),
        ("llamafactory", {"stage": "kto"}),
        ("axolotl", {"rl": "dpo"}),
        ("axolotl", {"rl": "dpo", "adapter": "lora", "lora_target_linear": True, "rl_adapter_ref_model": True}),
    ],
)
def test_a_reference_is_written(form: str, changes: dict[str, object]) -> None:
    found = read_launch(form, settings=changes)
    assert not any("reference model is left out" in entry.why for entry in found.findings.approximated)
    assert not {key for key in export(found.job, form).unsaid if key.startswith(("train.", "batch."))}


def test_every_setting_is_in_one_class() -> None:
    more = {"deepspeed": "zero.json", "warmup_ratio": 0.1, "optim": "adafactor", "seed": 1, "nonsense": 2}
    found = read_launch("trainer", settings=more, set=["model=llama3-8b", "plan.zero=3"]).findings
    classes = [{entry.shown for entry in part} for part in (found.taken, found.ignored, found.approximated)]
    assert {*LAUNCHES["trainer"]["settings"], *more} <= set().union(*classes)
    assert not classes[0] & classes[1]


def test_an_unknown_release_of_trl_has_a_second_forecast() -> None:
    command = "accelerate launch --num_processes 2 --multi_gpu sft.py"
    settings = {"dataset_name": "d", "max_length": 64, "model_max_length": None}
    found = read_launch("train.py", command=command, settings=settings)
    (entry,) = [entry for entry in found.findings.approximated if entry.shown == "gradient_checkpointing"]
    assert (entry.other, "plan.recompute" in found.assumed) == ({"plan.recompute": "none"}, True)
    assert keys_of(found)["batch.sequence"] == 64


def test_a_pair_of_texts_is_named() -> None:
    settings = {"beta": 0.1}
    found = read_launch("train.py", command="torchrun --nproc_per_node 2 train.py", settings=settings).findings
    assert any("pair of texts" in entry.why for entry in found.approximated)
