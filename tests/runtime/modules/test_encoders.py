"""Encoders: from observations of every space to features."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.encoders import (
    ImageLayout,
    ImpalaResNet,
    NatureCNN,
    NumberEncoder,
    OneHotEncoder,
    build_encoder,
)
from juggler.runtime.modules.layers import MLP
from juggler.runtime.wire.structures import to_tree, tree_map

VECTOR = spaces.Box(-1, 1, (4,), np.float32)


def image(*shape: int, dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(0, 255, shape, dtype)


def batch_of(space: gymnasium.Space[Any], rows: int = 3) -> Any:
    """Samples of a space as the batch that a module gets."""
    space.seed(0)
    batched = gymnasium.vector.utils.batch_space(space, rows)
    batched.seed(0)
    return tree_map(
        lambda array: torch.from_numpy(np.asarray(array)), to_tree(space, batched.sample())
    )


def first(rows: int, observations: Any) -> Any:
    return tree_map(lambda leaf: leaf[:rows], observations)


def test_choices_become_ones_among_zeros() -> None:
    one_hot = OneHotEncoder(spaces.Discrete(3, start=5))
    expected = torch.tensor([[0.0, 0, 1], [1, 0, 0]])
    assert torch.equal(one_hot(torch.tensor([7, 5])), expected)
    several = OneHotEncoder(spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[0, 4], [9, -1]]))
    chosen = torch.tensor([[[1, 4], [9, 0]]])
    assert torch.equal(several(chosen), torch.tensor([[0.0, 1, 1, 0, 0, 1, 0, 1]]))


def test_a_choice_that_is_not_in_the_space_is_said() -> None:
    with pytest.raises(ValueError, match=r"not in Discrete\(3\)"):
        OneHotEncoder(spaces.Discrete(3))(torch.tensor([1, 7]))


def test_bytes_are_scaled_by_what_bounds_them() -> None:
    full, few = NumberEncoder(image(2)), NumberEncoder(spaces.Box(0, 4, (2,), np.uint8))
    x = torch.tensor([[0, 255], [51, 4]], dtype=torch.uint8)
    torch.testing.assert_close(full(x), torch.tensor([[0.0, 1.0], [0.2, 4 / 255]]))
    torch.testing.assert_close(few(x)[1, 1], torch.tensor(1.0))
    assert x.dtype == torch.uint8
    assert x[0, 1] == 255  # the batch itself is left alone


@pytest.mark.parametrize(
    ("shape", "channels", "height", "width"),
    [
        ((8, 9), 1, 8, 9),
        ((84, 84, 3), 3, 84, 84),
        ((4, 84, 84), 4, 84, 84),
        ((210, 160, 3), 3, 210, 160),
        ((3, 210, 160), 3, 210, 160),
        ((7, 7, 20), 20, 7, 7),  # many planes on a small board
        ((20, 7, 7), 20, 7, 7),
        ((5, 5, 5), 5, 5, 5),
        ((4, 84, 84, 3), 12, 84, 84),  # stacks
        ((4, 3, 84, 84), 12, 84, 84),
        ((4, 84, 84, 1), 4, 84, 84),
    ],
)
def test_channels_are_found_first_or_last_and_stacks_folded(
    shape: tuple[int, ...], channels: int, height: int, width: int
) -> None:
    layout = ImageLayout.of(shape)
    assert (layout.channels, layout.height, layout.width) == (channels, height, width)
    assert layout(torch.zeros(2, *shape)).shape == (2, channels, height, width)


@pytest.mark.parametrize(
    ("network", "side", "initializer"),
    [
        (network, side, ["orthogonal", "default"][(i + j) % 2])
        for i, network in enumerate([NatureCNN, ImpalaResNet])
        for j, side in enumerate([1, 2, 5, 8, 9, 20, 35, 36, 84])
    ],
)
def test_convolutions_take_images_of_any_size(network: Any, side: int, initializer: str) -> None:
    cnn = network(image(side, side + 3, 3), initializer)
    assert cnn(torch.zeros(2, side, side + 3, 3, dtype=torch.uint8)).shape == (2, cnn.size)


def test_the_nature_network_is_that_of_the_paper_where_images_are_large_enough() -> None:
    shapes = {name: tuple(p.shape) for name, p in NatureCNN(image(84, 84, 4)).named_parameters()}
    assert shapes["convolutions.0.weight"] == (32, 4, 8, 8)
    assert shapes["convolutions.2.weight"] == (64, 32, 4, 4)
    assert shapes["convolutions.4.weight"] == (64, 64, 3, 3)
    assert shapes["linear.weight"] == (512, 64 * 7 * 7)


@pytest.mark.parametrize(
    ("shape", "convolutions", "features"),
    [
        ((84, 84, 3), 3, 64 * 7 * 7),
        ((96, 96, 3), 3, 64 * 8 * 8),
        ((97, 104, 3), 4, 64 * 4 * 5),
        ((210, 160, 3), 5, 64 * 6 * 4),
        ((280, 480, 3), 6, 64 * 4 * 7),
        ((36, 4000, 3), 6, 64 * 1 * 62),
        ((20, 2000, 3), 6, 32 * 1 * 63),
    ],
)
def test_the_nature_network_goes_on_where_images_leave_many_numbers(
    shape: tuple[int, ...], convolutions: int, features: int
) -> None:
    cnn = NatureCNN(image(*shape))
    weights = [p for name, p in cnn.convolutions.named_parameters() if p.ndim == 4]
    assert len(weights) == convolutions
    assert cnn.linear.in_features == features
    assert cnn(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, cnn.size)


def test_the_residual_network_has_the_fifteen_convolutions_of_the_paper() -> None:
    resnet = ImpalaResNet(image(72, 96, 3))
    weights = [tuple(p.shape) for name, p in resnet.named_parameters() if p.ndim == 4]
    assert len(weights) == 15
    assert weights[0] == (16, 3, 3, 3)
    assert weights[-1] == (32, 32, 3, 3)
    assert tuple(resnet.linear.weight.shape) == (256, 32 * 9 * 12)


LEAVES: list[gymnasium.Space[Any]] = [
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([[2, 3], [3, 4]]),
    spaces.MultiBinary((2, 3)),
    spaces.Box(0, 1, ()),
    spaces.Box(0, 1, (5,), np.float64),
    spaces.Box(0, 9, (2, 3), np.int32),
    spaces.Box(0, 1, (2, 3, 4)),
    spaces.Box(0, 1, (2, 3, 4, 5)),
    image(10),
    image(10, 11),
    image(10, 10, 3),
    image(3, 10, 10),
    image(2, 10, 10, 3),
    image(24, 24, 3, dtype=np.float32),
]
NESTED = spaces.Dict(
    a=spaces.Tuple([*LEAVES[:4], spaces.Dict({"b.c": image(10, 10, 3), "keys": VECTOR})]),
    z=image(9, 9),
)


@pytest.mark.parametrize("encoder", ["auto", "mlp"])
@pytest.mark.parametrize("space", [*LEAVES, NESTED, spaces.Tuple(LEAVES)], ids=str)
def test_every_space_has_an_encoder(space: gymnasium.Space[Any], encoder: str) -> None:
    built = build_encoder(space, ModelConfig(hidden_sizes=(16,), encoder=encoder))
    observations = batch_of(space)
    for rows in (3, 1, 0):
        features = built(first(rows, observations))
        assert features.shape == (rows, built.size)
        assert features.dtype == torch.float32
        assert features.isfinite().all()


def test_what_counts_as_an_image_depends_on_dtype_size_and_the_config() -> None:
    def kind(space: gymnasium.Space[Any], encoder: str) -> type[Any]:
        built = build_encoder(space, ModelConfig(encoder=encoder))
        return type(built) if isinstance(built, MLP) else type(built.encoders[0])  # type: ignore

    board, photo = image(8, 8, 12, dtype=np.float32), image(24, 24, 3, dtype=np.float32)
    assert kind(board, "auto") is MLP
    assert kind(board, "nature_cnn") is NatureCNN
    assert kind(photo, "auto") is NatureCNN
    assert kind(photo, "impala_resnet") is ImpalaResNet
    assert kind(image(8, 8), "auto") is NatureCNN
    assert kind(image(8, 8), "mlp") is NumberEncoder
    assert kind(VECTOR, "auto") is MLP


def test_hidden_layers_join_an_image_with_the_rest_and_an_image_alone_goes_without() -> None:
    config = ModelConfig(hidden_sizes=(16,))
    assert build_encoder(image(10, 10), config).size == 128
    assert build_encoder(spaces.Dict(only=image(10, 10)), config).size == 128
    assert build_encoder(spaces.Tuple([image(10, 10), VECTOR]), config).size == 16


@pytest.mark.parametrize("encoder", ["nature_cnn", "impala_resnet"])
def test_convolutions_for_what_has_no_image_are_refused(encoder: str) -> None:
    with pytest.raises(ValueError, match="is for images, and Box"):
        build_encoder(VECTOR, ModelConfig(encoder=encoder))


def test_an_encoder_of_ones_own_gets_what_is_to_be_encoded_and_says_its_size() -> None:
    class Wrong(torch.nn.Identity):
        size = 99

    class Sums(torch.nn.Module):
        def __init__(self, space: Any, config: ModelConfig) -> None:
            super().__init__()
            assert list(space.spaces) == ["observation"]
            self.size = config.hidden_sizes[-1]

        def forward(self, observations: Any) -> torch.Tensor:
            return observations["observation"].sum(1, keepdim=True).expand(-1, self.size)

    masked = spaces.Dict(observation=VECTOR, action_mask=spaces.MultiBinary(2))
    assert build_encoder(masked, ModelConfig(encoder=Sums))(batch_of(masked)).shape == (3, 64)
    with pytest.raises(ValueError, match="Wrong has size = 99, but"):
        build_encoder(VECTOR, ModelConfig(encoder=Wrong))
    Wrong.forward = lambda self, observations: (observations,)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"Wrong has size = 99, but returned .*tuple"):
        build_encoder(VECTOR, ModelConfig(encoder=Wrong))
    with pytest.raises(ValueError, match="encoder: give the class instead of this Identity"):
        build_encoder(VECTOR, ModelConfig(encoder=torch.nn.Identity()))
    with pytest.raises(ValueError, match="Identity must have an attribute `size`"):
        build_encoder(VECTOR, ModelConfig(encoder=lambda space, config: torch.nn.Identity()))


@pytest.mark.parametrize("shape", [(4, 40, 40), (40, 40, 4), (2, 3, 40, 40)], ids=str)
def test_channels_are_last_in_memory_where_gradients_are_computed_on_a_cpu(shape: Any) -> None:
    space = image(*shape)
    encoder, images = NatureCNN(space), batch_of(space)
    seen: list[torch.Tensor] = []
    encoder.convolutions.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    features = encoder(images)
    features.square().sum().backward()
    with torch.inference_mode():
        acted = encoder(images)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    expected = encoder.layout(images).float() / 255  # in the order in which they come
    assert seen[1].stride() == expected.stride()
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(features, acted)
    mine = [each.grad for each in encoder.parameters()]
    encoder.zero_grad(set_to_none=True)
    features = encoder.linear(encoder.convolutions(expected.contiguous()).flatten(1)).relu()
    features.square().sum().backward()
    torch.testing.assert_close(
        mine, [each.grad for each in encoder.parameters()], rtol=1e-3, atol=1e-4
    )


def test_members_of_a_population_have_gradients_of_their_own_images() -> None:
    space = image(4, 10, 10)
    encoder = NatureCNN(space)
    weights = {name: each.detach() for name, each in encoder.named_parameters()}
    images = torch.stack([batch_of(space), batch_of(space).flip(-1)])  # [2, B, C, H, W]

    def loss(given: Any, seen: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(encoder, given, (seen,)).square().sum()

    both = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, images)
    for member, seen in enumerate(images):
        mine = {name: each[member] for name, each in both.items()}
        expected = torch.func.grad(loss)(weights, seen)
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
