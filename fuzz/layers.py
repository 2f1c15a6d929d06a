"""Single layers: what a method claims, and what is proved of the weights, against the norm of the dense matrix."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import library, oracle
from fuzz.case import FILLS, Case, Outcome, Random, crash, fill, smaller_numbers

KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LARGEST = {1: (5, 4, 3, 9), 2: (4, 3, 2, 6), 3: (3, 2, 2, 3)}  # kernel, stride, dilation, pixels by number of axes
ROUNDING = 1e-6  # of measured ratios: large biases cancel in the forward pass, whose rounding is not that of the bound
UNITS = 32.0  # in the last place, that a weight computed from parameters may be off, beside its own rounding


def draw(rng: Random, methods: tuple[str, ...] = ()) -> Case:
    """A layer that torch may or may not accept, with a method or with none."""
    name = rng.choice(methods or ("none", "none", *library.METHODS))
    kinds = KINDS if name == "none" else tuple(layer.__name__ for layer in library.METHODS[name].layers)
    kind = rng.choice([k for k in kinds if k in KINDS])
    axes = 0 if kind == "Linear" else int(kind[-2])
    kernel, stride, dilation, pixels = LARGEST.get(axes, (1, 1, 1, 1))
    groups = rng.choice((1, 1, 1, 2)) if axes else 1

    def each(low: int, high: int) -> list[int]:
        return [rng.randint(low, high)] * axes if rng.random() < 0.6 else [rng.randint(low, high) for _ in range(axes)]

    most = 7 if kind == "Linear" else 4 if axes < 3 else 2
    case: Case = {
        "part": "layers",
        "kind": kind,
        "channels": [groups * rng.randint(1, most), groups * rng.randint(1, most)],
        "kernel": each(1, kernel),
        "stride": each(1, stride) if rng.random() < 0.6 else [1] * axes,
        "dilation": each(1, dilation) if rng.random() < 0.4 else [1] * axes,
        "padding": each(0, kernel - 1),
        "output_padding": each(0, 1) if kind.startswith("ConvT") and rng.random() < 0.5 else [0] * axes,
        "groups": groups,
        "mode": "zeros"
        if kind.startswith("ConvT")
        else rng.choice(("zeros", "circular", "zeros", "reflect", "replicate")),
        "size": each(1, pixels),
        "dtype": rng.choice(("float32", "float64")),
        "fill": rng.choice(FILLS),
        "seed": rng.randrange(2**20),
        "method": name,
        "options": {},
        "when": rng.choice(("before", "after")),
        "steps": rng.choice((0, 0, 0, 1, 3)),
        "rate": rng.choice((1e-1, 10.0, 1e4)),
        "effort": rng.choice(("quick", "quick", "normal", "normal", "normal", "high")),
        "exact": rng.random() < 0.4,
    }
    if axes and rng.random() < 0.5:  # what most methods serve: the size is kept
        case["kernel"] = [rng.choice((1, 3, 3, 5) if axes == 1 else (1, 3, 3))] * axes
        case["padding"] = [d * (k - 1) // 2 for d, k in zip(case["dilation"], case["kernel"], strict=True)]
        case["mode"] = rng.choice(("zeros", "circular")) if not kind.startswith("ConvT") else "zeros"
    if rng.random() < 0.4 and kind != "Linear":
        case["channels"] = [case["channels"][0]] * 2
    if name != "none" and (options := library.METHODS[name].options) and rng.random() < 0.4:
        case["options"] = dict(rng.choice(options))
    return case


def plain(case: Case, bias: bool = True) -> nn.Module:
    """The torch layer."""
    dtype = DTYPES[case["dtype"]]
    if case["kind"] == "Linear":
        return nn.Linear(*case["channels"], bias=bias, dtype=dtype)
    settings: dict[str, Any] = {key: tuple(case[key]) for key in ("stride", "padding", "dilation")}
    if case["kind"].startswith("ConvT"):
        settings["output_padding"] = tuple(case["output_padding"])
    settings |= {"groups": case["groups"], "padding_mode": case["mode"], "bias": bias, "dtype": dtype}
    return getattr(nn, case["kind"])(*case["channels"], tuple(case["kernel"]), **settings)


def check(case: Case) -> Outcome:
    outcome = Outcome("proved", case["method"])
    size, shape = tuple(case["size"]), (case["channels"][0], *case["size"])
    torch.manual_seed(case["seed"])
    try:
        layer = plain(case)
        with torch.no_grad():
            if layer(torch.zeros(1, *shape, dtype=DTYPES[case["dtype"]])).numel() == 0:
                return Outcome("invalid")
    except (RuntimeError, ValueError):
        return Outcome("invalid")
    fill(layer, case["fill"] if case["when"] == "before" else "gauss", case["seed"])
    try:
        if case["method"] != "none":
            layer = library.apply_method(case["method"], layer, size, case["options"])
        if case["when"] == "after":
            fill(layer, case["fill"], case["seed"])
        if not _train(layer, shape, case):
            return Outcome("invalid")
        layer.eval()
        claimed = library.claim(layer)
        if _is_plain(layer, case):
            _check_weight(layer, shape, size, claimed, case, outcome)
        else:
            _check_module(layer, shape, claimed, case, outcome)
    except library.UnsoundBound as error:
        outcome.fail("contradiction", crash(error))
    except Exception as error:
        if library.is_refusal(error):
            outcome.verdict = "refused"
        else:
            outcome.fail("crash", crash(error))
    if outcome.verdict == "proved" and outcome.claims == 0:
        outcome.verdict = "unproved"
    return outcome


def _is_plain(layer: nn.Module, case: Case) -> bool:
    return isinstance(layer, getattr(nn, case["kind"]))


def _train(layer: nn.Module, shape: tuple[int, ...], case: Case) -> bool:
    """Some steps of SGD with a large rate; whether all numbers stayed finite."""
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    layer.train()
    for _ in range(case["steps"]):
        x = torch.randn((2, *shape), generator=generator, dtype=torch.float64).to(DTYPES[case["dtype"]])
        y = layer(x)
        (y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter -= case["rate"] * parameter.grad
                    parameter.grad = None
        library.project(layer)
    return all(bool(p.isfinite().all()) for p in layer.parameters())


def _check_weight(
    layer: nn.Module, shape: tuple[int, ...], size: tuple[int, ...], claimed: float | None, case: Case, outcome: Outcome
) -> None:
    """A torch layer: the operator of the weight that it computes now."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    same = plain(case, bias=False).double().requires_grad_(False)
    if not bool(weight.isfinite().all()):
        if claimed is not None:
            outcome.fail("not finite", f"claimed {claimed!r} with a weight that is not finite, of finite parameters")
        return
    same.weight = nn.Parameter(weight.detach().double(), requires_grad=False)
    matrix = oracle.dense(same, shape)
    norm, _ = oracle.norm_of(matrix)
    if claimed is not None:
        entries, _ = oracle.norm_of(abs(matrix))
        room = UNITS * torch.finfo(weight.dtype).eps / 2 * (claimed + entries)
        outcome.compare("claim of the method", norm, claimed, oracle.exceeds(matrix, claimed + room))
    # Taps that meet the same pixel (copies at the border) are added in float64, so that entries are rounded there.
    room = 1.0 if case["mode"] == "zeros" else 1 + 1e-13
    for given in (size or None, None):
        bounds = library.stored_bounds(layer, given, case["effort"], case["exact"] and given is not None)
        for name, bound in bounds.items():
            name = f"{name} bound of the weights, {'this size' if given else 'any size'}"
            outcome.compare(name, norm, bound, oracle.exceeds(matrix, bound * room))
    baked = library.bake(layer)
    if not torch.equal(baked.weight, weight):  # pyright: ignore[reportArgumentType]
        outcome.fail("bake", "the baked weight is not that of the layer in eval mode")


def _check_module(
    layer: nn.Module, shape: tuple[int, ...], claimed: float | None, case: Case, outcome: Outcome
) -> None:
    """A module of its own, perhaps not linear; in float64, where its parameters are the same numbers."""
    generator = torch.Generator().manual_seed(case["seed"] + 2)
    doubled = copy.deepcopy(layer).double().eval()
    claims = [(doubled, "claim in float64", library.claim(doubled))]
    if claimed is not None:
        claims.append((doubled, f"claim in {case['dtype']}", claimed))
    baked = library.bake(layer).double().eval()
    claims.append((baked, "claim of the baked module", library.claim(baked)))
    for module, name, proved in claims:
        if proved is None:
            continue
        with torch.no_grad():
            measured = oracle.steepest(module, shape, generator, rounds=2)
        outcome.compare(name, measured, proved, measured > proved * (1 + ROUNDING))
    if case["exact"]:
        example = torch.zeros(1, *shape, dtype=torch.float64)
        proved = library.audit(baked, example, lower=False)
        if proved is not None:
            measured = oracle.steepest(baked, shape, generator, rounds=2)
            outcome.compare("audit of the baked module", measured, proved, measured > proved * (1 + ROUNDING))


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one setting simpler."""
    simple = {"options": {}, "steps": 0, "when": "after", "fill": "ones", "dtype": "float64", "mode": "zeros"}
    simple |= {"groups": 1, "seed": 0, "effort": "normal", "exact": False, "method": "none"}
    for key, value in simple.items():
        if case[key] != value:
            yield case | {key: value}
    for key in ("channels", "kernel", "stride", "dilation", "padding", "output_padding", "size"):
        for value in smaller_numbers(case[key]):
            if key in ("padding", "output_padding") or min(value) >= 1:
                yield case | {key: value}
