r"""Methods in the Fourier domain: circular convolutions by one matrix per frequency.

A circular convolution acts on each frequency of an image by a matrix $M_f$, and its norm is $\max_f \|M_f\|$. The
methods make these matrices orthogonal, so the layers are built for one image size. `onelip.bake` turns them into plain
real convolutions whose norms are proved from the stored weights.

- `maps`: the methods Cayley, LOT, BRO and ECO, each of which is one class of `OrthogonalMap`.
- `sandwich`: Sandwich layers, two maps with a relu between.
- `layer`: `OrthogonalMap`, the parametrizations `DenseMap` and `FrequencyMap`, and the module `FourierConv`.
- `frequencies`: the frequencies of real images and their real basis. `matrix_functions`: inverse and exponential.
- `plain`: the layers as plain torch layers.
"""
