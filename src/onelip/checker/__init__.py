"""Re-checks a certificate from its weight file: numpy, python-flint and the standard library, nothing else of onelip.

Accepted means that this is proved. Let f be the float64 program that the node list describes, with the weights of the
file (IEEE binary64, round to nearest, sums in any order, FMA and flush-to-zero allowed, conventional products). For an
image x in [0, 1]^n whose logits stand in the file with a radius R > 0, and every x' with ||x' - x||_2 <= R: class y is
strictly the largest of f(x'). Why: for rows w of the last layer, D = ||w_y - w_j||, and the numbers of the node before,

    |(f_y - f_j) - its real value| <= D error + rounding_y + rounding_j = loss / 4, at x and at x';
    so f_y > f_j at x' if f_y - f_j > loss / 2 + D lipschitz R at x.

The other half of the loss is for the logits of the file, which need not be those of a run: only to be within loss / 2
of what is computed here.

Every number is derived here again, in exact fractions, and must be equal to the last bit. The program is run on the
images, if they are where the file says or are given: its logits and the file's must agree within twice the proved
error, as two runs of one program do, and the verdict says how much smaller the radii from its own logits are. Without
images anybody can write good logits into a file: the verdict says so, and the exit code is not 0. Not derived: labels,
where the images come from, and that the nodes are the network you mean (the config is only hashed).

Read in this order; the first three are the proof:

    norms.py        exact roundings, and ||W||^2 <= square in whole numbers
    program.py      every kind of node: its program, and what rounding does to it
    proof.py        three numbers for each node, the logits' losses, the radius
    certificate.py  the whole file: hashes, results, summary, images
    reading.py      strict reading of JSON and safetensors, and the comparison with what is derived
    command.py      the command line

    python -m onelip.checker cert.json --images images.npy        (or python -m checker, beside a copy of this folder)

Exit codes: 0 accepted, 1 rejected, 2 a file cannot be read or the command makes no sense, 3 the bounds are accepted,
but there were no images to compute the logits from.
"""

from .certificate import check
from .command import main, report
from .reading import Rejected, Unreadable

__all__ = ["Rejected", "Unreadable", "check", "main", "report"]
