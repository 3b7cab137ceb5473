"""transformers' classes for a model directory; the package is optional and imported when it is needed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
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

    with _told(path / "config.json", "names no model of transformers"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    names = config.architectures
    one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    builder = getattr(transformers, names[0], None) if one else None
    if not (isinstance(builder, type) and issubclass(builder, transformers.PreTrainedModel)):
        raise ConfigError(
            f"{str(path / 'config.json')!r} has the architectures {names}; exactly one of this transformers "
            f"({transformers.__version__}) is wanted"
        )
    return builder, config


def model_of(path: Path, dtype: torch.dtype | None, stored: torch.dtype) -> Any:
    """The model of the directory `path` on the meta device, in `dtype`, the type in its config.json, or `stored`."""
    builder, config = architecture(path)
    with _told(path / "config.json", f"describes no {builder.__name__}"):
        model = build_on_meta(builder, config, dtype or config.dtype or stored)
    if model.can_generate() and (path / "generation_config.json").is_file():
        with _told(path / "generation_config.json", "cannot be used"):
            model.generation_config = type(model.generation_config).from_pretrained(path, local_files_only=True)
    return model


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


@contextmanager
def _told(file: Path, what: str) -> Iterator[None]:
    """Turn whatever transformers' classes make of odd values in `file` into a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its checks raise errors of several packages' own
        raise ConfigError(f"{str(file)!r} {what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error's text in a line of bounded length, its kind where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
