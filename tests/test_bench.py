"""What a bench prints and how it judges; no times."""

import pytest

from glm5_jax import bench, bench_gpu
from glm5_jax.bench import Cost, Timing
from glm5_jax.errors import ConfigError


def test_a_timing_names_both_numbers_the_ratio_and_the_goal():
    line = str(Timing("work", 0.1, 2.0, "a peer", 15))
    assert line == "work: 100.0 ms, a peer: 2.00 s; 20.00x, goal 15x reached"


def test_a_cost_is_so_many_times_as_long_as_the_peer():
    line = str(Cost("work", 1.2, 1.0, "a peer", 1 / 1.3))
    assert line == (
        "work: 1.20 s, a peer: 1.00 s; 1.20 times as long, goal 1.3 times as long reached"
    )
    assert "MISSED" in str(Cost("work", 1.4, 1.0, "a peer", 1 / 1.3))


def test_a_ratio_under_its_goal_is_missed_and_one_without_a_goal_is_not():
    assert not Timing("work", 0.2, 2.0, "a peer", 15).reached
    assert "MISSED" in str(Timing("work", 0.2, 2.0, "a peer", 15))
    assert Timing("work", 2.0, 0.2, "a peer").reached


def test_kda_is_timed_beside_the_peers_that_are_installed(monkeypatch):
    def missing(inputs):
        raise ImportError("no such peer")

    monkeypatch.setattr(bench, "TURN_SECONDS", 1e-9)
    monkeypatch.setattr(bench, "_oracle_kda", missing)
    monkeypatch.setattr(bench, "_jla_kda", lambda inputs: lambda: None)
    (timing,) = bench.bench_kda(repeats=1, tokens=3, heads=1, dim=4)
    assert (timing.what, timing.goal) == ("KDA, 1×3, 1 heads of 4, float32", 3)

    monkeypatch.setattr(bench, "_jla_kda", missing)
    with pytest.raises(ImportError, match="no such peer"):
        bench.bench_kda(repeats=1, tokens=3, heads=1, dim=4)


@pytest.mark.parametrize("name", bench_gpu.SHAPES)
def test_kernels_are_not_timed_without_a_gpu(name):
    with pytest.raises(ConfigError, match=rf"bench {name} --run: needs (a Hopper GPU|JAX 0\.11)"):
        bench_gpu.run_lines(bench_gpu.SHAPES[name])
