"""Images: sources with checksums, the paper's augmentation, batches.

    data = onelip.data.load_data("digits")
    generator = torch.Generator().manual_seed(0)
    for images, labels in onelip.data.batches(data.train_images, data.train_labels, 250, shuffle=True,
                                              generator=generator, augmentation=onelip.data.Augmentation()):
        ...

Names are loaded when they are first used: listing and fetching need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelip.data._augmentation import Augmentation
    from onelip.data._batches import Batch, Batches, batches
    from onelip.data._digits import load_digits
    from onelip.data._errors import ChecksumError, DataError, DataNotFound, FetchError
    from onelip.data._fetch import fetch
    from onelip.data._folder import load_folder
    from onelip.data._image_data import ImageData, to_float
    from onelip.data._load import load_data
    from onelip.data._npz import load_npz
    from onelip.data._places import DataStatus, data_places, data_status, list_data
    from onelip.data._splits import stratified_split, validation_split

_WHERE = {
    "Augmentation": "_augmentation",
    "Batch": "_batches",
    "Batches": "_batches",
    "ChecksumError": "_errors",
    "DataError": "_errors",
    "DataNotFound": "_errors",
    "DataStatus": "_places",
    "FetchError": "_errors",
    "ImageData": "_image_data",
    "batches": "_batches",
    "data_places": "_places",
    "data_status": "_places",
    "fetch": "_fetch",
    "list_data": "_places",
    "load_data": "_load",
    "load_digits": "_digits",
    "load_folder": "_folder",
    "load_npz": "_npz",
    "stratified_split": "_splits",
    "to_float": "_image_data",
    "validation_split": "_splits",
}

__all__ = [
    "Augmentation",
    "Batch",
    "Batches",
    "ChecksumError",
    "DataError",
    "DataNotFound",
    "DataStatus",
    "FetchError",
    "ImageData",
    "batches",
    "data_places",
    "data_status",
    "fetch",
    "list_data",
    "load_data",
    "load_digits",
    "load_folder",
    "load_npz",
    "stratified_split",
    "to_float",
    "validation_split",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'onelip.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onelip.data.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
