"""Modules of torch as layer graphs: FLOPs and bytes by hand, planners on them, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.planning.imported.module_league import choose_graph_planners
from meshcast.experiments.planning.imported.module_problem import ModuleProblem, trace
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.hardware.errors import PlanError

MODELS = Path(__file__).resolve().parents[2] / "data" / "planning"
TRANSFORMER, RESNET = f"{MODELS / 'small_models.py'}:transformer", f"{MODELS / 'small_models.py'}:resnet"
NODE = "dgx-h100:1"


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformer() -> ModuleProblem:
    return ModuleProblem(TRANSFORMER, NODE)


@pytest.fixture(scope="module")
def resnet() -> ModuleProblem:
    return ModuleProblem(RESNET, NODE)


def totals(problem: ModuleProblem, *names: str) -> list[float]:
    return [float(problem.graph().figures[name].sum()) for name in names]


@pytest.mark.slow
def test_a_transformer_has_the_flops_of_its_matrices(transformer: ModuleProblem) -> None:
    """2 layers of width 64, 4 heads, 2 sequences of 16 tokens, 100 words; the embedding's weights are the head's."""
    tokens, width, words, layers = 2 * 16, 64, 100, 2
    matrices = layers * 12 * width * width + width * words
    scores = layers * 4 * 2 * 16 * 16 * width / 2
    forward, backward = totals(transformer, "forward_flops", "backward_flops")
    assert forward == 2 * tokens * matrices + scores
    assert backward == 2 * 2 * tokens * matrices + 2.5 * scores
    norms, biases = (2 * layers + 1) * 2 * width, layers * (3 + 1 + 4 + 1) * width
    assert totals(transformer, "parameters") == [4 * (matrices + norms + biases)]


def test_a_transformer_is_layers_in_the_order_of_execution(transformer: ModuleProblem) -> None:
    graph = transformer.graph()
    assert graph.names[0] == "embedding" and graph.names[-1] == "head"
    assert graph.names[1:6] == ("layers.0.norm", "layers.0.qkv", "layers.0#1", "layers.0.out", "layers.0#2")
    residual = graph.names.index("layers.0#2")
    assert (0, residual) in graph.edges, "the residual addition reads the embedding"
    qkv = graph.names.index("layers.0.qkv")
    assert graph.figures["activations"][qkv] == 2 * 16 * 3 * 64 * 4
    blocks = ModuleProblem(TRANSFORMER, NODE, depth=2).graph()
    assert blocks.names == ("embedding", "layers.0", "layers.1", "norm", "head") and blocks.is_chain
    assert blocks.figures["forward"].sum() == pytest.approx(graph.figures["forward"].sum())


def test_a_resnet_has_the_flops_of_its_convolutions(resnet: ModuleProblem) -> None:
    """4 images of 32 x 32: a stem, a block of 16 channels, one that halves the image, and a classifier of 10."""
    stem = 2 * 4 * 32 * 32 * 16 * 3 * 9
    block = 2 * (2 * 4 * 32 * 32 * 16 * 16 * 9)
    halved = 2 * 4 * 16 * 16 * 32 * (16 * 9 + 32 * 9 + 16)
    classifier = 2 * 4 * 10 * 32
    forward, backward = totals(resnet, "forward_flops", "backward_flops")
    assert forward == stem + block + halved + classifier
    assert backward == 2 * forward - stem, "images need no gradient"
    convolutions = 16 * 3 * 9 + 2 * 16 * 16 * 9 + 32 * (16 * 9 + 32 * 9 + 16)
    norms = 2 * (16 + 16 + 16 + 32 + 32 + 32)
    assert totals(resnet, "parameters") == [4 * (convolutions + norms + 10 * 32 + 10)]


def test_a_resnet_has_branches(resnet: ModuleProblem) -> None:
    graph = resnet.graph()
    assert not graph.is_chain
    shortcut = graph.names.index("blocks.1.shortcut.0")
    source = graph.predecessors[shortcut]
    assert [graph.names[one] for one in source] == ["blocks.0#2"]
    assert len(graph.ideals()) > len(graph.names) + 1


def test_torch_counts_the_same_flops_of_a_step(resnet: ModuleProblem) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    space: dict[str, Any] = {}
    exec((MODELS / "small_models.py").read_text("utf-8"), space)
    with torch.device("meta"):
        module, inputs = space["resnet"]()
    with FlopCounterMode(display=False) as counter:
        module(*inputs).sum().backward()
    assert counter.get_total_flops() == sum(totals(resnet, "forward_flops", "backward_flops"))


def test_a_layer_costs_about_what_it_costs_as_a_layer_of_a_job(tmp_path: Path) -> None:
    """A layer of gpt3-5b on an H100, without dropout. Megatron-core has further kernels: gradients of biases and sums
    of weight gradients in fp32."""
    path = tmp_path / "mine.py"
    model = (MODELS / "small_models.py").read_text("utf-8")
    made = "Transformer(51200, 4096, 32, 4).to(torch.bfloat16), (torch.zeros(4, 2048, dtype=torch.long),)"
    path.write_text(f"{model}\n\ndef make():\n    return {made}\n", "utf-8")
    cluster = {"node": "dgx-h100", "nodes": 1, "gpus": 1}
    job: dict[str, Any] = {
        "model": {"preset": "gpt3-5b", "layers": 4, "dropout": 0.0},
        "cluster": cluster,
        "framework": "megatron-core",
        "batch": {"global": 32, "micro": 4, "sequence": 2048},
        "plan": {"tp": 1, "dp": 1, "pp": 1},
    }
    figures = ModuleProblem(f"{path}:make", cluster, depth=2).graph().figures
    table = JobProblem(job).stages(recompute=False)
    forward, both = float(table.forward[1, 1, 0]), float(table.seconds[1, 1, 0])
    assert 0.9 < figures["forward"][2] / forward < 1.05
    assert 0.9 < (figures["forward"][2] + figures["backward"][2]) / both < 1.05


def test_weights_take_no_memory(tmp_path: Path) -> None:
    """A trillion parameters."""
    spec = write(tmp_path, "return nn.Linear(2**20, 2**20, bias=False), (torch.zeros(1, 2**20),)")
    problem = ModuleProblem(spec, NODE)
    assert totals(problem, "parameters", "forward_flops") == [4.0 * 2**40, 2.0 * 2**40]


@pytest.mark.parametrize("spec", [TRANSFORMER, RESNET])
def test_planners_plan_modules(spec: str) -> None:
    """The bottleneck of stages is what their layers say; without tensor parallelism Piper may only be better."""
    problem = ModuleProblem(spec, "dgx-h100:1", depth=2)
    figures = problem.graph().figures
    whole = float((figures["forward"] + figures["backward"]).sum())
    budget = SearchBudget()
    pipedream, piper, placed = (
        find_planner(one)().plan(problem, budget) for one in ("pipedream", "piper", "tarnawski-dp")
    )
    for found in (pipedream, piper):
        nodes = sorted(node for stage in found.plan["stages"] for node in stage["nodes"])
        assert nodes == [*range(len(problem.graph().names))]
        assert whole / 8 * (1 - 1e-9) <= found.value <= whole
    assert placed.value >= float((figures["forward"] + figures["backward"]).max())


def write(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import torch\nfrom torch import nn\n\n\ndef make():\n    {body}\n", "utf-8")
    return f"{path}:make"


def test_regions_without_gradients_and_in_other_formats_are_counted(tmp_path: Path) -> None:
    """Three products of 4 x 8 with 8 x 8: one without gradients, one in bf16, one recomputed; inputs by name."""
    path = tmp_path / "mine.py"
    path.write_text(
        """import torch
import torch.utils.checkpoint
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            frozen = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = self.last(x)
        again = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return frozen + narrow + again


def make():
    return Mixed(), {"x": torch.zeros(4, 8)}
""",
        "utf-8",
    )
    product = 2 * 4 * 8 * 8
    problem = ModuleProblem(f"{path}:make", NODE)
    assert totals(problem, "forward_flops", "backward_flops") == [3 * product, 2 * product]
    assert totals(problem, "parameters") == [2 * 4 * (8 * 8 + 8)]
    first, second, third = (one for one in trace(f"{path}:make") if one.works.flops[0])
    formats = [one.works.forward[0].dtype for one in (first, second, third)]  # type: ignore[union-attr]
    assert formats == ["fp32", "bf16", "fp32"]
    assert first.path == ("first",) and second.path == ("last",) and not first.works.backward


def test_graphs_of_branches_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        """import torch
from torch import nn


class Either(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


def make():
    return Either(), (torch.zeros(4, 8),)
""",
        "utf-8",
    )
    with pytest.raises(PlanError, match="runs a graph of its own"):
        ModuleProblem(f"{path}:make", NODE)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return nn.Linear(2, 2)", "it returns Linear, not a pair"),
        ("raise RuntimeError('no data')", "it fails on the meta device: RuntimeError: no data"),
        ("return nn.Linear(2, 2), (torch.zeros(3, 5),)", "torch.export cannot trace it"),
    ],
)
def test_what_cannot_be_traced_is_refused(tmp_path: Path, body: str, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        ModuleProblem(write(tmp_path, body), NODE)


def test_names_are_checked(tmp_path: Path) -> None:
    for spec, rule in (
        ("model", "FILE.py:FUNCTION"),
        (f"{tmp_path / 'none.py'}:make", "no such file"),
        (f"{MODELS / 'small_models.py'}:transformers", "no such function"),
    ):
        with pytest.raises(PlanError, match=rule):
            ModuleProblem(spec, NODE)
    with pytest.raises(PlanError, match="it plans no layer graphs"):
        choose_graph_planners("pipedream,alpa")
    assert {"pipedream", "piper", "graphpipe", "spotlight"} <= {*choose_graph_planners("all")}


def test_too_many_branches_are_refused(tmp_path: Path) -> None:
    body = "return Wide(), (torch.zeros(1, 4),)"
    path = tmp_path / "mine.py"
    wide = "class Wide(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    wide += "        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))\n"
    wide += "    def forward(self, x):\n        return sum(one(x) for one in self.parts)\n"
    path.write_text(f"import torch\nfrom torch import nn\n{wide}\ndef make():\n    {body}\n", "utf-8")
    with pytest.raises(PlanError, match="ideals"):
        ModuleProblem(f"{path}:make", NODE).graph()
    chain = ModuleProblem(f"{path}:make", NODE, chain=True).graph()
    assert chain.is_chain and len(chain.ideals()) == len(chain.names) + 1


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "meshcast.experiments.planning.imported.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PlanError, match="Install the extra"):
        ModuleProblem(TRANSFORMER, NODE)


def test_the_command_answers() -> None:
    """Tables for people, and all layers and plans as JSON."""
    runner = CliRunner()
    shown = runner.invoke(app, ["plan-module", TRANSFORMER, "--with", "pipedream,graphpipe", "--depth", "2"])
    assert shown.exit_code == 0, shown.output
    assert "layers.1" in shown.output and "all 5 layers" in shown.output and "graphpipe" in shown.output
    asked = ["plan-module", RESNET, "--with", "pipedream,autopipe", "--cluster", "dgx-h100:2", "--json"]
    answer = json.loads(runner.invoke(app, asked).stdout)
    first, second = answer["plans"]
    assert {one for stage in first["stages"] for one in stage["layers"]} == {one["name"] for one in answer["layers"]}
    assert "needs a chain of blocks" in second["refused"]["rule"]
    wrong = runner.invoke(app, ["plan-module", TRANSFORMER, "--with", "alpa"])
    assert wrong.exit_code == 2
