"""Training as a plain loop, without checkpoints, display and processes: what the trainer must compute."""

from collections.abc import Callable

import torch
from torch import nn

from onelip.data import Batches, load_data
from onelip.losses import OffsetCrossEntropy
from onelip.training import Recipe, build_model, learning_rate, make_optimizer
from onelip.training.learner import make_augmentation


def train_plainly(recipe: Recipe, change_gradients: Callable[[nn.Module], None] = lambda model: None) -> nn.Module:
    """The network of a recipe for the digits, after all its epochs; gradients may be changed before each step."""
    data = load_data("digits")
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, 10, (1, 8, 8)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = make_optimizer(model, recipe)
    loss = OffsetCrossEntropy(recipe.offset, recipe.temperature)
    loader = Batches(
        data.train_images,
        data.train_labels,
        recipe.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(recipe.seed),
        augmentation=make_augmentation(recipe),
    )
    step = 0
    for _ in range(recipe.epochs):
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step, recipe.epochs * len(loader))
            optimizer.zero_grad()
            loss(model(images.contiguous(memory_format=torch.channels_last)), labels).backward()
            change_gradients(model)
            optimizer.step()
            step += 1
    return model
