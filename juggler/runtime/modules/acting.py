"""The part of a module that acting needs: what a learner publishes and an EnvRunner holds."""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

from torch import nn

from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import closest


def acting_names(module: RLModule) -> list[str]:
    """Names of the parameters and buffers that acting needs: those not in `training_only`.

    The names are those of `named_parameters` and `named_buffers`, which name a shared tensor once.

    Raises:
        ValueError: `training_only` names a part that does not exist, or one that the acting part
            shares under a name that is training only.
    """
    _check_names(module)
    apart = module.training_only
    once = chain(module.named_parameters(), module.named_buffers())
    names = {id(tensor): name for name, tensor in once}
    everywhere = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for alias, tensor in everywhere:
        name = names[id(tensor)]
        if _within(name, apart) and not _within(alias, apart):
            raise ValueError(
                f"{type(module).__name__} shares {name!r}, which is training only, with "
                f"{alias!r}, which is not: assign the latter first, so that it goes by that name"
            )
    return [name for name in names.values() if not _within(name, apart)]


def strip_to_acting(module: RLModule) -> None:
    """Remove everything `training_only` from a module. A pass that uses it raises an error that
    says so.

    Raises:
        ValueError: as `acting_names`.
    """
    acting_names(module)
    for path in module.training_only:
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        delattr(parent, name)
        parent.add_module(name, TrainingOnly(f"{type(module).__name__}.{path}"))


class TrainingOnly(nn.Module):
    """Takes the place of a submodule or parameter that an EnvRunner does not have."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.why = (
            f"{name} is in training_only, so it is not here, where the module acts: take it off "
            "training_only, or use it in _forward_train alone"
        )

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self.why)

    def __getitem__(self, _: Any) -> NoReturn:
        raise RuntimeError(self.why)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.why} (asked for {name!r})")

    @classmethod
    def __torch_function__(cls, *call: Any) -> NoReturn:
        _function, _types, args, *_ = call
        raise RuntimeError(next(each.why for each in args if isinstance(each, cls)))


def _within(name: str, paths: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)


def _check_names(module: RLModule) -> None:
    for path in module.training_only:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = module.get_submodule(parent_path)
        except AttributeError:
            parent = None
        if parent is not None and (
            name in parent._modules or name in parent._parameters or name in parent._buffers
        ):
            continue
        known = [each for each, _ in chain(module.named_modules(), module.named_parameters())]
        near = closest(path, known)
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(f"{type(module).__name__}.training_only has no such part {path!r}{hint}")
