"""The main test of the engine: for any placement the result is that of one process holding every expert."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fssdp.harness import WIDTH, Case, assert_same, scripted, train_alone, train_on_rank
from themis.core.topology import Topology
from themis.fssdp import MixedPrecision
from themis.moe import MoEConfig
from themis.policies import EP, Themis, ThemisJoint, ThemisRM
from themis.testing.ranks import run_ranks

TOPOLOGIES = {1: [Topology(1, 1)], 2: [Topology(1, 2), Topology(2, 1)], 4: [Topology(2, 2), Topology(1, 4)]}
IDLE = -50.0


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    num_experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, min(3, num_experts)))
    kind = draw(st.sampled_from(["gpt", "swiglu"]))
    idle = draw(st.lists(st.integers(0, num_experts - 1), unique=True, max_size=num_experts - top_k))
    bias_E = [IDLE if e in idle else draw(st.sampled_from([0.0, 0.0, 3.0])) for e in range(num_experts)]
    accumulate = draw(st.sampled_from([1, 1, 2]))
    steps = 2 * accumulate
    tokens = st.one_of(st.just(0), st.integers(1, 9))
    tokens_SD = [[draw(tokens) for _ in range(world_size)] for _ in range(steps)]
    seed = draw(st.integers(0, 999))
    rematerialize = draw(st.booleans())
    rule = draw(st.sampled_from(["local-first", "balanced"]))
    policy = draw(
        st.sampled_from(
            [
                EP(),
                Themis(budget=2, overlap_degree=3, reshard_interval=1, dispatch_rule=rule),
                ThemisRM(2, 3, 1),
                ThemisJoint(budget=2, reshard_interval=1, estimates=40),
                scripted(seed, rematerialize_replicas=rematerialize, rule=rule, reshard_every=1),
                scripted(seed, rematerialize_replicas=rematerialize, rule=rule, density=1.0),
                scripted(seed, rematerialize_replicas=rematerialize, density=0.2, kept=0.3, reshard_every=1),
            ]
        )
    )
    return Case(
        config=MoEConfig(
            WIDTH,
            draw(st.sampled_from([5, 16])),
            num_experts,
            top_k,
            experts=kind,
            bias=draw(st.booleans()),
            shared_hidden=draw(st.sampled_from([0, 6])),
            normalize_weights=draw(st.booleans()),
        ),
        topology=draw(st.sampled_from(TOPOLOGIES[world_size])),
        policy=policy,
        tokens_SD=tokens_SD,
        accumulate=accumulate,
        seed=seed,
        bias_LE=[bias_E, bias_E[::-1]],
        checkpointing=draw(st.sampled_from(["none", "none", "plain", "reentrant"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "adagrad"])),
        evaluate=draw(st.booleans()),
    )


def _train_all(rank: int, batch: list[Case]) -> list[dict]:
    return [train_on_rank(rank, case) for case in batch]


def _check(world_size: int, batch: list[Case], tolerance: float = 1e-10) -> None:
    by_rank = run_ranks(world_size, _train_all, batch, timeout_s=90.0)
    for i, case in enumerate(batch):
        try:
            assert_same(case, [results[i] for results in by_rank], train_alone(case), tolerance)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_placement_gives_the_result_of_one_process(world_size: int) -> None:
    # Shrinking would start ranks thousands of times; a failing case is small as it is.
    @settings(max_examples=4, phases=[Phase.generate])
    @given(st.lists(cases(world_size), min_size=8, max_size=8))
    def check(batch: list[Case]) -> None:
        _check(world_size, batch)

    check()


BASE = Case(
    config=MoEConfig(WIDTH, 16, 6, 2),
    topology=Topology(2, 2),
    policy=scripted(3),
    tokens_SD=[[5, 7, 0, 3]] * 4,
)


def _vary(**changes: object) -> Case:
    return dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize("checkpointing", ["plain", "reentrant"])
@pytest.mark.parametrize("policy", [scripted(5), scripted(5, rematerialize_replicas=True)], ids=["kept", "rm"])
def test_activation_checkpointing(checkpointing: str, policy: object) -> None:
    _check(4, [_vary(checkpointing=checkpointing, policy=policy, accumulate=2)])


def test_all_tokens_on_one_rank_and_one_expert() -> None:
    bias_LE = [[50.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2
    config = MoEConfig(WIDTH, 16, 6, 1, normalize_weights=False)
    _check(
        4, [_vary(config=config, tokens_SD=[[0, 0, 11, 0]] * 3, bias_LE=bias_LE, policy=p) for p in (EP(), BASE.policy)]
    )


def test_no_tokens_anywhere() -> None:
    _check(2, [_vary(topology=Topology(1, 2), tokens_SD=[[4, 2], [0, 0], [3, 3]], policy=scripted(1))])


def test_fewer_experts_than_ranks() -> None:
    config = MoEConfig(WIDTH, 8, 2, 1)
    _check(
        4, [_vary(config=config, policy=Themis(budget=1, overlap_degree=2, reshard_interval=1), random_owners=False)]
    )


def test_float32() -> None:
    _check(4, [_vary(dtype=torch.float32)], tolerance=2e-5)


def test_dense_parameters_fully_sharded() -> None:
    _check(2, [_vary(topology=Topology(1, 2), tokens_SD=[[5, 3]] * 3, dense="fully_shard", policy=scripted(2))])


def test_mixed_precision_tracks_the_full_one() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    case = _vary(dtype=torch.float32, mixed_precision=precision, policy=scripted(4, rematerialize_replicas=True))
    ranks = run_ranks(4, train_on_rank, case)
    other = run_ranks(4, train_on_rank, dataclasses.replace(case, policy=EP()))
    alone = train_alone(dataclasses.replace(case, mixed_precision=None))
    for d in range(4):
        # bfloat16 carries 8 bits: far from exact, and far from wrong.
        assert abs(ranks[d]["norms"][0] - alone["norms"][0]) < 0.03 * alone["norms"][0]
        assert abs(ranks[d]["norms"][0] - other[d]["norms"][0]) < 0.01 * alone["norms"][0]
        masters = [v for n, v in ranks[d]["parameters"].items() if ".experts." in n]
        assert all((v != v.astype("float32").view("uint32").astype("uint32")).any() for v in masters)
