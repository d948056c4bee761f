"""What a bench prints and how it judges; no times."""

from glm5_jax.bench import Timing


def test_a_timing_names_both_numbers_the_ratio_and_the_goal():
    line = str(Timing("work", 0.1, 2.0, "a peer", 15))
    assert line == "work: 100.0 ms, a peer: 2.00 s; 20.00x, goal 15x reached"


def test_a_ratio_under_its_goal_is_missed_and_one_without_a_goal_is_not():
    assert not Timing("work", 0.2, 2.0, "a peer", 15).reached
    assert "MISSED" in str(Timing("work", 0.2, 2.0, "a peer", 15))
    assert Timing("work", 2.0, 0.2, "a peer").reached
