"""Layers in training (forward and backward), relative to public implementations of the same method.

    pip install --no-deps --target DIR orthogonium deel-torchlip einops
    PYTHONPATH=DIR python benchmarks/public_layers.py

All candidates of a method run in turn in one process; the ratio is the median of the ratios of all rounds. The other
libraries are not dependencies of onelip: rows of missing libraries are skipped. Methods without a package are compared
with the recipe of their authors in `_published_recipes.py`. The guarantees differ: ours divide by proved bounds, and
most take the last step in float64. torchlip omits most of the derivative: it treats the cubic term of all but the last
of fifteen steps as a constant.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _published_recipes as recipes
import torch
from _harness import interleaved, publish
from torch import nn
from torch.nn.utils import parametrizations

import onelip
from onelip.core.parametrization import find_parametrization, original_of

CHANNELS, SIDE, FEATURES = 192, 8, 1024
Make = Callable[[], nn.Module]


def conv(method: str) -> Make:
    """Our 3x3 convolution of AOL-Small, with the padding that the method has."""

    def make() -> nn.Module:
        mode = "circular" if method in ("cayley", "sandwich") else "zeros"
        layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode=mode)
        example = torch.zeros(1, CHANNELS, SIDE, SIDE)
        return with_initial_weights(onelip.constrain(nn.Sequential(layer), method, example=example))

    return make


def dense(method: str) -> Make:
    """Our dense layer of AOL-Small."""
    return lambda: with_initial_weights(onelip.constrain(nn.Sequential(nn.Linear(FEATURES, FEATURES)), method))


def with_initial_weights(model: nn.Sequential) -> nn.Sequential:
    """Reset the weights to the initialisation of the method, as in the other libraries."""
    reset = getattr(find_parametrization(model[0]), "reset", None)
    if reset is not None:
        reset(original_of(model[0]))
    return model


def public_layers() -> Iterator[tuple[str, str, Make, str, Make]]:
    """(layer, method, ours, name of theirs, theirs)."""
    c, image, vector = CHANNELS, "3x3, 192 -> 192", "dense 1024"
    plain, flat = lambda: nn.Conv2d(c, c, 3, padding=1), lambda: nn.Linear(FEATURES, FEATURES)
    sn, on_conv = parametrizations.spectral_norm, "torch spectral_norm (of the reshaped kernel)"
    yield image, "spectral-norm-reshaped", conv("spectral-norm-reshaped"), on_conv, lambda: sn(plain())
    yield vector, "spectral-norm", dense("spectral-norm"), "torch spectral_norm", lambda: sn(flat())
    yield (
        vector,
        "cayley",
        dense("cayley"),
        "torch orthogonal (cayley)",
        lambda: parametrizations.orthogonal(flat(), orthogonal_map="cayley"),
    )
    conv_layers, legacy = "orthogonium.layers.conv.", "orthogonium.legacy."
    for method, where, name, make in (
        ("aol", conv_layers + "AOL.aol", "AOLConv2D", lambda kind: kind(c, c, 3, padding=1)),
        ("bcop", legacy + "block_ortho_conv", "BCOP", lambda kind: kind(c, c, 3)),
        ("aoc", conv_layers + "AOC", "AdaptiveOrthoConv2d", lambda kind: kind(c, c, 3)),
        ("soc", conv_layers + "adaptiveSOC", "AdaptiveSOCConv2d", lambda kind: kind(c, c, 3)),
        ("sll", conv_layers + "SLL.sll_layer", "SDPBasedLipschitzResBlock", lambda kind: kind(c, 1, 3)),
        ("cayley", legacy + "cayley_ortho_conv", "Cayley", lambda kind: kind(c, c, 3)),
        ("bjorck", "deel.torchlip", "SpectralConv2d", lambda kind: kind(c, c, 3, padding=1)),
    ):
        yield image, method, conv(method), f"{where.split('.')[0]} {name}", partial(public, where, name, make)
    for method, kind in (
        ("eco", recipes.ECO),
        ("sandwich", recipes.Sandwich),
        ("bro", recipes.BRO),
        ("cpl", lambda c: recipes.CPL(c, c, 3, padding=1)),
        ("lot", recipes.LOT),
        ("oni", lambda c: recipes.ONIConv2d(c, c, 3, padding=1)),
    ):
        yield image, method, conv(method), "the authors' recipe", partial(kind, c)
    for method, kind in (("bro", recipes.BROLinear), ("oni", lambda n: recipes.ONILinear(n, n))):
        yield vector, method, dense(method), "the authors' recipe", partial(kind, FEATURES)
    yield (
        vector,
        "eco",
        dense("eco"),
        "torch orthogonal (matrix_exp)",
        lambda: parametrizations.orthogonal(flat(), orthogonal_map="matrix_exp"),
    )
    linear = partial(public, "deel.torchlip", "SpectralLinear", lambda kind: kind(FEATURES, FEATURES))
    yield vector, "bjorck", dense("bjorck"), "deel SpectralLinear", linear


def public(where: str, name: str, make: Callable[[Any], nn.Module]) -> nn.Module:
    """A layer of a library that need not be there."""
    return make(getattr(importlib.import_module(where), name))


def step_of(layer: nn.Module, batch: int, kind: str) -> Callable[[], None]:
    """Forward and backward, with another weight each time, as training has it."""
    layer.train()
    shape = (batch, FEATURES) if kind.startswith("dense") else (batch, CHANNELS, SIDE, SIDE)
    x = torch.randn(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        layer.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
    with torch.no_grad():  # in the middle of training, not where it begins: there iterations end at once
        for p in layer.parameters():
            if p.dim() > 1:
                p.add_(torch.randn_like(p), alpha=0.1 * float(p.norm()) / p.numel() ** 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        layer(x.requires_grad_()).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", nargs="+", help="these methods, and nothing is published")
    args = parser.parse_args()
    rows = []
    if not torch.cuda.is_available():
        # Some of orthogonium's older layers ask for a GPU when they are made; they work without.
        setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)  # noqa: B010
    for kind, method, ours, name, theirs in public_layers():
        if args.only and method not in args.only:
            continue
        try:
            steps: dict[str, Callable[[], object]] = {
                "ours": step_of(ours(), args.batch, kind),
                "theirs": step_of(theirs(), args.batch, kind),
            }
            times = interleaved(steps, args.rounds)
            ratio, why = times["theirs"].ratio_to(times["ours"]), ""
        except Exception as error:  # an error of the other library: the row reports it
            ratio, why = None, f"{type(error).__name__}: {error}"[:100]
        rows.append({"layer": kind, "method": method, "theirs": name, "theirs / ours": ratio, "why not": why})
        print(rows[-1], flush=True)
    if args.only:
        return
    publish("public_layers", rows, what=f"forward and backward of a layer in training, batch {args.batch}")


if __name__ == "__main__":
    main()
