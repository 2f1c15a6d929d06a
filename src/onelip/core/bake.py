"""Convert a parametrized model to a plain torch model."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.batch_norm import fold as fold_batch_norms, is_foldable
from onelip.core.errors import CannotCopy, CannotTrace, NonFiniteWeight
from onelip.core.lipschitz_module import InputSizeGuard
from onelip.core.state import Snapshot, uncached

Model = TypeVar("Model", bound=nn.Module)


def bake(model: Model, *, expand: bool = True, fold: bool = True, guard: bool = True) -> Model:
    """Return a plain torch copy of a model that computes the same function as the model in eval mode.

    Every parametrized layer (AOL, or any other use of `torch.nn.utils.parametrize`) becomes the torch layer that it was
    created from, with its weight in eval mode. Everything else is copied. Prediction then costs as much as with the
    plain network, and the state dict has the plain keys.

    Layers that define a method `plain_form` are replaced by the plain layers that it returns: layers in the Fourier
    domain become convolutions, and residual blocks with ReLU become two layers with MaxMin. The plain form can be
    proved and exported to ONNX, but it is slower: an FFT is faster than sums over all pixels.

    Batch normalisation with stored statistics is folded as in eval mode: into the preceding linear layer or convolution
    if the forward pass shows that nothing else reads the output of that layer, else into an `onelip.nn.ChannelAffine`.
    The folded numbers are computed in float64 and rounded to the dtype of the model.

    Args:
        model: the model; it is not changed.
        expand: whether to replace layers by their `plain_form`. With False they keep the form that they have in
            training, with fixed weights. It is faster, but use the default for certificates and export.
        fold: whether to fold batch normalisation.
        guard: whether to keep the checks of the input size, which `torch.jit.script` cannot compile.

    Returns:
        The plain copy.

    Raises:
        NonFiniteWeight: if a parameter of the result is not finite; the message names it.
        CannotCopy: if the model contains an object that cannot be copied.
        ChangingModel: if computing a weight in eval mode changes the state of its parametrization: the model is then a
            different function at every call, and no plain copy computes the same.

    Examples:
        >>> import onelip
        >>> list(bake(nn.Sequential(onelip.nn.AOLLinear(4, 4))).state_dict())
        ['0.weight', '0.bias']
    """
    check_module(model)
    if is_plain(model, fold=fold):
        plain = copy_model(model)
    else:
        state = Snapshot(model)
        try:
            with uncached():
                plain = _bake(model, expand, fold, state)
        finally:
            state.restore()
    _check_finite(plain)
    if not guard:
        for module in plain.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, InputSizeGuard)]:
                del hooks[key], module._forward_pre_hooks_with_kwargs[key]
    return plain


def check_module(model: object) -> None:
    """Check that a model is a torch module.

    Raises:
        CannotTrace: if it is not.
    """
    if not isinstance(model, nn.Module):
        raise CannotTrace(f"expected a torch module, got {type(model).__name__}; wrap the function in an nn.Module")


def check_initialised(model: nn.Module) -> None:
    """Check that no parameter of a lazy layer is missing.

    Raises:
        CannotTrace: if one is.
    """
    missing = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if missing:
        raise CannotTrace(
            f"expected a model with weights, got none in {missing[0]!r}; run it once to initialise lazy layers"
        )


def copy_model(model: Model, done: dict[int, Any] | None = None) -> Model:
    """Copy a model; `done` maps parts of it to their replacements.

    Raises:
        CannotCopy: if it contains an object that cannot be copied.
    """
    try:
        return copy.deepcopy(model, done)
    except Exception as error:  # of somebody else's classes
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CannotCopy(
            f"expected a model that can be copied, got: {reason}; if it uses torch.nn.utils.weight_norm or "
            "spectral_norm, take those of torch.nn.utils.parametrizations, or remove them; detach tensors that are "
            "attributes; move locks, files and generators out of the model"
        ) from error


def is_plain(model: nn.Module, *, fold: bool = True) -> bool:
    """Whether `bake` would only copy the model: no module is parametrized, and there is no batch normalisation to fold.

    Examples:
        >>> is_plain(nn.Linear(2, 2)), is_plain(nn.BatchNorm1d(2)), is_plain(nn.BatchNorm1d(2), fold=False)
        (True, False, True)
    """
    return not any(parametrize.is_parametrized(m) or (fold and is_foldable(m)) for m in model.modules())


def plain_of(model: Model, *, fold: bool = True) -> Model:
    """Return the model itself if it is plain, else `bake(model)`. Callers must not change the result.

    Raises:
        NonFiniteWeight: if a weight is not finite.
    """
    check_module(model)
    if not is_plain(model, fold=fold):
        return bake(model, fold=fold)
    _check_finite(model)
    return model


def _bake(model: Model, expand: bool, fold: bool, state: Snapshot) -> Model:
    """Bake a model; raise if computing its weights changes its state."""
    # deepcopy + remove_parametrizations would remove the property from the class that the copy shares with the original
    # and so break the original. Instead, deepcopy's memo maps each parametrized layer to its plain replacement. This
    # keeps shared modules shared, and works for references from anywhere in the model.
    layers = [module for module in model.modules() if parametrize.is_parametrized(module)]
    forms = {id(layer): _plain_form(layer) if expand else None for layer in layers}
    done: dict[int, Any] = {id(layer): forms[id(layer)] or _empty_plain(layer) for layer in layers}
    for layer in layers:
        if forms[id(layer)] is None:
            _fill(done[id(layer)], layer, done)
        else:
            _take_hooks(done[id(layer)], layer, done)
    state.check()
    for norm in fold_batch_norms(model, done) if fold else ():
        _take_hooks(done[id(norm)], norm, done)
    return copy_model(model, done)


@torch.no_grad()
def _plain_form(layer: nn.Module) -> nn.Module | None:
    """The result of the layer's own method `plain_form`, or None.

    The structure of the form may depend on names and shapes only: weight files are loaded into the form that a model
    with other weights has.
    """
    before = parametrize.type_before_parametrizations(layer)
    form = vars(before).get("plain_form")  # not inherited, see _empty_plain
    if form is None:
        return None
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    plain: nn.Module | None = form(layer, {name: tensor_in_eval_mode(layer, name) for name in lists})
    if plain is not None and not any(parameter.requires_grad for parameter in layer.parameters()):
        plain.requires_grad_(False)
    return None if plain is None else plain.train(layer.training)


def _take_hooks(plain: nn.Module, layer: nn.Module, done: dict[int, Any]) -> None:
    """Add the hooks of the layer to those of its plain form."""
    for key, value in layer.__dict__.items():
        if "_hooks" in key and isinstance(value, dict):
            plain.__dict__[key].update(copy.deepcopy(value, done))


def _empty_plain(layer: nn.Module) -> nn.Module:
    before = parametrize.type_before_parametrizations(layer)
    # vars: `plain_class` is not inherited, because a subclass may override forward.
    plain_class = vars(before).get("plain_class", before)
    plain = object.__new__(plain_class)  # no constructor: _fill copies all attributes
    nn.Module.__init__(plain)
    return plain


@torch.no_grad()
def _fill(plain: nn.Module, layer: nn.Module, done: dict[int, Any]) -> None:
    """Copy all attributes of the parametrized layer to the plain one, and the values of its parametrized tensors."""
    state = {key: value for key, value in layer.__dict__.items() if key not in ("_modules", "_parameters")}
    plain.__dict__.update(copy.deepcopy(state, done))
    # Parametrized tensors come first, as weight comes before bias in every torch layer.
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    for name, maps in lists.items():
        tensor = tensor_in_eval_mode(layer, name)
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


def tensor_in_eval_mode(layer: nn.Module, name: str) -> Tensor:
    """The tensor in eval mode; iterations that a parametrization runs in training must not run here."""
    lists = layer.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    modes = [(module, module.training) for module in lists[name].modules()]
    lists[name].eval()
    try:
        with uncached():
            return getattr(layer, name).detach().clone()
    finally:
        for module, mode in modes:
            module.training = mode


def _check_finite(model: nn.Module) -> None:
    check_initialised(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NonFiniteWeight(
                f"{name!r} contains {bad} NaN or infinite of {parameter.numel()} values; "
                "training has diverged: load an earlier checkpoint"
            )
    for name, buffer in model.named_buffers():
        # Infinities can be intended in a buffer (a mask); NaN cannot.
        if not buffer.is_meta and bool(torch.isnan(buffer).any()):
            raise NonFiniteWeight(f"buffer {name!r} contains NaN; load an earlier checkpoint")
