"""The handwritten digits that come with the package: 1797 grey images of 8x8 pixels, for demos and tests.

From "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998, CC BY
4.0), in the form in which scikit-learn has them (`sklearn.datasets.load_digits`). digits.npz holds their own values, 0
to 16; loaded they are round(v · 255 / 16), so that black is 0 and white 255 as in every other data set.

The split is fixed and needs no random numbers: of each class, in the order of the file, every fifth image is a test
image.
"""

import numpy as np

from onelip.data._archives import damaged, read_file
from onelip.data._checksums import bytes_match
from onelip.data._class_names import DIGITS
from onelip.data._image_data import ImageData, image_data_from_arrays
from onelip.data._npz import read_arrays
from onelip.data._places import DIGITS_FILE

_DIGEST = "sha256:b3b9c8cc11d765ce4264d8748bf3edbafa5038d91c93cf713ddbd6ae8652b410"


def load_digits() -> ImageData:
    """1442 training and 355 test images, (1, 8, 8)."""
    if not bytes_match(read_file(DIGITS_FILE), _DIGEST):
        raise damaged(DIGITS_FILE, "install the package again")
    arrays = read_arrays(DIGITS_FILE)
    values, labels = arrays["images"].astype(np.int64), arrays["labels"]  # (1797, 8, 8) of 0..16, (1797)
    images = ((values * 255 + 8) // 16).astype(np.uint8)[:, None]
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    return image_data_from_arrays(
        "digits", (images[~test], labels[~test]), (images[test], labels[test]), DIGITS, str(DIGITS_FILE)
    )
