"""The proof about a network: a bound for every layer, the rounding recursion, and the tables of its logits.

It is about the weights, not about an image, so it is made once and serves all images of a shape. "fast" bounds layers
in float64 with rigorous error terms, "exact" in rational arithmetic (python-flint), as certificate files want it; both
are proofs.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import nn

from onelip.bounds import ProofFailed, Witness, bound_weight, exact_bound
from onelip.certify.head import Head, make_head
from onelip.certify.lowering import lower
from onelip.certify.program import WEIGHTED, Operation, Program
from onelip.certify.recursion import State, propagate
from onelip.certify.rounding import ProofError
from onelip.export import bake

Kind = Literal["fast", "exact"]
Effort = Literal["quick", "normal", "high"]
# Products of whole numbers that the fourth power of a Gram operator may cost: seconds, here and in the checker.
_FOURTH_STEP = 2**26
# Called with how much is done, of how much, and what is next.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LayerBound:
    """||W||^2 <= square, and what a checker needs to see it."""

    square: Fraction
    witness: Witness


@dataclass(frozen=True)
class Proof:
    """What is proved of a network.

    Attributes:
        kind: "fast" or "exact".
        program: its operations.
        states: Lipschitz constant, norm and rounding error of each.
        bounds: of the linear ones, by node.
        head: slope and loss of each pair of logits.
        fingerprint: SHA-256 of weights and modules, so that a proof is not used for others.
    """

    kind: Kind
    program: Program
    states: tuple[State, ...]
    bounds: dict[int, LayerBound]
    head: Head
    fingerprint: str

    @property
    def constant(self) -> float:
        """A Lipschitz constant of the map from images to logits (L2, real arithmetic)."""
        return self.states[-1].lipschitz

    @property
    def error(self) -> float:
        """The distance of computed and real logits is never more, at any image or perturbed image."""
        return self.states[-1].error

    def __str__(self) -> str:
        return (
            f"proved ({self.kind}): Lipschitz constant {self.constant!r}, rounding error of the logits at most "
            f"{self.error:.3g}, {len(self.bounds)} linear layers"
        )


def prove(
    model: nn.Module,
    input_shape: Sequence[int],
    proof: Kind = "fast",
    *,
    effort: Effort = "normal",
    progress: Progress | None = None,
) -> Proof:
    """Prove the constants of a model's stored weights, and bound the rounding of its float64 program.

    Args:
        model: a plain or parametrized network; weights of float32 are taken to float64, which is exact.
        input_shape: of one image, (channels, height, width).
        proof: "fast" or "exact"; the latter needs python-flint.
        effort: how tight the bounds of the layers shall be.
        progress: called for every layer.

    Raises:
        ProofError: if an operation has no rule, or numbers are too large.
        CannotTrace: if the model has no fixed graph.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> _ = nn.init.eye_(model[1].weight)
        >>> 1 <= prove(model, (1, 2, 2)).constant < 1 + 1e-8
        True
    """
    if proof not in ("fast", "exact"):
        raise ValueError(f"expected a proof 'fast' or 'exact', got {proof!r}; pick one")
    shape = tuple(input_shape)
    if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"expected the shape of one image (channels, height, width), got {input_shape!r}")
    plain = bake(model).to("cpu").double().eval()
    program = lower(plain, shape)
    return _prove(program, proof, effort, progress or _silent, fingerprint(plain))


def _prove(program: Program, kind: Kind, effort: Effort, progress: Progress, weights: str) -> Proof:
    bounds: dict[int, LayerBound] = {}
    seen: dict[object, LayerBound] = {}  # shared layers are proved once
    states: list[State] = []
    total = len(program.linear_nodes)
    for index, node in enumerate(program.nodes):
        square = None
        if node.op in WEIGHTED:
            progress(len(bounds), total, node.place or node.op)
            key = (_identity(node), node.geometry)
            bounds[index] = seen.get(key) or _bound(node, kind, effort)
            seen[key] = bounds[index]
            square = bounds[index].square
        states.append(propagate(node, [states[i] for i in node.inputs], square))
    progress(total, total, "pairs of classes")
    return Proof(kind, program, tuple(states), bounds, make_head(program, states), weights)


def _identity(node: Operation) -> object:
    name = node.names.get("weight")
    return id(node) if name is None else name


def _bound(node: Operation, kind: Kind, effort: Effort) -> LayerBound:
    assert node.geometry is not None
    most = None
    if kind == "exact":
        # A fourth step multiplies whole numbers for minutes in each layer, here and in the checker.
        most = 4 if node.op == "potential" and _cost_of_fourth_step(node) <= _FOURTH_STEP else 3
    try:
        fast = bound_weight(node.weight, node.geometry, effort=effort, most_steps=most)
        if node.op == "potential" and effort == "normal" and fast.value > 1 + 2.0**-16:
            # What is lost here counts four times, 2 (1 + t)^2 - 1; CPL divides by what "high" finds, so it is there.
            fast = bound_weight(node.weight, node.geometry, effort="high", most_steps=most)
        if kind == "exact":
            try:
                found = exact_bound(node.weight, node.geometry, fast.witness)
            except ProofFailed:  # a Cholesky claim too near to the truth; the next best always holds
                found = exact_bound(node.weight, node.geometry)
            return LayerBound(found.square, found.witness)
    except (ValueError, OverflowError) as error:
        raise ProofError(f"{node.title}: {error}") from error
    return LayerBound(Fraction(fast.value) ** 2, fast.witness)


def _cost_of_fourth_step(node: Operation) -> float:
    """Products in the square of (V^T V)^4, whose kernel has 8 (k - 1) + 1 taps on each axis; half of it is enough."""
    first, second, *kernel = node.weight.shape
    groups = node.settings["groups"]
    taps = math.prod(8 * (k - 1) + 1 for k in kernel)
    return groups * min(first // groups, second) ** 3 * taps**2 / 2


def _silent(done: int, total: int, what: str) -> None:
    pass


def fingerprint(plain: nn.Module) -> str:
    """SHA-256 of the modules of a plain network, and of the names, shapes and float64 values of its tensors.

    Equal weights can hide another activation, so what the modules say of themselves is in it.
    """
    digest = hashlib.sha256(f"onelip float64 weights 2\n{plain!r}\n".encode())
    for name, tensor in sorted(plain.state_dict().items()):
        if not tensor.is_floating_point():
            continue
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().to("cpu", torch.float64).contiguous()
        digest.update(values.numpy().astype("<f8", copy=False).data if math.prod(tensor.shape) else b"")
    return digest.hexdigest()
