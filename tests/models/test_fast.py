"""The fast networks: any image size, baked to plain layers, proved, certified with a file, exported."""

import numpy as np
import pytest
import torch
from torch import nn

import onelip
from onelip.certification.certificate import WeightFile, write_certificate
from onelip.checker import check
from onelip.export.files import save_plain
from onelip.models import create_model
from onelip.nn import BatchCentering

OPTIONS = {"widths": (8, 8, 12, 12), "depths": (2, 1, 1, 1)}


TILED = {"overlap": 0}


def trained(**options):
    """Some steps away from the initialisation, in eval mode."""
    torch.manual_seed(0)
    model = create_model("aol-fast-small", **{**OPTIONS, **options})
    optimizer = onelip.optim.LipschitzMuon(model, lr=0.1, products="float32")
    for _ in range(5):
        x = torch.rand(16, 3, 32, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16) % 10).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("size", [1, 2, 7, 8, (5, 20), 28, 32, 33, (64, 48)])
@pytest.mark.parametrize(("channels", "overlap"), [(1, 0), (3, 0), (3, 2)])
def test_any_image_size(size, channels, overlap):
    options = {**OPTIONS, "image_size": size, "in_channels": channels, "overlap": overlap}
    model = create_model("aol-fast-small", num_classes=7, **options).eval()
    height, width = size if isinstance(size, tuple) else (size, size)
    x = torch.rand(2, channels, height, width, requires_grad=True)
    y = model(x)
    assert y.shape == (2, 7)
    # Every pixel is read, also those that odd sizes leave at the border.
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.abs().amax(1).gt(0).double().mean() > 0.9
    assert gradient[..., -1, :].any()
    assert gradient[..., :, -1].any()


def test_sizes_of_the_family():
    for name, count in (("small", 436_170), ("medium", 592_586), ("large", 754_954)):
        model = create_model(f"aol-fast-{name}")
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count


def test_centring_becomes_a_part_of_the_bias():
    model = trained()
    plain = onelip.bake(model).eval()
    x = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(plain(x), model(x), atol=1e-6, rtol=1e-5)
    assert not any(isinstance(module, BatchCentering) for module in plain.modules())
    assert torch.equal(plain.conv1.weight, model.conv1.weight)
    torch.testing.assert_close(plain.conv1.bias, model.conv1.bias - model.conv1_centre.running_mean)
    assert model.conv1_centre.running_mean.abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, TILED])
def test_proved_certified_and_checked(tmp_path, options):
    plain = onelip.bake(trained(**options)).double().eval()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    assert onelip.audit(plain, images[:1].double() / 255).upper <= 1 + 1e-6
    found = onelip.certify(plain, images, exact=True)
    assert found.constant <= 1 + 1e-6
    save_plain(plain, tmp_path / "plain.safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    weights = WeightFile(tmp_path / "plain.safetensors")
    write_certificate(tmp_path / "c.json", found, images, weights, source="random", images_file="images.npy")
    verdict = check(tmp_path / "c.json", images=tmp_path / "images.npy")
    assert verdict["certified"] == int((found.radii > 0).sum()) > 0
    assert verdict["lipschitz"] == found.constant


def test_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    model = trained()
    onelip.export_onnx(model, tmp_path / "net.onnx", (3, 32, 32), dtype=torch.float64)
    assert (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize("method", ["bjorck", "cayley", "cpl", "spectral-norm", None, "soc", "lln"])
def test_other_methods(method):
    if method == "lln":
        model = create_model("aol-fast-small", method_options={"normalise_last_layer": True}, **OPTIONS)
    else:
        model = create_model("aol-fast-small", method=method, **OPTIONS)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (8,), "depths": (1,)}, "two or more widths"),
        ({"widths": (8, 8), "depths": (1,)}, "as many depths"),
        ({"widths": (7, 8), "depths": (1, 1)}, "expected width to be even"),
        ({"depths": (0, 1, 1, 1)}, "depth"),
        ({"patch": 0}, "patch"),
        ({"overlap": 3}, "even overlap"),
        ({"overlap": 6}, "overlap"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        create_model("aol-fast-small", **{**OPTIONS, **options})


def test_lapped_patches_keep_the_norm_and_the_fixed_weights():
    model = trained()
    x = torch.zeros(1, 3, 32, 32)
    x[..., 1:-1, 1:-1] = torch.randn(3, 30, 30)
    assert float(model.patches(x).norm() / x.norm()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(model.patches.weight, onelip.nn.lapped_patches(3, 4, 2).weight)
    # Windows of 6 x 6 pixels at a distance of 4: output 0 of a channel is the upper left pixel of each.
    rows = torch.arange(32.0).expand(32, 32).T
    assert model.patches(rows.expand(1, 3, 32, 32))[0, 0, :, 1].tolist() == pytest.approx(
        [0.0, *((4.0 * p - 1) / 2 for p in range(1, 8))], rel=1e-6
    )


def test_tiles_as_matrices_are_the_convolution():
    # In training, with channels last, convolutions whose windows tile the image are products of matrices.
    torch.manual_seed(0)
    model = create_model("aol-fast-medium", **OPTIONS).train()
    x, learned = torch.rand(4, 3, 32, 32), [p for p in model.parameters() if p.requires_grad]
    found = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=layout)
        y = model(x.to(memory_format=layout))
        found[layout] = (y.detach(), *torch.autograd.grad(y.square().sum(), learned))
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_mirror_average(tmp_path):
    """In training the network itself; else the mean over mirrored images, with the same constant, up to the file."""
    model = trained(mirror=True)
    x = torch.rand(3, 3, 32, 32)
    expected = 0.5 * (model.network(x) + model.network(x.flip(-1)))
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert torch.allclose(model(x), model(x.flip(-1)), atol=1e-6)
    assert onelip.summary(model).constant == onelip.summary(model.network).constant
    plain = onelip.bake(model).double()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    found = onelip.certify(plain, images, exact=True)
    assert 0.5 < found.constant <= 1 + 1e-6
    assert torch.equal(found.classes, plain(images.double() / 255).argmax(1))
    save_plain(model, tmp_path / "plain.safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    files = WeightFile(tmp_path / "plain.safetensors")
    write_certificate(tmp_path / "cert.json", found, images, files, source="", images_file="images.npy")
    assert check(tmp_path / "cert.json")["lipschitz"] == found.constant
    model.train()
    hooked = []
    model.network.register_forward_hook(lambda *_: hooked.append(1))
    model(x)
    assert len(hooked) == 1


def test_mirror_average_of_a_network_without_a_bound():
    layer = onelip.nn.MirrorAverage(nn.Bilinear(2, 2, 2))
    assert layer.lipschitz_constant is None
    assert "no bound of its network" in layer.bound().why
