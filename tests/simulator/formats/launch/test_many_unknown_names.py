"""Of many names that nothing knows the first are told and the rest counted, at a cost that grows with their number.

What is no number where one belongs is no error of Python.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

import pytest

from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator import load_job
from meshcast.simulator.formats.launch.convert import import_file
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, parse_launch_text, read_launch_file
from meshcast.simulator.formats.launch.reading import MAX_COMPARED, MAX_LISTED
from meshcast.simulator.loading.load import read_launch_job
from tests.draws import drawn_grid

NEMO = """\
model: {tensor_model_parallel_size: 2, num_layers: 8, hidden_size: 256, ffn_hidden_size: 512, num_attention_heads: 8,
  seq_length: 128}
train: {global_batch_size: 32, micro_batch_size: 1}
extra:
"""


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are compared with all known ones."""
    names: list[str] = []
    compare = difflib.get_close_matches

    def note(word: str, *rest: object, **more: object) -> list[str]:
        names.append(word)
        return compare(word, *rest, **more)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(difflib, "get_close_matches", note)
    return names


def test_settings_that_nothing_knows(tmp_path: Path, compared: list[str]) -> None:
    count = MAX_COMPARED + 100
    (tmp_path / "one.yaml").write_text(NEMO + "".join(f"  a_word_of_our_own_{i}: {i + 1}\n" for i in range(count)))
    imported = read_launch_job(tmp_path / "one.yaml", (), "nemo").launch
    assert imported is not None
    unknown = [entry.shown for entry in imported.findings.approximated if not entry.is_known]
    assert len(unknown) == MAX_LISTED + 1 and unknown[-1] == f"{count - MAX_LISTED:,} further settings"
    assert len(compared) <= MAX_COMPARED + 1


def test_settings_that_decide_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(NEMO + "".join(f"  tensor_parallel_of_us_{i}: {i + 1}\n" for i in range(300)))
    with pytest.raises(OpenQuestions, match="280 further settings of this kind") as refused:
        read_launch_job(tmp_path / "one.yaml", (), "nemo")
    assert len(refused.value.questions) <= MAX_LISTED + 3


def test_keys_of_a_job(compared: list[str]) -> None:
    keys = {f"t{i}": 1 for i in range(500)}
    with pytest.raises(MeshcastError, match=r"nor are t1 .* t20 and 479 more") as refused:
        load_job({"model": "gpt2-124m", "cluster": "dgx-h100:1", "plan": keys})
    assert len(compared) <= 30 and len(str(refused.value)) < 2_000


def test_a_launch_file_of_data_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    for name in ("config.py", "config.toml", "config.json"):
        path = tmp_path / name
        path.write_text("x = [" + "1," * 1_500_000 + "]\n", "utf-8")
        with pytest.raises(PlanError, match=r"3,000,\d+ bytes, at most 3,000,000 are read"):
            read_launch_file(path)


NUMBERED = {
    "run.sh": [
        "torchrun --nproc_per_node={} --nnodes={} -m torchtitan.train --module llama3 --config llama3_8b\n",
        "torchrun --nproc_per_node=8 ./train.py --job.config_file a.toml --training.selective_ac_option {}\n",
        "#SBATCH --nodes={}\n#SBATCH --ntasks-per-node={}\nsrun python pretrain_gpt.py --num-layers 8 --hidden-size 512"
        " --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000"
        " --micro-batch-size 1 --global-batch-size 8 --bf16 --window-size '({},0)' --window-attn-skip-freq {}\n",
        "swift sft --model Qwen/Qwen2.5-7B-Instruct --quant_bits {} --torch_dtype bfloat16\n",
        "NPROC_PER_NODE={} NNODES={} llamafactory-cli train --model_name_or_path meta-llama/Llama-3.1-8B --stage sft\n",
        "set -- a b\necho ${{{}}} {{1..{}}}\nX={}\ntorchrun --nproc_per_node=$((X)) train.py --bf16 --output_dir x\n",
    ],
    "job.toml": [
        "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\npipeline_parallel_split_points = ['layers.{}']\n"
    ],
}
"""Files with places for numbers, by their names."""


WRONG = ["1" * 5000, "²", "x", "-1", "1e400", "0"]
FILES = [(name, text) for name, texts in NUMBERED.items() for text in texts]


@pytest.mark.parametrize(("number", "file"), drawn_grid(WRONG, FILES))
def test_what_is_no_number_ends_in_a_message_or_counts_as_not_stated(number: str, file: tuple[str, str]) -> None:
    name, filled = file[0], file[1].format(*[number] * 4)
    with suppress(MeshcastError):
        options = LaunchOptions(assume_defaults=True)
        import_file(parse_launch_text(filled, name, Path(name).suffix, options=options), ["batch.micro=1"])
