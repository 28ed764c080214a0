"""Convolutional networks on one CPU thread: ways to act with them, and the order of their images.

A way to act maps bytes [N, …] to the inputs of the distribution [N, 6]. All ways take turns on the
same images, and each is first compared with the module's own pass. Times are CPU time in µs, the
least of several passes in each round. ONNX Runtime and OpenVINO take part where they are installed;
OpenVINO's model and the frozen graph are made for one number of rows.

`--updates` compares gradients of as many images in the order in which they come with gradients of
images whose channels are last in memory, which is what an encoder makes of them on a CPU.

Prints a line for each way: µs, and how many times as fast as the module's own pass it is, as the
median, the least and the greatest of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

from juggler.envrunner.sampling_worker import numpy_in_one_thread
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS
from juggler.runtime.modules.models import ActorCritic

Way = Callable[[Any], Any]


def module_for(shape: tuple[int, ...], encoder: str = "nature_cnn") -> Any:
    torch.manual_seed(0)
    images, moves = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(6)
    return ActorCritic(images, moves, {"encoder": encoder})


class Folded(nn.Module):
    """The policy with the scale of bytes in its first weights.

    Args:
        module: as `module_for` makes it, with `nature_cnn`.
        order: of images in memory.
    """

    def __init__(self, module: Any, order: torch.memory_format) -> None:
        super().__init__()
        encoder, self.head = copy.deepcopy((module.encoder.encoders[0], module.policy_head))
        self.layout, self.order = encoder.layout, order
        self.convolutions, self.linear = encoder.convolutions, encoder.linear
        with torch.no_grad():
            self.convolutions[0].weight.mul_(encoder.scale)
        if order is torch.channels_last:
            self.convolutions.to(memory_format=order)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layout(images).to(self.linear.weight.dtype, memory_format=self.order)
        y: Tensor = self.head(self.linear(self.convolutions(x).flatten(1)).relu()).float()
        return y


class Packed(Folded):
    """Convolutions whose weights and results stay in oneDNN's own order."""

    def __init__(self, module: Any, rows: int) -> None:
        super().__init__(module, torch.contiguous_format)
        layout, self.packed = self.layout, []
        x = torch.zeros(rows, layout.channels, layout.height, layout.width)
        with torch.no_grad():
            for each in self.convolutions[::2]:
                how = each.padding, each.stride, each.dilation, 1
                weight, bias = each.weight.detach().to_mkldnn(), each.bias.detach().to_mkldnn()
                weight = torch._C._nn.mkldnn_reorder_conv2d_weight(weight, *how, list(x.shape))
                self.packed.append((weight, bias, each.stride, each.padding))
                x = each(x)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layout(images).to(torch.float32, memory_format=self.order).to_mkldnn()
        for weight, bias, stride, padding in self.packed:
            x = torch.conv2d(x, weight, bias, stride, padding).relu_()
        y: Tensor = self.head(self.linear(x.to_dense().flatten(1)).relu_())
        return y


class ByMatrices:
    """The same policy in NumPy: a copy of all windows and one matrix product for each layer.

    Args:
        module: as `module_for` makes it, with `nature_cnn`.
        chunk: images at a time, whose windows stay in the caches.
    """

    def __init__(self, module: Any, chunk: int) -> None:
        policy = Folded(module, torch.contiguous_format)
        self.layout, self.chunk, self.layers = policy.layout, chunk, []
        for each in policy.convolutions[::2]:
            weight = each.weight.detach().numpy().transpose(2, 3, 1, 0)  # [K, K, C, D]
            weight = np.ascontiguousarray(weight.reshape(-1, each.out_channels))
            how = each.kernel_size[0], each.stride[0], each.padding[0]
            self.layers.append((weight, each.bias.detach().numpy(), *how))
        layout = self.layout
        with torch.no_grad():
            image = torch.zeros(1, layout.channels, layout.height, layout.width)
            last = policy.convolutions(image).shape[1:]
        weight = policy.linear.weight.detach().numpy().reshape(-1, *last).transpose(2, 3, 1, 0)
        self.linear = np.ascontiguousarray(weight.reshape(-1, weight.shape[-1]))
        self.head = np.ascontiguousarray(policy.head.weight.detach().numpy().T)
        self.biases = [each.bias.detach().numpy() for each in (policy.linear, policy.head)]

    def convolved(self, x: Any) -> Any:
        for weight, bias, kernel, stride, padding in self.layers:
            x = np.pad(x, ((0, 0), *[(padding, padding)] * 2, (0, 0))) if padding else x
            x = np.ascontiguousarray(x, np.float32)  # [B, H, W, C]
            b, h, w, c = x.strides
            high, wide = ((side - kernel) // stride + 1 for side in x.shape[1:3])
            shape = len(x), high, wide, kernel, kernel * x.shape[3]
            windows = as_strided(x, shape, (b, h * stride, w * stride, h, c))
            y = windows.reshape(-1, len(weight)) @ weight
            y += bias
            x = np.maximum(y, 0, out=y).reshape(*shape[:3], -1)
        return x.reshape(len(x), -1)

    def __call__(self, x: Any) -> Any:
        x = x if self.layout.channels_last else x.transpose(0, 2, 3, 1)
        parts = [self.convolved(x[i : i + self.chunk]) for i in range(0, len(x), self.chunk)]
        y = np.concatenate(parts) @ self.linear
        y += self.biases[0]
        return np.maximum(y, 0, out=y) @ self.head + self.biases[1]


def in_torch(policy: Any) -> Way:
    def run(x: Any) -> Any:
        with torch.inference_mode():
            return policy(torch.from_numpy(x)).numpy()

    return run


def own_pass(module: Any) -> Way:
    acting = ArrayModule(module)
    return lambda x: acting._torch_outputs("exploration", x, {})[ACTION_DIST_INPUTS].numpy()


def frozen(policy: Any, images: Any) -> Way:
    with torch.no_grad():
        traced = torch.jit.trace(policy.eval(), torch.from_numpy(images))
        graph = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
    return in_torch(graph)


def ways(module: Any, images: Any) -> dict[str, Way]:
    """By name, the module's own pass first."""
    plain = Folded(module, torch.contiguous_format).eval()
    found = {
        "as it is": own_pass(module),
        "scale in the weights": in_torch(Folded(module, torch.preserve_format)),
        "channels last": in_torch(Folded(module, torch.channels_last)),
        "oneDNN's own order": in_torch(Packed(module, len(images))),
        "frozen graph": frozen(Folded(module, torch.preserve_format), images),
        "NumPy, matrices": ByMatrices(module, 16),
    }
    if len(images) <= 16:  # processors without it take seconds for more
        narrow = Folded(module, torch.preserve_format).to(torch.bfloat16)
        found["bfloat16"] = in_torch(narrow)
    if not importlib.util.find_spec("onnxruntime"):
        return found
    import onnxruntime

    file, n = io.BytesIO(), torch.export.Dim("n")
    example = (torch.from_numpy(np.zeros((2, *images.shape[1:]), np.uint8)),)
    program = torch.onnx.export(
        plain, example, dynamo=True, dynamic_shapes=({0: n},), verbose=False
    )
    program.save(file)
    model = file.getvalue()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1

    def session() -> Any:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])

    made = session()
    name = made.get_inputs()[0].name
    found["ONNX Runtime"] = lambda x: made.run(None, {name: x})[0]
    print(
        f"  an ONNX Runtime session for new weights: {min(least(session) for _ in range(8)):.0f} µs"
    )
    if importlib.util.find_spec("openvino"):
        import openvino

        core = openvino.Core()
        read = core.read_model(model)
        read.reshape(list(images.shape))
        how = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        request = core.compile_model(read, "CPU", how).create_infer_request()
        found["OpenVINO"] = lambda x: request.infer({0: x}, share_inputs=True)[0]
    return found


def gradients(module: Any, images: Tensor, ordered: bool) -> Callable[[], list[Any]]:
    """A pass and its gradients.

    Args:
        module: with `value_head`.
        images: bytes [N, …].
        ordered: whether the encoder puts channels last, else convolutions get images as they are.
    """
    encoder = module.encoder.encoders[0]

    def features() -> Tensor:
        if ordered:
            return encoder(images)
        x = encoder.layout(images).float().mul_(encoder.scale)
        return encoder.linear(encoder.convolutions(x).flatten(1)).relu()

    def run() -> list[Any]:
        module.zero_grad(set_to_none=True)
        x = features()
        loss = module.policy_head(x).log_softmax(-1)[:, 0].mean()
        (loss + module.value_head(x).square().mean()).backward()
        return [each.grad for each in module.parameters()]

    return run


def least(run: Callable[[], Any]) -> float:
    """µs of CPU time of one run, in all threads of the process."""
    begin = time.process_time()
    run()
    return 1e6 * (time.process_time() - begin)


def compare(runs: dict[str, Callable[[], Any]], rounds: int, times: int) -> None:
    """Print how fast runs are beside the first of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(min(least(run) for _ in range(times)))
    first = next(iter(found.values()))
    for name, spent in found.items():
        ratios = [mine / its for mine, its in zip(first, spent, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(f"  {name:22} {statistics.median(spent):9.0f} µs  {spread}", flush=True)


def compare_acting(module: Any, images: Any, rounds: int) -> None:
    strip_to_acting(module)
    found = ways(module.eval(), images)
    expected = found["as it is"](images)
    for name, way in found.items():
        far = 0.05 if name == "bfloat16" else 1e-5
        np.testing.assert_allclose(way(images), expected, far, far, err_msg=name)
    runs = {name: partial(way, images) for name, way in found.items()}
    compare(runs, rounds, min(100, max(4, 320 // len(images))))


def compare_updates(module: Any, images: Any, rounds: int) -> None:
    both = [gradients(module, torch.from_numpy(images), each) for each in (False, True)]
    expected, mine, again = both[0](), both[1](), both[1]()
    assert all(map(torch.equal, mine, again))
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)
    compare(dict(zip(["as they come", "channels last"], both, strict=True)), rounds, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["4x84x84", "84x84x4", "10x10x4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", action="store_true")
    parser.add_argument("--encoder", default="nature_cnn", help="of updates")
    given = parser.parse_args()
    torch.set_num_threads(1)
    numpy_in_one_thread()
    warnings.simplefilter("ignore")  # of what torch no longer recommends
    logging.disable(logging.WARNING)  # of packages that exporting would know
    for shape in (tuple(map(int, each.split("x"))) for each in given.shapes):
        for rows in given.rows:
            print(f"{shape}, {rows} rows", flush=True)
            images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
            if given.updates:
                compare_updates(module_for(shape, given.encoder), images, given.rounds)
            else:
                compare_acting(module_for(shape), images, given.rounds)


if __name__ == "__main__":
    main()
