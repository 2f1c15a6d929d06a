"""Products of a kernel with itself: what AOL, its relatives and the proofs of norms are made of."""
