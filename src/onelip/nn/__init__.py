"""Layers with a proved Lipschitz constant: AOL drop-ins for torch.nn, activations, pooling, centering, residuals."""

from onelip.core.batch_norm import ChannelAffine as ChannelAffine
from onelip.core.lipschitz_module import Bound as Bound, LipschitzModule as LipschitzModule
from onelip.nn import init as init
from onelip.nn.activations import (
    Abs as Abs,
    GroupSort as GroupSort,
    Householder as Householder,
    MaxMin as MaxMin,
    NActivation as NActivation,
)
from onelip.nn.aol import (
    AOLConv1d as AOLConv1d,
    AOLConv2d as AOLConv2d,
    AOLConv3d as AOLConv3d,
    AOLConvTranspose1d as AOLConvTranspose1d,
    AOLConvTranspose2d as AOLConvTranspose2d,
    AOLConvTranspose3d as AOLConvTranspose3d,
    AOLLinear as AOLLinear,
)
from onelip.nn.channels import (
    BatchCentering as BatchCentering,
    FirstChannels as FirstChannels,
    LayerCentering as LayerCentering,
    Normalize as Normalize,
    PadChannels as PadChannels,
)
from onelip.nn.pooling import (
    ConcatenationPool1d as ConcatenationPool1d,
    ConcatenationPool2d as ConcatenationPool2d,
    ConcatenationPool3d as ConcatenationPool3d,
    L2Pool1d as L2Pool1d,
    L2Pool2d as L2Pool2d,
    L2Pool3d as L2Pool3d,
    LipschitzAvgPool1d as LipschitzAvgPool1d,
    LipschitzAvgPool2d as LipschitzAvgPool2d,
    LipschitzAvgPool3d as LipschitzAvgPool3d,
    lapped_patches as lapped_patches,
)
from onelip.nn.residual import (
    ConvexResidual as ConvexResidual,
    MirrorAverage as MirrorAverage,
    Monotone as Monotone,
)
