from dataclasses import replace

from practicum.dataplane.batch import BatchRef, Group, groups_of
from practicum.dataplane.keys import Key, Tags
from practicum.recipe.schema.recipe import Buffer
from practicum.trainer.sample_step import ReplayBuffer


def group(prompt: int, rewards: list[float | None]) -> Group:
    rows = []
    for session, reward in enumerate(rewards):
        status = "ready" if reward is not None else "failed"
        tags = Tags(status=status, reward=reward)
        rows.append((Key(prompt, session), tags))
    return Group(prompt, tuple(rows))


def test_takes_oldest_complete_groups_first():
    buffer = ReplayBuffer(Buffer(), "train")
    buffer.add([group(7, [0.0, 1.0]), group(3, [1.0, 0.0]), group(5, [0.0, 0.0])])
    taken = buffer.take(2)
    assert [key.prompt for key in taken.batch.keys] == [3, 3, 5, 5]
    assert [key for key, _ in buffer.take(1).batch] == [Key(7, 0), Key(7, 1)]


def test_flat_groups_are_left_out_only_when_asked():
    flat, uneven = group(1, [1.0, 1.0]), group(2, [1.0, 0.0])
    for filters, left in ((False, 2), (True, 1)):
        buffer = ReplayBuffer(Buffer(filter_flat_groups=filters), "train")
        buffer.add([flat, uneven])
        assert len(buffer) == left


def test_a_group_whose_only_difference_failed_is_flat():
    assert group(1, [1.0, None, 1.0]).is_flat
    assert not group(1, [1.0, None, 0.0]).is_flat


def test_a_session_of_several_trajectories_counts_once():
    tags = Tags(reward=1.0)
    rows = ((Key(1, 0, 0), tags), (Key(1, 0, 1), tags), (Key(1, 1, 0), replace(tags, reward=0.0)))
    assert Group(1, rows).rewards() == [1.0, 0.0]


def test_failed_and_baseline_rows_are_not_trained_on():
    rows = [
        (Key(1, 0), Tags(reward=1.0)),
        (Key(1, 1), Tags(status="failed", failure="reward raised")),
        (Key(1, 2), Tags(reward=0.5, is_baseline=True)),
    ]
    batch = BatchRef("train", tuple(k for k, _ in rows), tuple(t for _, t in rows))
    buffer = ReplayBuffer(Buffer(), "train")
    buffer.add(groups_of(batch))
    taken = buffer.take(1)
    assert taken.batch.keys == (Key(1, 0),)
    assert taken.baselines == {1: 0.5}
