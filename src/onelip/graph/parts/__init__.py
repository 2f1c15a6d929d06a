"""Tighter constants for calls that join parts of one tensor.

Example: `a, b = x.chunk(2, 1); y = torch.cat([a.abs(), b], 1)`. The rule of `cat` alone bounds y by sqrt(2), since it
does not know that a and b are different parts of x. Here every entry of x gets a weight: a has the weights (1, 0), its
absolute value too, b has (0, 1), and y has their sum (1, 1). The root of the largest weight is the constant of y: 1.

In general, let A be the last tensor through which all operands of a call depend on the input (its dominator). Each
operand, and then the call itself, gets weights w_i >= 0, one for each entry of A, with

    ||f - f'||^2 <= sum_i w_i (A_i - A'_i)^2,

so the call is sqrt(max w)-Lipschitz in A. The weights follow the program:

    A itself            1
    slices, sums        from rows: which entries of A are read, and with which factors
    L-Lipschitz maps    L^2 times the weights of the operand
    side by side        the sum of the weights: where the parts are disjoint, each entry of A is in one of them
    f + g               (1 + t) w_f + (1 + 1/t) w_g for any t > 0, as |a + b|^2 <= (1 + t) |a|^2 + (1 + 1/t) |b|^2

Where parts overlap, both weights count: nothing is assumed about them.

values.py      the tensors of a program, and their dominators; the piecewise affine function of one call
weights.py     weights over the entries of a dominator (`Joint`)
rows.py        a tensor as a piecewise affine function of another one, and the weights that follow from it
"""

from onelip.graph.parts.weights import Joint

__all__ = ["Joint"]
