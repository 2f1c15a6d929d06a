"""Prediction with AOL-Small: baked and parametrized, relative to the plain network. The ratio of the baked one is 1."""

import argparse

import torch
from _harness import interleaved, publish
from torch import nn
from torch.nn.utils import parametrize

import onelip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    aol = onelip.create_model("aol-small").eval()
    plain: nn.Module = onelip.create_model("aol-small", method=None).eval()
    baked = onelip.bake(aol)
    plain.load_state_dict(baked.state_dict())  # the same numbers too, should zeros be faster than others
    networks: dict[str, nn.Module] = {"plain": plain, "baked": baked, "parametrized": aol}
    rows = []
    for batch in (1, 32, 250):
        images = torch.rand(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

        def predict(model: nn.Module, images: torch.Tensor = images):
            def run() -> None:
                with torch.inference_mode():
                    model(images)

            return run

        for model in networks.values():
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
        times = interleaved({name: predict(model) for name, model in networks.items()}, rounds)
        rows += [
            {
                "batch": batch,
                "network": name,
                "ratio to plain": timing.ratio_to(times["plain"]),
                "milliseconds": 1e3 * timing.median,
            }
            for name, timing in times.items()
        ]
    same = [type(a) is type(b) for a, b in zip(plain.modules(), baked.modules(), strict=True)]
    assert all(same)
    assert not any(parametrize.is_parametrized(module) for module in baked.modules())
    publish("inference", rows, what="forward of AOL-Small in inference mode, medians of interleaved runs")


if __name__ == "__main__":
    main()
