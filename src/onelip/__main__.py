"""`python -m onelip`, also for torchrun: `torchrun --nproc-per-node 2 -m onelip train ...`."""

import sys

from onelip.cli import main

if __name__ == "__main__":
    sys.exit(main())
