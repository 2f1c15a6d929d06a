"""ONNX export, run in ONNX Runtime: whole networks, the command, and errors."""

import json
import os

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from _exports import make_certificate, make_run
from torch import nn

import onelip
from onelip.cli import export as command
from onelip.export import ExportError, decompositions, export_onnx, onnx as module


class Residual(nn.Module):
    """Sums and concatenations in forward, without modules."""

    def __init__(self):
        super().__init__()
        self.conv = onelip.nn.AOLConv2d(2, 2, 3, padding=1)
        self.head = onelip.nn.AOLLinear(4, 3, side="auto")

    def forward(self, x):
        y = (x + onelip.nn.activations.maxmin(self.conv(x))) / 2
        return self.head(torch.cat([y.mean((2, 3)), y.amax((2, 3))], 1))


def networks():
    torch.manual_seed(0)
    return {
        "aol-fc": (onelip.create_model("aol-fc", image_size=8, in_channels=1, width=16), (1, 8, 8)),
        "aol-std": (onelip.create_model("aol-std", image_size=32, in_channels=1, width=2), (1, 32, 32)),
        "residual": (Residual(), (2, 4, 4)),
    }


@pytest.mark.parametrize("name", ["aol-fc", "aol-std", "residual"])
def test_networks_in_float32(name, tmp_path, capfd):
    net, shape = networks()[name]
    path = tmp_path / "net.onnx"
    before = {key: tensor.clone() for key, tensor in net.train().state_dict().items()}
    report = export_onnx(net, path, shape, class_names=("a", "b"))
    assert net.training
    assert all(torch.equal(before[key], tensor) for key, tensor in net.state_dict().items())
    assert report.difference <= report.bound < 1e-2
    assert report.images == 34
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for count in (1, 7):
        images = torch.rand(count, *shape)
        (got,) = session.run(["logits"], {"image": images.numpy()})
        np.testing.assert_allclose(got, net.eval()(images).detach().numpy(), rtol=0, atol=1e-5)
    graph = onnx.load(path).graph
    axes = [d for v in (*graph.input, *graph.output, *graph.value_info) for d in v.type.tensor_type.shape.dim]
    assert {axis.dim_param for axis in axes if axis.dim_param} == {"batch"}
    assert os.listdir(tmp_path) == ["net.onnx"]  # no external data, no partial file
    assert capfd.readouterr() == ("", "")  # torch's notes on torchvision do not reach the user


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Export by the command: float64 because there is a certificate, and uint8 input."""
    folder = tmp_path_factory.mktemp("onnx")
    run = make_run(folder / "run")
    certificate = make_certificate(folder / "c.json", run)
    out = folder / "out" / "net.onnx"
    flags = ["--format", "onnx", "--out", out, "--certificate", certificate, "--uint8-input", "--json"]
    code = command.run([str(a) for a in (run.path, *flags)])
    assert code == 0
    return run, certificate, out


def test_command_ships_the_float64_program_with_its_certificate(shipped):
    run, certificate, out = shipped
    beside = {"net.onnx", "net.cert.json", "net.safetensors", "net.config.json"}
    assert set(os.listdir(out.parent)) == beside
    assert (out.parent / "net.cert.json").read_bytes() == certificate.read_bytes()
    assert (out.parent / "net.safetensors").read_bytes() == run.plain.read_bytes()
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    assert [(i.name, i.type, i.shape[1:]) for i in session.get_inputs()] == [("image", "tensor(uint8)", [1, 8, 8])]
    assert [value.shape[0] for value in (*session.get_inputs(), *session.get_outputs())] == ["batch", "batch"]
    assert [(o.name, o.type) for o in session.get_outputs()] == [("logits", "tensor(double)")]
    plain = onelip.load_run(run.path).plain.double()
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    (got,) = session.run(None, {"image": images.numpy()})
    expected = plain(images.double() / 255).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
    words = session.get_modelmeta().custom_metadata_map
    assert json.loads(words["class_names"]) == list("0123456789")
    assert words["weights_sha256"] == json.loads(certificate.read_text())["weights"]["sha256"]
    assert words["onelip"] == onelip.__version__
    assert "255" in words["preprocessing"]
    assert "float64" in words["arithmetic"]


def test_file_is_plain_onnx_without_paths_of_this_machine(shipped):
    _, _, out = shipped
    proto = onnx.load(out, load_external_data=False)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    # Nothing of float32 is left, and no convolution whose algorithm the runtime would choose.
    kinds = {tensor.data_type for tensor in proto.graph.initializer}
    assert onnx.TensorProto.FLOAT not in kinds
    assert onnx.TensorProto.DOUBLE in kinds
    assert not {"Conv", "ConvTranspose"} & {node.op_type for node in proto.graph.node}
    assert b".py" not in out.read_bytes()


# Errors.


def linear(tmp_path, **settings):
    return export_onnx(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), tmp_path / "n.onnx", (1, 2, 2), **settings)


def test_disagreement_is_loud_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROUNDINGS", 0.0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with pytest.raises(ExportError, match=r"differ by at most 0.0e\+00, got"):
        export_onnx(net, tmp_path / "n.onnx", (1, 8, 8))
    assert not any(tmp_path.iterdir())


def test_a_wrong_graph_is_found(tmp_path, monkeypatch):
    """Without the float64 rule for numbers, torch.onnx rounds 0.1 to float32, which is a difference of 1e-9."""
    real = decompositions.float64_decompositions

    def without():
        table = dict(real())
        table.pop(torch.ops.aten.mul.Tensor)
        return table

    class Scaled(nn.Module):
        def forward(self, x):
            return 0.1 * x.flatten(1)

    monkeypatch.setattr(module, "float64_decompositions", without)
    with pytest.raises(ExportError, match=r"differ by at most 9\.1e-13, got 1\.5e-09"):
        export_onnx(Scaled(), tmp_path / "n.onnx", (1, 2, 2), dtype=torch.float64)
    assert not any(tmp_path.iterdir())


def test_an_operation_that_the_runtime_lacks(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.GELU())
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot run the network in float64.*export float32 instead"):
        export_onnx(net, tmp_path / "n.onnx", (1, 2, 2), dtype=torch.float64)


def test_what_cannot_be_traced(tmp_path):
    class Branching(nn.Module):
        def forward(self, x):
            return x.flatten(1) if x.sum() > 0 else -x.flatten(1)

    with pytest.raises(ExportError, match=r"torch\.export cannot trace the network"):
        export_onnx(Branching(), tmp_path / "n.onnx", (1, 2, 2))
    assert not any(tmp_path.iterdir())


def test_other_refusals(tmp_path):
    with pytest.raises(ExportError, match=r"float32 or float64, got torch\.bfloat16"):
        linear(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match=r"expected uint8 images of shape \(n, 1, 2, 2\)"):
        linear(tmp_path, images=torch.rand(3, 1, 2, 2))
    (tmp_path / "n.onnx").write_text("mine")
    with pytest.raises(ExportError, match="--force"):
        linear(tmp_path)
    assert (tmp_path / "n.onnx").read_text() == "mine"
    linear(tmp_path, force=True)
    onnx.checker.check_model(onnx.load(tmp_path / "n.onnx"))
    with pytest.raises(ExportError, match="got a directory"):
        export_onnx(nn.Flatten(), tmp_path, (1, 2, 2))


def test_two_gigabytes_are_the_end_of_one_file(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LIMIT", 30)
    with pytest.raises(ExportError, match="limited to 2 GB"):
        linear(tmp_path)
