"""Nodes whose program is another than it seems: batches, masks, windows, shapes."""

from fractions import Fraction

import numpy as np
from _certificates import Builder, U
from _certified_networks import change, dyadic, files, quiet, rejected
from _exact_layers import text, up_root

from onelip.checker import check


def test_images_of_a_batch_do_not_meet(tmp_path):
    """Programs have the batch as the last axis: one that sorts there gives images each other's logits."""
    net = Builder((1,))
    net.exact("sort", (1,), lambda x: x, axis=0, group_size=1)
    net.map([[1.0], [-1.0]], [0.0, 1.0])
    images = np.array([[0.9], [0.1]])
    check(files(net, tmp_path, images=images), images=tmp_path / "images.npy")
    for axis in (-1, 1):
        rejected(files(net, tmp_path, images=images, edit=change("nodes", 1, "axis", to=axis)), "node 1 .*")


def test_a_pixel_is_no_mask(tmp_path):
    """numpy takes true for a mask, over channels: then the sum of a window is that of all of them."""
    net = Builder((100, 1))
    terms = {"rounding": 5 * U / (1 - 5 * U), "underflow": 3, "factor": text(0.1), "take": [[True]]}
    net.scaled("sum", (1,), lambda x: x.sum(0) * 0.1, Fraction(0.1), **terms)
    net.map([[1.0], [-1.0]], [0.0, 10.0])
    rejected(files(net, tmp_path, images=np.full((1, 100, 1), 0.6)), "node 1 .*expected integers from -1")


def test_every_window_holds_a_pixel(tmp_path):
    net = Builder((1, 3))
    net.scaled("max", (1, 2), lambda x: x[:, :2], Fraction(1), take=[[0, -1], [1, -1]])
    net.exact("join", (2,), np.ravel)
    rejected(files(net, tmp_path, pairs=False), "node 1 .*a window without pixels")


def test_nodes_that_do_not_fit_their_input(tmp_path):
    net = Builder((1, 3))
    net.scaled("max", (1, 2), lambda x: x[:, :2], Fraction(1), take=[[0, 3]])
    net.exact("join", (2,), np.ravel)
    rejected(files(net, tmp_path, pairs=False), "node 1 .*take: expected pixels below 3, got 3")
    net = Builder((3,))
    net.exact("sort", (3,), lambda x: x, axis=0, group_size=2)
    rejected(files(net, tmp_path, pairs=False), "node 1 .*group_size: expected a divisor of 3, got 2")
    path = files(quiet(), tmp_path, edit=change("nodes", 3, "shape", to=[2, 2]))
    rejected(path, "node 4 .*take: expected pixels below 2, got 3")


def test_entries_may_be_cut_and_filled_up(tmp_path):
    net = Builder((6,))
    net.map(dyadic(4, 6), dyadic(4))
    net.exact("join", (2,), lambda x: x[:2])
    net.exact("join", (3,), lambda x: np.append(x, 0.0))
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")


TAKES = [
    ("max", [[0, 1, 1]], 2),
    ("max", [[0, 1, 2], [-1, 2, 0], [1, -1, -1]], 2),
    ("max", [[0, 0], [1, -1]], 2),
    ("sum", [[0, 0], [1, -1], [-1, 0]], 3),
]


def test_a_pixel_in_several_windows_counts_as_often(tmp_path):
    """Also twice in one window, and if the second time is in a list of its own."""
    for op, take, m in TAKES:
        K = len(take)
        for factor in (up_root(Fraction(m * (K if op == "sum" else 1))), Fraction(1)):
            net = Builder((2, 3))
            shape = (2, len(take[0]))

            def run(x, take=take, op=op):
                wide = np.append(x, np.full((2, 1), -np.inf if op == "max" else 0.0), 1)[:, np.array(take)]
                return wide.max(1) if op == "max" else wide.sum(1)

            terms = {"rounding": (K + 4) * U / (1 - (K + 4) * U), "underflow": K + 2, "factor": text(1.0)}
            net.scaled(op, shape, run, factor, take=take, **(terms if op == "sum" else {}))
            net.exact("join", (int(np.prod(shape)),), np.ravel)
            net.map(dyadic(2, int(np.prod(shape))))
            path = files(net, tmp_path)
            check(path, images=tmp_path / "images.npy") if factor > 1 else rejected(path, "node 1 .*constant")
