"""The schedule: which weights sample which step."""

from hypothesis import given
from hypothesis import strategies as st

from practicum.trainer.window import Schedule

LAGS, STEPS = st.integers(0, 16), st.integers(1, 60)


@given(LAGS, STEPS)
def test_every_step_is_sampled_once_by_weights_that_are_there(lag: int, steps: int):
    schedule, begun = Schedule(lag, steps), list[int]()
    for learnt in range(steps):
        ready = schedule.in_flight(learnt)
        assert learnt + 1 in ready
        assert all(schedule.weights_of(step) <= learnt for step in ready)
        assert all(schedule.weights_of(step) in range(max(0, learnt - lag), learnt + 1) for step in ready)
        begun += [step for step in ready if step not in begun]
    assert begun == list(range(1, steps + 1))
    assert list(schedule.in_flight(steps)) == []


@given(LAGS, STEPS)
def test_staleness_is_the_lag_but_in_the_first_steps(lag: int, steps: int):
    schedule = Schedule(lag, steps)
    stale = [t - schedule.weights_of(t + 1) for t in range(steps)]
    assert stale == [min(t, lag) for t in range(steps)]


@given(LAGS, STEPS)
def test_steps_under_way_have_copies_of_their_own_which_evaluations_may_share(lag: int, steps: int):
    schedule = Schedule(lag, steps)
    for learnt in range(steps):
        copies = [schedule.copy_of(step) for step in schedule.in_flight(learnt)]
        assert len(set(copies)) == len(copies) <= lag + 1
        # What samples with the newest weights next is the copy where an evaluation looks for them.
        newest = learnt + 1 + lag
        assert schedule.weights_of(newest) == learnt
        assert schedule.copy_of(newest) == learnt % (lag + 1)
