"""Steepest slopes of smooth activations: |f(a) - f(b)| <= c |a - b| for all numbers a, b.

Where the largest slope has a closed form it is given; else it was enclosed by values on a grid of step h together with
|f''| <= b, which lets the slope rise by at most b h / 2 between two points (tests/test_rules.py repeats it).
All numbers are rounded up in the last digit given.
"""

SIGMOID = 0.25  # s (1 - s)
GELU = 1.13  # exact form: f'' = (2 - x^2) phi(x), so f'(sqrt 2) = 1.12890...; tanh form: 1.12905... by grid
SILU = 1.1  # 1.09984... by grid, |f''| <= 1/2
MISH = 1.09  # 1.08850... by grid, |f''| <= 1
# torch multiplies by 1/6 as a float32 in every type, which is 3e-8 too much.
HARDSWISH = 1.5000001  # x (x + 3) / 6 has slope (2 x + 3) / 6, steepest at its end x = 3
HARDSIGMOID = 0.1666667  # 1/6
SELU = 1.7581  # scale * alpha = 1.0507... * 1.6732..., the slope at zero from below
ERF = 1.1283791670955128  # 2 / sqrt(pi), rounded up
# The Jacobian diag(p) - p p^T is symmetric; row i of it has absolute values that add up to
# p_i (1 - p_i) + p_i (1 - p_i) <= 1/2, so by Gershgorin its norm is at most 1/2. Reached at p = (1/2, 1/2, 0, ...).
SOFTMAX = 0.5
