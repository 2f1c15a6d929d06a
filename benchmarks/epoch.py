"""Cost of data and augmentation: training steps of AOL-Small with the loader, relative to steps on the same tensors.

Both train the same network with the same loss and optimizer at batch 250. One takes its batches from the loader of
`onelip train` (shuffled uint8 images, the augmentation of the paper, conversion, memory layout), the other uses the
same float tensors in every step. The images are random noise.
"""

import argparse
import itertools

import torch
from _harness import interleaved, publish

from onelip.data import Batches
from onelip.losses import OffsetCrossEntropy
from onelip.training.build import build_model
from onelip.training.learner import make_augmentation, make_optimizer, set_layout
from onelip.training.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps in a round")
    args = parser.parse_args()
    torch.manual_seed(0)
    recipe = Recipe()
    images = torch.randint(256, (50 * recipe.batch_size, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (len(images),))
    loader = Batches(
        images,
        labels,
        recipe.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        augmentation=make_augmentation(recipe),
    )
    model = build_model(recipe, 10, (3, 32, 32))
    layout = set_layout(model, recipe)
    optimizer = make_optimizer(model, recipe)
    loss = OffsetCrossEntropy(recipe.offset, recipe.temperature)

    def step(batch: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(batch), targets).backward()
        optimizer.step()

    endless = itertools.chain.from_iterable(loader.epoch() for _ in itertools.count())
    ready = next(endless)
    ready_images = ready.images.contiguous(memory_format=layout)

    def epoch_steps() -> None:
        for batch in itertools.islice(endless, args.steps):
            step(batch.images.contiguous(memory_format=layout), batch.labels)

    def bare_steps() -> None:
        for _ in range(args.steps):
            step(ready_images, ready.labels)

    def data_alone() -> None:
        for batch in itertools.islice(endless, args.steps):
            batch.images.contiguous(memory_format=layout)

    times = interleaved({"bare steps": bare_steps, "epoch": epoch_steps, "data alone": data_alone}, args.rounds)
    rows = [
        {
            "what": name,
            "ratio to bare steps": timing.ratio_to(times["bare steps"]),
            "seconds a step": timing.median / args.steps,
        }
        for name, timing in times.items()
    ]
    publish("epoch", rows, what="AOL-Small, batch 250, paper's augmentation")


if __name__ == "__main__":
    main()
