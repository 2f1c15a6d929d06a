"""Every layer of onelip.nn, exported in float64 and run in ONNX Runtime: all of them in one file, each compared."""

import onnxruntime
import pytest
import torch
from torch import nn

import onelip
from onelip.export import export_onnx

U = 2.0**-53
SHAPE = (4, 4, 4)


def layers() -> dict[str, nn.Module]:
    own = onelip.nn
    torch.manual_seed(0)
    return {
        "AOLLinear": nn.Sequential(nn.Flatten(), own.AOLLinear(64, 6)),
        "AOLConv1d": nn.Sequential(nn.Flatten(2), own.AOLConv1d(4, 4, 3, padding=1)),
        "AOLConv2d": own.AOLConv2d(4, 6, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
        "AOLConv2d circular": own.AOLConv2d(4, 4, 3, padding=1, padding_mode="circular"),
        "AOLConv3d": nn.Sequential(nn.Unflatten(1, (2, 2)), own.AOLConv3d(2, 2, (1, 2, 2))),
        "AOLConvTranspose1d": nn.Sequential(nn.Flatten(2), own.AOLConvTranspose1d(4, 4, 2, stride=2)),
        "AOLConvTranspose2d": own.AOLConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        "AOLConvTranspose3d": nn.Sequential(nn.Unflatten(1, (2, 2)), own.AOLConvTranspose3d(2, 2, (1, 2, 2))),
        "Abs": own.Abs(0.5),
        "BatchCentering": own.BatchCentering(4),
        "ChannelAffine": own.ChannelAffine(4),
        "ConcatenationPool1d": nn.Sequential(nn.Flatten(2), own.ConcatenationPool1d(2)),
        "ConcatenationPool2d": own.ConcatenationPool2d(2),
        "ConcatenationPool3d": nn.Sequential(nn.Unflatten(1, (2, 2)), own.ConcatenationPool3d(2)),
        "MirrorAverage": own.MirrorAverage(own.AOLConv2d(4, 4, 1)),
        "ConvexResidual": own.ConvexResidual(own.AOLConv2d(4, 4, 1), alpha=0.3),
        "FirstChannels": own.FirstChannels(2),
        "GroupSort": own.GroupSort(),
        "Householder": own.Householder(4),
        "Householder 2": own.Householder(4, order=2),
        "L2Pool1d": nn.Sequential(nn.Flatten(2), own.L2Pool1d(2)),
        "L2Pool2d": own.L2Pool2d(3, 1),
        "L2Pool3d": nn.Sequential(nn.Unflatten(1, (2, 2)), own.L2Pool3d(None)),
        "LayerCentering": own.LayerCentering((1, 2)),
        "LipschitzAvgPool1d": nn.Sequential(nn.Flatten(2), own.LipschitzAvgPool1d(3)),
        "LipschitzAvgPool2d": own.LipschitzAvgPool2d(3, 2, 1),
        "LipschitzAvgPool3d": nn.Sequential(nn.Unflatten(1, (2, 2)), own.LipschitzAvgPool3d(None)),
        "MaxMin": own.MaxMin(),
        "Monotone": nn.Sequential(nn.Flatten(), own.Monotone(own.AOLLinear(64, 6), signs=[1, 0, -1, 1] * 16)),
        "NActivation": own.NActivation(4, init=(-0.1, 0.3)),
        "Normalize": own.Normalize((0.5,) * 4, (0.25, 0.5, 0.75, 1.0)),
        "PadChannels": own.PadChannels(6),
    }


class Branches(nn.Module):
    """Apply each layer to the image itself and concatenate the outputs."""

    def __init__(self, branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return torch.cat([branch(x).flatten(1) for branch in self.branches], 1)


def test_all_layers_are_here():
    classes = {n for n, v in vars(onelip.nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    assert classes - {"LipschitzModule"} == {name.split()[0] for name in layers()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "all.onnx"
    named = layers()
    report = export_onnx(Branches(named.values()), path, SHAPE, dtype=torch.float64)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.rand(5, *SHAPE, dtype=torch.float64)
    (got,) = session.run(["logits"], {"image": images.numpy()})
    parts, start = {}, 0
    for name, layer in named.items():
        expected = onelip.bake(layer).double().eval()(images).detach().flatten(1)
        stop = start + expected.shape[1]
        parts[name] = torch.from_numpy(got[:, start:stop]), expected
        start = stop
    assert start == got.shape[1]
    return report, parts


@pytest.mark.parametrize("name", layers())
def test_layer_in_float64(exported, name):
    got, expected = exported[1][name]
    assert got.dtype == torch.float64
    # At most 65 products per sum, of numbers up to 1: the difference is float64 rounding, not float32.
    assert float((got - expected).abs().max()) <= 65 * U * max(1.0, float(expected.abs().max()))


def test_report(exported):
    report, _ = exported
    assert report.difference <= report.bound < 1e-10
