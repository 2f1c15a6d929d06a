"""The plain loop and the Lightning loop reach the same weights."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("plain_loop", "lightning_loop"):
        sys.modules.pop(name, None)


def test_the_plain_loop_learns():
    import plain_loop  # pyright: ignore[reportMissingImports]

    _, share = plain_loop.main(epochs=2)
    assert share > 0.6


def test_lightning_reaches_the_same_weights():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside of Lightning
        pytest.importorskip("lightning")
        import lightning_loop  # pyright: ignore[reportMissingImports]
        import plain_loop  # pyright: ignore[reportMissingImports]

        theirs, their_share = lightning_loop.main(epochs=1)
    ours, our_share = plain_loop.main(epochs=1)
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict())
    assert their_share == our_share
