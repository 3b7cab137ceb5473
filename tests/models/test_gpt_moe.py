"""The model by itself, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from themis.core.errors import ConfigError
from themis.models import GPTMoE, GPTMoEConfig

CONFIG = GPTMoEConfig(
    vocab_size=31, sequence_length=12, width=16, num_heads=2, num_layers=2, num_experts=4, expert_hidden=24
)


def build(config: GPTMoEConfig = CONFIG, seed: int = 0) -> GPTMoE:
    torch.manual_seed(seed)
    return GPTMoE(config).double()


def tokens(batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(7))


def test_the_seed_decides_the_weights():
    first, second, other = build(), build(), build(seed=1)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)


def test_it_starts_out_knowing_nothing():
    output = build()(tokens(), tokens())
    assert output.cross_entropy.item() == pytest.approx(torch.log(torch.tensor(31.0)).item(), abs=0.1)
    assert output.logits.shape == (3, 12, 31)


def test_the_loss_is_what_it_says():
    config = replace(CONFIG, aux_loss_weight=0.3, z_loss_weight=0.2)
    output = build(config)(tokens(), tokens())
    expected = F.cross_entropy(output.logits.flatten(0, 1), tokens().flatten())
    assert output.cross_entropy.item() == pytest.approx(expected.item(), rel=1e-12)
    total = output.cross_entropy + 0.3 * output.aux_loss + 0.2 * output.z_loss
    assert output.loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert output.aux_loss.item() >= 1.0 - 1e-9  # its least value, at even routing


@pytest.mark.parametrize("change", [{}, {"experts": "swiglu", "bias": False}, {"shared_hidden": 8}])
def test_no_token_sees_a_later_one(change):
    model = build(replace(CONFIG, **change))
    changed = tokens()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    before, after = model(tokens()).logits, model(changed).logits
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_positions_matter():
    same = torch.full((1, 12), 5)
    logits = build()(same).logits
    assert not torch.allclose(logits[0, 0], logits[0, 5])


def test_shorter_sequences_are_prefixes():
    model = build()
    torch.testing.assert_close(model(tokens()[:, :5]).logits, model(tokens()).logits[:, :5], rtol=0, atol=1e-12)


def test_longer_ones_are_refused():
    with pytest.raises(ConfigError, match="the sequence's length is 13; it must be at most 12"):
        build()(tokens(length=13))


def test_an_empty_batch_has_a_loss_of_zero_and_gradients():
    model = build()
    empty = torch.zeros(0, 12, dtype=torch.int64)
    output = model(empty, empty)
    assert output.loss.item() == 0.0
    output.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model.token_embedding.weight.grad is not None
    assert model.blocks[0].attention.qkv.weight.grad is not None


def test_checkpointed_blocks_give_the_same_gradients():
    plain, frugal = build(), build(replace(CONFIG, checkpoint_blocks=True))
    for model in (plain, frugal):
        model(tokens(), tokens()).loss.backward()
    for a, b in zip(plain.parameters(), frugal.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-14)


def test_router_losses_reach_the_routers_of_all_layers():
    model = build(replace(CONFIG, aux_loss_weight=1.0, z_loss_weight=1.0, checkpoint_blocks=True))
    output = model(tokens(), tokens())
    (output.loss - output.cross_entropy).backward()
    assert all(block.moe.gate.weight.grad.abs().max() > 0 for block in model.blocks)


def test_tied_embeddings_are_one_parameter():
    tied, free = build(), build(replace(CONFIG, tie_embeddings=False))
    assert len(list(free.parameters())) == len(list(tied.parameters())) + 1
    assert tied.head.weight is tied.token_embedding.weight


def test_it_learns_a_text_by_heart():
    model = build().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    for _ in range(120):
        loss = model(inputs, targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model(inputs, targets).cross_entropy.item() < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 15}, r"model\.width is 15; it must be a multiple of model\.num_heads \(2\)"),
        ({"num_experts": 1}, r"model\.top_k is 2; it must be at most num_experts \(1\)"),
        ({"top_k": 0}, r"model\.top_k is 0; it must be .*1 or more"),
        ({"num_layers": 0}, r"model\.num_layers is 0; it must be 1 or more"),
        ({"vocab_size": -5}, r"model\.vocab_size is -5; it must be 1 or more"),
        ({"expert_hidden": -1}, r"model\.expert_hidden is -1; it must be .*1 or more"),
        ({"shared_hidden": -1}, r"model\.shared_hidden is -1; it must be .*0 or more"),
        ({"aux_loss_weight": -0.1}, r"model\.aux_loss_weight is -0\.1; it must be 0 or more"),
        ({"experts": "dense"}, r"model\.experts is 'dense'; it must be 'gpt' or 'swiglu'"),
    ],
)
def test_wrong_dimensions_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **change)
