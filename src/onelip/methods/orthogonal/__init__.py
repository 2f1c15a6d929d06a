r"""Orthogonal weights: matrices and kernels whose singular values are 1, up to convergence, and never above 1.

- `steps`: Björck's iteration, which cannot exceed norm 1, with proved scaling and rounding.
- `reshaped`: Björck, ONI and Cholesky: orthogonal matrices, and reshaped kernels divided by the root of their overlap.
- `block_kernels`: BCOP and AOC: kernels as products of factors that are orthogonal convolutions.
- `soc`: SOC, the exponential of a skew convolution, with and without certificate regularisation.
"""
