"""Modules with freshly drawn parameters, and which of them are trained as one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from juggler.runtime.modules.multi_rl_module import MultiRLModule
from juggler.runtime.modules.rl_module import RLModule

#: What makes modules with freshly drawn parameters: by module id, or all of them together.
Factories = Mapping[str, Callable[[], RLModule]] | Callable[[], MultiRLModule]


def make_modules(factories: Factories, seed: int) -> tuple[dict[str, RLModule], list[list[str]]]:
    """Modules by id, drawn from a seed, and groups of ids of those that share parameters."""
    if isinstance(factories, Mapping):
        modules = {}
        for module_id, make in factories.items():
            with _seeded(seed, module_id):
                modules[module_id] = make()
        return modules, [[module_id] for module_id in modules]
    with _seeded(seed, "multi"):
        multi = factories()
    return dict(multi.items()), [list(ids) for ids in multi.shared_groups()]


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Torch's CPU random numbers from a seed of this name's own, and afterwards as before."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        torch.set_rng_state(before)
