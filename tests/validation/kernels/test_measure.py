"""Kernels of one rank: every operator has a module of its size and a forecast, and files are written blind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan

torch = pytest.importorskip("torch")

from meshcast.simulator.ir.operators import Linear, Norm  # noqa: E402
from meshcast.simulator.ir.ops import Collective, Gemm, Memory  # noqa: E402
from meshcast.simulator.loading.load import load_job  # noqa: E402
from meshcast.simulator.plan.plan import Plan  # noqa: E402
from meshcast.validation.kernels import fp8, fp8_libraries  # noqa: E402
from meshcast.validation.kernels import measure as measuring  # noqa: E402
from meshcast.validation.kernels.measure import _measure_copy, measure  # noqa: E402
from meshcast.validation.kernels.modes import REHEARSALS, Bench, capture_graph, sample  # noqa: E402
from meshcast.validation.kernels.operators import kernels, local_operators, optimizer  # noqa: E402
from meshcast.validation.measurements.device import Device  # noqa: E402
from meshcast.validation.measurements.measurement import read  # noqa: E402
from meshcast.validation.measurements.row_errors import WORK  # noqa: E402

pytestmark = pytest.mark.torch

GPT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16, "dropout": 0}
LLAMA = {
    **{"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 64, "seq": 16, "positions": "rope"},
    **{"norm": "rmsnorm", "gated": True, "tied": False, "qkv_bias": False, "proj_bias": False, "mlp_bias": False},
}
EXPERTS = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32, "first_dense": 1}}
MODELS = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS}

DENSE = ["embedding", "norm1", "qkv", "core", "proj", "residual1", "norm2", "up", "act", "down", "residual2"]
MOE = ["router", "top_k", "permute", "expert.up", "expert.act", "expert.down", "unpermute"]
ENDING = ["final_norm", "head", "loss"]


def job(model: str = "llama", tp: int = 1, **more: Any) -> dict[str, Any]:
    cluster = {"gpu": "cpu-core", "gpus": tp}
    precision = {"compute": "fp32", "gradients": "fp32"}
    fields = {"model": MODELS[model], "cluster": cluster, "framework": "reference", "precision": precision}
    return {**fields, "batch": {"micro": 2}, "plan": {"tp": tp}, **more}


def plan_of(*args: Any, **more: Any) -> Plan:
    return resolve_plan(load_job(job(*args, **more)))


@pytest.fixture
def cpu() -> Device:
    return Device.of("cpu")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_modules_have_the_sizes_of_their_operators(model: str, tp: int, cpu: Device) -> None:
    plan = plan_of(model, tp)
    bench, found = Bench(plan, cpu), local_operators(plan)
    names = {part.name for part in found}
    more = {"gpt": ["positions"], "llama": ["rope"], "experts": ["rope", *MOE]}[model]
    assert names == {*DENSE, *ENDING, *more}
    for part in found:
        module = bench.module(part)
        outs = module.forward(*module.inputs)
        outs = [outs] if isinstance(outs, torch.Tensor) else outs
        # Rope is handed the values as well, weights of experts come besides, and a loss is a mean.
        if part.name not in ("rope", "expert.act", "unpermute"):
            assert sum(one.numel() for one in module.inputs) == part.at.size(*part.operator.ins), part.name
        if part.name not in ("rope", "top_k", "loss"):
            assert sum(one.numel() for one in outs) == part.at.size(*part.operator.outs), part.name
        if isinstance(part.operator, Norm) or (isinstance(part.operator, Linear) and model != "gpt"):
            assert sum(one.numel() for one in module.weights) == part.weights, part.name
        if model == "gpt" and part.name in ("proj", "down"):
            assert len(module.weights) == (2 if tp == 1 else 1)  # a sum over ranks comes before the bias
        grads = torch.autograd.grad(outs, module.wanted, [torch.ones_like(one) for one in outs])
        assert all(one.isfinite().all() for one in grads), part.name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_holds_the_weights_of_its_operators(model: str, tp: int, cpu: Device) -> None:
    plan = plan_of(model, tp)
    elements, works = optimizer(plan)
    assert elements == sum(param.numel() for param in Bench(plan, cpu).layer.parameters())
    norm, adam = works
    # Gradients, main weights and two moments, four bytes each.
    assert (norm.read, adam.read, adam.write) == (4 * elements, 16 * elements, 12 * elements)


def test_a_rank_alone_runs_no_collectives_and_adds_no_gradients() -> None:
    product = Gemm(8, 8, 8, dtype="bf16", accumulate=True, out_dtype="fp32")
    left = kernels([Collective("all_reduce", 8, ("tp",)), product, Memory("norm", 8, 8)])
    assert left == [Gemm(8, 8, 8, dtype="bf16", accumulate=False, out_dtype="bf16"), Memory("norm", 8, 8)]


def test_backward_passes_follow_a_forward_pass_of_their_own(cpu: Device) -> None:
    """The loss writes its gradient over its saved input: a graph used twice would be refused."""
    plan = plan_of()
    passes = Bench(plan, cpu).passes(next(part for part in local_operators(plan) if part.name == "loss"), "eager")
    first, again = (passes.before()()[0] for _ in range(2))
    assert torch.equal(first, again)
    assert len(sample(cpu, passes, True, warmup=1, repeat=3, cold=False)) == 3


def test_the_file_holds_forecasts_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And before that the device is warm."""
    out, seen, warmed = tmp_path / "kernels.json", [], []
    monkeypatch.setattr(measuring, "warm_up_with_gemms", warmed.append)

    def progress(text: str) -> None:
        assert len(warmed) == 1
        if not seen:
            before = read(out)
            assert before.measured is None and not any(row.samples for row in before.rows)
            seen.append([(row.name, row.forecasts) for row in before.rows])

    measured = measure(job("experts"), "cpu", out, repeat=2, warmup=1, cold=False, progress=progress)
    assert measured.measured
    assert [(row.name, row.forecasts) for row in read(out).rows] == seen[0]
    names = [row.name for row in measured.rows]
    assert names == list(dict.fromkeys(names))
    operators = [*DENSE, "rope", *MOE, *ENDING]
    assert {name.rpartition(" ")[0] for name in names} == {*operators, "optimizer"}
    # A residual hands its gradient on.
    assert len(names) == 2 * len(operators) - 2 + 1
    for row in read(out).rows:
        assert len(row.samples) == 2 and min(row.samples) > 0
        assert row.forecasts["catalog"].value > 0 and row.instrument == "time.perf_counter"


def test_degrees_and_formats_are_groups(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    measured = measure(job(), "cpu", out, tps=[1, 2], dtypes=["fp32", "bf16", "fp8"], repeat=1, warmup=0, cold=False)
    assert {row.group for row in measured.rows} == {
        f"tp {tp} {dtype} eager" for tp in (1, 2) for dtype in ("fp32", "bf16")
    }
    sizes = {row.group: row.shape["weights"] for row in measured.rows if row.name == "up forward"}
    assert next(row.shape[WORK]["dtype"] for row in measured.rows if row.name == "up forward") == "fp32"
    assert sizes["tp 1 fp32 eager"] == 2 * sizes["tp 2 fp32 eager"] == 2 * 64 * 32
    assert measured.notes == ("fp8: not measured, torch has its GEMMs on GPUs only",)


def test_an_interrupt_keeps_finished_measurements(tmp_path: Path) -> None:
    out, progress = tmp_path / "kernels.json", []

    def stop(text: str) -> None:
        progress.append(text)
        if len(progress) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(job(), "cpu", out, repeat=1, warmup=0, cold=False, progress=stop)
    found = read(out)
    assert [bool(row.samples) for row in found.rows[:5]] == [True, True, True, False, False]
    assert found.notes == ("interrupted: rows without samples were not measured",)


def test_a_compiler_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, dynamic: bool) -> Any:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", fails)
    found = measure(job(), "cpu", tmp_path / "kernels.json", modes=("compile",), repeat=1, warmup=0, cold=False)
    assert not any(row.samples for row in found.rows)
    assert found.notes[0] == "tp 1 compile, embedding forward: not measured, RuntimeError: no C++ compiler"


def test_graphs_are_captured_once_and_replayed(fake_cuda: Any) -> None:
    device = Device.of("cuda")
    module, calls = Bench(plan_of(), device).module(local_operators(plan_of())[1]), []
    counted = replace(module, forward=lambda *inputs: calls.append(1) or module.forward(*inputs))
    passes = capture_graph(counted, device)
    assert len(calls) == REHEARSALS + 1
    passes.forward()
    passes.before()()
    forward, backward = fake_cuda.graphs
    assert (forward.of_pool, backward.of_pool) == (None, forward)
    assert (forward.replays, backward.replays) == (1, 1)
    # Rehearsals run on a stream of their own, which waits for the current one and is waited for.
    assert fake_cuda.calls["new_stream"] == 1 and len(device.cuda.compute.waited_for) == 1


def test_products_in_fp8(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands have the layout of the hardware, and results the sizes of the operator's."""
    plan, seen = plan_of(), []

    def multiply(left: Any, right: Any, **more: Any) -> None:
        assert left.dtype == right.dtype == torch.float8_e4m3fn
        assert left.stride()[1] == 1 and right.stride()[0] == 1
        seen.append((left.shape[0], right.shape[1], left.shape[1]))

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    found = {part.name: part for part in local_operators(plan)}
    fp8.make_runner(fp8.fp8_gemms(found["down"], False), cpu)()
    fp8.make_runner(fp8.fp8_gemms(found["down"], True), cpu)()
    tokens, ffn, hidden = 32, 64, 32
    assert seen == [(tokens, hidden, ffn), (tokens, ffn, hidden), (hidden, ffn, tokens)]
    assert not fp8.fp8_gemms(found["norm1"], False)
    odd = local_operators(plan_of(model="llama", batch={"micro": 1, "sequence": 9}))
    assert not any(fp8.fp8_gemms(part, False) for part in odd)


def test_which_devices_multiply_fp8(fake_cuda: Any) -> None:
    plan, gpu = plan_of(), Device.of("cuda")
    fake_cuda.compute_capability = (8, 0)
    assert "8.0 has no" in fp8.why_missing(gpu, plan)
    fake_cuda.compute_capability = (9, 0)
    assert "cpu-core has no peak rate" in fp8.why_missing(gpu, plan)
    hopper = plan_of(cluster={"gpu": "h100-sxm", "gpus": 1})
    assert fp8.why_missing(gpu, hopper) == ""


@pytest.mark.slow
def test_fp8_by_libraries_is_measured_where_they_are_installed(
    tmp_path: Path, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of a library stands for what it would do: its casts are forecast, and both of its passes run."""
    made: list[tuple[int, int]] = []

    def make(size: int, columns: int, device: Any) -> Any:
        layer = torch.nn.Linear(size, columns, bias=False, dtype=torch.bfloat16)
        made.append((size, columns))
        return layer, layer.weight

    here = fp8_libraries.Library("a library", "torch.nn", "fp8-delayed", make)
    absent = fp8_libraries.Library("another", "no_such_module", "fp8-delayed", make)
    monkeypatch.setattr(measuring, "LIBRARIES", (here, absent))
    monkeypatch.setattr(measuring, "WARM_UP_SIZE", 16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: None)
    given = job(cluster={"gpu": "h100-sxm", "gpus": 1}, precision={"compute": "bf16", "gradients": "fp32"})
    found = measure(given, "cuda", tmp_path / "k.json", dtypes=["bf16", "fp8"], repeat=1, warmup=0)
    assert "fp8 by another: not measured, not installed" in found.notes
    rows = {row.name: row for row in found.rows if row.group == "tp 1 fp8 a library"}
    names = {f"{name} {which}" for name in ("qkv", "proj", "up", "down") for which in ("forward", "backward")}
    assert rows.keys() == names and all(row.samples for row in rows.values())
    bare = {row.name: row for row in found.rows if row.group == "tp 1 fp8"}
    ours, gemm = (some["down forward"].forecasts["catalog"].value for some in (rows, bare))
    assert ours > gemm  # casts come on top
    assert (64, 32) in made and (32, 64) in made


def test_layers_of_libraries_have_no_bias_and_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries compute on GPUs only; these modules in their place note what is asked of them."""
    quantised: list[Any] = []

    @contextmanager
    def autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        quantised.append(fp8_recipe if enabled else None)
        yield

    def linear(size: int, columns: int, bias: bool, params_dtype: Any, device: Any) -> Any:
        return torch.nn.Linear(size, columns, bias, device, params_dtype)

    engine = SimpleNamespace(Linear=linear, fp8_autocast=autocast)
    modules = {
        "transformer_engine": SimpleNamespace(pytorch=engine),
        "transformer_engine.pytorch": engine,
        "transformer_engine.common": None,
        "transformer_engine.common.recipe": SimpleNamespace(DelayedScaling=lambda: "delayed"),
        "torchao": None,
        "torchao.float8": SimpleNamespace(convert_to_float8_training=quantised.append),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    for library in fp8_libraries.LIBRARIES:
        forward, weight = library.make(16, 32, torch.device("cpu"))
        assert torch.allclose(forward(x), x @ weight.T, atol=0.02)
    recipe, layer = quantised
    assert recipe == "delayed" and layer[0].weight is weight


def test_a_copy_goes_to_the_gpu_and_back() -> None:
    """From a device without data nothing can be copied."""
    device = SimpleNamespace(pin_memory=lambda tensor: tensor, torch=torch.device("meta"))
    how: Any = SimpleNamespace(device=device, seconds=lambda copy: copy())
    bench: Any = None
    on: Any = _measure_copy(how, 8, True, bench)
    assert on.device.type == "meta"
    with pytest.raises(NotImplementedError):
        _measure_copy(how, 8, False, bench)
