"""Products of a kernel with itself, used by AOL, by related methods and by the proofs of norms."""
