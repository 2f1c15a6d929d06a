"""Train the network of examples/plain_loop.py with Lightning, to the same weights: python examples/lightning_loop.py

Needs pip install lightning.
"""

import lightning
import torch
from plain_loop import batches, certified_accuracy, make_model

import onelip


class Classifier(lightning.LightningModule):
    """A 1-Lipschitz classifier. Layers, loss and optimizer of onelip need nothing special."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.loss_of = onelip.OffsetCrossEntropy()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        return self.loss_of(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that keeps AOL layers near orthogonality."""
        return onelip.optim.LipschitzMuon(self.model, lr=0.03)


def main(epochs: int = 5) -> tuple[torch.nn.Module, float]:
    """Train; returns the network and its certified accuracy at radius 36/255."""
    data = onelip.data.load_data("digits")
    classifier = Classifier()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, torch.utils.data.DataLoader(batches(data, epochs), batch_size=None))  # pyright: ignore[reportArgumentType]
    return classifier.model, certified_accuracy(classifier.model, data)


if __name__ == "__main__":
    print(f"certified accuracy at 36/255: {main()[1]:.1%}")
