"""From a parametrized model to a plain torch one."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.batch_norm import fold as fold_batch_norms, is_foldable
from onelip.core.errors import NonFiniteWeight
from onelip.core.state import State, unchanged

Model = TypeVar("Model", bound=nn.Module)


def bake(model: Model, *, forms: bool = True, fold: bool = True) -> Model:
    """Return a plain torch copy of the model that computes the same function; the model itself is left as it is.

    Every parametrized layer (AOL, or any other use of `torch.nn.utils.parametrize`) becomes the torch layer it was
    made from, with the weight it has in eval mode; everything else is copied. Prediction then costs what the plain
    network costs, and the state dict has the plain keys. A layer may also say itself what plain layers it is, by a
    method `plain_form`: those of the Fourier domain become convolutions, blocks with relu two layers with MaxMin. These
    have a proof and an ONNX file instead of speed: an FFT is faster than sums over all pixels.

    Batch normalisation with stored statistics is folded, as it is in eval mode: into the linear layer or convolution
    before it where the forward pass shows that nothing else reads that layer, else into an `onelip.nn.ChannelAffine`.
    The folded numbers are computed in float64 and rounded to the type of the model.

    Args:
        model: left as it is.
        forms: False keeps such layers as they compute in training, with fixed weights: faster, and nothing else.
        fold: False keeps batch normalisation as it is.

    Raises:
        NonFiniteWeight: if a parameter of the result is not finite; the message names it.
        ChangingModel: if computing a weight changes the state of its parametrization in eval mode: the model is another
            function at every call, and no plain copy computes the same.

    Examples:
        >>> import onelip
        >>> list(bake(nn.Sequential(onelip.nn.AOLLinear(4, 4))).state_dict())
        ['0.weight', '0.bias']
    """
    if is_plain(model, fold=fold):
        plain = copy.deepcopy(model)
    else:
        with unchanged(model):
            plain = _bake(copy.deepcopy(model), forms, fold)
    _check_finite(plain)
    return plain


def is_plain(model: nn.Module, *, fold: bool = True) -> bool:
    """Whether `bake` would only copy the model: no module is parametrized, no batch normalisation is left to fold.

    Examples:
        >>> is_plain(nn.Linear(2, 2)), is_plain(nn.BatchNorm1d(2)), is_plain(nn.BatchNorm1d(2), fold=False)
        (True, False, True)
    """
    return not any(parametrize.is_parametrized(m) or (fold and is_foldable(m)) for m in model.modules())


def plain_of(model: Model, *, fold: bool = True) -> Model:
    """The model itself if it is plain, else `bake(model)`: for readers, which do not change what they get.

    Raises:
        NonFiniteWeight: if a weight is not finite.
    """
    if not is_plain(model, fold=fold):
        return bake(model, fold=fold)
    _check_finite(model)
    return model


def _bake(model: Model, forms: bool, fold: bool) -> Model:
    """The plain copy of a model that may be changed: weights are computed by it, and a forward may keep notes."""
    # deepcopy + remove_parametrizations would take the property off the class that the copy shares with the original,
    # and so destroy the original. Instead deepcopy is told what stands for each parametrized layer: an empty plain one,
    # filled right after. It keeps shared modules shared, and follows references from wherever they come.
    state = State(model)
    layers = [module for module in model.modules() if parametrize.is_parametrized(module)]
    formed = {id(layer): _plain_form(layer) if forms else None for layer in layers}
    done: dict[int, Any] = {id(layer): formed[id(layer)] or _empty_plain(layer) for layer in layers}
    for layer in layers:
        if formed[id(layer)] is None:
            _fill(done[id(layer)], layer, done)
        else:
            _take_hooks(done[id(layer)], layer, done)
    state.check()
    for norm in fold_batch_norms(model, done) if fold else ():
        _take_hooks(done[id(norm)], norm, done)
    return copy.deepcopy(model, done)


@torch.no_grad()
def _plain_form(layer: nn.Module) -> nn.Module | None:
    """What a layer says it is in plain layers; None if it says nothing. Only names and shapes may decide what it says:
    a file of weights is read into the form that other weights have given."""
    before = parametrize.type_before_parametrizations(layer)
    form = vars(before).get("plain_form")  # not inherited, see _empty_plain
    if form is None:
        return None
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    plain: nn.Module | None = form(layer, {name: _in_eval_mode(layer, name) for name in lists})
    if plain is not None and not any(parameter.requires_grad for parameter in layer.parameters()):
        plain.requires_grad_(False)
    return None if plain is None else plain.train(layer.training)


def _take_hooks(plain: nn.Module, layer: nn.Module, done: dict[int, Any]) -> None:
    """Hooks of the layer, besides those that its plain form has."""
    for key, value in layer.__dict__.items():
        if "_hooks" in key and isinstance(value, dict):
            plain.__dict__[key].update(copy.deepcopy(value, done))


def _empty_plain(layer: nn.Module) -> nn.Module:
    before = parametrize.type_before_parametrizations(layer)
    # What a class names for itself is not inherited: a subclass may have a forward of its own.
    plain_class = vars(before).get("plain_class", before)
    plain = object.__new__(plain_class)  # no constructor: all that it would set is copied
    nn.Module.__init__(plain)
    return plain


@torch.no_grad()
def _fill(plain: nn.Module, layer: nn.Module, done: dict[int, Any]) -> None:
    """Give the plain layer all that the parametrized one has, with the values of its parametrized tensors."""
    state = {key: value for key, value in layer.__dict__.items() if key not in ("_modules", "_parameters")}
    plain.__dict__.update(copy.deepcopy(state, done))
    # Parametrized tensors come first, as weight comes before bias in every torch layer.
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    for name, maps in lists.items():
        tensor = _in_eval_mode(layer, name)
        originals = list(maps.parameters(recurse=False))
        if originals:
            plain.register_parameter(name, nn.Parameter(tensor, any(p.requires_grad for p in originals)))
        else:
            plain.register_buffer(name, tensor)
    for name, parameter in layer._parameters.items():
        plain.register_parameter(name, copy.deepcopy(parameter, done))
    for name, child in layer._modules.items():
        if name != "parametrizations":
            plain.add_module(name, copy.deepcopy(child, done))


def _in_eval_mode(layer: nn.Module, name: str) -> Tensor:
    """The tensor as evaluation uses it; iterations that a parametrization runs in training must not run here."""
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    modes = [(module, module.training) for module in lists[name].modules()]
    lists[name].eval()
    try:
        return getattr(layer, name).detach().clone()
    finally:
        for module, mode in modes:
            module.training = mode


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NonFiniteWeight(
                f"expected finite weights, got {bad} NaN or infinite of {parameter.numel()} in {name!r}; "
                "training has diverged: go back to an earlier checkpoint"
            )
    for name, buffer in model.named_buffers():
        # Infinities can be meant in a buffer (a mask); NaN never is.
        if not buffer.is_meta and bool(torch.isnan(buffer).any()):
            raise NonFiniteWeight(
                f"expected buffers without NaN, got some in {name!r}; go back to an earlier checkpoint"
            )
