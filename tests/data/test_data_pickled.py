"""CIFAR's python batches are read but never executed, and only the official content is accepted."""

import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from _data_samples import CPickle, cifar_python, random_images

from onelip import data
from onelip.data.formats import parse_cifar_python, read_cifar_pickle


def test_a_pickle_is_never_executed(tmp_path):
    witness = tmp_path / "executed"

    class Bad:
        def __reduce__(self):
            return (Path.touch, (witness,))

    for protocol in range(6):
        with pytest.raises(data.DataError, match="none of its code was executed"):
            read_cifar_pickle(pickle.dumps({"data": Bad()}, protocol=protocol), "batch")
    assert not witness.exists()
    calls = [
        b"cos\nsystem\nU\x04true\x85R.",
        b"cbuiltins\neval\n.",
        b"cnumpy\nload\n.",
        b"(U\x04trueios\nsystem\n.",
        b"cnumpy\ndtype\nU\x01O\x85R.",
        b"cnumpy\ndtype\nJ\xff\xff\xff\x7f\x85R.",
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\n\x85R.",
    ]
    with pytest.raises(data.DataError, match="unexpected instruction GLOBAL os system"):
        read_cifar_pickle(b"\x80\x02" + calls[0], "batch")
    for program in calls:
        with pytest.raises(data.DataError, match="not an official CIFAR batch"):
            read_cifar_pickle(b"\x80\x02" + program, "batch")


@pytest.mark.parametrize(
    "program",
    [
        b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.",  # a nested tuple as a key: its hash would end the process
        b"}r\xff\xff\xff\x7f.",  # a place in the memo that pickle's own reader would allocate memory for
        b"}" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"}T\xff\xff\xff\x7f.",
        b"(" * 1000 + b"}.",
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87RN.",
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R(K\x01(tNNNtb.",
    ],
)
def test_hostile_pickles_are_refused_or_harmless(program):
    with contextlib.suppress(data.DataError):
        assert read_cifar_pickle(b"\x80\x02" + program, "batch") == {}


def test_broken_pickles_are_errors_of_ours():
    good = cifar_python(random_images(3, 3, 32, 32), np.arange(3), coarse=False)
    assert set(read_cifar_pickle(good, "batch")) == {"batch_label", "labels", "data", "filenames"}
    rng = np.random.default_rng(0)
    for cut in [*range(200), *rng.integers(0, len(good), 50)]:
        with pytest.raises(data.DataError, match="not an official CIFAR batch"):
            read_cifar_pickle(good[:cut], "batch")
    for position, value in zip(rng.integers(0, 400, 300), rng.integers(0, 256, 300), strict=True):
        changed = bytearray(good)
        changed[position] = value
        with contextlib.suppress(data.DataError):  # anything else would be a crash
            read_cifar_pickle(bytes(changed), "batch")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({b"labels": [1]}, "an array `data`.* got NoneType"),
        ({b"data": np.zeros((2, 10), np.uint8), b"labels": [1, 2]}, r"shape \(N, 3072\), got shape \(2, 10\)"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "list of 2 labels, got a list of 1"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [b"a", b"b"]}, "list of 2 labels"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "list of 2 labels, got NoneType"),
    ],
)
def test_python_batches_with_other_content_are_refused(entries, message):
    with pytest.raises(data.DataError, match=message):
        parse_cifar_python(CPickle().dictionary(entries), "batch")
