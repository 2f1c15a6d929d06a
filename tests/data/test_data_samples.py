"""The samples used by the other tests are in the official formats."""

import pickle

import numpy as np
import pytest
from _data_samples import cifar_binary, cifar_python, random_images


@pytest.mark.parametrize("count", [3, 2000])
def test_the_python_samples_are_pickles_that_python_reads(count):
    images = random_images(count, 3, 32, 32)
    labels = np.arange(count) % 10
    batch = pickle.loads(cifar_python(images, labels, coarse=False), encoding="latin1")
    assert list(batch) == ["batch_label", "labels", "data", "filenames"]
    assert batch["labels"] == labels.tolist()
    np.testing.assert_array_equal(batch["data"], images.reshape(count, 3072))


def test_the_binary_samples_have_records_of_the_official_size():
    images, labels = random_images(4, 3, 32, 32), np.arange(4)
    assert len(cifar_binary(images, labels, coarse=False)) == 4 * 3073
    assert len(cifar_binary(images, labels, coarse=True)) == 4 * 3074
