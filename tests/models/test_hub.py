"""Model directories: each rank reads its own part, and what is written is what was read."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import themis
from themis.core.errors import CheckpointError, ConfigError, PeerError
from themis.fssdp import executor_of
from themis.models import GPTMoE, GPTMoEConfig
from themis.models.directory_writer import DirectoryWriter
from themis.models.hub import PretrainedWeights
from themis.models.model_directory import ModelDirectory
from themis.testing.models import ScriptedPolicy
from themis.testing.ranks import run_ranks

pytest.importorskip("transformers")

from themis.testing.agreement import RANKS, batch_loss, difference
from themis.testing.directories import first_difference, round_trip, stored_tensors
from themis.testing.families import build_tiny, output_of

#: The four of the recipes, then every way in which a directory's experts differ from the model's: one tensor for all,
#: transposed, with biases, without gate; buffers that initialisation would write over; weights tied; 16 bits.
FAMILIES = [
    ("mixtral", torch.float32),
    ("qwen2_moe", torch.float32),
    ("phimoe", torch.bfloat16),
    ("deepseek_v3", torch.bfloat16),
    ("gpt_oss", torch.float32),
    ("aria", torch.float32),
    ("nemotron_h", torch.bfloat16),
    ("ernie4_5_vl_moe", torch.float32),
    ("qwen3_omni_moe", torch.float32),
    ("zaya", torch.float32),
    ("granitemoe", torch.float16),
]
TOKENS = torch.arange(3, 17).view(2, 7)


def _directory(path: Path, family: str = "mixtral", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    model: Any = build_tiny(family, dtype=dtype)
    model.save_pretrained(path, **options)
    return path


def _logits(path: Path, family: str) -> torch.Tensor:
    model = type(build_tiny(family)).from_pretrained(path)
    for parameter in model.parameters():
        # Off the mapped file: where a tensor begins there decides how GEMMs add, and so the last bits.
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return output_of(model(input_ids=TOKENS))


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_what_is_written_is_what_was_read(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = _directory(tmp_path / "in", family, dtype)
    run_ranks(2, round_trip, source, tmp_path / "out")
    assert first_difference(source, tmp_path / "out") is None
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "out/config.json").read_text())
    assert len(list((tmp_path / "out").glob("model-0*.safetensors"))) > 1
    assert (_logits(source, family) - _logits(tmp_path / "out", family)).abs().max() == 0


def _held(rank: int, path: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, float]:
    model: Any = themis.from_pretrained(path)
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    logits = output_of(model(input_ids=TOKENS))
    logits.square().sum().backward()
    norm = float(themis.clip_grad_norm_(model, 1e9))
    executor_of(model).close()
    return held, logits.detach(), norm


@pytest.mark.parametrize("world_size", [1, 3, 10])
def test_a_rank_holds_its_experts_and_the_dense_part(tmp_path: Path, world_size: int) -> None:
    """8 experts: three ranks own unequal numbers, of ten ranks two own none."""
    path = _directory(tmp_path / "model", max_shard_size="60KB")
    assert (path / "model.safetensors.index.json").is_file()
    reference: Any = type(build_tiny("mixtral")).from_pretrained(path)
    whole, owners = reference.state_dict(), []
    wanted_logits = output_of(reference.train()(input_ids=TOKENS))
    wanted_logits.square().sum().backward()
    wanted_norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    for held, logits, norm in run_ranks(world_size, _held, path):
        for name, tensor in held.items():
            module, _, rest = name.partition(".owned.")
            wanted = whole[name] if not rest else whole[f"{module}.{rest.split('.')[1]}"][int(rest.split(".")[0])]
            assert torch.equal(tensor, wanted), name
        owners.append({int(name.split(".owned.")[1].split(".")[0]) for name in held if ".owned." in name})
        assert (logits - wanted_logits).abs().max() < 1e-5
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert sum(map(len, owners)) == 8
    assert set.union(*owners) == set(range(8))


def _bytes_read(rank: int, path: Path, family: str) -> tuple[int, int]:
    """What is read, and what this rank holds of what is saved."""
    total = 0
    read = ModelDirectory.read

    def counted(self: ModelDirectory, key: str, row: int | None = None) -> torch.Tensor:
        nonlocal total
        tensor = read(self, key, row)
        total += tensor.nbytes
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDirectory, "read", counted)
        model = themis.from_pretrained(path)
    held = sum(tensor.nbytes for tensor in {id(t): t for t in model.state_dict().values()}.values())
    executor_of(model).close()
    return total, held


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_reads_what_it_holds_and_no_more(tmp_path: Path, family: str) -> None:
    path = _directory(tmp_path / "model", family)
    for read, held in run_ranks(3, _bytes_read, path, family):
        assert read == held


def test_experts_read_into_another_type_and_left_out_by_name(tmp_path: Path) -> None:
    path = _directory(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.extra": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.extra.* no slot; drop it by name"):
        themis.from_pretrained(path)
    with pytest.raises(ConfigError, match="drop is 'other', which matches none"):
        themis.from_pretrained(path, drop=["other"])
    model = themis.from_pretrained(path, drop=["model.ext*"], dtype=torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    themis.export(model, tmp_path / "out", dtype=torch.float32)
    assert stored_tensors(tmp_path / "out").keys() == tensors.keys()
    executor_of(model).close()


def _truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _without(key: str) -> Any:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        del tensors[key]
        save_file(tensors, path / "model.safetensors")

    return change


def _renamed(old: str, new: str) -> Any:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        save_file({key.replace(old, new): tensor for key, tensor in tensors.items()}, path / "model.safetensors")

    return change


def _doubled(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.ones(32)}, path / "model.safetensors")


def _reshaped(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors")


def _quantised(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors")


def _config(**entries: object) -> Any:
    def change(path: Path) -> None:
        record = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(record | entries))

    return change


def _index(weight_map: object) -> Any:
    def change(path: Path) -> None:
        (path / "model.safetensors").rename(path / "whole.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


DAMAGES = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "no config": (lambda path: (path / "config.json").unlink(), r"config\.json' cannot be read"),
    "config is no JSON": (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
    "truncated": (_truncate, "not a whole safetensors file"),
    "a dense tensor missing": (_without("model.norm.weight"), r"lacks model\.norm\.weight"),
    "an expert missing": (
        _without("model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        "of 7 tensors like .*; of 8 experts' either one each or one for all",
    ),
    "another expert in its stead": (
        _renamed("layers.0.block_sparse_moe.experts.3.w1", "layers.0.block_sparse_moe.experts.9.w1"),
        "of 8 tensors like .*; of 8 experts' either one each or one for all",
    ),
    "a tensor twice": (_doubled, r"both 'model.norm.weight' and 'norm.weight' for model.norm.weight; drop one"),
    "another shape": (_reshaped, r"model\.norm\.weight as \[3\]; by its config.json it would be \[32\]"),
    "quantised": (_config(quantization_config={"quant_method": "fp8"}), "quantised weights .fp8.; give an unquantised"),
    "a quantised tensor": (_quantised, r"model\.norm\.weight as torch\.float8_e4m3fn, a quantised form"),
    "a part quantised": (_config(text_config={"quantization_config": {"quant_method": "awq"}}), "weights .awq."),
    **{
        f"architectures {names}": (_config(architectures=names), "has the architectures .*; exactly one")
        for names in (["Nope"], [], None, [7], [None], ["AutoConfig"], ["__doc__"], ["GenerationConfig"], [[]])
    },
    **{
        f"architectures {names}": (
            _config(architectures=names),
            r"config\.json' (has the arch|names no model of trans)",
        )
        for names in ("MixtralForCausalLM", {"MixtralForCausalLM": 1}, 7, ["MixtralForCausalLM", "MixtralModel"])
    },
    **{
        f"{key} {value}": (
            _config(**{key: value}),
            r"config\.json' (names no model|describes no|has)|by its config|lacks",
        )
        for key, value in [
            ("model_type", None),
            ("model_type", 7),
            ("model_type", []),
            ("hidden_size", "wide"),
            ("hidden_size", -3),
            ("hidden_size", None),
            ("hidden_size", [32]),
            ("hidden_size", 1e400),
            ("num_local_experts", 4),
            ("num_hidden_layers", "two"),
            ("num_hidden_layers", 9),
            ("dtype", "nope"),
            ("hidden_act", "nope"),
            ("rope_parameters", "nope"),
        ]
    },
    "no experts": (_config(num_local_experts=0), "num_experts is 0; it must be 1 or more"),
    "generation config is no JSON": (
        lambda path: (path / "generation_config.json").write_text("{"),
        r"generation_config\.json' cannot be used",
    ),
    "generation config of odd values": (
        lambda path: (path / "generation_config.json").write_text('{"max_new_tokens": -4, "num_beams": "x"}'),
        r"generation_config\.json' cannot be used",
    ),
    "unknown model type": (_config(model_type="nope"), "names no model of transformers"),
    "index out of the directory": (_index({"a": "../whole.safetensors"}), "no weight_map from tensors to files beside"),
    "index of a missing file": (_index({"a": "b.safetensors"}), "not a whole safetensors file"),
    "index of a missing tensor": (_index({"a": "whole.safetensors"}), "lacks a, which"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, damage: str) -> None:
    path = _directory(tmp_path / "model")
    change, message = DAMAGES[damage]
    change(path)
    with pytest.raises(ConfigError, match=message) as caught:
        themis.from_pretrained(path)
    assert "\n" not in str(caught.value)


def test_a_backbone_and_no_quantisation_and_tensors_that_tell_their_type(tmp_path: Path) -> None:
    """Beside a generation_config.json, which a backbone has no use for; config.json names no type."""
    path = _directory(tmp_path / "model", dtype=torch.bfloat16)
    record = json.loads((path / "config.json").read_text())
    del record["dtype"]
    tensors = load_file(path / "model.safetensors")
    backbone = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}
    for kind, stored in (("MixtralForCausalLM", tensors), ("MixtralModel", backbone)):
        save_file(stored, path / "model.safetensors")
        odd = record | {"architectures": [kind], "quantization_config": None}
        (path / "config.json").write_text(json.dumps(odd))
        (path / "generation_config.json").write_text('{"max_new_tokens": 4}')
        model = themis.from_pretrained(path)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        themis.export(model, tmp_path / kind)
        executor_of(model).close()
        assert first_difference(path, tmp_path / kind) is None
        assert (tmp_path / kind / "generation_config.json").exists() == (kind == "MixtralForCausalLM")


def test_both_names_of_tied_tensors_come_back(tmp_path: Path) -> None:
    path = _directory(tmp_path / "model")
    _config(tie_word_embeddings=True)(path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    model = themis.from_pretrained(path)
    themis.export(model, tmp_path / "out")
    executor_of(model).close()
    assert first_difference(path, tmp_path / "out") is None


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    path = _directory(tmp_path / "model")
    _config(tie_word_embeddings=True)(path)
    with pytest.raises(ConfigError, match="with different values; by its config"):
        themis.from_pretrained(path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory here; name a local directory"):
        themis.from_pretrained(tmp_path / "none")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.int8}, "dtype is torch.int8; it must be torch.float32"),
    ({"dtype": "bf16"}, "dtype is 'bf16'; it must be torch.float32"),
    ({"path": None}, "path is None; it must be the path of a local model directory"),
    ({"drop": 3}, "drop is 3; it must be a list of shell-style patterns"),
    ({"device": "cpu"}, "device is 'cpu'; it must be a torch.device with memory"),
    ({"device": torch.device("meta")}, "it must be a torch.device with memory"),
    ({"drop": "nothing"}, "drop is 'nothing', which matches none"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        themis.from_pretrained(**{"path": _directory(tmp_path / "model"), **arguments})


def test_names_of_types_and_no_reading_under_meta(tmp_path: Path) -> None:
    path = _directory(tmp_path / "model")
    model = themis.from_pretrained(path, dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype is 'bf16'"):
        themis.export(model, tmp_path / "out", dtype="bf16")
    executor_of(model).close()
    with torch.device("meta"), pytest.raises(ConfigError, match="call Themis after the `with` block"):
        themis.from_pretrained(path)


def test_what_export_cannot_do_is_told_in_a_line(tmp_path: Path) -> None:
    model = themis.from_pretrained(_directory(tmp_path / "model"))
    wrong: Any = [None, 3, "a\0b"]
    for path in wrong:
        with pytest.raises(ConfigError, match="it must be the path of a new directory"):
            themis.export(model, path)
    with pytest.raises(ConfigError, match="max_file_bytes is 0; it must be a whole number of bytes above zero"):
        themis.export(model, tmp_path / "out", max_file_bytes=0)
    for error in (SafetensorError("no space\nleft"), OSError(28, "no space left"), ValueError("no space left")):

        def full(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("themis.models.directory_writer.save_file", full)
            with pytest.raises(CheckpointError, match="cannot be written: no space left"):
                themis.export(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "loose").symlink_to(tmp_path / "nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("themis.models.export.dense_tensors", None)
        for path, message in (("file", "exists"), ("model", "exists"), ("link", "a link"), ("loose", "a link")):
            with pytest.raises(ConfigError, match=f"{path}' (is )?{message}"):
                themis.export(model, tmp_path / path)
        with pytest.raises(ConfigError, match="file' is no directory"):
            themis.export(model, tmp_path / "file/below/out")
    executor_of(model).close()


def test_export_leaves_what_stands_beside(tmp_path: Path) -> None:
    """Also in a folder that is made for it, under a name with spaces, relative to here."""
    beside = tmp_path / "out.tmp"
    beside.mkdir()
    (beside / "mine").touch()
    model = themis.from_pretrained(_directory(tmp_path / "model"))
    themis.export(model, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        themis.export(model, "new folder/x y/")
    executor_of(model).close()
    assert first_difference(tmp_path / "out", tmp_path / "new folder/x y") is None
    assert (beside / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new folder", "out", "out.tmp"]


def test_what_has_no_slot_is_refused_unless_dropped(tmp_path: Path) -> None:
    model: Any = build_tiny("mixtral")
    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        gate.register_buffer("balance", torch.zeros(8))
    gates[0].bias = nn.Parameter(torch.zeros(8))
    themis.parallelize(model)
    with pytest.raises(ConfigError, match=r"0\.mlp\.gate\.(bias|balance)', for which a MixtralForCausalLM"):
        themis.export(model, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"mlp\.gate\.bias'"):
        themis.export(model, tmp_path / "out", drop=["*.balance"])
    with pytest.raises(ConfigError, match="matches none"):
        themis.export(model, tmp_path / "out", drop=["*.balance", "model.norm.weight"])
    assert not list(tmp_path.iterdir())
    themis.export(model, tmp_path / "out", drop=["*.balance", "*.gate.bias"])
    reference: Any = build_tiny("mixtral")
    reference.save_pretrained(tmp_path / "reference")
    assert first_difference(tmp_path / "reference", tmp_path / "out") is None
    with pytest.raises(ConfigError, match="exists; name a new directory"):
        themis.export(model, tmp_path / "out", drop=["*.balance", "*.gate.bias"])
    executor_of(model).close()


def test_only_models_of_transformers_are_exported(tmp_path: Path) -> None:
    model = GPTMoE(GPTMoEConfig(vocab_size=8, sequence_length=4, width=8, num_heads=2, num_layers=1, expert_hidden=8))
    themis.parallelize(model)
    with pytest.raises(ConfigError, match="is none of transformers'"):
        themis.export(model, tmp_path / "out")
    executor_of(model).close()


def _export_trained(rank: int, path: Path, dense: str) -> dict[str, torch.Tensor]:
    """A step of training, experts elsewhere than at first, and the model written."""
    model: Any = build_tiny("qwen2_moe")
    themis.parallelize(model, dense=dense)
    executor = executor_of(model)
    executor.set_owners(executor.owner_LE[:, ::-1].copy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output_of(model(input_ids=TOKENS)).square().mean().backward()
    optimizer.step()
    themis.export(model, path)
    executor.close()
    return {}


@pytest.mark.parametrize("dense", ["replicate", "fully_shard"])
def test_a_trained_model_is_written_as_one_process_would(tmp_path: Path, dense: str) -> None:
    run_ranks(2, _export_trained, tmp_path / "out", dense)
    model: Any = build_tiny("qwen2_moe")
    output_of(model(input_ids=TOKENS)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "reference")
    before, after = stored_tensors(tmp_path / "reference"), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-6


def _fail(rank: int, path: Path) -> str:
    model = themis.from_pretrained(path.parent / "in", timeout_s=20)
    try:
        themis.export(model, path)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    finally:
        executor_of(model).close()
    return ""


def _slow(rank: int, path: Path) -> str:
    """Reading takes one rank longer than the limit, then writing takes rank 0 longer."""
    fill, write = PretrainedWeights.fill, DirectoryWriter.finish

    def slow_fill(*arguments: Any) -> None:
        time.sleep(5.0 if rank == 1 else 0.0)
        fill(*arguments)

    def slow_write(self: DirectoryWriter) -> None:
        time.sleep(5.0)
        write(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedWeights, "fill", slow_fill)
        patch.setattr(DirectoryWriter, "finish", slow_write)
        model = themis.from_pretrained(path, timeout_s=3.0)
        themis.export(model, path.parent / "out")
    executor_of(model).close()
    return "done"


def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, _slow, _directory(tmp_path / "model")) == ["done", "done"]


def _dies_reading(rank: int, path: Path, how: str) -> str:
    def die(*_: object) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConfigError("a damaged shard")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(PretrainedWeights, "fill", die)
        try:
            themis.from_pretrained(path, timeout_s=5.0)
        except (PeerError, ConfigError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["kill", "error"])
def test_a_rank_that_cannot_read_is_named(tmp_path: Path, how: str) -> None:
    outcomes = run_ranks(2, _dies_reading, _directory(tmp_path / "model"), how, return_errors=True)
    assert "rank 1" in outcomes[0].value
    if how == "error":
        assert outcomes[1].value == "a damaged shard"


def test_where_rank_0_cannot_write_every_rank_says_so(tmp_path: Path) -> None:
    _directory(tmp_path / "in")
    (tmp_path / "out").write_text("a file")
    first, second = run_ranks(2, _fail, tmp_path / "out")
    assert "exists; name a new directory" in first
    assert "rank 0 could not write" in second
    assert (tmp_path / "out").read_text() == "a file"


def _tune_from_directory(rank: int, path: Path, dense: Any) -> tuple[float, int, bool]:
    """Adapters that are added once the model has its values, beside one process that adds them afterwards."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def adapt(model: Any) -> None:
        torch.manual_seed(0)
        peft.get_peft_model(model, config).double()

    alone: Any = type(build_tiny("mixtral")).from_pretrained(path, experts_implementation="eager").train()
    adapt(alone)
    model: Any = themis.from_pretrained(path, prepare=adapt, dense=dense, policy=ScriptedPolicy(6))
    for r in range(RANKS):
        (batch_loss(alone, r)[1] / RANKS).backward()
    batch_loss(model, rank)[1].backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    mine: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == wanted.keys()
    whole = {n: g.full_tensor() if dense == "fully_shard" else g for n, g in mine.items()}
    worst = max(difference(gradient, wanted[name]) for name, gradient in whole.items())
    return worst, len(mine), any(any(layer.shard.trainable.values()) for layer in executor_of(model).layers)


@pytest.mark.parametrize("dense", ["replicate", "fully_shard"])
def test_adapters_on_a_model_from_a_directory(tmp_path: Path, dense: str) -> None:
    source = _directory(tmp_path / "in", dtype=torch.float64)
    for worst, count, experts_train in run_ranks(RANKS, _tune_from_directory, source, dense):
        assert worst < 1e-9
        assert count == 8
        assert not experts_train
