"""Weights, certificates and directories are restored bit for bit; invalid files are rejected."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
from fractions import Fraction

import _runs
import pytest
import safetensors.torch
import torch
from _exports import RECIPE, make_certificate, make_run
from torch import nn

import onelip
from onelip.cli import export as command
from onelip.core.errors import NonFiniteWeight, RunError
from onelip.export import ExportError, from_pretrained, load_plain, load_pretrained, save_plain, save_pretrained
from onelip.training import load_run
from onelip.training.build import PLAIN_FORMAT
from onelip.training.run_directory import RunConfig

IMAGES = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
CONFIG = RunConfig(RECIPE, "digits", "0" * 64, tuple("0123456789"), (1, 8, 8))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("export") / "run")


def network():
    torch.manual_seed(0)
    return nn.Sequential(onelip.nn.AOLLinear(3, 4), onelip.nn.MaxMin(), nn.Linear(4, 2))


def plain():
    return nn.Sequential(nn.Linear(3, 4), onelip.nn.MaxMin(), nn.Linear(4, 2))


# The plain file.


def test_plain_round_trip(tmp_path):
    net, path = network(), tmp_path / "new" / "net.safetensors"
    save_plain(net, path, metadata={"author": "me"})
    again = load_plain(path, plain())
    x = torch.randn(4, 3)
    assert torch.equal(again(x), onelip.bake(net)(x))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": PLAIN_FORMAT, "author": "me"}
    assert os.listdir(path.parent) == ["net.safetensors"]
    with pytest.raises(ExportError, match=r"the file exists.*--force"):
        save_plain(net, path)
    save_plain(net, path, force=True)


def test_plain_refuses_to_save_nan(tmp_path):
    net = network()
    net.register_buffer("table", torch.tensor([float("inf")]))
    with pytest.raises(NonFiniteWeight, match="'table'"):
        save_plain(net, tmp_path / "net.safetensors")
    assert not any(tmp_path.iterdir())


def state():
    return plain().state_dict()


def stored(tensors, format=PLAIN_FORMAT):
    return safetensors.torch.save(tensors, {"format": format})


def with_nan():
    tensors = state()
    tensors["0.bias"][1] = float("nan")
    return stored(tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: stored(state())[:-1], "damaged or truncated"),
        (lambda: stored(state()) + b"\0", "damaged or truncated"),
        (lambda: stored(state())[:20], "truncated"),
        (lambda: b"", "truncated"),
        (with_nan, "NaN or infinity in '0.bias'"),
        (lambda: stored({**state(), "more": torch.zeros(1)}), "the model has no tensor 'more'"),
        (lambda: stored({k: v for k, v in state().items() if k != "2.bias"}), "the tensor '2.bias' is missing"),
        (lambda: stored({**state(), "2.bias": torch.zeros(3)}), "expected '2.bias' of shape 2"),
        (lambda: stored({**state(), "2.bias": torch.zeros(2).double()}), "type F64"),
        (lambda: stored({**state(), "2.bias": torch.zeros(2).half()}), "type F16"),
        (lambda: stored(state(), "something else"), "expected the format"),
        (lambda: pickle.dumps(state()), "got a pickle"),
        (lambda: struct.pack("<Q", 10 * 2**30) + b"{}", "claims 10,737,418,240"),
        (lambda: struct.pack("<Q", 2) + b"{}", "format"),
    ],
)
def test_broken_files_are_refused_and_the_model_stays(tmp_path, content, message):
    path, net = tmp_path / "net.safetensors", plain()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    path.write_bytes(content())
    with pytest.raises(ExportError, match=message):
        load_plain(path, net)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_torch_save_is_called_by_its_name(tmp_path):
    path = tmp_path / "net.safetensors"
    torch.save(state(), path)
    with pytest.raises(ExportError, match="got a pickle"):
        load_plain(path, plain())


def test_a_file_of_ten_gigabytes_is_refused_by_its_size(tmp_path):
    path = tmp_path / "net.safetensors"
    with path.open("wb") as file:  # sparse: it takes no space
        file.truncate(10 * 2**30)
    with pytest.raises(ExportError, match=r"expected about 104 bytes .* got 10,737,418,240"):
        load_plain(path, plain())


def test_no_file(tmp_path):
    with pytest.raises(ExportError, match="No such file"):
        load_plain(tmp_path / "net.safetensors", plain())


# Directories.


def test_directory_round_trip_is_bit_identical(run, tmp_path):
    certificate = make_certificate(tmp_path / "c.json", run)
    written = save_pretrained(run.path, tmp_path / "net", certificate=certificate)
    assert {p.name for p in written} == set(os.listdir(tmp_path / "net"))
    assert set(os.listdir(tmp_path)) == {"net", "c.json"}
    for kept, name in (
        (run.plain, "model.safetensors"),
        (run.config, "config.json"),
        (certificate, "certificate.json"),
    ):
        assert (tmp_path / "net" / name).read_bytes() == kept.read_bytes()
    again, loaded = load_pretrained(tmp_path / "net"), load_run(run.path)
    x = IMAGES.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(again.model(x), loaded.plain(x))
    assert not again.model.training
    assert again.config == loaded.config
    assert again.certificate == tmp_path / "net" / "certificate.json"
    card = (tmp_path / "net" / "README.md").read_text()
    content = json.loads(certificate.read_bytes())
    assert f"**{float(Fraction(content['nodes'][-1]['lipschitz']))!r}**" in card
    assert "On the 3 images, according to the certificate" in card
    assert "| accuracy | 100.00 % |" in card
    assert hashlib.sha256(run.plain.read_bytes()).hexdigest() in card
    assert "| accuracy | 50.00 % |" in card
    assert f"| CRA at 36/255 | {100 * content['summary']['cra']['36/255'] / 3:.2f} % |" in card


def test_card_without_a_certificate_says_by_construction(run, tmp_path):
    save_pretrained(run.path, tmp_path / "net")
    card = (tmp_path / "net" / "README.md").read_text()
    assert "by construction" in card
    assert "certificate.json" not in card
    assert load_pretrained(tmp_path / "net").certificate is None


def test_card_of_changed_plain_weights_states_their_own_constant(tmp_path):
    """The constant by construction is that of other weights, and so are the results of the training."""
    run = make_run(tmp_path / "run")
    tensors = safetensors.torch.load_file(run.plain)
    tensors["conv1.weight"] *= 3
    safetensors.torch.save_file(tensors, run.plain, metadata={"format": PLAIN_FORMAT})
    save_pretrained(run.path, tmp_path / "net")
    card = (tmp_path / "net" / "README.md").read_text()
    stated = float(re.search(r"at most \*\*(.*?)\*\*", card)[1])
    assert onelip.audit(load_pretrained(tmp_path / "net").model, IMAGES).lower <= stated < 3.1
    assert "by construction" not in card
    assert "accuracy" not in card


def test_a_model_with_its_config(tmp_path):
    model = onelip.training.build.build_model(RECIPE, 10, (1, 8, 8))
    with pytest.raises(ExportError, match="a model needs its config"):
        save_pretrained(model, tmp_path / "net")
    save_pretrained(model, tmp_path / "net", config=CONFIG)
    torch.testing.assert_close(from_pretrained(tmp_path / "net")(IMAGES), onelip.bake(model)(IMAGES))
    with pytest.raises(ExportError, match="the config builds another model: tensor"):
        save_pretrained(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), tmp_path / "other", config=CONFIG)
    for name, layer in model.named_children():
        if isinstance(layer, onelip.nn.MaxMin):
            setattr(model, name, nn.Identity())
    with pytest.raises(ExportError, match="a different function than the model"):
        save_pretrained(model, tmp_path / "other", config=CONFIG)
    assert not (tmp_path / "other").exists()


def test_directories_are_not_overwritten_unless_forced(run, tmp_path):
    (tmp_path / "mine").write_text("here")
    with pytest.raises(ExportError, match="the directory is not empty"):
        save_pretrained(run.path, tmp_path)
    save_pretrained(run.path, tmp_path, force=True)
    assert (tmp_path / "mine").read_text() == "here"
    from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": {"model": "os.system"}}, "unknown model 'os.system'"),
        ({"recipe": {"model": "aol-std"}}, "has no option"),
        ({"recipe": {"surprise": 1}}, "surprise"),
        ({"data": {"shape": [1, 8]}}, "name, fingerprint"),
        ({"version": 99}, "version 99"),
        # Built on the meta device first, this costs nothing; it is rejected by its shapes.
        ({"recipe": {"model_options": ["channels=100000", "width=2", "convs=1", "linears=1"]}}, "expected"),
    ],
)
def test_configs_from_elsewhere_are_checked(run, tmp_path, change, message):
    save_pretrained(run.path, tmp_path / "net")
    path = tmp_path / "net" / "config.json"
    content = json.loads(path.read_text())
    for key, value in change.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=message):
        from_pretrained(tmp_path / "net")


def test_hub_by_name(run, tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    save_pretrained(run.path, tmp_path / "net")
    asked = []

    def download(**arguments):
        asked.append(arguments)
        return str(tmp_path / "net")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    model = from_pretrained("somebody/digits", revision="v1")
    assert torch.equal(model(IMAGES), from_pretrained(tmp_path / "net")(IMAGES))
    assert asked[0]["repo_id"] == "somebody/digits"
    assert asked[0]["revision"] == "v1"
    assert set(asked[0]["allow_patterns"]) == {"config.json", "model.safetensors", "README.md", "certificate.json"}

    def fail(**arguments):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ExportError, match="no network"):
        from_pretrained("somebody/digits")
    for name in ("nowhere", "a/b/c", "../up", "/abs/olute"):
        with pytest.raises(ExportError, match="not the name of a repository"):
            from_pretrained(name)


# The command, for files.


def call(capsys, *arguments):
    code, out, err = _runs.call(capsys, "export", *arguments)
    return code, out + err


def test_command_copies_the_weights_byte_for_byte(run, tmp_path, capsys):
    certificate = make_certificate(tmp_path / "c.json", run)
    out = tmp_path / "o" / "net.safetensors"
    code, text = call(capsys, run.path, "--out", out, "--certificate", certificate, "--json")
    assert code == 0, text
    assert {os.path.basename(p) for p in json.loads(text)["files"]} == set(os.listdir(out.parent))
    assert out.read_bytes() == run.plain.read_bytes()
    assert (out.parent / "net.config.json").read_bytes() == run.config.read_bytes()
    assert (out.parent / "net.cert.json").read_bytes() == certificate.read_bytes()
    code, text = call(capsys, run.path, "--out", out)
    assert code == 2
    assert "--force" in text
    assert call(capsys, run.path, "--out", out, "--force")[0] == 0


def test_command_converts_to_float64_exactly(run, tmp_path, capsys):
    out = tmp_path / "net.safetensors"
    assert call(capsys, run.path, "--out", out, "--dtype", "float64")[0] == 0
    wide = load_plain(out, load_run(run.path).plain.double()).state_dict()
    narrow = load_run(run.path).plain.state_dict()
    assert all(torch.equal(wide[name].float(), narrow[name]) and wide[name].dtype == torch.float64 for name in narrow)
    certificate = make_certificate(tmp_path / "c.json", run)
    flags = ("--dtype", "float64", "--certificate", certificate)
    assert "changes the stored weights" in call(capsys, run.path, "--out", tmp_path / "b.safetensors", *flags)[1]


def test_command_without_a_place(run, tmp_path, capsys):
    """Without --out, the file is written to the run directory under a default name."""
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    code, text = call(capsys, copy)
    assert (code, "export/model.safetensors" in text) == (0, True)
    assert (
        safetensors.torch.load_file(copy / "export" / "model.safetensors").keys()
        == load_run(run.path).plain.state_dict().keys()
    )


def test_command_makes_a_directory(run, tmp_path, capsys):
    code, text = call(capsys, run.path, "--format", "hub", "--out", tmp_path / "net")
    assert code == 0
    assert "README.md" in text
    from_pretrained(tmp_path / "net")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "net.onnx"], "ends in .safetensors"),
        (["--out", "net.bin", "--format", "onnx"], "ends in .onnx"),
        (["--out", "net.safetensors", "--uint8-input"], "needs --format onnx"),
        (["--out", "net", "--format", "hub", "--dtype", "float64"], "--dtype and --format hub exclude"),
        (["--out", "n.onnx", "--format", "onnx", "--dtype", "float32", "--certificate", "c"], "holds for float64 only"),
    ],
)
def test_invalid_commands_of_export(run, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    code, text = call(capsys, run.path, *flags)
    assert code == 2
    assert message in text
    assert not os.listdir(tmp_path)


def test_unfinished_runs_are_not_shipped(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    run.plain.unlink()
    code, text = call(capsys, run.path, "--out", tmp_path / "net.safetensors")
    assert code == 1
    assert "onelip train --resume" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"sha256": "0" * 64}}, r"for another weights file \(sha256 000000000000"),
        ({"weights": None}, r"\(sha256 none"),
        ({"config": {"sha256": "1" * 64}}, "for another config file"),
        ({"version": 1}, "got 1; certify again"),
        ({"format": "another"}, "the file is not an onelip certificate"),
    ],
)
def test_certificates_of_something_else(run, tmp_path, capsys, changes, message):
    certificate = make_certificate(tmp_path / "c.json", run, **changes)
    for format, out in (("safetensors", "net.safetensors"), ("hub", "net"), ("onnx", "net.onnx")):
        flags = ("--format", format, "--out", tmp_path / out, "--certificate", certificate)
        with pytest.raises(ExportError, match=message):
            command.run([str(a) for a in (run.path, *flags)])
    assert os.listdir(tmp_path) == ["c.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t[:-9],
        lambda t: t.replace('"count": 3', '"count": 4'),
        lambda t: "",
        lambda t: t.replace('"count": 3', '"count": NaN'),
    ],
)
def test_damaged_certificates(run, tmp_path, damage):
    certificate = make_certificate(tmp_path / "c.json", run)
    certificate.write_text(damage(certificate.read_text()))
    with pytest.raises(ExportError, match="damaged"):
        save_pretrained(run.path, tmp_path / "net", certificate=certificate)
    assert not (tmp_path / "net").exists()


def test_a_full_disk_leaves_nothing_half(run, tmp_path, monkeypatch):
    """The second of three files cannot be synced: all new files are removed, and the error states the reason."""
    calls, real = [], os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) == 3:  # the first file syncs itself and its directory
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    monkeypatch.setattr("onelip.core.files.os.fsync", full)
    for format, out in (("safetensors", "o/net.safetensors"), ("hub", "o/net")):
        calls.clear()
        with pytest.raises(RunError, match="the disk is full"):
            command.run([str(run.path), "--format", format, "--out", str(tmp_path / out)])
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
