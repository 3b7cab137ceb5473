"""A transformers model by its dimensions, under the names that all models of `themis train` share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from themis.core.errors import ConfigError, require
from themis.models.family import require_transformers

Setting = int | float | bool | str

#: The names under which families' configurations know a dimension; the first that a family has is meant.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "sequence_length": ("max_position_embeddings",),
    "width": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_layers": ("num_hidden_layers",),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "top_k_experts", "moe_topk"),
    "expert_hidden": ("moe_intermediate_size", "intermediate_size"),
}


@final
@dataclass(frozen=True)
class TransformersConfig:
    """The dimensions of a transformers model, built on its family's own classes; the defaults suit a CPU."""

    model_type: str = "mixtral"
    """The family, as transformers names it."""
    vocab_size: int = 256
    """Tokens the model knows."""
    sequence_length: int = 128
    """S, the longest sequence, and the one trained on."""
    width: int = 128
    """M."""
    num_heads: int = 4
    """Attention heads; as many key-value heads, unless settings say otherwise."""
    num_layers: int = 4
    """L."""
    num_experts: int = 8
    """E, routed experts of a layer."""
    top_k: int = 2
    """K, experts of a token."""
    expert_hidden: int = 256
    """H, hidden width of a routed expert."""
    aux_loss_weight: float = 0.001
    """Weight of the load-balancing loss."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss."""
    bias_update_rate: float = 0.0
    """How far a step moves the biases that balance DeepSeek-V3's routers without a loss; 0: not at all."""
    checkpoint_blocks: bool = False
    """Whether backward recomputes each block instead of keeping its activations."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Further arguments of the family's configuration class, by its own names."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        for name in ("aux_loss_weight", "z_loss_weight", "bias_update_rate"):
            require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "0 or more")
        require(self.top_k <= self.num_experts, "model.top_k", self.top_k, f"at most {self.num_experts}, num_experts")
        if "head_dim" not in self.settings:  # rotary positions turn a head's numbers in pairs
            right = f"a multiple of 2 * model.num_heads ({2 * self.num_heads})"
            require(self.width % (2 * self.num_heads) == 0, "model.width", self.width, right)

    def family(self) -> Any:
        """The family's own configuration. ConfigError for an unknown family or setting, or a value it refuses."""
        require_transformers()
        from transformers import AutoConfig

        try:
            kind = type(AutoConfig.for_model(self.model_type))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"model.model_type is {self.model_type!r}, which transformers does not know; "
                "it must be the name of a family with experts, such as mixtral or qwen2_moe"
            ) from error
        known = _arguments_of(kind)
        values: dict[str, Any] = {_name_of(name, known, self.model_type): getattr(self, name) for name in _NAMES}
        if "num_key_value_heads" in known:
            values["num_key_value_heads"] = self.num_heads
        for name in self.settings:
            require(name in known, "model.settings", name, f"arguments of {kind.__name__}: {', '.join(sorted(known))}")
            require(
                name not in values or name == "num_key_value_heads", "model.settings", name, "given as its own flag"
            )
        try:
            family = kind(**values | self.settings)
        except Exception as error:  # its checks raise errors of several packages' own
            raise ConfigError(
                f"{kind.__name__} refuses these settings: {' '.join(str(error).split())[:200]}"
            ) from error
        self._check(family)
        return family

    def _check(self, family: Any) -> None:
        """ConfigError for what the family would compute wrongly without a word, or in the middle of a run."""
        key_heads = getattr(family, "num_key_value_heads", None) or self.num_heads
        right = f"a multiple of model.settings.num_key_value_heads ({key_heads})"
        require(self.num_heads % key_heads == 0, "model.num_heads", self.num_heads, right)
        if self.model_type == "phimoe":  # its sparse mixer draws two experts, whatever the configuration says
            require(self.top_k == 2, "model.top_k", self.top_k, "2 in a phimoe")
        groups = getattr(family, "n_group", None) or 1
        right = f"a multiple of model.settings.n_group ({groups})"
        require(self.num_experts % groups == 0, "model.num_experts", self.num_experts, right)
        if groups > 1:
            reach = self.num_experts // groups * family.topk_group
            right = f"at most {reach}, the experts of model.settings.topk_group ({family.topk_group}) groups"
            require(self.top_k <= reach, "model.top_k", self.top_k, right)


def _arguments_of(kind: type[Any]) -> set[str]:
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    names |= {name for parent in kind.__mro__ for name in getattr(parent, "__annotations__", {})}
    return {name for name in names if not name.startswith("_")} - {"self", "kwargs", "model_type"}


def _name_of(dimension: str, known: set[str], model_type: str) -> str:
    for name in _NAMES[dimension]:
        if name in known:
            return name
    raise ConfigError(
        f"model.model_type is {model_type!r}, which has no {' or '.join(_NAMES[dimension])}; "
        "it must be a family with routed experts, such as mixtral or qwen2_moe"
    )
