"""Certified programs against exact arithmetic: all numbers of all nodes, and a network with every operation."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from _exact_network import exact, run_exactly, squared_norm
from torch import nn

from onelip.bounds import bound_weight
from onelip.graph.kinds import Affine, propagate
from onelip.nn import (
    Abs,
    ConcatenationPool2d,
    FirstChannels,
    GroupSort,
    LipschitzAvgPool2d,
    MaxMin,
    PadChannels,
)
from onelip.nn.channels import Normalize


def states_of(program):
    states = []
    for node in program.nodes:
        if isinstance(node, Affine):
            bound = bound_weight(node.weight.values, node.geometry, effort="quick")
            node = replace(node, square=Fraction(bound.value) ** 2)
        states.append(propagate(node, *(states[i] for i in node.inputs)))
    return states


def check(program, pixels):
    """All three numbers of all nodes, at images k / 255 and between them."""
    states = states_of(program)
    images = [np.array([Fraction(int(k), 255) for k in p.ravel()], dtype=object).reshape(p.shape) for p in pixels]
    real = [run_exactly(program, image) for image in images]
    rounded = torch.tensor(np.array([p / 255 for p in pixels]), dtype=torch.float64)
    computed = program.run(rounded)
    for index, (node, state) in enumerate(zip(program.nodes, states, strict=True)):
        lipschitz, norm, error = state.fractions
        for i in range(len(images)):
            assert squared_norm(real[i][index]) <= norm**2, node
            assert squared_norm(exact(computed[index][i]) - real[i][index]) <= error**2, node
        apart = squared_norm(real[0][index] - real[1][index])
        assert apart <= lipschitz**2 * squared_norm(images[0] - images[1]), node
    return states


class Everything(nn.Module):
    """One of each operation that can be certified, by layers and by calls."""

    def __init__(self):
        super().__init__()
        self.normalize = Normalize((0.4, 0.5), (0.25, 0.2))
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", dilation=1)
        self.maxmin = MaxMin()
        self.grouped = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.strided = nn.Conv2d(4, 6, 2, stride=2, bias=False)
        self.sort = GroupSort(3)
        self.average = LipschitzAvgPool2d(2, 1)
        self.patches = ConcatenationPool2d(2)
        self.abs = Abs()
        self.wider = PadChannels(26)
        self.kernel = nn.Parameter(torch.randn(4, 26, 1, 1) / 8)
        self.last = nn.Linear(4, 5)
        self.choose = FirstChannels(3)

    def forward(self, x):
        x = self.maxmin(self.first(self.normalize(x)))  # (4, 6, 6)
        x = torch.relu(x + 0.5 * self.grouped(x))
        x = self.pool(torch.cat([x, -x], 1))  # (8, 3, 3)
        x = nn.functional.dropout(self.up(x), training=self.training)  # (4, 6, 6)
        x = self.sort(self.strided(x))  # (6, 3, 3)
        x = self.average(x)  # (6, 2, 2)
        x = self.wider(self.abs(self.patches(x)))  # (26, 1, 1)
        x = nn.functional.conv2d(x, self.kernel)[:, :4]
        return self.choose(self.last(x.mean((2, 3), keepdim=True).flatten(1)))
