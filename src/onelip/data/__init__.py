"""Images: data sets with checksums, augmentation, batches.

    data = onelip.data.load_data("digits")
    generator = torch.Generator().manual_seed(0)
    loader = onelip.data.Batches(data.train_images, data.train_labels, 250, shuffle=True, generator=generator,
                                 augmentation=onelip.data.Augmentation())
    for images, labels in loader:
        ...

Names are imported on first use: listing and downloading data sets does not import torch.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.core.errors import (
        ChecksumError as ChecksumError,
        DataError as DataError,
        DataNotFound as DataNotFound,
        FetchError as FetchError,
    )
    from onelip.core.images import to_float as to_float
    from onelip.data.augmentation import Augmentation as Augmentation
    from onelip.data.download import fetch as fetch
    from onelip.data.image_data import (
        Batch as Batch,
        Batches as Batches,
        ImageData as ImageData,
        stratified_split as stratified_split,
        validation_split as validation_split,
    )
    from onelip.data.load import load_data as load_data, load_digits as load_digits
    from onelip.data.own import (
        NewImages as NewImages,
        load_folder as load_folder,
        load_images as load_images,
        load_npz as load_npz,
    )
    from onelip.data.registry import (
        DataStatus as DataStatus,
        data_places as data_places,
        data_status as data_status,
        list_data as list_data,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
