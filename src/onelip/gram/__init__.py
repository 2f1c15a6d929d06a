"""Products of a kernel with itself, used by AOL, by related methods and by the proofs of norms.

products.py   absolute row sums of the Gram operator, with derivatives of any order
rescale.py    the rescaling of AOL, exact scaling by powers of two, and the right inverse
jacobian.py   crops of J^T J and singular values of layers
"""
