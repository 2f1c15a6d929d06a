"""Singular values of layers: each way of computing them, and their summary."""

import pytest
import torch
from torch import nn

from onelip.core.bake import bake
from onelip.gram import jacobian
from onelip.methods.residual import sll
from onelip.testing import exact_jacobian


@pytest.mark.parametrize(("kernel", "settings"), [(3, {}), (2, {}), (3, {"dilation": 2}), (3, {"groups": 2})])
def test_fourier_gives_the_singular_values_of_circular_convolutions(kernel, settings):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 2, kernel, padding="same", padding_mode="circular", **settings).double()
    how, values, shares = jacobian._fourier(layer, (6, 5)) or pytest.fail("refused")
    wanted = torch.linalg.svdvals(exact_jacobian(layer, (4, 6, 5)))
    found = values.flatten().repeat_interleave(shares.long())
    assert how == "Fourier"
    assert torch.allclose(found.sort(descending=True)[0], wanted, atol=1e-12)


def test_windows_that_tile_the_image_have_one_matrix():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 2, stride=2).double()
    _, values, _ = jacobian._fourier(layer, (4, 4)) or pytest.fail("refused")
    wanted = torch.linalg.svdvals(exact_jacobian(layer, (2, 4, 4)))
    assert torch.allclose(values.flatten().repeat(4).sort(descending=True)[0], wanted, atol=1e-12)
    assert jacobian._fourier(nn.Conv2d(2, 3, 3, stride=2), (4, 4)) is None


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_lanczos_finds_the_values_of_small_layers(shape):
    torch.manual_seed(0)
    layer = nn.Linear(*shape).double()
    nodes, weights = jacobian._lanczos(layer, torch.zeros(1, shape[0]).double(), shape[1] < shape[0])
    assert float(weights.sum()) == pytest.approx(jacobian._LANCZOS_VECTORS)
    wanted = torch.linalg.svdvals(layer.weight).detach()
    for part in nodes.reshape(jacobian._LANCZOS_VECTORS, -1):
        assert torch.allclose(part.sort(descending=True)[0], wanted, atol=1e-7)


def test_lanczos_differentiates_layers_that_are_not_linear(monkeypatch):
    torch.manual_seed(0)
    layer = bake(sll(nn.Linear(6, 6))).double().requires_grad_(False)
    x = torch.randn(1, 6).double()
    exact = jacobian.spectrum_of_layer("", layer, x)
    monkeypatch.setattr(jacobian, "_ENTRIES", 0)
    found = jacobian.spectrum_of_layer("", layer, x)
    assert (exact.how, found.how) == ("Jacobian", "Lanczos (estimate)")
    assert float(found.values.max()) == pytest.approx(float(exact.values.max()), abs=1e-7)
    assert float(found.values.min()) == pytest.approx(float(exact.values.min()), abs=1e-7)


def test_spectra_count_layers_alike_and_leave_the_network_alone():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 8))
    nn.init.dirac_(model[0].weight)
    nn.init.zeros_(model[3].weight)
    found = jacobian.spectrum_of_network(model, torch.rand(1, 1, 2, 2))
    assert [(layer["layer"], layer["how"]) for layer in found["layers"]] == [("0", "Jacobian"), ("3", "matrix")]
    assert (found["largest"], found["smallest"], found["mean"]) == (1.0, 0.0, 0.5)
    assert found["mean_distance_from_1"] == 0.5
    shares = found["histogram"]["shares"]
    assert sum(shares) + found["histogram"]["above"] == pytest.approx(1)
    edges = found["histogram"]["edges"]
    (place,) = [i for i in range(len(shares)) if edges[i] < 1 < edges[i + 1]]
    assert shares[place] == shares[0] == pytest.approx(0.5)
    assert model[0].weight.dtype == torch.float32
    assert not model[0]._forward_pre_hooks


def test_layers_of_other_kinds_are_looked_at_as_a_whole():
    network = bake(nn.Sequential(sll(nn.Conv2d(2, 2, 3, padding=1))))
    found = jacobian.spectrum_of_network(network, torch.rand(1, 2, 4, 4))
    assert [layer["kind"] for layer in found["layers"]] == ["ConvexPotential"]
    assert found["largest"] <= 1 + 1e-6


def test_values_above_the_histogram_are_counted():
    found = jacobian.summarise(torch.tensor([0.1, 7.0]), torch.tensor([3.0, 1.0]))
    assert found["histogram"]["above"] == 0.25
    assert found["quantiles"] == {
        **dict.fromkeys(("0", "0.05", "0.25", "0.5", "0.75"), pytest.approx(0.1)),
        "0.95": 7.0,
        "1": 7.0,
    }
