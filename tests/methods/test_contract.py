"""The contract over all registered methods, with their defaults and options; and that it finds wrong methods."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import geometry_of
from onelip.core.parametrization import LipschitzParametrization, attach
from onelip.methods import SpectralBall, SpectralNorm
from onelip.methods.power_iteration import PowerIterated
from onelip.methods.registry import METHODS, Method
from onelip.nn.aol import AOL
from onelip.testing import CHECKS, ContractViolation, check_contract, contract
from onelip.testing.contract import NORM
from onelip.testing.layers import FULL_TYPES, KINDS, LayerCase, covering_masks, grid

# Methods with the function of another method, which differ in their loss only: their layers are the same.
SAME_LAYERS = {"gloro": "lmt", "emma": "lmt", "ocnn": "gradient-penalty", "soc-cr": "soc"}

# In evaluation the default of LCC is spectral normalisation that does not enlarge weights, with the same proof, which
# takes most of the time: the contract runs on fewer of its layers.
COVERED_BY = {"lcc": "spectral-norm"}

# The constants of these contain their rounding: they hold for the stored weight without an allowance.
WITH_ROUNDING = {
    *(
        "clipping",
        "bjorck",
        "oni",
        "cholesky",
        "bcop",
        "aoc",
        "cayley",
        "lot",
        "bro",
        "eco",
        "soc",
        "lln",
        "cpl",
    )
}

# Traits that the layers of a method never have.
STRIDES = {"strided", "kernel no multiple of stride", "stride and dilation", "common factor"}
REFUSED = {name: {*STRIDES, "more inputs", "more outputs"} for name in ("sll", "cpl")}
REFUSED["sandwich"] = {*STRIDES, "grouped", "zero padding"}


@pytest.mark.parametrize("method", [m for m in METHODS.values() if m.name not in SAME_LAYERS], ids=lambda m: m.name)
def test_contract(method, monkeypatch):
    if method.name in WITH_ROUNDING:  # only the computed singular values are rounded then
        monkeypatch.setattr(contract, "rounding_allowance", lambda jacobian, dtype: 1e-14)
    if method.name in COVERED_BY:
        check_contract(method, strength=1)
        return
    found = check_contract(method)
    for name, check in CHECKS.items():
        if method.train_equals_eval or check.moving_states:
            assert {*found.forms[name]} == {*found.forms[NORM]}, f"{name} must run on every form of the method's layers"
    for kind in found.traits.keys() - {"Linear"}:
        possible = set[str]().union(*(case.traits() for case in grid(kind)))
        assert possible - found.traits[kind].keys() == REFUSED.get(method.name, set()) & possible, kind


@pytest.mark.parametrize(("name", "other"), SAME_LAYERS.items())
def test_methods_without_a_contract_of_their_own_have_the_same_layers(name, other):
    fields = ("apply", "layers", "guarantee", "replaces", "needs_input_size", "train_equals_eval")
    assert all(getattr(METHODS[name], field) == getattr(METHODS[other], field) for field in fields)
    assert all(options in METHODS[other].options for options in METHODS[name].options)
    assert other not in {*SAME_LAYERS, *COVERED_BY}


def test_the_whole_covering_runs_for_the_method_that_another_refers_to():
    assert issubclass(SpectralBall, PowerIterated)
    assert SpectralBall.scaled_by_proof is SpectralNorm.scaled_by_proof
    assert not {*COVERED_BY} & {*COVERED_BY.values()}


# ---- the grid


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_the_grid_runs(kind):
    for case in grid(kind)[::7]:
        y = case.build()(torch.zeros(1, *case.input_shape, dtype=case.dtype))
        assert y.numel() > 0
        assert kind == "Linear" or max(case.size) > 1


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate", "transposed"])
def test_what_torch_runs_is_what_has_an_output(mode):
    kind = "ConvTranspose1d" if mode == "transposed" else "Conv1d"
    mode = "zeros" if mode == "transposed" else mode
    for k, s, d, p, n in itertools.product((1, 2, 4), (1, 2), (1, 3), (0, 1, 3, "same"), (1, 2, 5)):
        if p == "same" and kind != "Conv1d":
            continue
        padding = p if p == "same" else (p,)
        case = LayerCase(kind, 2, 2, (k,), (s,), (d,), padding, (0,), padding_mode=mode, size=(n,))
        try:
            runs = case.build()(torch.zeros(1, *case.input_shape, dtype=case.dtype)).numel() > 0
        except (RuntimeError, ValueError):
            runs = False
        assert case.has_output() == runs, case


def test_the_grid_is_the_same_each_time():
    code = "from onelip.testing.layers import grid; print(grid('Conv2d')[:50])"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another one than here
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": seed})
    assert run.stdout.strip() == str(grid("Conv2d")[:50])


def test_a_covering_has_every_pair():
    cases = grid("ConvTranspose1d", dtypes=FULL_TYPES)
    met = 0
    kept = []
    for case, mask in zip(cases, covering_masks(cases, 2), strict=True):
        if mask & ~met:
            kept.append(case)
            met |= mask

    def pairs(cases):
        return {
            pair for case in cases if case.overlaps for pair in itertools.combinations(case.levels().items(), 2)
        } | {(case.kernel_size, case.stride, case.dilation) for case in cases}

    assert pairs(kept) == pairs(cases)
    assert len(kept) < len(cases) / 10


# ---- methods that are wrong


class Base(AOL):
    """AOL, quickly applied: the weight is kept as the parameter."""

    def right_inverse(self, W):
        return W


def wrong(kind: type[LipschitzParametrization] = Base, *, refuse=None, change=None, **settings) -> Method:
    """A method on all linear layers whose parametrization is the given one."""

    def apply(layer):
        geometry = geometry_of(layer)
        if refuse is not None and refuse(layer):
            raise UnsupportedLayer("expected another layer, got this one; take a layer that this method accepts")
        made = kind(geometry, layer.weight.shape)
        made.module = [layer]  # not a child
        attach(layer, made)
        if change is not None:
            change(layer)
        return layer

    return Method(name="wrong", title="", apply=apply, **{"guarantee": "proved"} | settings)


def test_the_base_of_the_wrong_methods_is_right():
    check_contract(wrong(), checks=tuple(set(CHECKS) - {"exports"}), strength=1)


class TooSmall(Base):
    """A stated constant that is one per cent too small for the layers of which `is_wrong` of a subclass is true.

    `is_wrong` is not declared here: a subclass that overrides something below the stated constant has none.
    """

    def constant_in(self, dtype):
        return super().constant_in(dtype) * (0.99 if self.is_wrong(self.module[0]) else 1.0)


class TooSmallForUnevenTransposed(TooSmall):
    def is_wrong(self, layer):
        uneven = any(k % s for k, s in zip(self.geometry.kernel_size, self.geometry.phases, strict=True))
        return uneven and self.geometry.transposed


class TooSmallForDilation(TooSmall):
    def is_wrong(self, layer):
        return any(d > 1 for d in getattr(layer, "dilation", ()))


class TooSmallForCommonFactors(TooSmall):
    def is_wrong(self, layer):
        return getattr(layer, "stride", ())[:1] == getattr(layer, "dilation", ())[:1] == (2,)


class TooSmallForOutputPadding(TooSmall):
    def is_wrong(self, layer):
        return any(getattr(layer, "output_padding", ()))


class TooSmallForGroups(TooSmall):
    def is_wrong(self, layer):
        return self.geometry.groups > 1


class TooSmallForCircular3d(TooSmall):
    def is_wrong(self, layer):
        return isinstance(layer, nn.Conv3d) and layer.padding_mode == "circular" and layer.padding != (0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (TooSmallForUnevenTransposed, "kind='ConvTranspose1d'"),
        (TooSmallForDilation, r"dilation=\((2|3),"),
        (TooSmallForCommonFactors, r"stride=\(2,\), dilation=\(2,\)"),
        (TooSmallForOutputPadding, r"output_padding=\([123]"),
        (TooSmallForGroups, "groups=2"),
        (TooSmallForCircular3d, "kind='Conv3d'.*padding_mode='circular'"),
    ],
)
def test_a_constant_that_is_too_small_for_some_layers_is_found(kind, seen):
    with pytest.raises(ContractViolation, match=rf"expected: norm <= 0\.99.*{seen}"):
        check_contract(wrong(kind), checks=(NORM,))


class GrowsInTraining(Base):
    """A weight that is one per cent too large after training."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, P):
        if self.training and torch.is_grad_enabled():
            self.gain.fill_(1.01)
        return super().forward(P) * self.gain.to(P.dtype)

    def constant_in(self, dtype):  # a constant of the base class would not count
        return self.lipschitz


def test_a_constant_that_is_too_small_after_training_is_found():
    method = wrong(GrowsInTraining)
    check_contract(method, checks=(NORM,), strength=1)
    with pytest.raises(ContractViolation, match=r"expected: norm <= 1\.0 .* state = after training"):
        check_contract(method, checks=(NORM, "norm after training"), strength=1)


class KnowsItsFirstWeight(Base):
    """Divides by a norm of the weight at the time when it was applied."""

    def right_inverse(self, W):
        self.bound = max(1e-300, float(W.double().abs().sum()))
        return W

    def forward(self, P):
        return (P.double() / self.bound).to(P.dtype)

    def constant_in(self, dtype):  # a constant of the base class would not count
        return self.lipschitz


def test_a_constant_of_the_first_weight_only_is_found():
    with pytest.raises(ContractViolation, match=r"state = with .* parameters"):
        check_contract(wrong(KnowsItsFirstWeight), checks=(NORM,), strength=1)


@pytest.mark.parametrize(
    ("refuse", "kind", "count"),
    [
        (lambda layer: True, "Linear", "0"),
        (lambda layer: isinstance(layer, nn.ConvTranspose1d), "ConvTranspose1d", "0"),
        (lambda layer: isinstance(layer, nn.Conv1d) and layer.weight.shape != (2, 2, 1), "Conv1d", "[1-7]"),
    ],
)
def test_refusals_do_not_count(refuse, kind, count):
    with pytest.raises(ContractViolation, match=rf"at least 8 layers of kind {kind}.* got: {count},"):
        check_contract(wrong(refuse=refuse), checks=(NORM,), strength=1)


@pytest.mark.parametrize("check", [check for check in CHECKS if check != NORM])
def test_every_check_has_a_floor(check):
    with pytest.raises(ContractViolation, match=rf"{check!r} to run on at least [12] layers of kind Linear"):
        check_contract(wrong(refuse=lambda layer: True), checks=(check,))


def test_kinds_that_are_not_named_must_be_refused():
    with pytest.raises(ContractViolation, match=r"not in Method.layers.*kind='Conv2d'"):
        check_contract(wrong(layers=(nn.Linear, nn.Conv1d)), checks=("bakes",), strength=1)


def test_too_late_a_refusal_is_found():
    def refuse(module, args):
        raise ValueError("expected something else")

    def change(layer):
        if getattr(layer, "groups", 1) > 1:
            layer.register_forward_pre_hook(refuse)

    with pytest.raises(ContractViolation, match=r"when the method is applied, not at the first input.*groups=2"):
        check_contract(wrong(change=change), checks=("bakes",), strength=1)


def test_other_errors_than_refusals_are_found():
    def change(layer):
        if getattr(layer, "groups", 1) > 1:
            raise RuntimeError("groups")

    with pytest.raises(ContractViolation, match=r"a layer, or UnsupportedLayer; got: RuntimeError\('groups'\)"):
        check_contract(wrong(change=change), checks=("bakes",), strength=1)


class ClaimsNothing(Base):
    def constant_in(self, dtype):
        return None


def test_a_proved_method_has_to_claim():
    with pytest.raises(ContractViolation, match="expected: a claimed constant"):
        check_contract(wrong(ClaimsNothing), checks=(NORM,), strength=1)
    check_contract(wrong(ClaimsNothing, guarantee=None), checks=(NORM,), strength=1)


class OtherInTraining(Base):
    def forward(self, P):
        return super().forward(P) * (0.9 if self.training else 1.0)


class HalfOfTheGradient(Base):
    def forward(self, P):
        return super().forward(P + P.detach())


class NoGradientAtZero(Base):
    def forward(self, P):
        return P / P.norm()


class CannotStart(Base):
    def reset(self, P):
        P[:, 3] = 1


class RoundedByAutocast(Base):
    def forward(self, P):
        return (super().forward(P).flatten(1) @ torch.eye(P[0].numel(), dtype=P.dtype)).reshape(P.shape)


class ForgetsInCopies(Base):
    def __init__(self, *args):
        super().__init__(*args)
        self.gain = 0.5

    def forward(self, P):
        return super().forward(P) * self.gain

    def __deepcopy__(self, memo):
        made = type(self)(self.geometry, self.weight_shape)
        made.gain, made.module = 1.0, self.module
        return made


@pytest.mark.parametrize(
    ("kind", "check", "promise"),
    [
        (OtherInTraining, "train equals eval", "the same function in training and evaluation"),
        (HalfOfTheGradient, "gradients right", "gradients that agree with differences"),
        (NoGradientAtZero, "gradients finite", "finite gradients"),
        (CannotStart, "gradients finite", "`reset` initialises the layer"),
        (RoundedByAutocast, "autocast harmless", "the same weight under autocast"),
        (ForgetsInCopies, "copies and loads", "a deep copy that computes the same"),
    ],
)
def test_each_check_can_fail(kind, check, promise):
    with pytest.raises(ContractViolation, match=f"expected: {promise}"):
        check_contract(wrong(kind), checks=(check,), strength=1)


# ---- what it needs


def test_norms_and_contract_need_torch_only():
    code = """
import sys
sys.modules["hypothesis"] = sys.modules["pytest"] = None
from torch import nn
import onelip.testing
assert onelip.testing.exact_norm(nn.Identity(), (3,)) == 1
onelip.testing.check_contract
"""
    subprocess.run([sys.executable, "-c", code], check=True)
