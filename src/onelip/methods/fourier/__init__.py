r"""Methods in the Fourier domain: circular convolutions by one matrix per frequency.

A circular convolution acts on each frequency of an image by a matrix $M_f$, and its norm is $\max_f \|M_f\|$. The
methods make these matrices orthogonal, so the layers are built for one image size. `onelip.bake` turns them into plain
real convolutions whose norms are proved from the stored weights.

- `frequencies`: the frequencies of real images, their real basis, and `Period`, which applies the matrices.
- `matrix_functions`: the inverse and the exponential of batches of matrices.
- `maps`: the base class `OrthogonalMap` of the methods, and the parametrizations `DenseMap` and `FrequencyMap`.
- `layer`: the module `FourierConv`, and `replaced`, with which the methods replace a layer.
- `plain`: the layers as plain torch layers.
- `cayley`, `lot`, `bro`, `eco`: the methods. `sandwich`: Sandwich layers, two maps with a relu between.
"""
