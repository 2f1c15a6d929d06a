"""Re-checks a certificate from its weight file: numpy, python-flint and the standard library, nothing else of onelip.

Accepted means that this is proved. Let f be the float64 program that the node list describes, with the weights of the
file (IEEE binary64, round to nearest, sums in any order, FMA and flush-to-zero allowed, conventional products). For an
image x in [0, 1]^n whose logits stand in the file with a radius R > 0, and every x' with ||x' - x||_2 <= R: class y is
strictly the largest of f(x').

Why: a logit of the program is within `error` of its real value, at x and at x'; f_y - f_j falls by at most slope R in
real arithmetic; and the logits of the file, which anybody may have written, are within 2 error of those computed here,
as two runs of one program are. So f_y > f_j at x' if in the file f_y - f_j > slope R + 8 error.

Nothing is believed. Every proved number must be the smallest float64 (a radius the largest) for which its inequality
holds in exact fractions; every other value must be, to the letter, what is derived; no value may stay unread but words
for people. The program is run on the images, if they are where the file says or are given. Without them anybody can
write good logits into a file: the verdict says so, and the exit code is not 0. Not derived: labels, where the images
come from, and that the nodes are the network you mean (the config is only hashed).

Read in this order; the first three are the proof:

    norms.py        exact numbers, and ||W|| <= sigma in whole numbers
    program.py      every kind of node: its program, and what rounding does to it
    proof.py        three numbers for each node, slopes, the radius
    certificate.py  the whole file: hashes, results, summary, images
    reading.py      JSON and safetensors as anybody may have made them
    __main__.py     the command line

    python -m onelip.checker cert.json --images images.npy        (or python -m checker, beside a copy of this folder)

Exit codes: 0 accepted, 1 rejected, 2 a file cannot be read or the command makes no sense, 3 the bounds are accepted,
but there were no images to compute the logits from.
"""

from .certificate import check
from .reading import Rejected

__all__ = ["Rejected", "check"]
