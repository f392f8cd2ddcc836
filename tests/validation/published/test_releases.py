"""The month of the code of published runs."""

from __future__ import annotations

import pytest

from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.releases import month_of
from meshcast.validation.published.stacks import FALLBACK, framework
from tests.validation.published.runs import row


@pytest.mark.parametrize(
    ("text", "month"),
    [
        ("NeMo container 25.09", "2025-09"),
        ("nemo:24.05", "2024-05"),
        ("nemo:25.02.01", "2025-02"),
        ("nemo:dev 2024-11 (sha256:9c876dce)", "2024-11"),
        ("April 2021", "2021-04"),
        ("2022-05", "2022-05"),
        ("core_r0.12.0, PyTorch 25.03", "2025-05"),
        ("r0.8", "2024-08"),
        ("jax:maxtext-2024-12-09", "2024-12"),
        ("jax:25.01-maxtext", "2025-01"),
        ("commit 23e00ed, TransformerEngine 2.11, torch 2.10", None),
        ("PyTorch 2.8.0.dev20251001+rocm7.0.0.git64359f59, ROCm 7.0.0", None),
        ("PyTorch", None),
        (None, None),
    ],
)
def test_the_month_is_read_from_the_release(text: str | None, month: str | None) -> None:
    assert month_of(row(stack_version=text), "megatron-core") == month


def test_results_of_mlperf_are_of_their_round() -> None:
    """B200 came after the container of September 2023 that some of its results name."""
    run = row(stack="mlperf-nemo", stack_version="PyTorch NVIDIA Release 23.09")
    assert month_of(run, "nemo") == "2023-09"
    assert month_of(run.model_copy(update={"id": "mlperf-v51-lenovo"}), "nemo") == "2025-10"


def test_a_run_gets_the_traits_of_its_release() -> None:
    old = map_run(row(stack="megatron-lm-2021", stack_version="April 2021")).job["framework"]
    assert old["release"] == "2021-04" and map_run(row(stack_version="0.12")).job["framework"]["release"] == "2025-05"


def test_an_unknown_program_is_megatron_core_in_the_unknown_regime() -> None:
    mapped = map_run(row(stack="never-heard-of"))
    assert mapped.job["framework"]["name"] == FALLBACK == "megatron-core" and "stack" in mapped.assumed
    assert mapped.job["framework"]["set"]["regime"] == "unknown"


@pytest.mark.parametrize(
    ("stack", "profile", "regime"),
    [
        ("jax", "maxtext", "unknown"),
        ("paxml", "maxtext", "unknown"),
        ("axolotl", "axolotl", "family"),
        ("accelerate", "hf-trainer", "family"),
        ("internlm", "internevo", "unknown"),
        ("mlperf-nemo", "nemo", "family"),
        ("megatron-bridge", "megatron-bridge", "family"),
        ("torchtitan", "torchtitan", "family"),
        ("llm-foundry", "llm-foundry", "program"),
        ("nemo", "nemo", "program"),
        *((name, name, "family") for name in ("fms-fsdp", "gpt-neox", "primus")),
        *((name, name, "unknown") for name in ("nanotron", "colossalai", "deepspeed")),
    ],
)
def test_programs_get_their_profiles(stack: str, profile: str, regime: str) -> None:
    assert framework(stack) == profile
    assert map_run(row(stack=stack)).job["framework"]["set"]["regime"] == regime
