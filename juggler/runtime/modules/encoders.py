"""Encoders, which map observations of a space to features [B, size]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from juggler.runtime.modules.columns import without_mask
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.modules.layers import MLP, initialized
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Path, path_name

_NATURE_SIDE = 36  # the smallest side that its three convolutions can process
_MOST_FEATURES = 4096  # inputs of its linear layer; 3,136 for 84 × 84


@dataclass(frozen=True)
class ImageLayout:
    """Layout of an observation's dimensions as an image [C, H, W].

    Two dimensions are [H, W], three [H, W, C] or [C, H, W], and four a stack of images, whose
    channels are put side by side. The channels are the odd dimension if the other two are equal
    and adjacent; otherwise the smaller of the first and the last; if these are equal, the last.
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
        """Convert observations [B, ...] to [B, C, H, W], preferably without copy."""
        if x.ndim == 3:
            return x.unsqueeze(1)  # [B, 1, H, W]
        if self.channels_last:
            x = x.movedim(-1, -3)  # [B, C, H, W] or [B, K, C, H, W]
        return x.flatten(1, 2) if self.stacked else x  # [B, C, H, W]


class ImageEncoder(nn.Module):
    """Encodes images of one layout to features [B, size].

    Bytes are scaled to [0, 1] here, on the device, because they travel as bytes.

    For gradients on a CPU, channels are last in memory: convolutions and their gradients then take
    75 % of the time. Passes without gradients are not faster.
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
            x = x.movedim(-3, -1).contiguous().movedim(-1, -3)  # works with vmap, too
        x = x.float()  # [B, C, H, W]
        if self.scale is not None:
            x.mul_(self.scale)  # [B, C, H, W] if they were bytes
        x = self.convolutions(x).flatten(1)  # [B, F]
        features: Tensor = self.linear(x)  # [B, size]
        return features.relu()


def byte_scale(space: gymnasium.spaces.Box) -> float | None:
    """Factor that scales a space's bytes to [0, 1]; None: no bytes."""
    return 1 / max(1, int(space.high.max())) if space.dtype == np.uint8 else None


class NatureCNN(ImageEncoder):
    """The DQN network, extended to other image sizes (Mnih et al. 2015).

    "Human-level control through deep reinforcement learning". Its first convolutions are too large
    for an image with a side below 36, which instead gets three 3 × 3 convolutions that halve it
    while a side is above 8, and 128 features.

    For an image much larger than the paper's 84 × 84, nearly all weights would be in the linear
    layer: 57 of 57 million for 280 × 480. So more 3 × 3 convolutions halve it until at most 4,096
    numbers are left.
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
        # The linear layer would otherwise have nearly all weights.
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
    """Return the height and width of a convolution's output.

    Args:
        sides: height and width of the image.
        shape: channels, kernel, stride and padding.
    """
    _, kernel, stride, padding = shape
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in sides)
    return height, width


class ImpalaResNet(ImageEncoder):
    """IMPALA's 15-layer residual network (Espeholt et al. 2018, figure 3).

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
        # Initially, a block adds only a fraction of its input, so that six blocks do not explode.
        self.first = initialized(nn.Conv2d(channels, channels, 3, padding=1), initializer)
        self.second = initialized(
            nn.Conv2d(channels, channels, 3, padding=1), initializer, gain=0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x.relu()).relu())  # [B, C, H, W]
        return x + y


_CONVOLUTIONS: dict[object, type[NatureCNN | ImpalaResNet]] = {
    "auto": NatureCNN,
    "nature_cnn": NatureCNN,
    "impala_resnet": ImpalaResNet,
}

# Matrices of dtypes other than uint8 count as images if two sides have at least this size.
_IMAGE_SIDE = 16


class NumberEncoder(nn.Module):
    """Flattens Box or MultiBinary observations; scales bytes to [0, 1]."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        super().__init__()
        self.size = math.prod(space.shape)
        self.scale = byte_scale(space) if isinstance(space, spaces.Box) else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, self.size).float()  # [B, F]
        return x if self.scale is None else x.mul_(self.scale)  # [B, F] if they were bytes


class OneHotEncoder(nn.Module):
    """One-hot encoding of Discrete and MultiDiscrete."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)  # [k]
        starts = np.ravel(space.start)  # [k]
        self.size, self.choices, self.space = int(sizes.sum()), len(sizes), space
        self.first: Tensor
        self._offsets = (np.cumsum(sizes) - sizes - starts).astype(np.int64)  # [k]
        self.register_buffer("first", torch.tensor(self._offsets))

    def of_arrays(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Encode arrays [B, ...] to [B, F]."""
        places = x.reshape(-1, self.choices).astype(np.int64) + self._offsets  # [B, k]
        if places.size and places.min() < 0:  # NumPy would count from the end
            raise ValueError(f"observations are not in {self.space}")
        ones = np.zeros((len(places), self.size), np.float32)  # [B, F]
        ones[np.arange(len(places))[:, None], places] = 1
        return ones

    def forward(self, x: Tensor) -> Tensor:
        places = x.reshape(-1, self.choices).long() + self.first.to(x.device)  # [B, k]
        ones = torch.zeros(places.shape[0], self.size, device=x.device)  # [B, F]
        try:
            return ones.scatter(-1, places, 1.0)  # [B, F]
        except RuntimeError as error:
            raise ValueError(f"observations are not in {self.space}: {error}") from error


class TreeEncoder(nn.Module):
    """Encodes each leaf of observations, then their concatenated features.

    A single image has no hidden layers.

    Args:
        paths: of the leaves.
        encoders: of the leaves, each with a `size`.
        config: of the hidden layers.
    """

    def __init__(
        self, paths: Sequence[Path], encoders: Sequence[nn.Module], config: ModelConfig
    ) -> None:
        super().__init__()
        self.paths = list(paths)
        self.encoders = nn.ModuleList(encoders)
        self.has_images = any(isinstance(each, ImageEncoder) for each in encoders)
        sizes = [feature_size(encoder) for encoder in encoders]
        self.layers = None
        self.size = sizes[0]
        if len(encoders) > 1 or not self.has_images:
            self.layers = MLP(sum(sizes), config)
            self.size = self.layers.size

    def forward(self, observations: Any) -> Tensor:
        features = []  # [B, F] each
        for path, encoder in zip(self.paths, self.encoders, strict=True):
            leaf = observations
            for key in path:
                leaf = leaf[key]
            features.append(encoder(leaf))
        joined = torch.cat(features, -1) if len(features) > 1 else features[0]  # [B, F]
        return joined if self.layers is None else self.layers(joined)  # [B, H]


def build_encoder(space: gymnasium.Space[Any], config: ModelConfig) -> nn.Module:
    """Build the configured encoder, whose `size` counts its features.

    Args:
        space: of one observation. The "action_mask" of a Dict is not encoded.
        config: for `encoder` and, unless that is your own, the hidden layers.

    Raises:
        UnsupportedSpace: the space, or one within it, cannot be encoded.
        ValueError: the encoder's name cannot be imported, or it does not fit this space.
    """
    space = without_mask(space)
    choice = config.encoder
    if choice != "mlp" and choice not in _CONVOLUTIONS:
        make = _named(choice) if isinstance(choice, str) else choice
        if isinstance(make, nn.Module):  # its forward would be called
            raise ValueError(f"encoder: give the class instead of this {type(make).__name__}")
        encoder: nn.Module = make(space, config)
        _must_return(encoder, space, feature_size(encoder))
        return encoder
    # All leaves first: then the error names the one without an encoding.
    leaves = space_leaves(space)
    for path, leaf in leaves:
        _check_leaf(path, leaf)
    if choice in ("nature_cnn", "impala_resnet"):
        if not any(_is_image(leaf, config) for _, leaf in leaves):
            raise ValueError(
                f"model_config.encoder = {choice!r} is for images, and {space} has none: "
                "a Box of two to four dimensions is one"
            )
    elif leaves[0][0] == () and _is_plain(space, config):
        return MLP(math.prod(space.shape or ()), config)
    encoders = [_leaf_encoder(leaf, config) for _, leaf in leaves]
    return TreeEncoder([path for path, _ in leaves], encoders, config)


def feature_size(encoder: nn.Module) -> int:
    """Return the number of an encoder's features.

    Raises:
        ValueError: the encoder has no such number.
    """
    size = getattr(encoder, "size", None)
    if type(size) is not int:
        raise ValueError(
            f"the encoder {type(encoder).__name__} must have an attribute `size`, the number of "
            f"features that it returns for one observation; it is {size!r}"
        )
    return size


def _must_return(encoder: nn.Module, space: gymnasium.Space[Any], size: int) -> None:
    """Check the number of features with two observations of zeros.

    Other errors of the encoder show at the first real observations.

    Raises:
        ValueError: the encoder returns another number of features than its `size`.
    """
    modes = {part: part.training for part in encoder.modules()}  # parts may be frozen
    features: Any = None
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
        zeros_of = tree_map(torch.as_tensor, zeros(space, (2,)))  # [2, ...]
        features = encoder.eval()(zeros_of)  # [2, size]
    for part, training in modes.items():
        part.training = training
    if features is not None and getattr(features, "shape", None) != (2, size):
        shape = f"type {type(features).__name__}"
        if isinstance(features, Tensor):
            shape = f"shape {[*features.shape]}"
        raise ValueError(
            f"the encoder {type(encoder).__name__} has size = {size}, but returned features of "
            f"{shape} for 2 observations: they must have [2, {size}]"
        )


def _named(name: str) -> Callable[..., Any]:
    if ":" in name:
        return found(name, "encoder")
    known = ("auto", "mlp", "nature_cnn", "impala_resnet")
    raise ValueError(
        f"there is no encoder {name!r}"
        + nearest(name, known, own="your own must be named as 'package.module:Class'")
    )


def _leaf_encoder(space: gymnasium.Space[Any], config: ModelConfig) -> nn.Module:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return OneHotEncoder(space)
    assert isinstance(space, (spaces.Box, spaces.MultiBinary))
    if isinstance(space, spaces.Box) and _is_image(space, config):
        return _CONVOLUTIONS[config.encoder](space, config.initializer)
    return NumberEncoder(space)


def _is_image(space: gymnasium.Space[Any], config: ModelConfig) -> bool:
    if config.encoder == "mlp" or not isinstance(space, spaces.Box):
        return False
    if not 2 <= len(space.shape) <= 4:
        return False
    if config.encoder != "auto" or space.dtype == np.uint8:
        return True
    return sum(side >= _IMAGE_SIDE for side in space.shape) >= 2


def _is_plain(space: gymnasium.Space[Any], config: ModelConfig) -> bool:
    """Return whether the space has numbers that enter hidden layers unchanged."""
    numbers = isinstance(space, spaces.Box) and not _is_image(space, config)
    return numbers and space.dtype != np.uint8


def _check_leaf(path: Path, space: gymnasium.Space[Any]) -> None:
    where = f"{space} at {path_name(path)}" if path else str(space)
    if math.prod(space.shape or ()) == 0:
        raise UnsupportedSpace(f"no encoder for observations in {where}: they have no elements")
    if not any(np.issubdtype(space.dtype, kind) for kind in (np.integer, np.floating, np.bool_)):
        raise UnsupportedSpace(
            f"no encoder for observations in {where}: numbers can be encoded, not {space.dtype}"
        )
