"""Where one of several processes is killed the others end, say so, and leave nothing half done."""

import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax.checkpoint.restore import load_leaves

HEARTBEAT_SECONDS = 5  # what killed.py sets
SLACK_SECONDS = 20  # for a busy machine


@pytest.mark.parametrize("moment", ["running", "saving"])
def test_one_killed_ends_the_others(moment, plain, run_together, tmp_path):
    path = tmp_path / "saved"
    first, second = run_together("killed.py", moment, plain, path, processes=2, devices=4)
    assert second.status == -9
    assert first.status not in (0, -9)
    assert first.at - second.at < HEARTBEAT_SECONDS + SLACK_SECONDS
    assert "another task died" in first.err
    assert not path.exists()
    if moment == "saving":
        assert (tmp_path / "saved.saving").exists()  # it had begun
        glm.save(glm.load(plain), path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
        expected, found = (load_leaves(at)[1] for at in (plain, path))
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
