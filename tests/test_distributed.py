"""Two processes: the weights of one, up to the order of sums; one log, one checkpoint; stopping together."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from _runs import ENVIRONMENT, SMALL, SMALL_FLAGS, same_bytes, start
from safetensors.torch import load_file
from torch import nn

from onelip.training import RunDirectory, RunError, Stopped, read_log, train
from onelip.training.checkpoint import read_position
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
    from onelip.training import preset

    changes = {name: getattr(RECIPE, name) for name in ("model_options", "batch_size", "epochs")}
    return preset("digits").replace(augment=True, **changes)


def pair(log: Path, *arguments: str | Path, **options) -> list:
    """Two processes that know of each other as torchrun would tell them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(
            log.with_name(f"log{rank}"), *arguments, environment=common | {"RANK": rank, "LOCAL_RANK": rank}, **options
        )
        for rank in ("0", "1")
    ]


def finish_pair(log: Path, *arguments: str | Path) -> None:
    processes = pair(log, *arguments)
    for rank, process in enumerate(processes):
        process.join(90)
        assert process.exitcode == 0, log.with_name(f"log{rank}").read_text()


def assert_close(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def test_torchrun(alone, tmp_path):
    """The command as users write it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "onelip"]
    out = tmp_path / "run"
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(
        [*command, *FLAGS, "--out", out], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(out, alone)
    assert [line["epoch"] for line in read_log(RunDirectory(out))] == [1, 2, 3]
    assert done.stdout.count("epoch 3/3") == 1  # only the first process speaks
    assert done.stdout.count("The run is in") == 1
    assert '"processes": 2' in (out / "environment.json").read_text()


def test_stop_and_go_on_together(alone, tmp_path):
    whole, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    finish_pair(log, *FLAGS, "--out", whole)
    assert_close(whole, alone)
    processes = pair(log, *FLAGS, "--out", out)
    checkpoint = out / "checkpoint.safetensors"
    while all(p.is_alive() for p in processes) and not (checkpoint.exists() and read_position(checkpoint).epoch):
        time.sleep(0.002)
    os.kill(processes[1].pid, signal.SIGTERM)  # only one hears it
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [143, 143], log.with_name("log0").read_text()
    assert f"--resume {out}" in log.with_name("log0").read_text()
    finish_pair(log, "train", "--resume", out)
    assert same_bytes(out, whole)


def test_a_part_without_images(tmp_path):
    """1442 = 1441 + 1: of the last batch one of the processes gets nothing, and waits for the other all the same."""
    flags = ["train", *SMALL_FLAGS, "--batch-size", "1441", "--epochs", "1"]
    finish_pair(tmp_path / "log", *flags, "--out", tmp_path / "two")
    train(preset_of_flags().replace(batch_size=1441, epochs=1), tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


def fail_pair(log: Path, *arguments: str | Path, code: int = 1, **options) -> tuple[str, str]:
    """Two processes that cannot, the first ending with `code`; returns what each said."""
    processes = pair(log, *arguments, **options)
    for process in processes:
        process.join(90)
    texts = [log.with_name(f"log{rank}").read_text() for rank in (0, 1)]
    assert [process.exitcode for process in processes] == [code, 1], texts
    assert "Traceback" not in texts[0] + texts[1]
    return texts[0], texts[1]


def test_an_error_of_the_first_process_is_all_that_is_said(alone, tmp_path):
    first, second = fail_pair(tmp_path / "log", *FLAGS, "--out", alone, code=2)
    assert "got one that holds a run" in first
    assert first.count("\n") == 1
    assert second == ""


def test_a_full_disk_is_told_by_the_first_process(alone, tmp_path):
    limit = (alone / "checkpoint.safetensors").stat().st_size - 1
    first, second = fail_pair(tmp_path / "log", *FLAGS, "--out", tmp_path / "run", limit=limit)
    assert "the disk is full" in first
    assert second == ""


def test_damaged_checkpoints_are_told_once(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"")
    first, second = fail_pair(tmp_path / "log", "train", "--resume", tmp_path / "run")
    assert "damaged or truncated" in first
    assert second == ""


def test_who_loses_the_others_says_so_in_a_line(tmp_path):
    """Killed, the first process says nothing; the second has only the lost connection to tell of."""
    log, out = tmp_path / "log", tmp_path / "run"
    processes = pair(log, *FLAGS[:-1], "1000", "--out", out)
    while processes[0].is_alive() and not (out / "log.jsonl").exists():
        time.sleep(0.01)
    processes[0].kill()
    processes[1].join(90)
    text = log.with_name("log1").read_text()
    assert processes[1].exitcode == 1, text
    assert text.splitlines() == [
        "onelip train: process 1 of 2 lost the connection to another, which ended; its own message says why"
    ]


def raise_with_network(how: str, refs: list) -> None:
    """As the loop does: the network is a local variable of the frame that raises."""
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
            raise RunError("told in words") from error
        raise RunError("told in words") from None  # still in __context__


@pytest.mark.parametrize("how", ["stopped", "from", "during"])
def test_networks_go_before_the_group(monkeypatch, how):
    """Each network is dead when the group is destroyed, also one that only the cause of the error holds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # A real group, of this process alone: WORLD_SIZE 2 is said to `processes` only.
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    join = torch.distributed.init_process_group
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **k: join(*a, rank=0, world_size=1, **k))
    refs, alive = [], []
    destroy = torch.distributed.destroy_process_group

    def look_and_destroy() -> None:
        alive.extend(ref() is not None for ref in refs)
        destroy()

    monkeypatch.setattr("torch.distributed.destroy_process_group", look_and_destroy)
    with pytest.raises(RunError), processes("cpu"):
        fail(how, refs)
    assert alive == [False]
