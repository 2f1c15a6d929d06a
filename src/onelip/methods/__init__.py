"""Methods that give layers a Lipschitz constant: one function and, where it parametrizes a weight, one class for each.

**Convention.** Each function takes the layer as its first argument `module` and returns the layer to use in its place;
options are keywords. Functions that parametrize a weight change the layer in place, return the same module, and take
the name of the weight as second argument, `name="weight"`, like `torch.nn.utils.parametrizations.spectral_norm`. The
methods of `fourier` and `residual`, and SOC, compute something else than a convolution with a weight: they read the
`weight` and the `bias` of the layer and return a new module (the layer itself, changed in place, where a parametrized
weight suffices). So write `layer = cayley(layer, input_size=32)`, always with the assignment. Layers and settings for
which no bound is known raise `onelip.UnsupportedLayer`.

**Unknown constants** are None: `Method.guarantee` and `LipschitzParametrization.constant_in` are None if no constant is
known by construction, and so is the `lipschitz_constant` of a module. Its method `bound()` also returns the reason,
which `onelip.summary` and `onelip.audit` report.

- `onelip.constrain(model, method)` applies a method to all layers of a model.
- `method`: the record `Method`; `registry`: `register_method`, `get_method`, `list_methods`; `describe`: texts and
  tables for `onelip methods` and docs/methods.md.
- `onelip.nn.aol`: AOL. `orthogonal`: orthogonal weights and kernels. `fourier`: circular convolutions by their matrices
  at each frequency. `residual`: residual layers. `norms`: norms and projections. `free_weights`: methods that only act
  on the loss.
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
