"""Classifiers for the tests of attacks."""

import torch
from torch import nn


def linear(dims: int, classes: int, seed: int = 0) -> nn.Linear:
    """A random linear classifier in float64."""
    torch.manual_seed(seed)
    return nn.Linear(dims, classes).double().eval()
