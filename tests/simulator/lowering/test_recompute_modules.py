"""Selective recompute, module by module: saved bytes, and recomputed ops in their order."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Memory, Op, UnitRun
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.memory.shared.recompute import discard_outputs
from meshcast.validation.contract.measure import make, saved_bytes, waits_for
from meshcast.validation.contract.played import play_job
from tests.draws import drawn_grid

USE = "memory/recompute-selective"
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 6}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}
SIZES = {"layers": 8, "hidden": 64, "heads": 4, "vocab": 512, "seq": 32}
TOKENS = 32
GPT = {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}


def unit_runs(
    modules: tuple[str, ...], tp: int = 1, regather: bool = True, quantised: str = "", **model: Any
) -> list[UnitRun]:
    """Two layers of a gated model on `tp` ranks, sequence-parallel."""
    mesh = Mesh({"tp": tp})
    schemes = [make("tensor/megatron-sp", mesh, ("tp",))] if tp > 1 else []
    options = {key: model.pop(key) for key in ("layers",) if key in model}
    schemes += [make(USE, mesh, (), modules=modules, **options)] if modules else []
    built = Architecture(Model(**SIZES, **GPT, **model), 1, TOKENS, 512, quantised=quantised)
    return Lowering(mesh, schemes, regather).run(built.stage(range(2), False, False)).unit_runs


def spared(*modules: str, **how: Any) -> float:
    """Bytes of a layer that need not be kept, without the statistics of its norms."""
    return saved_bytes(unit_runs((), **how)[0], statistics=False) - saved_bytes(
        unit_runs(modules, **how)[0], statistics=False
    )


def again(*modules: str, **how: Any) -> list[str]:
    """The recomputed ops of a layer, in order."""
    backward = unit_runs(modules, **how)[0].fragment.backward
    return [op.name.removeprefix("re ") for op in backward if op.phase == "R"]


# ------------------------------------------------------------------------------------------ bytes spared


@pytest.mark.parametrize(("tp", "regather"), drawn_grid([1, 2, 4], [False, True]))
def test_layernorm_spares_both_results(tp: int, regather: bool) -> None:
    """2 b s h bytes each, cut along the sequence; whole where the gathered ones are kept, and then they are gathered
    again, too."""
    whole = tp if not regather else 1
    assert spared("layernorm", tp=tp, regather=regather) == 2 * 2 * TOKENS * 64 * whole / tp
    moved = ["all_gather norm2", "all_gather norm1"] if tp > 1 and not regather else []
    assert sorted(again("layernorm", tp=tp, regather=regather)) == sorted(["norm2", "norm1", *moved])


SHARED, DENSE, FP8 = ["shared.up", "shared.act", "shared.down"], ["up", "act", "down"], {"quantised": "fp8-delayed"}
SPARED: list[tuple[str, dict[str, Any], float | None, list[str] | None]] = [
    ("norm", {"mla": MLA, "qk_layernorm": True}, 2 * TOKENS * (2 * 64 + 24 + 16), None),
    ("norm", {}, 2 * 2 * TOKENS * 64, ["norm2", "norm1"]),
    ("moe_act", {"moe": MOE}, 2 * TOKENS * 2 * 16, ["expert.act"]),
    ("moe_act", {}, 0, []),
    ("shared_experts", {"moe": MOE}, 2 * TOKENS * 3 * 16, SHARED),
    ("mlp", {"moe": MOE}, None, []),
    ("mlp", {}, None, DENSE),
    # The product's input is kept in its own format only: a byte an element.
    ("layernorm", FP8, 2 * TOKENS * 64, ["norm2", "cast norm2", "norm1", "cast norm1"]),
    ("moe_act", FP8 | {"moe": MOE}, TOKENS * 2 * 16, None),
]


@pytest.mark.parametrize(("module", "how", "nbytes", "ops"), SPARED)
def test_bytes_spared_and_ops_made_again(
    module: str, how: dict[str, Any], nbytes: float | None, ops: list[str] | None
) -> None:
    """Shared experts and dense blocks have words of their own; casts of discarded tensors come again with them."""
    assert nbytes is None or spared(module, **how) == nbytes
    assert ops is None or again(module, **how) == ops
    assert {*SHARED} < {*again("moe", moe=MOE)}
    assert spared("norm", qk_layernorm=True) >= spared("layernorm", qk_layernorm=True)


@pytest.mark.parametrize("tp", [1, 2])
def test_mla_up_proj_keeps_the_latents_alone(tp: int) -> None:
    """Gone are the normed latents, and queries, keys and values of all heads behind them; the part of the keys that all
    heads share is kept, for it takes part again."""
    heads, qk, shared = 4, 8 + 4, 4
    normed, widths = 24 + 16, heads * (2 * qk + 6) - shared
    found = spared("mla_up_proj", mla=MLA, qk_layernorm=True, tp=tp)
    assert found == 2 * TOKENS * (normed + widths) / tp
    names = again("mla_up_proj", mla=MLA, qk_layernorm=True, tp=tp)
    kernels = ["q.latent.norm", "q.up", "kv.latent.norm", "kv.up", "rope"]
    assert [name for name in names if not name.startswith("all_gather")] == kernels
    assert sum(name.startswith("all_gather") for name in names) == (3 if tp > 1 else 0)
    # Without norms of their own the latents themselves are what is kept.
    assert spared("mla_up_proj", mla=MLA, qk_layernorm=False, tp=tp) == 2 * TOKENS * widths / tp


def test_the_modules_of_deepseek_v3_are_one_group_of_norms_and_ups() -> None:
    both = spared("norm", "mla_up_proj", mla=MLA, qk_layernorm=True)
    assert both == spared("layernorm", mla=MLA) + spared("mla_up_proj", mla=MLA, qk_layernorm=True)
    names = again("norm", "mla_up_proj", mla=MLA, qk_layernorm=True)
    assert len(names) == len(set(names)) == 7


def test_modules_inside_a_recomputed_block_are_not_recomputed_twice() -> None:
    names = again("moe", "layernorm", "core_attn", "moe_act", moe=MOE)
    assert len(names) == len(set(names))
    assert names[0] == "norm2" and names[1] == "router"
    assert {"expert.act", "core", "norm1"} < set(names)


@pytest.mark.parametrize("modules", [("layernorm",), ("core_attn",), ("mlp", "layernorm")])
def test_the_first_layers_only(modules: tuple[str, ...]) -> None:
    one, other = unit_runs(modules, layers=1)
    assert (one.count, other.count) == (1, 1)
    assert saved_bytes(one) == saved_bytes(unit_runs(modules)[0]) and saved_bytes(other) == saved_bytes(
        unit_runs(())[0]
    )
    assert [unit_run.count for unit_run in unit_runs(modules, layers=0)] == [2]
    assert [op.phase for op in unit_runs(modules, layers=0)[0].fragment.backward].count("R") == 0


# ------------------------------------------------------------------------------------------------- order


def test_it_is_made_again_just_in_front_of_the_first_that_reads_it() -> None:
    """When that could begin: behind the gradient that it waits for."""
    fragment = unit_runs(("layernorm",))[0].fragment
    for name, first in (("norm2", "wup"), ("norm1", "wqkv")):
        place = next(i for i, op in enumerate(fragment.backward) if op.name == f"re {name}")
        made, reader = fragment.backward[place : place + 2]
        assert reader.name == first
        assert made in waits_for(reader)
        assert waits_for(made) <= waits_for(reader)
        assert any(op in waits_for(made) for op in fragment.backward[:place])


def test_discarding_unneeded_tensors_changes_nothing() -> None:
    fragment = unit_runs(())[0].fragment.copy()
    before = list(fragment.backward), list(fragment.tensor_uses)
    forward = [op for op in fragment.forward if op.name == "residual2"]
    discard_outputs(fragment, forward)
    assert (fragment.backward, fragment.tensor_uses) == before


def test_recompute_leaves_regathers_unchanged() -> None:
    """A shard that is made again is gathered for the weight gradient as a kept one is."""

    def gathers(modules: tuple[str, ...]) -> list[Op]:
        ops = unit_runs(modules, tp=2)[0].fragment.backward
        return [op for op in ops if isinstance(op.work, Collective) and op.work.operation == "all_gather"]

    assert [op.work for op in gathers(())] == [op.work for op in gathers(("layernorm",))]


@pytest.mark.parametrize(
    ("use", "options"), [("expert/all-to-all", {}), ("expert/tutel", {"degree": 4}), ("expert/fastermoe", {"group": 2})]
)
def test_a_scheme_that_splits_ops_changes_neither_memory_nor_traffic(use: str, options: dict[str, Any]) -> None:
    """Outputs are discarded whether the scheme that splits their ops stands before recomputation or after it."""
    selective = {"use": USE, "modules": ["layernorm", "moe_act"]}
    expert = {"use": use, "over": "ep", **options}
    figures = []
    for schemes in ([selective, expert], [expert, selective]):
        entries = [{"use": "data/zero-1", "over": "dp"}, *schemes]
        job = {
            "model": {**SIZES, **GPT, "layers": 2, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 16}},
            "cluster": {"gpu": "h100-sxm", "gpus": 4},
            "batch": {"global": 4},
            "plan": {"mesh": {"dp": 4}, "views": {"experts": {"edp": 1, "ep": 4}}, "schemes": entries},
        }
        played = play_job(job)
        again = [op.work for _, op in played.instances() if op.phase == "R"]
        figures.append((played.most_kept(0), sum(work.bytes for work in again if isinstance(work, Memory))))
    assert figures[0] == figures[1] and figures[0][1] > 0
