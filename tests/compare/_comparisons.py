"""What the tests of `onelip compare` share: a small network and few images."""

import dataclasses

from onelip.data import load_data
from onelip.training import Recipe

OPTIONS = ("channels=8", "width=2", "convs=1", "linears=1")
SHARED = Recipe(data="digits", model="patchwise-tiny", model_options=OPTIONS, batch_size=50, lr=0.05, threads=1)


def small_data():
    digits = load_data("digits")
    return dataclasses.replace(
        digits,
        train_images=digits.train_images[:200],
        train_labels=digits.train_labels[:200],
        test_images=digits.test_images[:60],
        test_labels=digits.test_labels[:60],
    )
