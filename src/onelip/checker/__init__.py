"""Check a certificate from its weight file, with numpy, python-flint and the standard library only.

If a certificate is accepted, the following is proved. Let f be the float64 program that the nodes describe, with the
weights of the file (IEEE binary64, round to nearest, sums in any order, FMA and flush-to-zero allowed, conventional
products). For each image x in [0, 1]^n with logits in the file and a radius R > 0, and every x' with
||x' - x||_2 <= R: class y is strictly the largest of f(x').

Proof: a logit of the program is within `error` of its real value, at x and at x'. f_y - f_j decreases by at most
slope R in real arithmetic. The logits in the file are within 2 error of those computed here, as those of two runs of
one program are. So f_y > f_j at x' if f_y - f_j > slope R + 8 error in the file.

Nothing in the file is trusted. Every proved number must be the smallest float64 (a radius the largest) for which its
inequality holds in exact fractions. Every other value must be exactly the derived one, and no key may remain unread
except descriptions (onelip, created, source, place). The program is run on the images, if they are available. Without
images, forged logits cannot be detected: the verdict reports it, and the exit code is not 0. Not checked are the
labels, the origin of the images, and that the nodes are the intended network (the config is only hashed).

Work and memory are estimated before anything is computed. A file whose estimate exceeds a limit is rejected.

Read the modules in this order; the first two are the proof:

    norms.py        exact numbers, and ||W|| <= sigma in integer arithmetic
    program.py      every kind of node: its program and rounding error; three numbers for each node, slopes, the
                    radius; estimates of work and memory
    certificate.py  the whole file: hashes, limits, results, summary, images
    reading.py      untrusted JSON and safetensors
    __main__.py     the command line

    python -m onelip.checker cert.json --images images.npy        (or python -m checker, next to a copy of this folder)

Exit codes: 0 accepted; 1 rejected; 2 a file cannot be read, or the command is invalid; 3 the bounds are accepted, but
there were no images to recompute the logits from.
"""

from .certificate import check
from .reading import Rejected

__all__ = ["Rejected", "check"]
