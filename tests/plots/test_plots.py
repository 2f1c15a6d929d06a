"""Figures of runs, certifications, audits and attacks: what they draw, and their form as SVG."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from _runs import SMALL
from torch import nn

import onelip
from onelip import plots
from onelip.core.errors import UnsupportedLayer
from onelip.data import load_data
from onelip.gram.jacobian import spectrum_of_network
from onelip.plots.canvas import PALETTE, to_svg
from onelip.plots.pictures import _interest


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    onelip.train(SMALL.replace(threads=1), path)
    return path


@pytest.fixture(scope="module")
def found(run):
    """A certification of the first test images."""
    data = load_data("digits")
    certification = onelip.load_run(run).predict(data.test_images[:40]).certification
    return replace(certification, labels=data.test_labels[:40])


@pytest.fixture(scope="module")
def attack(run, found):
    network = onelip.load_run(run).plain.double()
    images = load_data("digits").test_images[:6]
    return onelip.attack(network, images, found.classes[:6], radii=found.radii[:6], clip=True, steps=4, restarts=0)


def texts(figure):
    """All words of a figure."""
    figure.draw_without_rendering()
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def line(figure, label):
    (one,) = [one for axes in figure.axes for one in axes.get_lines() if one.get_label() == label]
    return one.get_xdata(), one.get_ydata()


def test_the_curve_is_the_certified_accuracy(found, attack):
    figure = plots.certified_accuracy(found, attacks=attack, paper={"published": {0.0: 0.7, 1.0: 0.2}})
    radii, shares = line(figure, "certified (sound)")
    assert shares[0] == pytest.approx(100 * found.accuracy())
    for place in (20, 100):
        assert shares[place] == pytest.approx(100 * next(iter(found.cra([radii[place]]).values())))
    _, upper = line(figure, "attack: upper bound, first 6 images")
    _, lower = line(figure, "certified, the same images")
    assert all(a >= b for a, b in zip(upper, lower, strict=True))
    assert list(line(figure, "published")[1]) == [70.0, 20.0]
    assert "36/255" in texts(figure)


def test_several_curves_are_overlaid(run, found):
    figure = plots.certified_accuracy({"one": found, "two": run})
    data = load_data("digits")
    right = onelip.load_run(run).predict(data.test_images).certification.classes == data.test_labels
    assert line(figure, "two")[1][0] == pytest.approx(100 * float(right.double().mean()))  # all test images
    assert line(figure, "one")[1][0] == pytest.approx(100 * found.accuracy())


def test_labels_are_needed(found):
    with pytest.raises(ValueError, match="expected a certification with labels"):
        plots.certified_accuracy(replace(found, labels=None))
    with pytest.raises(ValueError, match="expected a certification with labels"):
        plots.confusion(replace(found, labels=None))


def test_training_curves(run):
    figure = plots.training_curves(run)
    epochs, accuracy = line(figure, "accuracy")
    log = onelip.training.read_log(onelip.training.RunDirectory(run))
    assert list(epochs) == [1, 2, 3]
    assert list(accuracy) == pytest.approx([100 * one["accuracy"] for one in log])
    both = plots.training_curves({"one": run, "two": log})
    assert "two" in texts(both)
    gap = [{**log[0], "cra": None, "loss": None}, *log[1:]]
    assert torch.tensor(line(plots.training_curves(gap), "CRA 36/255")[1]).isnan().tolist() == [True, False, False]
    with pytest.raises(ValueError, match="no epoch is finished"):
        plots.training_curves([])


def test_radii_and_decisions(found):
    names = [f"digit {k}" for k in range(10)]
    assert "digit 3" in texts(plots.radii(found, names))
    figure = plots.confusion(found, names)
    (image,) = figure.axes[0].get_images()
    right = torch.tensor([float((found.classes[found.labels == k] == k).double().mean()) for k in range(10)])
    shown = torch.tensor(image.get_array()[..., 3]).diagonal()  # opacity: 0.6 sqrt(share)
    torch.testing.assert_close((shown / 0.6) ** 2, right.double(), rtol=0, atol=0.06)


def test_constant_networks_have_infinite_radii(found):
    without = replace(found, radii=torch.full_like(found.radii, torch.inf))
    assert "inf" not in texts(plots.radii(without))
    _, shares = line(plots.certified_accuracy(without), "certified (sound)")
    accuracy = 100 * float((found.classes == found.labels).double().mean())
    assert list(shares) == pytest.approx([accuracy] * len(shares))


def test_singular_values_and_proved_constants(run):
    loaded = onelip.load_run(run)
    proved = onelip.audit(loaded.plain, torch.rand(1, 1, 8, 8), lower=False)
    spectrum = spectrum_of_network(loaded.plain, torch.rand(1, 1, 8, 8))
    words = texts(plots.singular_values(spectrum, proved))
    for layer in spectrum["layers"]:
        assert layer["layer"] in words
    assert words.count("≤") == len(spectrum["layers"])
    assert texts(plots.singular_values(run)).count("≤") == len(spectrum["layers"])
    assert "one" in texts(plots.spectra({"one": spectrum, "two": spectrum}))


def test_crops_of_jtj(run):
    layer = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight)
    figure = plots.jtj(layer, (8, 8))
    one, pixel, neighbour = (torch.tensor(axes.get_images()[0].get_array()[..., 3]) for axes in figure.axes)
    torch.testing.assert_close(one, torch.eye(27, dtype=torch.float64))
    torch.testing.assert_close(pixel, torch.eye(3, dtype=torch.float64))
    assert not neighbour.any()
    assert "0 to 0" in texts(figure)
    assert "first 4 inputs" in texts(plots.jtj(nn.Linear(4, 2)))
    assert "Conv2d" in texts(plots.jtj(run))
    assert _interest(nn.Conv2d(3, 108, 6, stride=4, groups=3)) < _interest(nn.Conv2d(108, 64, 1))  # fixed windows
    name = next(name for name, module in onelip.load_run(run).plain.named_modules() if isinstance(module, nn.Linear))
    assert name in texts(plots.jtj(run, layer=name))
    with pytest.raises(ValueError, match="expected the name of a linear layer, got 'x'"):
        plots.jtj(run, layer="x")
    with pytest.raises(UnsupportedLayer):
        plots.jtj(nn.Softmax(), 3)


def test_pictures(found, attack):
    images = load_data("digits").test_images[:40]
    words = texts(plots.robust_images(found, images, count=3))
    assert f"{float(found.radii.max()):.2g}" in words
    assert f"{float(found.radii.min()):.2g}" in words
    with pytest.raises(ValueError, match="pass images="):
        plots.robust_images(found)
    figure = plots.adversarial_images(attack, [f"digit {k}" for k in range(10)], count=4)
    assert "certified" in texts(figure)
    assert len([axes for axes in figure.axes if axes.get_images()]) == 12
    nothing = replace(attack, squares=(None,) * 6)
    with pytest.raises(ValueError, match="found no image"):
        plots.adversarial_images(nothing)


def test_svg_has_no_ids_twice_no_colours_and_no_addresses(found):
    figure = plots.certified_accuracy(found)
    svg = to_svg(figure, 'a <"label">', "one")
    assert 'aria-label="a &lt;&quot;label&quot;&gt;"' in svg
    assert not any(light in svg for light, _ in PALETTE.values())
    assert "var(--series-0)" in svg
    assert "http" not in svg
    assert "font-family" not in svg
    other = to_svg(figure, "a", "two")
    ids = re.findall(r'\bid="([^"]+)"', svg + other)
    assert len(ids) == len(set(ids)) > 0
    assert svg == to_svg(figure, 'a <"label">', "one")  # the same each time


def test_without_matplotlib_the_error_is_one_line(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^onelip\.plots needs matplotlib: pip install 'onelip\[plots\]'$"):
        plots.certified_accuracy(found)
