"""Describes traced layers by the parts of models: attention, MLPs, experts, state-space blocks, norms. What no part
describes is `Other`, so that the parameters of a layer are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from meshcast.hardware.errors import ModelError
from meshcast.hardware.records import dataclass
from meshcast.simulator.models.trace.record import Part, Work, count_elements
from meshcast.simulator.models.transformer import Transformer

Step = Mapping[str, Any]

SMALLEST = 0.02
"""Share of the FLOPs of a layer that another MLP beside its first has at least, to be described as one."""

NO_SCAN = {"heads": 1, "head_dim": 1, "state": 1, "groups": 1}
"""Sizes of state-space blocks in a layer without any, which is a single block."""


class Block(NamedTuple):
    """A part of a layer.

    Attributes:
        letter: its letter in patterns of hybrid models (`StateSpace.pattern`), D of a gated delta rule.
        fields: the fields of `Transformer` that describe it.
        products: its products with parameters.
        place: number of its first step.
    """

    letter: str
    fields: dict[str, Any]
    products: list[Step]
    place: int


@dataclass
class LayerReading:
    """Reads a layer.

    part: the layer.
    tokens: tokens of the trace.
    hidden: width of the residual stream.
    """

    part: Part
    tokens: int
    hidden: int

    def read(self) -> list[dict[str, Any]]:
        """Returns the fields of the layer; where its blocks are no attention and then an MLP, those of a layer a
        block."""
        blocks = self._find_blocks()
        taken = [step for block in blocks for step in block.products]
        layers = self._compose(blocks)
        for simpler in ({}, {"norm_place": "before", "norm_residual": False}):
            layers = [fields | (simpler if "ssm" not in fields else {}) for fields in layers]
            with suppress(ModelError):
                left = self.part.size - sum(count_parameters(fields, self.hidden) for fields in layers)
                if layers and left >= -4 * self.hidden:  # else it has weights of another layer
                    other = self._describe_other(taken, left)
                    return [
                        *layers[:-1],
                        layers[-1] | ({"other": other} if other["parameters"] or other["flops"] else {}),
                    ]
        return [{"other": self._describe_other([], self.part.size) | {"alone": True}}]

    def _find_blocks(self) -> list[Block]:
        """Returns the parts of the layer in the order in which they run."""
        blocks, taken = list[Block](), list[Step]()

        def add(block: Block | None) -> bool:
            if block is None or any(step in taken for step in block.products):
                return False
            blocks.append(block)
            taken.extend(block.products)
            return True

        for place, call in self._steps("attention") or self._find_scores():
            add(self._read_attention(place, call))
        for place, call in self._steps("recurrence"):
            add(self._read_recurrence(place, call))
        least = SMALLEST * sum(work.flops for work in self.part.work.values())
        has_inner = add(self._read_experts(taken))
        while (mlp := self._read_mlp(taken)) and (not has_inner or sum(s["flops"] for s in mlp.products) > least):
            has_inner = add(mlp)
        return sorted(blocks, key=lambda block: block.place)

    # ----------------------------------------------------------------------------------------- attention

    def _steps(self, *kinds: str) -> list[tuple[int, Step]]:
        return [(i, step) for i, step in enumerate(self.part.steps) if step["step"] in kinds]

    def _products(self, taken: Sequence[Step] = ()) -> list[tuple[int, Step]]:
        names = {step["parameter"] for step in taken}
        return [(i, step) for i, step in self._steps("product") if step["parameter"] not in names]

    def _find_scores(self) -> list[tuple[int, Step]]:
        """Returns attention that is written as products and a softmax."""
        matmuls = [(i, step) for i, step in self._steps("matmul") if step["m"] == self.tokens]
        scores = next(((i, s) for i, s in matmuls if s["n"] == self.tokens), None)
        values = next(((i, s) for i, s in matmuls if scores and i > scores[0] and s["k"] == self.tokens), None)
        soft = any(step["sizes"][-1] == self.tokens for _, step in self._steps("softmax"))
        if not (scores and values and soft):
            return []
        heads = scores[1]["batch"]
        shape = {"heads": heads, "kv_heads": heads, "qk": scores[1]["k"], "v": values[1]["n"], "window": None}
        flags = {"softcap": False, "sinks": False, "causal": True}
        return [(scores[0], {"module": scores[1]["module"], **shape, **flags})]

    def _read_attention(self, place: int, call: Step) -> Block | None:
        heads, kv, qk, v = (call[name] for name in ("heads", "kv_heads", "qk", "v"))
        products = self._products()
        last = next(
            (s for i, s in products if i > place and s["inner"] == heads * v and s["outer"] == self.hidden), None
        )
        scope = self._scope(call["module"], [s for i, s in products if i < place])
        first = [
            (i, s) for i, s in products if s["module"].startswith(scope) and s is not last and (scope or i < place)
        ]
        before = [(i, s) for i, s in first if s["inner"] == self.hidden]
        if last is None or not before:
            return None
        start = min(i for i, _ in before)
        fields = (
            self._latent(call, [s for _, s in first])
            if any(s["inner"] != self.hidden for i, s in first if i < place)
            else None
        )
        if fields is None:
            made, widths = sum(s["outer"] for _, s in before), heads * qk + kv * (qk + v)
            if made - widths == kv * (qk + v) * (heads // kv - 1) and kv != heads:
                kv, widths = heads, made
            elif made < widths and heads == kv:  # keys and values were copied to all heads
                kv = (made - heads * qk) // (qk + v) or 1
                widths = heads * qk + kv * (qk + v)
            gate = made == widths + heads * v
            if (made != widths and not gate) or v != qk or heads % kv:
                return None
            fields = {"kv_heads": kv, "head_dim": qk, "attention_gate": gate, "fused_qkv": len(before) == 1}
            fields |= self._query_norms(scope, heads * qk, qk)
            fields["qkv_bias"] = self._has_bias([s for _, s in before])
        limits = {"window": call["window"], "bidirectional": not call["causal"], "sinks": self._has_sinks(call, scope)}
        fields |= limits | {"softcaps": ("attention",) if call["softcap"] else ()}
        turned = next((s["width"] for _, s in self._steps("rotation") if s["module"].startswith(scope)), 0)
        if "mla" not in fields:
            fields |= {"rope_share": turned / qk if 0 < turned < qk else 1.0, "positions": "rope" if turned else "none"}
        fields |= {"heads": heads, "proj_bias": self._has_bias([last])}
        return Block("*", fields, [*(s for _, s in first), last], start)

    def _scope(self, module: str, before: Sequence[Step]) -> str:
        """Returns the module of attention that also has the products in front of it."""
        while module and not any(step["module"].startswith(module) for step in before):
            module = module.rpartition(".")[0]
        return module

    def _latent(self, call: Step, products: Sequence[Step]) -> dict[str, Any] | None:
        """Returns the fields of latent attention; None if it is none."""
        heads, qk, v = call["heads"], call["qk"], call["v"]
        ups = [step for step in products if step["inner"] != self.hidden]
        downs = [step for step in products if step["inner"] == self.hidden]
        queries = next((step for step in ups if step["outer"] == heads * qk), None)
        source = queries or next((step for step in downs if step["outer"] == heads * qk), None)
        keys = next((step for step in ups if step is not queries), None)
        if source is None or keys is None or len(ups) > (2 if queries else 1) or len(downs) != 2:
            return None
        down = next(
            (
                s
                for s in downs
                if s is not source
                and s["outer"] > keys["inner"]
                and (queries is None or s["outer"] != queries["inner"])
            ),
            None,
        )
        if down is None or keys["outer"] % heads:
            return None
        rope, nope = down["outer"] - keys["inner"], keys["outer"] // heads - v
        if nope <= 0 or rope + nope != qk or rope % 2:
            return None
        sizes = {"kv_lora_rank": keys["inner"], "qk_nope": nope, "qk_rope": rope, "v": v}
        normed = [s for _, s in self._steps("norm") if s["width"] == keys["inner"]]
        latent = {"mla": {**({"q_lora_rank": queries["inner"]} if queries else {}), **sizes}, "positions": "rope"}
        return latent | {"qk_layernorm": bool(normed), "kv_heads": heads, "head_dim": v, "qkv_bias": False}

    def _query_norms(self, scope: str, width: int, head: int) -> dict[str, Any]:
        norms = [s for _, s in self._steps("norm") if s["module"].startswith(scope) and s["module"] != scope]
        weights = [self.part.parameters.get(f"{s['module']}.weight", ()) for s in norms]
        if (len(norms) >= 2 and weights[:2] == [[head], [head]]) or weights[:2] == [(head,), (head,)]:
            return {"qk_layernorm": True}
        if len(norms) >= 2 and weights[0] and count_elements(weights[0]) == width and scope:
            return {"qk_layernorm": "all"}
        return {"qk_layernorm": False}

    def _has_bias(self, products: Sequence[Step]) -> bool:
        """Returns whether all of these linear layers have a bias."""
        names = [step["parameter"].removesuffix("weight") + "bias" for step in products]
        return all(name in self.part.parameters for name in names)

    def _has_sinks(self, call: Step, scope: str) -> bool:
        heads = [call["heads"]]
        return call["sinks"] and any(
            list(shape) == heads and name.startswith(scope) for name, shape in self.part.parameters.items()
        )

    # -------------------------------------------------------------------------------------- recurrences

    def _read_recurrence(self, place: int, step: Step) -> Block | None:
        scope = step["module"]
        shapes = {
            name.removeprefix(f"{scope}."): shape
            for name, shape in self.part.parameters.items()
            if name.startswith(f"{scope}.")
        }
        products = [(i, s) for i, s in self._products() if s["module"].startswith(scope)]
        conv = next(
            (shape for name, shape in shapes.items() if "conv" in name and len(shape) == 3 and shape[1] == 1), None
        )
        rates = next((shape for name, shape in shapes.items() if name.endswith(("A_log", "dt_bias"))), ())
        last = next((s for _, s in products if s["outer"] == self.hidden), None)
        made = sum(
            s["outer"] for _, s in products if s["inner"] == self.hidden and s["rows"] == self.tokens and s is not last
        )
        if conv is None or last is None or len(rates) != 1 or last["inner"] % rates[0]:
            return None
        heads, inner = rates[0], last["inner"]
        sizes = {"heads": heads, "width": inner // heads, "conv": conv[2], "channels": conv[0], "made": made}
        steps = [s for _, s in products]
        if "D" in shapes and made == inner + conv[0] + heads:
            return self._read_scan(sizes, step["numbers"], steps, place)
        return self._read_delta(sizes, scope, steps, place)

    def _read_scan(
        self, sizes: Mapping[str, int], numbers: Mapping[str, int], steps: list[Step], place: int
    ) -> Block | None:
        heads, width = sizes["heads"], sizes["width"]
        both, odd = divmod(sizes["channels"] - heads * width, 2)
        groups = next((numbers[key] for key in ("n_groups", "ngroups", "num_groups") if key in numbers), 1)
        if odd or both % groups or heads % groups:
            return None
        chunk = {"chunk": numbers["chunk_size"]} if "chunk_size" in numbers else {}
        shape = {"pattern": "M", "heads": heads, "head_dim": width, "state": both // groups, "groups": groups}
        return Block("M", {"ssm": {**shape, "conv": sizes["conv"], **chunk}}, steps, place)

    def _read_delta(self, sizes: Mapping[str, int], scope: str, steps: list[Step], place: int) -> Block | None:
        heads, value = sizes["heads"], sizes["width"]
        keys, odd = divmod(sizes["channels"] - heads * value, 2)
        products = [s for _, s in self._steps("matmul") if s["module"].startswith(scope)]
        width = products[0]["k"] if products else 0
        if (
            odd
            or not width
            or keys % width
            or heads % (keys // width)
            or sizes["made"] != 2 * keys + 2 * heads * value + 2 * heads
        ):
            return None
        shape = {"kind": "gated-delta-net", "heads": heads, "key_heads": keys // width, "key_dim": width}
        return Block("D", {"linear_attention": {**shape, "value_dim": value, "conv": sizes["conv"]}}, steps, place)

    # ------------------------------------------------------------------------------------ MLPs and experts

    def _read_experts(self, taken: Sequence[Step]) -> Block | None:
        calls = self._steps("experts")
        if not calls:
            return None
        place, call = calls[0]
        matrices = [shape for shape in call["weights"].values() if len(shape) == 3]
        inner = [shape[2] if shape[1] == self.hidden else shape[1] for shape in matrices if self.hidden in shape[1:]]
        if len(inner) != len(matrices) or len(matrices) not in (2, 3) or max(inner) not in (min(inner), 2 * min(inner)):
            return None
        experts, ffn = matrices[0][0], min(inner)
        gated = len(matrices) == 3 or max(inner) == 2 * ffn
        bias = any(len(shape) == 2 for shape in call["weights"].values())
        scope = call["module"].rpartition(".")[0]
        left = self._products(taken)
        routers = [s for _, s in left if s["inner"] == self.hidden and s["outer"] == experts]
        beside = [s for s in routers if s["module"].rpartition(".")[0] == scope]
        router = next(iter([*beside, *routers]), None)
        if router is None:
            return None
        moe: dict[str, Any] = {"experts": experts, "top_k": call["top_k"], "expert_ffn": ffn}
        moe["router_bias"] = any(
            list(shape) == [experts] and name.startswith(scope) for name, shape in self.part.parameters.items()
        )
        products, fields = [router], {"gated": gated, "mlp_bias": bias}
        shared = self._read_mlp([*taken, router])
        if shared and shared.fields["gated"] == gated and shared.fields["mlp_bias"] == bias:
            gate = next((s for _, s in left if s["inner"] == self.hidden and s["outer"] == 1), None)
            moe |= {"shared_experts": 1, "shared_ffn": shared.fields["ffn"], "shared_gate": gate is not None}
            products += [*shared.products, *([gate] if gate else [])]
        return Block("E", {**fields, "moe": moe}, products, place)

    def _read_mlp(self, taken: Sequence[Step]) -> Block | None:
        """Returns the first MLP among the products that are left: one or two linear layers up, and one down."""
        left = [(i, s) for i, s in self._products(taken) if s["rows"] == self.tokens]
        for place, down in left:
            ups = [(i, s) for i, s in left if i < place and s["inner"] == self.hidden]
            if down["outer"] != self.hidden or not ups:
                continue
            ffn = down["inner"]
            pair, whole = [x for x in ups if x[1]["outer"] == ffn], [x for x in ups if x[1]["outer"] == 2 * ffn]
            chosen = whole[-1:] or pair[-2:]
            if chosen:
                steps = [s for _, s in chosen]
                fields = {"ffn": ffn, "gated": bool(whole) or len(pair) > 1, "mlp_bias": self._has_bias([*steps, down])}
                return Block("-", fields, [*steps, down], chosen[0][0])
        return None

    # ------------------------------------------------------------------------------------- whole layers

    def _level_norms(self, blocks: Sequence[Block]) -> list[Step]:
        """Returns the norms over the residual stream, or over what is added to it."""
        scopes = [s["module"] for _, s in self._steps("attention", "recurrence") if s["module"]]
        return [
            s
            for _, s in self._steps("norm")
            if s["width"] == self.hidden
            and s["rows"] == self.tokens
            and not any(s["module"].startswith(f"{scope}.") for scope in scopes)
            and s["module"]
        ]

    def _compose(self, blocks: Sequence[Block]) -> list[dict[str, Any]]:
        """Returns the fields of the layers that these blocks make."""
        letters = "".join(block.letter for block in blocks)
        norms = self._level_norms(blocks)
        common = self._read_norms(norms)
        fields = {key: value for block in blocks for key, value in block.fields.items()}
        if letters in ("*-", "*E", "D-", "DE"):
            return [fields | common | self._place_norms([norm["reads"] for norm in norms])]
        if letters in ("-*", "E*"):
            return [fields | common | {"parallel_residual": True, "shared_norm": len(norms) < 2}]
        bare = {"norm": f"{common['norm'].removesuffix('1p').removesuffix('0')}0"}
        layers = []
        for i, block in enumerate(blocks):
            fields = dict(block.fields)
            if block.letter != "D":
                fields["ssm"] = fields.get("ssm", NO_SCAN) | {"pattern": block.letter}
            layers.append((common if i < len(norms) else bare) | fields)
        return layers if "D" not in letters else []

    def _read_norms(self, norms: Sequence[Step]) -> dict[str, Any]:
        if not norms:
            return {"norm": "rmsnorm0"}
        names = [name for name in self.part.parameters if name.rpartition(".")[0] == norms[0]["module"]]
        kind = "layernorm" if len(names) == 2 else "rmsnorm"
        return {"norm": f"{kind}{'1p' if norms[0]['shifted'] else '' if names else '0'}"}

    def _place_norms(self, reads: Sequence[str]) -> dict[str, Any]:
        inputs, streams, blocks = (reads.count(word) for word in ("input", "stream", "block"))
        if not reads:
            return {}
        if blocks >= 2 and inputs + streams == 0:
            return {"norm_place": "after"}
        if blocks >= 2 and inputs and streams:
            return {"norm_place": "both"}
        if inputs >= 2:
            return {"parallel_residual": True}
        if inputs == 1 and not streams:
            return {"parallel_residual": True, "shared_norm": True}
        return {"norm_residual": True} if not inputs and streams == 2 else {}

    def _describe_other(self, taken: Sequence[Step], parameters: int) -> dict[str, Any]:
        """Returns the fields of `Other` for what is left of the layer. parameters: their number."""
        left = [step for _, step in self._products(taken)]
        known = {step["module"] for step in (*taken, *left)} | {""}
        known |= {step["module"] for _, step in self._steps("norm", "experts")}
        mixers = [step["module"] for _, step in self._steps("attention", "recurrence") if taken]
        flops, work = sum(step["flops"] for step in left), Work()
        if not taken:
            flops = sum(each.flops for each in self.part.work.values())
        for module, each in self.part.work.items():
            beside = not any(module == name or module.startswith(f"{name}.") for name in mixers)
            if module not in known and (beside or not taken):
                work += each
        return {
            "modules": self._name_left(taken) if taken else (self.part.name,),
            "parameters": parameters,
            "flops": flops / self.tokens,
            "moved": work.moved / self.tokens,
            "saved": work.results / self.tokens,
        }

    def _name_left(self, taken: Sequence[Step]) -> tuple[str, ...]:
        """Names the largest parameters, without those of blocks, of experts and of norms as wide as the layer."""
        blocks = {step["parameter"].rpartition(".")[0] for step in taken}
        blocks |= {step["module"] for _, step in self._steps("experts", "recurrence")}
        sizes = {
            name: count_elements(shape)
            for name, shape in self.part.parameters.items()
            if name.rpartition(".")[0] not in blocks and (list(shape) != [self.hidden])
        }
        return tuple(sorted(sizes, key=lambda name: -sizes[name])[:4])


def count_parameters(fields: Mapping[str, Any], hidden: int) -> int:
    """Counts the parameters of a layer of these fields."""
    ends = {"layers": 1, "hidden": hidden, "heads": 1, "vocab": 1, "seq": 2048}
    return Transformer.model_validate(ends | dict(fields)).every_layer_parameters()
