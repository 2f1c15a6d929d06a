"""Orthogonal weights: reshaped kernels (Björck, ONI, Cholesky), block convolutions (BCOP, AOC), exponentials (SOC)."""
