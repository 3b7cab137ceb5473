"""transformers' classes for a model directory; the package is optional and imported when it is needed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from themis.core.errors import ConfigError, require


def require_transformers() -> None:
    """ConfigError, with what to install, where transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("models of transformers need that package: pip install 'themis-moe[hf]'")


def floating_type(name: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The type that argument `name` means, None where none is given; ConfigError unless it is one to train in."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    wide = isinstance(found, torch.dtype) and found.is_floating_point and torch.finfo(found).bits >= 16
    require(dtype is None or wide, name, dtype, "torch.float32, torch.bfloat16 or another floating-point type")
    return found


def architecture(path: Path) -> tuple[Any, Any]:
    """The transformers class and the configuration that `path`/config.json names; no code of the directory is run."""
    require_transformers()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{str(path / 'config.json')!r} names no model of transformers: {_line(error)}") from error
    names = config.architectures or []
    builder = getattr(transformers, names[0], None) if len(names) == 1 else None
    if builder is None:
        raise ConfigError(
            f"{str(path / 'config.json')!r} has the architectures {names}; exactly one of this transformers "
            f"({transformers.__version__}) is wanted"
        )
    return builder, config


def causal_lm_class(config: Any) -> Any:
    """The causal language model of a family's `config`, None where it has none."""
    require_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None


def build_on_meta(builder: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model of class `builder` on the meta device, its tensors of the types that transformers would load."""
    with torch.device("meta"):
        model = builder._from_config(config, dtype=dtype)
    for pattern, wide in model._get_dtype_plan(dtype).items():
        expression = re.compile(pattern.replace("*", ".*"))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if expression.search(name):
                _replace(model, name, tensor.detach().to(wide))
    return model


def _replace(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        old = module._parameters[leaf]
        assert old is not None
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
