"""What the commands that run a model say of devices and processes that cannot be."""

import sys

import pytest

from glm5_jax.cli import main

TOGETHER = ("--coordinator", "127.0.0.1:1", "--process", "0/2")


@pytest.fixture
def refused(monkeypatch, capsys, plain, tmp_path):
    """Run a command that must fail: what it says."""

    def run(command, *options):
        words = [command, str(plain), "--tokens", "1,2", *options]
        if command == "trace":
            words += ["--out", str(tmp_path / "trace.safetensors")]
        monkeypatch.setattr(sys, "argv", ["glm5-jax", *words])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capsys.readouterr()
        assert (exit.value.code, out, err.count("\n")) == (2, "", 1), err
        assert not any(tmp_path.iterdir())
        return err

    return run


@pytest.mark.parametrize("command", ["forward", "generate", "trace"])
def test_more_devices_than_there_are(refused, command):
    said = refused(command, "--mesh", "tensor=3,expert=2")
    assert "--mesh tensor=3,expert=2: needs 6 devices, there are 1" in said
    assert "JAX_NUM_CPU_DEVICES=6" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "8"), "mesh: expected NAME=N"),
        (("--mesh", "tensor=1", "--rules", "pp"), "rules: expected"),
        (("--rules", "tp"), "--rules: needs a --mesh"),
        (TOGETHER, "--coordinator: needs a --mesh"),
        (("--mesh", "tensor=1", *TOGETHER[:2]), "or neither"),
        (("--mesh", "tensor=1", *TOGETHER[2:]), "or neither"),
        (("--mesh", "tensor=1", "--coordinator", "auto", *TOGETHER[2:]), "or neither"),
        (("--mesh", "tensor=1", *TOGETHER[:3], "2/2"), "below the count, got 2/2"),
        (("--mesh", "tensor=1", "--coordinator", "here", *TOGETHER[2:]), "HOST:PORT or auto"),
        (("--mesh", "tensor=1", "--stream"), "--stream: runs on one device"),
    ],
)
def test_options_that_do_not_go_together(refused, options, said):
    assert said in refused("forward", *options)
