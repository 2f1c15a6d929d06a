"""The example that draws augmented images runs and shows originals and augmented images."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

EXAMPLE = Path(__file__).parents[2] / "examples" / "augmentation_gallery.py"


def test_the_gallery_shows_originals_and_changed_images(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("augmentation_gallery", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    out = example.main(["--out", str(tmp_path / "new" / "sheet.png"), "--rows", "3", "--columns", "2", "--scale", "2"])
    assert "3 images of digits" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (72 + 3 * 20 + 12, 3 * 20 + 4)
        pixels = np.asarray(picture)
    original, changed = pixels[4:20, 72:88], pixels[4:20, 104:120]
    assert not np.array_equal(original, changed)
