"""Who is to blame: every case of the verdict, on records made by hand."""

from themis.comm.beats import Beat, Channel, Operation
from themis.comm.blame import judge


def _beat(count, accused=(), left=False, **numbers):
    """A record; numbers: tokens=(3, True) for the third operation of a channel, still running."""
    operations = {
        Channel(name): Operation(number, f"{name}_operation", running) for name, (number, running) in numbers.items()
    }
    return Beat(count, 100.0, operations, accused, left)


def _judge(before, after, rank=0, channel=Channel.TOKENS, world_size=3):
    return judge(before, after, world_size, rank, channel, now_s=103.1)


def test_a_record_survives_its_encoding():
    beat = _beat(7, accused=(1, 2), left=True, tokens=(3, True), sparse=(9, False))
    assert Beat.decode(beat.encode()) == beat
    assert Beat.decode(beat.encode().encode()) == beat


def test_a_rank_without_new_beats_is_dead_or_frozen():
    before = {r: _beat(10, tokens=(5, True)) for r in range(3)}
    after = {0: _beat(13, tokens=(5, True)), 1: _beat(13, tokens=(4, False)), 2: _beat(10, tokens=(5, True))}
    verdict = _judge(before, after)
    assert verdict.ranks == (2,)
    (reason,) = verdict.reasons
    assert reason == "rank 2 stopped responding in tokens_operation (number 5); it was last seen 3.1 s ago"


def test_ranks_that_have_not_come_are_named_with_their_place():
    before = {r: _beat(10) for r in range(3)}
    after = {
        0: _beat(13, tokens=(5, True)),
        1: _beat(13, tokens=(4, False)),
        2: _beat(13, tokens=(5, True)),
    }
    verdict = _judge(before, after)
    assert verdict.ranks == (1,)
    assert verdict.reasons == ("rank 1 has not come to it; it is after tokens_operation (number 4)",)


def test_a_rank_that_waits_in_another_channel_passes_the_blame_on():
    """Rank 0 waits for rank 1 in tokens; rank 1 waits for rank 2 in sparse; rank 2 does nothing."""
    before = {r: _beat(10) for r in range(3)}
    after = {
        0: _beat(13, tokens=(5, True), sparse=(2, True)),
        1: _beat(13, tokens=(4, False), sparse=(2, True)),
        2: _beat(13, tokens=(4, False), sparse=(1, False)),
    }
    assert _judge(before, after).ranks == (2,)


def test_a_circle_of_waiting_still_names_someone():
    before = {r: _beat(10) for r in range(2)}
    after = {0: _beat(13, tokens=(5, True), sparse=(1, False)), 1: _beat(13, tokens=(4, False), sparse=(2, True))}
    assert _judge(before, after, world_size=2).ranks == (1,)


def test_a_rank_that_left_because_of_another_is_not_to_blame():
    before = {r: _beat(10, tokens=(5, True)) for r in range(3)}
    after = {
        0: _beat(13, tokens=(5, True)),
        1: _beat(11, accused=(2,), left=True, tokens=(5, True)),
        2: _beat(13, tokens=(4, False)),
    }
    verdict = _judge(before, after)
    assert verdict.ranks == (2,)
    assert "rank 2 has not come to it" in verdict.reasons[0]
    assert _judge(before, after, rank=2).reasons == ("the other ranks gave up waiting for this rank (2)",)


def test_a_rank_accused_elsewhere_is_passed_on():
    before = {r: _beat(10) for r in range(3)}
    after = {
        0: _beat(13, tokens=(5, True)),
        1: _beat(13, accused=(2,), tokens=(5, True)),
        2: _beat(13, tokens=(5, True)),
    }
    verdict = _judge(before, after)
    assert verdict.ranks == (2,)
    assert verdict.reasons == ("other ranks hold rank 2 responsible",)


def test_a_rank_that_left_or_never_came():
    before = {0: _beat(10, tokens=(1, True)), 1: _beat(10)}
    after = {0: _beat(13, tokens=(1, True)), 1: _beat(11, left=True)}
    verdict = _judge(before, after)
    assert verdict.ranks == (1, 2)
    assert verdict.reasons == ("rank 1 has left; it was last before its first operation", "rank 2 never joined")


def test_nobody_is_blamed_when_all_are_there():
    before = {r: _beat(10) for r in range(3)}
    after = {r: _beat(13, tokens=(5, True)) for r in range(3)}
    assert _judge(before, after).ranks == ()


def test_a_rank_that_does_something_else_is_named():
    """All are in their fifth operation, but rank 1 believes that it is another one."""
    before = {r: _beat(10) for r in range(3)}
    after = {r: _beat(13, tokens=(5, True)) for r in range(3)}
    after[1].operations[Channel.TOKENS] = Operation(5, "counts", True)
    for rank in range(3):
        verdict = _judge(before, after, rank=rank)
        assert (verdict.ranks, verdict.reasons) == (
            (1,),
            ("rank 1 is in counts while the others are in tokens_operation",),
        )


def test_a_save_in_the_background_keeps_nobody_from_training():
    """Rank 0 waits for rank 1 in tokens; that rank 1's save waits for rank 2's is not why it has not come."""
    before = {r: _beat(10) for r in range(3)}
    after = {
        0: _beat(13, tokens=(5, True), saving=(3, True)),
        1: _beat(13, tokens=(4, False), saving=(3, True)),
        2: _beat(13, tokens=(5, True), saving=(2, False)),
    }
    assert _judge(before, after).ranks == (1,)


def test_a_save_waits_for_what_training_waits_for():
    """Rank 0's save waits for rank 1's, and rank 1 does not come to its own, as it waits for rank 2 in tokens."""
    before = {r: _beat(10) for r in range(3)}
    after = {
        0: _beat(13, tokens=(6, True), saving=(3, True)),
        1: _beat(13, tokens=(5, True), saving=(2, False)),
        2: _beat(13, tokens=(4, False), saving=(2, False)),
    }
    assert _judge(before, after, channel=Channel.SAVING).ranks == (2,)
