"""What is trained: the shapes that decide floating-point operations, bytes on the wire and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from themis.core.cost import LayerCost
from themis.core.errors import ConfigError, is_whole, require
from themis.sim.hardware import Cluster


@final
@dataclass(frozen=True)
class ModelShape:
    """A decoder of `num_layers` equal blocks, attention then MoE.

    width M, expert_hidden H, num_experts E, top_k K, sequence tokens a sequence; gated: three matrices an expert
    (SwiGLU) instead of two; element_bytes: of what travels and is computed in, bf16 by default;
    attention_parameters: of one block, projections alone; score_width: heads times the mean
    of the query and the value width, what a pair of tokens costs in the scores; cache_width: elements of q, k and v
    together that a token keeps; shared_hidden: width of experts that every token passes, 0 for none; vocabulary.
    """

    name: str
    width: int
    expert_hidden: int
    num_experts: int
    top_k: int
    sequence: int
    num_layers: int
    gated: bool
    attention_parameters: int
    score_width: int
    cache_width: int
    vocabulary: int
    shared_hidden: int = 0
    element_bytes: int = 2

    def __post_init__(self) -> None:
        names = (
            "width",
            "expert_hidden",
            "num_experts",
            "top_k",
            "sequence",
            "num_layers",
            "vocabulary",
            "score_width",
        )
        for name in names:
            require(is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number, 1 or more")
        require(is_whole(self.shared_hidden, 0), "shared_hidden", self.shared_hidden, "a whole number, 0 or more")
        require(self.top_k <= self.num_experts, "top_k", self.top_k, f"at most num_experts ({self.num_experts})")

    @property
    def matrices(self) -> int:
        """Matrices of one expert."""
        return 3 if self.gated else 2

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert."""
        return self.matrices * self.width * self.expert_hidden

    @property
    def expert_bytes(self) -> int:
        """Psi: one expert on the wire."""
        return self.expert_parameters * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """One token on the wire."""
        return self.width * self.element_bytes

    @property
    def layer_parameters(self) -> int:
        """What one block holds besides routed experts: attention, shared experts, router, two norms."""
        shared = self.matrices * self.width * self.shared_hidden
        return self.attention_parameters + shared + self.width * self.num_experts + 2 * self.width

    @property
    def dense_parameters(self) -> int:
        """All but the routed experts; embedding and head are two matrices."""
        return self.num_layers * self.layer_parameters + 2 * self.vocabulary * self.width


@final
@dataclass(frozen=True)
class Workload:
    """A model on a cluster with `batch` sequences a device: the seconds and bytes that routing does not change."""

    model: ModelShape
    cluster: Cluster
    batch: int

    def __post_init__(self) -> None:
        require(is_whole(self.batch, 1), "batch", self.batch, "a whole number, 1 or more sequences a device")

    @property
    def tokens(self) -> int:
        """Tokens a device and iteration."""
        return self.batch * self.model.sequence

    @property
    def score_flops(self) -> float:
        """Floating-point operations a device for the scores of one block, forward: causal, so half the pairs."""
        return 4.0 * self.model.score_width * self.tokens * self.model.sequence / 2

    def _dense_s(self, parameters: float) -> float:
        return 2.0 * parameters * self.tokens / self.cluster.device.flops_per_s

    @property
    def attention_s(self) -> float:
        """Forward time of one block's attention, projections and scores; backward takes twice as long."""
        return self._dense_s(self.model.attention_parameters) + self.score_flops / self.cluster.device.flops_per_s

    @property
    def shared_s(self) -> float:
        """Forward time of the shared experts and the router."""
        shared = self.model.matrices * self.model.shared_hidden
        return self._dense_s(self.model.width * (shared + self.model.num_experts))

    @property
    def window_s(self) -> float:
        """What runs before the tokens leave and hides the SparseAllGather: attention, router, shared experts."""
        return self.attention_s + self.shared_s

    @property
    def window_backward_s(self) -> float:
        """Its backward."""
        return 2 * self.window_s

    @property
    def head_s(self) -> float:
        """Forward time of the output head."""
        return self._dense_s(self.model.width * self.model.vocabulary)

    @property
    def expert_s_per_token(self) -> float:
        """Forward seconds of one token at one expert."""
        return 2.0 * self.model.expert_parameters / self.cluster.device.grouped_flops_per_s

    @property
    def counts_s(self) -> float:
        """The exchange that tells every rank `tokens_ED`: 4 bytes an expert and device reach each node."""
        cluster = self.cluster
        if cluster.num_devices == 1:
            return 0.0
        link = cluster.inter if cluster.num_nodes > 1 else cluster.intra
        return link.seconds(4.0 * self.model.num_experts * cluster.num_devices)

    @property
    def cost(self) -> LayerCost:
        """The constants that policies decide by."""
        return LayerCost(3 * self.expert_s_per_token, self.model.token_bytes, self.model.expert_bytes)


def from_config(config: Mapping[str, Any], *, sequence: int, name: str = "model") -> ModelShape:
    """The shape of a transformers model from its `config.json`, as a dictionary; ConfigError if it is no MoE model.

    Blocks count as equal: dense blocks among them are taken for MoE blocks.
    """
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, Mapping) else {})}

    def whole(*names: str, default: int | None = None) -> int:
        for key in names:
            if is_whole(values.get(key), 0):
                return int(values[key])
        if default is None:
            raise ConfigError(f"the configuration has none of {', '.join(names)}; it must be that of an MoE model")
        return default

    width, heads = whole("hidden_size", "d_model", "n_embd"), whole("num_attention_heads", "n_head")
    hidden = whole("moe_intermediate_size", "expert_hidden_size", "intermediate_size", "ffn_hidden_size")
    shared = whole("shared_expert_intermediate_size", default=hidden * whole("n_shared_experts", default=0))
    attention, score_width, cache_width = _attention(values, width, heads)
    return ModelShape(
        name=name,
        width=width,
        expert_hidden=hidden,
        num_experts=whole("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        top_k=whole("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k"),
        sequence=sequence,
        num_layers=whole("num_hidden_layers", "n_layer"),
        gated=True,
        attention_parameters=attention,
        score_width=score_width,
        cache_width=cache_width,
        vocabulary=whole("vocab_size"),
        shared_hidden=shared,
    )


def _attention(values: Mapping[str, Any], width: int, heads: int) -> tuple[int, int, int]:
    """(parameters, score width, width of q, k and v) of one block; DeepSeek's latent attention or grouped queries."""
    if is_whole(values.get("kv_lora_rank"), 1):
        plain, rotary, value = (int(values[n]) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        query, latent = int(values.get("q_lora_rank") or 0), int(values["kv_lora_rank"])
        to_query = width * query + query * heads * (plain + rotary) if query else width * heads * (plain + rotary)
        to_cache = width * (latent + rotary) + latent * heads * (plain + value)
        cache_width = heads * (2 * (plain + rotary) + value)
        return to_query + to_cache + heads * value * width, heads * (plain + rotary + value) // 2, cache_width
    size = values.get("head_dim") or width // heads
    groups = values.get("num_key_value_heads") or heads
    queries, keys = heads * int(size), int(groups) * int(size)
    return width * (2 * queries + 2 * keys), queries, queries + 2 * keys


def _paper(name: str, config: dict[str, Any], sequence: int, gated: bool = True) -> ModelShape:
    return replace(from_config(config, sequence=sequence, name=name), gated=gated)


def _config(width: int, hidden: int, heads: int, top_k: int, vocabulary: int, **more: int) -> dict[str, Any]:
    base = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads}
    sizes = {"num_experts_per_tok": top_k, "vocab_size": vocabulary, "num_hidden_layers": 1, "num_experts": 2 * top_k}
    return {**base, **sizes, **more}


_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
#: Table 1's models, heads and vocabularies as published; layers and experts follow the cluster (`paper_model`).
PAPER_MODELS: Mapping[str, ModelShape] = {
    "gpt-s-moe": _paper("gpt-s-moe", _config(768, 3072, 12, 2, 50257), 2048, gated=False),
    "gpt-l-moe": _paper("gpt-l-moe", _config(1536, 6144, 16, 2, 50257), 2048, gated=False),
    "phi-3.5-moe": _paper("phi-3.5-moe", _config(4096, 6400, 32, 2, 32064, num_key_value_heads=8), 4096),
    "qwen1.5-moe": _paper(
        "qwen1.5-moe", _config(2048, 1408, 16, 4, 151936, shared_expert_intermediate_size=5632), 4096
    ),
    "deepseek-v3": _paper("deepseek-v3", _config(7168, 2048, 128, 8, 129280, n_shared_experts=1, **_LATENT), 4096),
}
#: Layers on cluster A and elsewhere, and experts a device (table 1).
_SIZES = {
    "gpt-s-moe": (12, 12, 2),
    "gpt-l-moe": (12, 12, 2),
    "phi-3.5-moe": (4, 8, 1),
    "qwen1.5-moe": (12, 24, 2),
    "deepseek-v3": (2, 4, 4),
}


def paper_model(name: str, cluster: Cluster, *, top_k: int | None = None) -> ModelShape:
    """Table 1's model `name` as it runs on `cluster`, its experts in proportion to devices; ConfigError if unknown."""
    if name not in PAPER_MODELS:
        raise ConfigError(f"model {name!r} is unknown; there are {', '.join(PAPER_MODELS)}, and config.json files")
    layers_a, layers_b, experts = _SIZES[name]
    shape = PAPER_MODELS[name]
    layers = layers_a if cluster.name == "a" else layers_b
    total = max(experts * cluster.num_devices, shape.top_k)
    return replace(shape, num_layers=layers, num_experts=total, top_k=top_k or shape.top_k)
