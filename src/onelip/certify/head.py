"""From the bounds of the nodes to the loss of every pair of logits.

The difference f_y - f_j of two logits is slope_yj-Lipschitz in the input, and its computed value is within loss_yj / 4
of the real one, at the image and at every perturbed image. So at an image with computed logits f^ the decision y holds
at every distance R with

    f^_y - f^_j > slope_yj R + loss_yj    for all j != y,

and half of the loss would do. The other half is for the logits of a file: a checker that runs the program itself can
only tell that they are within what two runs may differ by, loss_yj / 2, of its own.

Where logits are rows of a linear node H with the input node P, slope_yj = ||w_y - w_j|| lipschitz_P: the true distance
of two rows, where sqrt(2) ||W|| would serve any two. Each row is rounded by itself,
rounding_k = gamma (||w_k|| (norm_P + error_P) + |b_k|) + underflow, and loss_yj = 4 ||w_y - w_j|| error_P +
4 (rounding_y + rounding_j).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from onelip.certify.exact import squared_distances, squared_norm
from onelip.certify.program import Operation, Program
from onelip.certify.recursion import State, inner_length
from onelip.certify.rounding import ETA, gamma, up, up_root

# Pairs of rows grow with the square of the classes; beyond this one number serves all pairs.
MOST_CLASSES_WITH_PAIRS = 128

_PASSES_LOGITS = ("first_channels", "flatten", "reshape", "identity")


@dataclass(frozen=True)
class Head:
    """slope and loss of every pair of classes; zeros on the diagonal.

    Attributes:
        node: the linear node whose rows the logits are; None where one number serves all pairs.
        slope: (classes, classes).
        loss: (classes, classes).
        distance: ||w_y - w_j||, or None.
        rounding: per class, or None.
    """

    node: int | None
    slope: list[list[float]]
    loss: list[list[float]]
    distance: list[list[float]] | None = None
    rounding: list[float] | None = None


def make_head(program: Program, states: list[State]) -> Head:
    """The tables of a program whose nodes are proved."""
    node = _logits_node(program)
    if node is None:
        return same_for_all(program.classes, states[-1])
    return _per_pair(program, node, states[program.nodes[node].inputs[0]])


def _logits_node(program: Program) -> int | None:
    """The linear node whose first rows are the logits, if their differences can be read off it."""
    if program.classes > MOST_CLASSES_WITH_PAIRS:
        return None
    index = len(program.nodes) - 1
    while program.nodes[index].op in _PASSES_LOGITS:
        (index,) = program.nodes[index].inputs
    node = program.nodes[index]
    if node.op == "linear":
        return index
    # One position: each input is met by one tap at most, so a row of the operator is a part of the row of the kernel.
    # Not so with circular padding, which can fold several taps onto one pixel, nor if a row sees only its own group.
    single = node.op == "conv" and math.prod(node.shape[1:]) == 1
    return index if single and node.settings["mode"] == "zeros" and node.settings["groups"] == 1 else None


def same_for_all(classes: int, output: State) -> Head:
    """sqrt(2) times the constant and the error of all logits: true of every pair."""
    root = Fraction(up_root(Fraction(2)))
    slope, loss = up(root * Fraction(output.lipschitz)), up(4 * root * Fraction(output.error))
    return Head(None, _off_diagonal(classes, slope), _off_diagonal(classes, loss))


def _off_diagonal(classes: int, value: float) -> list[list[float]]:
    return [[0.0 if i == j else value for j in range(classes)] for i in range(classes)]


def _per_pair(program: Program, index: int, before: State) -> Head:
    node, classes = program.nodes[index], program.classes
    rows = _rows(node)[:classes]  # (classes, inputs)
    lipschitz, norm, error = before.fractions
    distance = [[up_root(square) for square in line] for line in squared_distances(rows)]
    terms = inner_length(node)
    biases = [0.0] * classes if node.bias is None else node.bias[:classes].tolist()
    rounding = [
        up(
            gamma(terms) * (Fraction(up_root(squared_norm(row))) * (norm + error) + abs(Fraction(b)))
            + (terms + 2) * ETA
        )
        for row, b in zip(rows, biases, strict=True)
    ]
    slope, loss = _off_diagonal(classes, 0.0), _off_diagonal(classes, 0.0)
    for i in range(classes):
        for j in range(classes):
            if i != j:
                d = Fraction(distance[i][j])
                slope[i][j] = up(d * lipschitz)
                loss[i][j] = up(4 * d * error + 4 * (Fraction(rounding[i]) + Fraction(rounding[j])))
    return Head(index, slope, loss, distance, rounding)


def _rows(node: Operation) -> Tensor:
    weight = node.weight.transpose(0, 1) if node.settings.get("transposed") else node.weight
    return weight.flatten(1)
