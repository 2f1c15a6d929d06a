"""What the tests of orthogonal layers share."""

import torch

from onelip.core.parametrization import original_of
from onelip.testing.norms import exact_jacobian

DOUBLE = {"dtype": torch.float64}
CIRCULAR = {"padding_mode": "circular", **DOUBLE}


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def values(layer, *size):
    """Singular values of a layer."""
    channels = layer.in_channels if hasattr(layer, "in_channels") else layer.in_features
    return torch.linalg.svdvals(exact_jacobian(layer, (channels, *size)))


def randomised(layer):
    with torch.no_grad():
        original_of(layer).normal_()
    return layer
