r"""Residual layers: a gradient step on a convex function (SLL, CPL), and linear residual layers (LiResNet).

The layer $x - 2 V^\top \mathrm{relu}(V x + b)$ is 1-Lipschitz for every $V$ of norm at most 1. SLL and CPL differ in
how they bound $V$: SLL by AOL on the outputs, CPL by spectral normalisation. A linear residual layer is one
convolution, whose norm is bounded as a whole.

- `potential`: the module `ConvexPotential`, and checks that a layer keeps the shape of its input.
- `sll`, `cpl`, `liresnet`: the methods.
"""
