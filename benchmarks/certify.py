"""Sound certification of images with AOL-Small, relative to a plain float64 forward pass over the same images.

The proof is computed once for a network and timed separately. The additional work is the radii in fractions, and
running some images through the proved program: all of the first batch of 250, three of each other batch. The ratio
decreases with the number of images, from slightly above 2 for one batch.
"""

import argparse
import time

import torch
from _harness import interleaved, publish

import onelip
from onelip.certification import certify, prove


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="aol-small")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = onelip.create_model(arguments.model)
    with torch.no_grad():  # not the orthogonal start: trained weights are not either
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.std().nan_to_num(0.1))
    plain = onelip.bake(model).double().eval()
    images = torch.randint(0, 256, (arguments.images, 3, 32, 32), dtype=torch.uint8)

    start = time.perf_counter()
    proof = prove(plain, (3, 32, 32))
    proving = time.perf_counter() - start

    def forward() -> None:
        with torch.inference_mode():
            for batch in images.split(250):
                plain(batch.double().div_(255))

    times = interleaved({"forward": forward, "sound": lambda: certify(plain, images, proof=proof)}, arguments.rounds)
    rows = [
        {
            "what": name,
            "ratio to forward": timing.ratio_to(times["forward"]),
            "images per second": arguments.images / timing.median,
        }
        for name, timing in times.items()
    ]
    publish(
        "certify_speed",
        rows,
        what=f"float64 forward and sound certification of {arguments.images} images by {arguments.model}",
        seconds_of_the_fast_proof=round(proving, 1),
        rounding_error_of_the_logits=proof.error,
    )


if __name__ == "__main__":
    main()
