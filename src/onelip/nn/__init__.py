"""Layers with a proved Lipschitz constant: AOL drop-ins for torch.nn, activations, pooling, centering, residuals."""

from onelip.core.batch_norm import ChannelAffine
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.nn import init
from onelip.nn.activations import Abs, GroupSort, Householder, MaxMin, NActivation
from onelip.nn.aol import (
    AOLConv1d,
    AOLConv2d,
    AOLConv3d,
    AOLConvTranspose1d,
    AOLConvTranspose2d,
    AOLConvTranspose3d,
    AOLLinear,
)
from onelip.nn.channels import BatchCentering, FirstChannels, LayerCentering, Normalize, PadChannels
from onelip.nn.pooling import (
    ConcatenationPool1d,
    ConcatenationPool2d,
    ConcatenationPool3d,
    L2Pool1d,
    L2Pool2d,
    L2Pool3d,
    LipschitzAvgPool1d,
    LipschitzAvgPool2d,
    LipschitzAvgPool3d,
    lapped_patches,
)
from onelip.nn.residual import ConvexResidual, Monotone

__all__ = [
    "AOLConv1d",
    "AOLConv2d",
    "AOLConv3d",
    "AOLConvTranspose1d",
    "AOLConvTranspose2d",
    "AOLConvTranspose3d",
    "AOLLinear",
    "Abs",
    "BatchCentering",
    "Bound",
    "ChannelAffine",
    "ConcatenationPool1d",
    "ConcatenationPool2d",
    "ConcatenationPool3d",
    "ConvexResidual",
    "FirstChannels",
    "GroupSort",
    "Householder",
    "L2Pool1d",
    "L2Pool2d",
    "L2Pool3d",
    "LayerCentering",
    "LipschitzAvgPool1d",
    "LipschitzAvgPool2d",
    "LipschitzAvgPool3d",
    "LipschitzModule",
    "MaxMin",
    "Monotone",
    "NActivation",
    "Normalize",
    "PadChannels",
    "init",
    "lapped_patches",
]
