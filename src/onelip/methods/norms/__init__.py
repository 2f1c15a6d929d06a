r"""Methods by norms: divide a weight by its norm, or move it back into a set of bounded norm after each step.

The operator norm of a layer is estimated by power iteration in training, which is cheap and never too large; in
evaluation the weight is divided by a proved bound instead, so that the constant holds for every weight. Projections
leave the weight free for the optimizer and act after its step (`onelip.project`).

- `power_iteration`: the operator of a layer, its estimated norm, its remembered proved bound, and the base class
  `PowerIterated` of parametrizations that follow the largest singular vector.
- `projection`: the base class `Projection`, `project` and `project_after`.
- `spectral_norm`: spectral normalisation, of the true operator and of the reshaped kernel.
- `lcc`: Lipschitz continuity constraint, projection onto balls of the 1-, 2- or inf-norm.
- `clipping`: weight clipping of WGAN.
- `parseval`: Parseval networks.
- `last_layer`: last-layer normalisation (LLN), rows of norm 1.
"""
