"""Weights divided by their norm, clipped or projected: spectral normalisation, LCC, clipping, Parseval, last layers."""
