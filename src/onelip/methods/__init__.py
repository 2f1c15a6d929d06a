"""Methods that give layers a Lipschitz constant: a function and, where it parametrizes a weight, a class for each.

`onelip.constrain(model, method)` applies one to a whole model; the functions here apply it to a layer. `onelip methods`
lists what each proves and costs, docs/methods.md compares them.
"""

from onelip.methods.constrain import constrain as constrain
from onelip.methods.fourier.bro import BROMap as BROMap, bro as bro
from onelip.methods.fourier.cayley import CayleyMap as CayleyMap, cayley as cayley
from onelip.methods.fourier.eco import ECOMap as ECOMap, eco as eco
from onelip.methods.fourier.layer import FourierConv as FourierConv
from onelip.methods.fourier.lot import LOTMap as LOTMap, lot as lot
from onelip.methods.fourier.sandwich import Sandwich as Sandwich, sandwich as sandwich
from onelip.methods.free_weights import Tracked as Tracked, track as track
from onelip.methods.method import Method as Method, PaperRow as PaperRow
from onelip.methods.norms.clipping import Clipped as Clipped, clipping as clipping
from onelip.methods.norms.last_layer import UnitRows as UnitRows, lln as lln
from onelip.methods.norms.lcc import SpectralBall as SpectralBall, SumBall as SumBall, lcc as lcc
from onelip.methods.norms.parseval import Parseval as Parseval, parseval as parseval
from onelip.methods.norms.projection import (
    Projection as Projection,
    project as project,
    project_after as project_after,
)
from onelip.methods.norms.spectral_norm import (
    ReshapedSpectralNorm as ReshapedSpectralNorm,
    SpectralNorm as SpectralNorm,
    spectral_norm as spectral_norm,
    spectral_norm_reshaped as spectral_norm_reshaped,
)
from onelip.methods.orthogonal.aoc import AOC as AOC, aoc as aoc
from onelip.methods.orthogonal.bcop import BCOP as BCOP, bcop as bcop
from onelip.methods.orthogonal.bjorck import Bjorck as Bjorck, bjorck as bjorck
from onelip.methods.orthogonal.cholesky import Cholesky as Cholesky, cholesky as cholesky
from onelip.methods.orthogonal.oni import ONI as ONI, oni as oni
from onelip.methods.orthogonal.soc import SOC as SOC, SkewExponential as SkewExponential, soc as soc
from onelip.methods.registry import (
    get_method as get_method,
    list_methods as list_methods,
    register_method as register_method,
)
from onelip.methods.residual.cpl import CPLWeight as CPLWeight, cpl as cpl
from onelip.methods.residual.liresnet import LinearResidual as LinearResidual, liresnet as liresnet
from onelip.methods.residual.potential import ConvexPotential as ConvexPotential
from onelip.methods.residual.sll import SLLWeight as SLLWeight, sll as sll
from onelip.nn.aol import AOL as AOL, aol as aol
