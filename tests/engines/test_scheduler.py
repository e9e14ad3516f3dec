"""Steps of the scheduler, one at a time and without the engine's thread."""

from __future__ import annotations

from practicum.engines.protocol import Counter, Generation
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import GenerateJob
from practicum.engines.torch.sampler import Draw, stream_key
from tests.engines.engines import engine_of, generate, sampling, tiny


def job(*prompt: int, length: int = 50) -> GenerateJob:
    return GenerateJob(PromptKey(prompt), sampling(length), Draw(), stream_key(Counter(0, 0)))


def test_an_abandoned_row_makes_room_in_the_next_step():
    with engine_of(tiny(), slots=2) as engine:
        scheduler = engine.scheduler
        running, waiting = [job(5), job(6)], [job(7), job(8, length=1)]
        scheduler.step([*running, *waiting])
        running[0].abandoned = waiting[0].abandoned = True
        outcomes, left = scheduler.step([])
        assert [done for done, _ in outcomes] == [waiting[1]]
        assert left
        assert scheduler.running.jobs == [running[1]]


def test_no_work_is_left_when_all_is_abandoned():
    with engine_of(tiny(), slots=1) as engine:
        jobs = [job(5), job(5), job(6)]
        assert engine.scheduler.step([*jobs]) == ([], True)
        for each in jobs:
            each.abandoned = True
        assert engine.scheduler.step([]) == ([], False)


def test_a_finished_row_and_its_successor_share_a_slot_without_a_gap():
    with engine_of(tiny(), slots=1) as engine:
        jobs = [job(5, length=2), job(6, length=1), job(7, length=2)]
        finished = [[jobs.index(done) for done, _ in engine.scheduler.step([*jobs])[0]]]  # pyright: ignore
        while len(finished) < 5:
            finished.append([jobs.index(done) for done, _ in engine.scheduler.step([])[0]])  # pyright: ignore
        assert finished == [[], [0], [1], [], [2]]


def test_a_prompt_kept_from_older_weights_is_never_used():
    model, other = tiny(), tiny(seed=1)
    request = ([5, 6, 7], sampling(12), Counter(0, 0))
    with engine_of(other) as engine:
        (expected,) = generate(engine, [request])
    with engine_of(model, slots=1) as engine:
        jobs = [job(5, 6, 7), job(5, 6, 7)]
        engine.scheduler.step([*jobs])
        for each in jobs:
            each.abandoned = True
        engine.load_weights(other.state_dict().items(), 1)
        (got,) = generate(engine, [request])
    assert isinstance(got, Generation)
    assert got.tokens.tolist() == expected.tokens.tolist()


def test_sessions_share_a_sequence_until_their_tokens_differ():
    with engine_of(tiny()) as engine:
        running, stats = engine.scheduler.running, engine.stats
        keys = [stream_key(Counter(0, 0, i)) for i in range(6)]
        jobs = [GenerateJob(PromptKey((5, 6)), sampling(9), Draw(temperature=0.6), key) for key in keys]
        engine.scheduler.step([*jobs])
        while engine.scheduler.busy:
            rows = running._state[: running.count].tolist()
            so_far = [tuple(running._tokens[out, :made].tolist()) for _, _, made, _, _, out, *_ in rows]
            assert running.sequences == len(set(so_far)) == int(running.slot_B.max()) + 1
            slots = running.slot_B.tolist()
            assert slots == sorted(slots)
            assert len(set(zip(so_far, slots, strict=True))) == running.sequences
            engine.scheduler.step([])
        assert stats.shared_tokens > 0
        assert stats.decoded_tokens + stats.shared_tokens == 6 * 8
