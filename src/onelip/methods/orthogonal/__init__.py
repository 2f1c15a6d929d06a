r"""Orthogonal weights: matrices and kernels whose singular values are 1, up to convergence, and never above 1.

Matrices are made orthogonal by an iteration that cannot exceed norm 1 (Björck, ONI) or by a Cholesky factor. A
convolution is treated as a reshaped kernel, divided by the root of its overlap, or built as a product of factors that
are orthogonal convolutions (BCOP, AOC). SOC is the exponential of a skew convolution.

- `steps`: Björck's iteration with proved scaling and rounding.
- `reshaped`: the base class `ReshapedOrthogonal`, and `stored_constant`, the constant after rounding a weight.
- `bjorck`, `oni`, `cholesky`: methods on reshaped kernels.
- `block_kernels`: the base class `BlockOrthogonal`; `bcop`, `aoc`: the methods.
- `skew`: skew kernels and the norm of their truncated exponential; `soc`: the method, with and without
  certificate regularisation.
"""
