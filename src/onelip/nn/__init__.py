"""Layers with a proved Lipschitz constant: AOL drop-ins for torch.nn, activations, pooling, centering, residuals."""

from onelip.core.channel_affine import ChannelAffine
from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn import init
from onelip.nn.absolute import Abs
from onelip.nn.aol import (
    AOLConv1d,
    AOLConv2d,
    AOLConv3d,
    AOLConvTranspose1d,
    AOLConvTranspose2d,
    AOLConvTranspose3d,
    AOLLinear,
)
from onelip.nn.centering import BatchCentering, LayerCentering
from onelip.nn.channels import FirstChannels, PadChannels
from onelip.nn.groupsort import GroupSort
from onelip.nn.householder import Householder
from onelip.nn.lapped import lapped_patches
from onelip.nn.maxmin import MaxMin
from onelip.nn.n_activation import NActivation
from onelip.nn.normalize import Normalize
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
)
from onelip.nn.residual import ConvexResidual

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
    "NActivation",
    "Normalize",
    "PadChannels",
    "UnknownLipschitzConstant",
    "init",
    "lapped_patches",
]
