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
- `registry`: the record `Method`, and `register_method`, `get_method`, `list_methods`. `describe`: texts and tables for
  `onelip methods` and docs/methods.md.
- `onelip.nn.aol`: AOL. `orthogonal`: orthogonal weights and kernels. `fourier`: circular convolutions by their matrices
  at each frequency. `residual`: residual layers. `power_iteration`: spectral normalisation. `projections`: projections
  after the step of the optimizer. `last_layer`: rows of norm 1. `free_weights`: methods that only act on the loss.
  `sum_norm`: norms other than L2. `numerics` and `same_size`: arithmetic and convolutions that several methods share.
"""

from onelip.core.parametrization import LipschitzParametrization as LipschitzParametrization
from onelip.methods.constrain import constrain as constrain
from onelip.methods.fourier.layer import FourierConv as FourierConv
from onelip.methods.fourier.maps import (
    BROMap as BROMap,
    CayleyMap as CayleyMap,
    ECOMap as ECOMap,
    LOTMap as LOTMap,
    bro as bro,
    cayley as cayley,
    eco as eco,
    lot as lot,
)
from onelip.methods.fourier.sandwich import Sandwich as Sandwich, sandwich as sandwich
from onelip.methods.free_weights import Tracked as Tracked, track as track
from onelip.methods.last_layer import UnitRows as UnitRows, lln as lln
from onelip.methods.orthogonal.block_kernels import AOC as AOC, BCOP as BCOP, aoc as aoc, bcop as bcop
from onelip.methods.orthogonal.reshaped import (
    ONI as ONI,
    Bjorck as Bjorck,
    Cholesky as Cholesky,
    bjorck as bjorck,
    cholesky as cholesky,
    oni as oni,
)
from onelip.methods.orthogonal.soc import SOC as SOC, SkewExponential as SkewExponential, soc as soc
from onelip.methods.power_iteration import (
    ReshapedSpectralNorm as ReshapedSpectralNorm,
    SpectralNorm as SpectralNorm,
    spectral_norm as spectral_norm,
    spectral_norm_reshaped as spectral_norm_reshaped,
)
from onelip.methods.projections import (
    Clipped as Clipped,
    Parseval as Parseval,
    Projection as Projection,
    SpectralBall as SpectralBall,
    SumBall as SumBall,
    clipping as clipping,
    lcc as lcc,
    limit_batch_norm as limit_batch_norm,
    parseval as parseval,
    project as project,
    project_after as project_after,
)
from onelip.methods.registry import (
    Method as Method,
    PaperRow as PaperRow,
    attach_new as attach_new,
    get_method as get_method,
    list_methods as list_methods,
    register_method as register_method,
)
from onelip.methods.residual import (
    ConvexPotential as ConvexPotential,
    CPLWeight as CPLWeight,
    LinearResidual as LinearResidual,
    SLLWeight as SLLWeight,
    cpl as cpl,
    liresnet as liresnet,
    sll as sll,
)
from onelip.methods.sum_norm import SumNorm as SumNorm, sum_norm as sum_norm
from onelip.nn.aol import AOL as AOL, aol as aol
