"""Draw images with augmented copies: each row is an image, followed by copies with the augmentation of the paper.

    python examples/augmentation_gallery.py --data cifar10 --out docs/images/augmentation.png

Needs pillow. The default data are the digits in the package.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from onelip.data import Augmentation, ImageData, load_data, to_float

GAP, NAMES = 4, 72  # pixels between images, and for the names of the classes


def gallery(
    data: ImageData, augmentation: Augmentation, rows: int, columns: int, seed: int
) -> tuple[Tensor, list[str]]:
    """Images (rows, 1 + columns, C, H, W) in [0, 1], the originals first, and the class of each row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train_labels), generator=generator)
    # One image of each class in turn, so that the sheet shows them all.
    labels = [row % data.num_classes for row in range(rows)]
    chosen = [order[data.train_labels[order] == label][row // data.num_classes] for row, label in enumerate(labels)]
    originals = to_float(data.train_images[torch.stack(chosen)])
    changed = augmentation(originals.repeat_interleave(columns, dim=0), generator)
    sheet = torch.cat([originals.unsqueeze(1), changed.unflatten(0, (rows, columns))], dim=1)
    return sheet, [data.class_names[label] for label in labels]


def draw(sheet: Tensor, names: list[str], scale: int) -> Image.Image:
    """One picture of all images, a wider gap after the originals."""
    rows, columns, channels, height, width = sheet.shape
    step_y, step_x = height * scale + GAP, width * scale + GAP
    picture = Image.new("RGB", (NAMES + columns * step_x + 3 * GAP, rows * step_y + GAP), "white")
    pen = ImageDraw.Draw(picture)
    pixels = (sheet.expand(-1, -1, 3, -1, -1) if channels == 1 else sheet).mul(255).round().to(torch.uint8)
    for row in range(rows):
        pen.text((GAP, row * step_y + step_y // 2 - GAP), names[row], fill="black")
        for column in range(columns):
            image = Image.fromarray(np.ascontiguousarray(pixels[row, column].permute(1, 2, 0).numpy()))
            image = image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
            picture.paste(image, (NAMES + column * step_x + (3 * GAP if column else 0), GAP + row * step_y))
    return picture


def main(arguments: list[str] | None = None) -> Path:
    """Draw the sheet that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="digits", help="name or path, as for onelip.data.load_data")
    parser.add_argument("--root", default=None, help="where the data set lies")
    parser.add_argument("--out", type=Path, default=Path("augmentation.png"))
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    data = load_data(options.data, options.root)
    sheet, names = gallery(data, Augmentation(), options.rows, options.columns, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(sheet, names, options.scale).save(options.out, optimize=True)
    print(f"{options.out}: {options.rows} images of {data.name}, the original first, then {options.columns} of each")
    return options.out


if __name__ == "__main__":
    main()
