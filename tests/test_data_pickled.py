"""CIFAR's python batches: read, never executed, and nothing but the authors' content accepted."""

import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from test_data_samples import CPickle, cifar_python, random_images

from onelip import data
from onelip.data._formats import parse_cifar_python
from onelip.data._pickled import read_pickled_dict


def test_a_pickle_is_never_executed(tmp_path):
    witness = tmp_path / "executed"

    class Bad:
        def __reduce__(self):
            return (Path.touch, (witness,))

    for protocol in range(6):
        with pytest.raises(data.DataError, match="nothing of it was executed"):
            read_pickled_dict(pickle.dumps({"data": Bad()}, protocol=protocol), "batch")
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
    with pytest.raises(data.DataError, match=r"the name os.system, which no CIFAR batch has"):
        read_pickled_dict(b"\x80\x02" + calls[0], "batch")
    for program in calls:
        with pytest.raises(data.DataError, match="expected a CIFAR batch"):
            read_pickled_dict(b"\x80\x02" + program, "batch")


def test_broken_pickles_are_errors_of_ours():
    good = cifar_python(random_images(3, 3, 32, 32), np.arange(3), coarse=False)
    assert set(read_pickled_dict(good, "batch")) == {"batch_label", "labels", "data", "filenames"}
    rng = np.random.default_rng(0)
    for cut in [*range(200), *rng.integers(0, len(good), 50)]:
        with pytest.raises(data.DataError, match="expected a CIFAR batch"):
            read_pickled_dict(good[:cut], "batch")
    for position, value in zip(rng.integers(0, 400, 300), rng.integers(0, 256, 300), strict=True):
        changed = bytearray(good)
        changed[position] = value
        with contextlib.suppress(data.DataError):  # anything else would be a crash
            read_pickled_dict(bytes(changed), "batch")


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
