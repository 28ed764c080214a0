"""Convolutional networks for images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from juggler.runtime.modules.layers import initialized

_NATURE_SIDE = 36  # the smallest side that its three convolutions can process
_MOST_FEATURES = 4096  # that go into its linear layer; of 84 × 84, 3,136 do


@dataclass(frozen=True)
class ImageLayout:
    """How the dimensions of one observation form an image [C, H, W].

    Two dimensions are [H, W], three [H, W, C] or [C, H, W], and four a stack of images, whose
    channels are put side by side. The channels are the odd dimension if the two others are equal
    and adjacent, else the smaller of the first and the last, else the last.
    """

    channels: int
    height: int
    width: int
    stacked: bool  # the first dimension is a stack
    channels_last: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> ImageLayout:
        stack = shape[0] if len(shape) == 4 else 1
        if len(shape) == 2:
            return cls(1, *shape, stacked=False, channels_last=True)
        a, b, c = shape[-3:]
        last = a == b if (a == b) != (b == c) else c <= a
        channels, height, width = (c, a, b) if last else (a, b, c)
        return cls(stack * channels, height, width, len(shape) == 4, last)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps observations [B, ...] to [B, C, H, W], without a copy unless there is a stack."""
        if x.ndim == 3:
            return x.unsqueeze(1)  # [B, 1, H, W]
        if self.channels_last:
            x = x.movedim(-1, -3)  # [B, C, H, W] or [B, K, C, H, W]
        return x.flatten(1, 2) if self.stacked else x  # [B, C, H, W]


class ImageEncoder(nn.Module):
    """Maps images of one layout, and of any dtype, to features [B, size].

    Bytes are scaled to [0, 1] here, on the device, because they travel as bytes.

    Where gradients are computed on a CPU, channels are last in memory: convolutions and their
    gradients then take three quarters of the time. Passes without gradients gain nothing by it.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        convolutions: nn.Sequential,
        size: int,
        initializer: str,
    ) -> None:
        super().__init__()
        self.layout = layout = ImageLayout.of(space.shape)
        self.scale = byte_scale(space)
        self.size = size
        self.convolutions = convolutions
        with torch.no_grad():
            image = torch.zeros(1, layout.channels, layout.height, layout.width)  # [1, C, H, W]
            flat = convolutions(image).numel()
        self.linear = initialized(nn.Linear(flat, size), initializer)

    def forward(self, observations: Tensor) -> Tensor:
        x = self.layout(observations)  # [B, C, H, W]
        if torch.is_grad_enabled() and x.device.type == "cpu":
            x = x.movedim(-3, -1).contiguous().movedim(-1, -3)  # which vmap knows, too
        x = x.float()  # [B, C, H, W]
        if self.scale is not None:
            x.mul_(self.scale)  # [B, C, H, W] of what were bytes
        x = self.convolutions(x).flatten(1)  # [B, F]
        features: Tensor = self.linear(x)  # [B, size]
        return features.relu()


def byte_scale(space: gymnasium.spaces.Box) -> float | None:
    """The factor that scales a space's bytes to [0, 1]; None if they are not bytes."""
    return 1 / max(1, int(space.high.max())) if space.dtype == np.uint8 else None


class NatureCNN(ImageEncoder):
    """The network of Mnih et al. 2015, "Human-level control through deep reinforcement learning".

    Its first convolutions are too large for an image with a side below 36. Such an image gets three
    3 × 3 convolutions, which halve it while it has a side above 8, and 128 features.

    Of an image that is much larger than the paper's 84 × 84, nearly all weights would be in the
    linear layer: 57 of 57 million for 280 × 480. So 3 × 3 convolutions go on to halve it until at
    most 4,096 numbers are left.
    """

    def __init__(self, space: gymnasium.spaces.Box, initializer: str = "orthogonal") -> None:
        layout = ImageLayout.of(space.shape)
        sides = layout.height, layout.width
        is_small = min(sides) < _NATURE_SIDE
        # Channels, kernel, stride and padding.
        shapes = [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)]
        if is_small:
            side, shapes = min(sides), []
            for channels in (16, 32, 32):
                stride = 2 if side > 8 else 1
                side = math.ceil(side / stride)
                shapes.append((channels, 3, stride, 1))
        for shape in shapes:
            sides = _convolved(sides, shape)
        last = shapes[-1][0]
        while last * math.prod(sides) > _MOST_FEATURES:
            shapes.append((last, 3, 2, 1))
            sides = _convolved(sides, shapes[-1])
        layers: list[nn.Module] = []
        inputs = layout.channels
        for channels, kernel, stride, padding in shapes:
            convolution = nn.Conv2d(inputs, channels, kernel, stride, padding)
            layers += [initialized(convolution, initializer), nn.ReLU()]
            inputs = channels
        size = 128 if is_small else 512
        super().__init__(space, nn.Sequential(*layers), size, initializer)


def _convolved(sides: tuple[int, int], shape: tuple[int, int, int, int]) -> tuple[int, int]:
    """Height and width of what a convolution makes of an image.

    Args:
        sides: height and width of the image.
        shape: channels, kernel, stride and padding.
    """
    _, kernel, stride, padding = shape
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in sides)
    return height, width


class ImpalaResNet(ImageEncoder):
    """The residual network of 15 convolutions in Espeholt et al. 2018, "IMPALA", figure 3.

    Takes images of any size. Each of its three sections halves the image.
    """

    def __init__(self, space: gymnasium.spaces.Box, initializer: str = "orthogonal") -> None:
        layers: list[nn.Module] = []
        inputs = ImageLayout.of(space.shape).channels
        for outputs in (16, 32, 32):
            layers += [
                initialized(nn.Conv2d(inputs, outputs, 3, padding=1), initializer, gain=1.0),
                nn.MaxPool2d(3, stride=2, padding=1),
                _Residual(outputs, initializer),
                _Residual(outputs, initializer),
            ]
            inputs = outputs
        super().__init__(space, nn.Sequential(*layers, nn.ReLU()), 256, initializer)


class _Residual(nn.Module):
    def __init__(self, channels: int, initializer: str) -> None:
        super().__init__()
        # At first, a block adds only a fraction of its input, so that six in a row do not explode.
        self.first = initialized(nn.Conv2d(channels, channels, 3, padding=1), initializer)
        self.second = initialized(
            nn.Conv2d(channels, channels, 3, padding=1), initializer, gain=0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x.relu()).relu())  # [B, C, H, W]
        return x + y
