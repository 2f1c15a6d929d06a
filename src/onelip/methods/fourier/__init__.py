"""Layers that are orthogonal or bounded frequency by frequency: Cayley, LOT, BRO, ECO, Sandwich."""
