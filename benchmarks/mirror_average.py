"""Certified accuracy of a trained network and of its average over mirrored images (`onelip.nn.MirrorAverage`).

python benchmarks/mirror_average.py --data-root DIR         # results/mirror_average.json
"""

import argparse
from pathlib import Path

import torch
from _harness import publish

import onelip
from onelip.core.bake import bake
from onelip.data import load_data
from onelip.training.evaluation import Constants, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--network", default="cifar10-fast", help="a name of `onelip zoo`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data(args.network.removesuffix("-fast"), args.data_root)
    network = onelip.from_pretrained(args.network)
    rows = []
    for name, model in (("network", network), ("mirror average", onelip.nn.MirrorAverage(network))):
        constant = onelip.audit(model.eval(), torch.rand(1, *data.shape), lower=False).upper
        found = evaluate(bake(model), data.test_images, data.test_labels, Constants(constant)).total
        rows.append({"network": args.network, "what": name, "accuracy": found.accuracy, "cra": found.cra})
        print(rows[-1])
    publish("mirror_average", rows, what="test images, real arithmetic, constant of the audit")


if __name__ == "__main__":
    main()
