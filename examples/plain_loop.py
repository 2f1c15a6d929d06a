"""Train a 1-Lipschitz classifier in a plain PyTorch loop, and certify it: python examples/plain_loop.py

examples/lightning_loop.py trains the same network with Lightning, to the same weights.
"""

import torch

import onelip


def batches(data: onelip.data.ImageData, epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches for every loop."""
    torch.manual_seed(0)
    orders = [torch.randperm(len(data.train_labels)).split(100) for _ in range(epochs)]
    return [(data.train_images[i] / 255, data.train_labels[i]) for order in orders for i in order]


def make_model() -> torch.nn.Module:
    """A network of AOL layers for 8 x 8 digits, and the same initial weights for every loop."""
    torch.manual_seed(1)
    return onelip.create_model("aol-fast-small", image_size=8, in_channels=1)


def main(epochs: int = 5) -> tuple[torch.nn.Module, float]:
    """Train; returns the network and its certified accuracy at radius 36/255."""
    data = onelip.data.load_data("digits")
    model = make_model()
    loss_of, optimizer = onelip.OffsetCrossEntropy(), onelip.optim.LipschitzMuon(model, lr=0.03)
    for images, labels in batches(data, epochs):
        loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, certified_accuracy(model, data)


def certified_accuracy(model: torch.nn.Module, data: onelip.data.ImageData) -> float:
    """Share of the test images that are classified correctly, for all changes of L2 norm up to 36/255."""
    found = onelip.certify(onelip.bake(model).double().eval(), data.test_images)
    return float(((found.classes == data.test_labels) & (found.radii >= 36 / 255)).double().mean())


if __name__ == "__main__":
    print(f"certified accuracy at 36/255: {main()[1]:.1%}")
