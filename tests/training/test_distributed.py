"""Two processes give the weights of one up to the order of sums, write one log and checkpoint, and stop together."""

import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from _process_pairs import assert_close, finish_pair, free_port, join_pair, start_pair
from _runs import ENVIRONMENT, SMALL, SMALL_FLAGS, same_bytes
from torch import nn

from onelip.training import RunDirectory, RunError, Stopped, preset, read_log, train
from onelip.training.distributed import processes

# An odd batch, so that the parts of the processes differ.
FLAGS = ["train", *SMALL_FLAGS, "--batch-size", "241", "--epochs", "3"]
RECIPE = SMALL.replace(batch_size=241)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    train(preset_of_flags(), out)
    return out


def preset_of_flags():
    changes = {name: getattr(RECIPE, name) for name in ("model_options", "batch_size", "epochs")}
    return preset("digits").replace(augment=True, **changes)


def test_torchrun(alone, tmp_path):
    """The command as users write it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "onelip"]
    out = tmp_path / "run"
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(
        [*command, *FLAGS, "--out", out], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(out, alone)
    assert [line["epoch"] for line in read_log(RunDirectory(out))] == [1, 2, 3]
    assert done.stdout.count("epoch 3/3") == 1  # only the first process prints
    assert done.stdout.count("Run: ") == 1
    assert '"processes": 2' in (out / "environment.json").read_text()


def test_stop_and_resume_together(alone, tmp_path):
    whole, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    finish_pair(log, *FLAGS, "--out", whole)
    assert_close(whole, alone)
    # Only one of the processes gets the signal, in the second epoch.
    interrupts = {1: ("onelip.training.trainer.learning_rate", 9, signal.SIGTERM)}
    codes, texts = join_pair(log, start_pair(log, *FLAGS, "--out", out, interrupts=interrupts))
    assert codes == [143, 143], texts
    assert f"--resume {out}" in texts[0]
    finish_pair(log, "train", "--resume", out)
    assert same_bytes(out, whole)


def test_a_part_without_images(tmp_path):
    """1442 = 1441 + 1: one process gets no image of the last batch, and still waits for the other."""
    flags = ["train", *SMALL_FLAGS, "--batch-size", "1441", "--epochs", "1"]
    finish_pair(tmp_path / "log", *flags, "--out", tmp_path / "two")
    train(preset_of_flags().replace(batch_size=1441, epochs=1), tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


def fail_pair(log: Path, *arguments: str | Path, code: int = 1, limit: int = 0) -> tuple[str, str]:
    """Two processes that fail, the first with `code`; returns the output of each."""
    codes, texts = join_pair(log, start_pair(log, *arguments, limit=limit))
    assert codes == [code, 1], texts
    assert "Traceback" not in texts[0] + texts[1]
    return texts[0], texts[1]


def test_an_error_of_the_first_process_is_reported_once(alone, tmp_path):
    first, second = fail_pair(tmp_path / "log", *FLAGS, "--out", alone, code=2)
    assert "already contains a run" in first
    assert first.count("\n") == 1
    assert second == ""


def test_a_full_disk_is_reported_by_the_first_process(alone, tmp_path):
    limit = (alone / "checkpoint.safetensors").stat().st_size - 1
    first, second = fail_pair(tmp_path / "log", *FLAGS, "--out", tmp_path / "run", limit=limit)
    assert "the disk is full" in first
    assert second == ""


def test_damaged_checkpoints_are_reported_once(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"")
    first, second = fail_pair(tmp_path / "log", "train", "--resume", tmp_path / "run")
    assert "damaged or truncated" in first
    assert second == ""


def test_a_lost_connection_is_one_line(tmp_path):
    """Killed, the first process prints nothing; the second has only the lost connection to report."""
    log, out = tmp_path / "log", tmp_path / "run"
    interrupts = {0: ("onelip.training.trainer.learning_rate", 9, signal.SIGKILL)}
    codes, texts = join_pair(log, start_pair(log, *FLAGS, "--out", out, interrupts=interrupts))
    assert codes == [-signal.SIGKILL, 1], texts
    assert texts[1].splitlines() == [
        "onelip train: process 1 of 2 lost the connection to another process, which has ended; see its message"
    ]


def raise_with_network(how: str, refs: list) -> None:
    """The network is a local variable of the frame that raises."""
    network = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    refs.append(weakref.ref(network))
    if how == "stopped":
        raise Stopped("stopped", signal.SIGTERM)
    raise ZeroDivisionError


def fail(how: str, refs: list) -> None:
    try:
        raise_with_network(how, refs)
    except ZeroDivisionError as error:
        if how == "from":
            raise RunError("with advice") from error
        raise RunError("with advice") from None  # still in __context__


@pytest.mark.parametrize("how", ["stopped", "from", "during"])
def test_networks_go_before_the_group(monkeypatch, how):
    """Each network is released before the group is destroyed, also one that only the cause of the error refers to."""
    # A real group, of this process alone: only `processes` sees a WORLD_SIZE of 2.
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join = torch.distributed.init_process_group
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **k: join(*a, rank=0, world_size=1, **k))
    refs, alive = [], []
    destroy = torch.distributed.destroy_process_group

    def check_and_destroy() -> None:
        alive.extend(ref() is not None for ref in refs)
        destroy()

    monkeypatch.setattr("torch.distributed.destroy_process_group", check_and_destroy)
    with pytest.raises(RunError), processes("cpu"):
        fail(how, refs)
    assert alive == [False]


FAULTS = """
import ctypes, resource, sys, torch
from onelip.training.distributed import keep_freed_memory
if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
    sys.exit("no glibc")
if sys.argv[1:]:
    keep_freed_memory()
for _ in range(8):
    torch.ones(2**24)
start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
"""


def test_freed_memory_is_kept():
    """Blocks of 64 MB are new pages each time; kept ones are not."""
    faults = []
    for arguments in ([], ["keep"]):
        command = [sys.executable, "-c", FAULTS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if "no glibc" in done.stderr:
            pytest.skip("glibc only")
        assert done.returncode == 0, done.stderr
        faults.append(int(done.stdout))
    assert faults[1] < faults[0] / 10, faults
