"""The reference trainer keeps the tensors that the simulator forecasts, and its kernels are the fused ones."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.contract.measure import saved_bytes
from tests.draws import drawn
from tests.validation.reference.plans import GPT, LLAMA, MODELS, plan

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from meshcast.validation.reference import functions, model, optimizer, tokens  # noqa: E402
from meshcast.validation.reference.context_parallel import WHOLE_SEQUENCES, ContextGroup  # noqa: E402
from meshcast.validation.reference.tensor_parallel import ONE_RANK, AxisGroup, TensorGroup  # noqa: E402

CPU = torch.device("cpu")


def kept(work: Any, *outside: Any) -> int:
    """Bytes of the storages that `work` saves for its backward pass, without the tensors `outside`."""
    storages: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    assert result.grad_fn is not None
    inside = storages.keys() - {tensor.untyped_storage().data_ptr() for tensor in outside}
    return sum(storages[place].nbytes() for place in inside)


def layer(
    name: str,
    tensor: tuple[int, bool],
    precision: str,
    recompute: str = "none",
    context: ContextGroup = WHOLE_SEQUENCES,
    expert: AxisGroup = ONE_RANK,
) -> tuple[int, float, int]:
    """Bytes that a layer keeps, by PyTorch and by the simulator, and the tokens of its residual stream."""
    size, sequence = tensor
    shape = {**MODELS[name], "hidden": 128, "seq": 64, "ffn": 192}
    degrees = {"dp": expert.size, "ep": expert.size, "cp": context.size, "tp": size}
    given = plan(
        shape, precision, size * context.size * expert.size, **degrees, sequence_parallel=sequence, recompute=recompute
    )
    if context.scheme == "ulysses":
        given = resolve_plan(load_job({**given.job.to_dict(), "plan": ulysses(given)}))
    stage = model.build_stage(given, None, TensorGroup(size, 0, None, sequence), CPU, None, context, expert)
    tokens = 2 * 64 // (size if sequence else 1) // context.size
    x = torch.randn(2, tokens // 2, 128).to(next(stage.parameters()).dtype).requires_grad_()
    runs = Lowering(given.mesh, given.stage_schemes).run(given.model_parts.stage(0)).unit_runs
    (unit_run,) = [run for run in runs if run.name == "layer"]
    return kept(lambda: stage.layers["0"](x), *stage.parameters()), saved_bytes(unit_run), tokens


def spared_on_cpu(name: str, precision: str, tokens: int) -> int:
    """Bytes by which mean and deviation in two layer norms are smaller on a CPU: they have the input's format."""
    return 2 * tokens * 2 * 2 if (name, precision) == ("gpt", "bf16") else 0


def ulysses(given: Plan) -> dict[str, Any]:
    """The plan with sequence/ulysses in place of sequence/all-gather."""
    fields: dict[str, Any] = given.job.to_dict()["plan"]
    schemes = [{**scheme, "use": scheme["use"].replace("all-gather", "ulysses")} for scheme in fields["schemes"]]
    return {**fields, "schemes": schemes}


def resident(adam: Any) -> list[Any]:
    """Weights, gradients, main weights and moments, each storage once."""
    held = [*adam.params, *(optimizer.gradient(param) for param in adam.params)]
    held += [param.grad for param in adam.params if param.grad is not None]
    for group, pairs in adam.adams:
        held += [main for _, main in pairs] + [main.grad for _, main in pairs if main.grad is not None]
        held += [t for state in group.state.values() for name, t in state.items() if name != "step"]
    return list({t.untyped_storage().data_ptr(): t for t in held}.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tensor", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_the_bytes_of_the_simulator(name: str, tensor: tuple[int, bool], precision: str) -> None:
    found, forecast, tokens = layer(name, tensor, precision)
    if name != "experts":
        assert found == forecast - spared_on_cpu(name, precision, tokens)
    else:  # and the router's probabilities and choices
        assert forecast < found <= forecast + 48 * tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "scheme", "tensor"),
    [
        ("gpt", "all-gather", (1, False)),
        ("gpt", "ulysses", (2, True)),
        ("llama", "all-gather", (2, True)),
        ("llama", "ulysses", (1, False)),
    ],
)
def test_a_layer_on_some_positions_keeps_what_the_simulator_says(
    name: str, scheme: str, tensor: tuple[int, bool], precision: str
) -> None:
    """Keys and values of all positions or heads are kept, those of the rank's own positions are not."""
    found, forecast, tokens = layer(name, tensor, precision, context=ContextGroup(2, 0, None, scheme))
    assert found == forecast - spared_on_cpu(name, precision, tokens)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_with_some_experts_keeps_what_the_simulator_says(precision: str) -> None:
    found, forecast, tokens = layer("experts", (1, False), precision, expert=AxisGroup(2, 0, None))
    assert forecast < found <= forecast + 48 * tokens


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_recomputed_layers_keep_their_input(name: str) -> None:
    found, forecast, tokens = layer(name, (1, False), "fp32", "full")
    assert found == forecast == tokens * 128 * 4


def test_a_recomputed_attention_core_keeps_no_row_sums() -> None:
    whole, forecast, tokens = layer("llama", (1, False), "fp32")
    again, forecast_again, _ = layer("llama", (1, False), "fp32", "selective")
    assert whole - again == forecast - forecast_again == tokens * 4 * 4


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [4, 2])
def test_attention_is_the_fused_kernel(precision: Any, keys: int) -> None:
    b, s, d = 1, 256, 16
    qkv = torch.randn(b, s, (4 + 2 * keys) * d, dtype=precision, requires_grad=True)
    q, k, v = functions.split_heads(qkv, 4, keys, functions.rope_table(s, d, 1e4, CPU))
    assert {part.untyped_storage().data_ptr() for part in (q, k, v)} == {qkv.untyped_storage().data_ptr()}
    result = functions.attention(q, k, v)
    assert result.is_contiguous()
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(type(node).__name__)
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert any(name.startswith("ScaledDotProductFlashAttentionForCpu") for name in seen), seen
    itself = qkv.element_size()
    assert kept(lambda: functions.attention(q, k, v)) == (qkv.numel() + result.numel()) * itself + 4 * s * 4


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_keeps_four_bytes_a_logit(precision: Any) -> None:
    logits = torch.randn(2, 64, 512, dtype=precision, requires_grad=True)
    targets = torch.randint(512, (2, 64))
    found = kept(lambda: functions.cross_entropy(logits, targets, TensorGroup()))
    assert 4 * logits.numel() <= found <= 4 * logits.numel() + 16 * targets.numel()


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("weights", "gradients", "main", "bytes_a_parameter"),
    [("fp32", "fp32", "fp32", 16), ("bf16", "bf16", "fp32", 16), ("bf16", "fp32", "fp32", 18), ("bf16",) * 3 + (8,)],
)
def test_gradients_and_state_have_the_formats_of_the_plan(
    shape: dict[str, Any], weights: str, gradients: str, main: str, bytes_a_parameter: int
) -> None:
    formats = {"compute": weights, "gradients": gradients, "main_weights": main, "moments": main}
    given = plan(shape, job={"precision": formats})
    stage = model.build_stage(given, None, TensorGroup(), CPU)
    adam = optimizer.Optimizer(stage.parameters(), given)
    places = [optimizer.gradient(param).data_ptr() for param in adam.params]
    losses = []
    for _ in range(3):
        loss = stage(*tokens.make_tokens(given, 0, 0, 0))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert [optimizer.gradient(param).data_ptr() for param in adam.params] == places
    held = sum(tensor.untyped_storage().nbytes() for tensor in resident(adam))
    assert held == bytes_a_parameter * sum(param.numel() for param in adam.params)


def test_long_gradients_are_shortened_to_norm_one() -> None:
    norm = optimizer.global_norm([torch.full((3,), 4.0), torch.full((1,), 4.0)], [], CPU)
    assert norm.item() == pytest.approx(8.0)
    assert (optimizer.clip_factor(norm) * norm).item() == pytest.approx(1.0, rel=1e-5)
    assert optimizer.clip_factor(torch.tensor(0.5)).item() == 1.0


@pytest.mark.parametrize(
    ("recompute", "name"), drawn([*product(("none", "full"), ("gpt", "llama", "experts"))], keep=4)
)
def test_the_peak_of_a_step_is_the_forecast_one(name: str, recompute: str) -> None:
    precision = "fp32" if name == "gpt" else "bf16"
    shape = {**MODELS[name], "layers": 2, "hidden": 192, "heads": 6, "vocab": 512, "seq": 128, "ffn": 512}
    if name == "experts":
        shape["moe"] = {"experts": 4, "top_k": 2, "expert_ffn": 256}
    formats = {"compute": precision, "gradients": precision, "main_weights": "fp32", "moments": "fp32"}
    job = {"precision": formats, "batch": {"micro": 2, "global": 4}}
    given = plan(shape, job=job, recompute=recompute)
    peak = simulate(given.job.to_dict()).to_dict()["memory"]["stages"][0]["peak_allocated_gib"] * 2**30
    stage = model.build_stage(given, None, TensorGroup(), CPU)
    adam = optimizer.Optimizer(stage.parameters(), given)

    def step(number: int) -> None:
        for i in range(2):
            stage(*tokens.make_tokens(given, number, i, 0)).div(2).backward()
        adam.step()
        adam.zero_grad()

    step(0)
    resting = sum(x.untyped_storage().nbytes() for x in resident(adam))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(1)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    levels = accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0)
    assert resting + max(levels) == pytest.approx(peak, rel=0.03)
