"""Which logits are rows of the last layer, so that pairs of them have slopes of their own; and which are not."""

import numpy as np
import pytest
from _certificates import Builder
from _certified_networks import change, dyadic, files, no_head, potential, rejected, scale, small

from onelip.checker import check


def test_no_pairs_around_a_circle(tmp_path):
    """Three taps fold onto the one pixel: the row is longer than its taps."""
    net = Builder((2, 1))
    net.map(dyadic(2, 2, 3), dyadic(2), padding=[[1, 1]], mode="circular")
    net.exact("join", (2,), np.ravel)
    rejected(files(net, tmp_path), "pairs: .*not circular")
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")


def test_no_pairs_with_groups_or_positions(tmp_path):
    net = Builder((2, 1))
    net.map(dyadic(2, 1, 1), groups=2)
    net.exact("join", (2,), np.ravel)
    rejected(files(net, tmp_path), "pairs: expected a last layer of one pixel and one group")
    net = Builder((1, 2))
    net.map(dyadic(2, 1, 1))
    net.exact("join", (4,), np.ravel)
    net.exact("join", (2,), lambda x: x[:2])
    rejected(files(net, tmp_path), "pairs: expected a last layer of one pixel and one group")


def test_no_pairs_of_what_is_computed_after_the_last_layer(tmp_path):
    """Rows of the last node are taken: those of a layer before are none of it."""
    rejected(
        files(no_head(), tmp_path, pairs=False, edit=change("pairs", to=True)),
        "pairs: expected a linear layer or convolution at the end",
    )
    net = Builder((2, 1))
    net.map(dyadic(2, 2, 1))
    potential(net, dyadic(2, 2, 1))
    net.exact("join", (2,), np.ravel)

    def with_pairs(content):
        content["pairs"] = True

    rejected(
        files(net, tmp_path, pairs=False, edit=with_pairs), "pairs: expected a linear layer or convolution at the end"
    )


@pytest.mark.parametrize("given", [{"padding": [[1, 1]]}, {"padding": [[2, 1]], "dilation": [2]}])
def test_pairs_of_a_transposed_layer(given, tmp_path):
    net = Builder((3, 2))
    net.map(dyadic(3, 4, 2), dyadic(4), transposed=True, **given)
    net.exact("join", (4,), np.ravel)
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_logits_are_all_entries_of_the_last_node(tmp_path):
    """A class that is left out by a node is left out where everybody sees it."""
    net = Builder((2, 2))
    net.map(dyadic(2, 2, 1))
    net.exact("join", (3,), lambda x: x.ravel()[:3])
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")

    def without_the_last(content):
        content["nodes"].pop()

    rejected(files(net, tmp_path, pairs=False, edit=without_the_last), "result 0: logits: expected 4, got 3")


@pytest.mark.parametrize("more", [False, True])
def test_rows_of_logits_are_not_filled_up(more, tmp_path):
    """A join that has fewer entries than there are logits loses rows: what it fills up with are no rows."""
    net = Builder((6,))
    net.map(dyadic(4, 6), dyadic(4))
    net.exact("join", (2,), lambda x: x[:2])
    net.exact("join", (3,), lambda x: np.append(x, 0.0))
    if more:
        net.exact("join", (2,), lambda x: x[:2])
    path = files(net, tmp_path)
    check(path, images=tmp_path / "images.npy") if more else rejected(
        path, "pairs: expected logits that are rows of one layer"
    )
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")


def test_one_number_for_all_pairs_is_that_of_the_last_node(tmp_path):
    net = small()
    scale(net, 0.7)
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")
