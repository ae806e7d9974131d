"""tests/pool.py: a group of ranks stays as long as it may, and a rank in trouble is named with its cause."""

import pytest

from pool import Pool, RankError


@pytest.fixture(scope="module")
def own_pool():
    pool = Pool()
    yield pool
    pool.stop()


def test_a_group_stays_until_its_place_changes_or_a_case_has_made_another(own_pool):
    first, second = (own_pool.run(2, "whereabouts") for _ in "ab")
    assert first == second and len({process for process, *_ in first}) == 2
    assert not set(own_pool.run(1, "whereabouts")[0][:2]) & {part for at in first for part in at[:2]}
    assert own_pool.run(2, "whereabouts") == first
    nodes = own_pool.run(2, "whereabouts", True, local_world=1)
    assert [at[0] for at in nodes] == [at[0] for at in first] and [at[2] for at in nodes] == [1, 1]
    last = own_pool.run(2, "whereabouts", local_world=1)
    assert [at[0] for at in last] == [at[0] for at in first]
    assert len({at[1] for at in (*first, *nodes, *last)}) == 3


@pytest.mark.parametrize(
    "how, text, timeout",
    [
        ("raises", "rank 1 of 2:\n.*ZeroDivisionError", 60),
        ("dies", "rank 1 of 2:\nhas ended without a word, with exit code -9", 60),
        ("hangs", r"ranks \[0, 1\] of 2 gave no answer", 1),
        ("leaves out a collective", r"ranks \[0, 1\] of 2 gave no answer", 1),
    ],
)
def test_trouble_is_named_and_new_ranks_come(own_pool, how, text, timeout):
    before = own_pool.run(2, "whereabouts")
    with pytest.raises(RankError, match="(?s)" + text):
        own_pool.run(2, "in_trouble", how, timeout=timeout)
    assert not {at[0] for at in before} & {at[0] for at in own_pool.run(2, "whereabouts")}
