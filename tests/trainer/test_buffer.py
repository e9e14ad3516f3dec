from dataclasses import replace

from practicum.dataplane.batch import BatchRef, Group, groups_of
from practicum.dataplane.keys import Key, Tags
from practicum.trainer.sample_step import keep_groups, take_groups


def group(prompt: int, rewards: list[float | None]) -> Group:
    tags = [Tags(status="failed" if reward is None else "ready", reward=reward) for reward in rewards]
    return Group(prompt, tuple((Key(prompt, session), each) for session, each in enumerate(tags)))


def test_takes_oldest_complete_groups_first():
    groups = [group(7, [0.0, 1.0]), group(3, [1.0, 0.0]), group(5, [0.0, 0.0])]
    assert [key.prompt for key in take_groups(groups, 2, "train")[0].keys] == [3, 3, 5, 5]


def test_flat_and_failed_groups_are_left_out_only_when_asked():
    flat, uneven, failed = group(1, [1.0, 1.0]), group(2, [1.0, 0.0]), group(3, [1.0, None, 0.0])
    groups = [flat, uneven, failed]
    assert keep_groups(groups, filters=False) == groups
    assert keep_groups(groups, filters=True) == [uneven, failed]
    assert keep_groups(groups, filters=False, on_failure="drop_group") == [flat, uneven]


def test_a_group_whose_only_difference_failed_is_flat():
    assert group(1, [1.0, None, 1.0]).is_flat
    assert not group(1, [1.0, None, 0.0]).is_flat


def test_a_session_of_several_trajectories_counts_once():
    tags = Tags(reward=1.0)
    rows = ((Key(1, 0, 0), tags), (Key(1, 0, 1), tags), (Key(1, 1, 0), replace(tags, reward=0.0)))
    assert Group(1, rows).rewards() == [1.0, 0.0]


def test_failed_and_baseline_rows_are_not_trained_on():
    tags = (Tags(reward=1.0), Tags(status="failed", failure="x"), Tags(reward=0.5, is_baseline=True))
    batch = BatchRef("train", tuple(Key(1, session) for session in range(3)), tags)
    taken, baselines = take_groups(groups_of(batch), 1, "train")
    assert taken.keys == (Key(1, 0),)
    assert baselines == {1: 0.5}
