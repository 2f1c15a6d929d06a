"""A plain convolutional network: a teacher for networks of constant 1, and a baseline without a certificate."""

import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import check_integer
from onelip.core.lipschitz_module import guard_image_shape
from onelip.models.chain import ImageSize, height_and_width
from onelip.models.registry import register_model


class _Block(nn.Module):
    """Convolution 3x3, batch normalisation, ReLU; added to the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.is_residual = inputs == outputs and stride == 1

    def forward(self, images: Tensor) -> Tensor:
        found = F.relu(self.norm(self.conv(images)))
        return images + found if self.is_residual else found


@register_model
def cnn_teacher(
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = None,
    width: int = 48,
    depth: int = 1,
) -> nn.Sequential:
    """A plain residual network with batch normalisation, without a Lipschitz constant: a teacher (`--teacher`).

    For 32 x 32 images:

        Conv 3x3, stride 2, batch norm, ReLU       16 x 16 x 48     1x
        Conv 3x3, batch norm, ReLU, + input        16 x 16 x 48     1x
        Conv 3x3, stride 2, batch norm, ReLU        8 x 8 x 96      1x
        Conv 3x3, batch norm, ReLU, + input         8 x 8 x 96      1x
        Conv 3x3, stride 2, batch norm, ReLU        4 x 4 x 192     1x
        Conv 3x3, batch norm, ReLU, + input         4 x 4 x 192     1x
        Maximum over the pixels                    192
        FC                                         classes

    An image is halved at least once, and until at most 4 x 4 pixels are left.

    Args:
        num_classes: number of logits.
        image_size: one number, or (height, width).
        in_channels: channels of the image.
        method: None: the network is not constrained.
        width: channels of the first stage; those of each further stage are doubled, up to 4 `width`.
        depth: number of residual convolutions in each stage.
    """
    if method is not None:
        raise ValueError(f"cnn-teacher has plain layers, got method {method!r}; use --method none")
    check_integer("width", width)
    check_integer("depth", depth, 0)
    size = height_and_width(image_size)
    blocks: list[nn.Module] = []
    channels, smallest, stage = in_channels, max(size), 0
    while stage == 0 or smallest > 4:
        outputs = width * min(4, 2**stage)
        blocks.append(_Block(channels, outputs, 2))
        blocks += [_Block(outputs, outputs, 1) for _ in range(depth)]
        channels, smallest, stage = outputs, -(-smallest // 2), stage + 1
    network = nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    guard_image_shape(network, (in_channels, *size))
    return network
