"""Shared parts of modules, copied to each module's learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.learner import Learner
from juggler.learner.optim.flat_module import FlatModule, TrainState
from juggler.runtime.checkpoints.weights import is_named
from juggler.runtime.near_matches import nearest


@dataclass(slots=True, eq=False)
class _SharingModule:
    """A module that shares parts with others."""

    module_id: str
    learner: Learner
    core: GradientCore
    patterns: dict[str, list[str]]  # the names that each pattern matches
    #: By id of another module, its names of the shared tensors, by the names here.
    links: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def state(self) -> TrainState:
        own: TrainState = self.learner.state
        return own

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {**self.core.flat.named(self.state["parameters"]), **self.state["buffers"]}

    def copy_from(self, source: _SharingModule) -> None:
        """Copy shared parameters, buffers and optimizer moments from another module."""
        source.learner.wait()
        self.learner.wait()
        own, theirs, flat = self.state, source.state, self.core.flat
        names = self.links[source.module_id]

        def joined(mine: Tensor, other: Tensor) -> Tensor:
            named = source.core.flat.named(other)
            taken = {to: named[name] for to, name in names.items() if to in flat.sizes}
            return flat.joined({**flat.named(mine), **taken})  # [P]

        buffers = {
            to: theirs["buffers"][name] for to, name in names.items() if to in own["buffers"]
        }
        # Counts, and the algorithm's own state such as a target network, stay apart.
        self.learner.state = TrainState(
            parameters=joined(own["parameters"], theirs["parameters"]),
            buffers={**own["buffers"], **buffers},
            moments={
                name: joined(x, theirs["moments"][name]) for name, x in own["moments"].items()
            },
            extra=own["extra"],
            steps=own["steps"],
        )


class SharedParts:
    """Keeps modules' shared parts equal, bit for bit, in one process.

        shared = SharedParts({"encoder.*": ["left", "right"]})
        for module_id, learner in learners.items():
            shared.add(module_id, learner)
        learners["left"].update_from_episodes(episodes)
        shared.broadcast("left")

    An update of a module also steps the shared parameters, with its learning rate and gradient
    clipping. `broadcast` then copies the shared parameters and buffers to the other modules, with
    their optimizer moments. So each parameter has one value and one optimizer, which steps with
    every module's updates, in order. Target networks are not shared.

    Args:
        shared: ids of the modules that share a part, by pattern of names of parameters and buffers;
            `MultiRLModule.shared_parts` makes this table.
    """

    def __init__(self, shared: Mapping[str, Sequence[str]]) -> None:
        self._shared = shared
        self._members: dict[str, _SharingModule] = {}

    def add(self, module_id: str, learner: Learner) -> None:
        """Add a module, which takes over the parts already shared.

        Raises:
            ValueError: it cannot share them.
        """
        patterns = [pattern for pattern, ids in self._shared.items() if module_id in ids]
        if not patterns:
            return
        core = learner.core
        if not isinstance(core, GradientCore):
            raise ValueError(
                f"shared: module {module_id!r} cannot share parts, because its algorithm "
                f"{core.name!r} is not a GradientCore: leave the module out of the table shared"
            )
        member = _SharingModule(module_id, learner, core, _matched(module_id, core.flat, patterns))
        links = {each.module_id: _links(each, member) for each in self._members.values()}
        # Nothing has changed before: a module that cannot share leaves the others as they were.
        learner.wait()
        learner.state = core.shares_parts(learner.state)
        for other_id, names in links.items():
            self._members[other_id].links[module_id] = names
            member.links[other_id] = {mine: theirs for theirs, mine in names.items()}
        self._members[module_id] = member
        for other_id in links:
            member.copy_from(self._members[other_id])

    def remove(self, module_id: str) -> None:
        """Remove a module, if it shares parts."""
        self._members.pop(module_id, None)
        for other in self._members.values():
            other.links.pop(module_id, None)

    def partners(self, module_id: str) -> set[str]:
        """Return the modules that share parts with a module, directly or indirectly."""
        found, pending = {module_id}, [module_id]
        while pending:
            member = self._members.get(pending.pop())
            new = set() if member is None else member.links.keys() - found
            found |= new
            pending += new
        return found - {module_id}

    def broadcast(self, module_id: str) -> None:
        """Copy a changed module's shared parts to its partners."""
        if (member := self._members.get(module_id)) is not None:
            for other_id in member.links:
                self._members[other_id].copy_from(member)


def _matched(module_id: str, flat: FlatModule, patterns: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of parameters and buffers that each pattern matches.

    Raises:
        ValueError: a pattern matches nothing, or two of them match the same name.
    """
    known = flat.names
    found = {
        pattern: [name for name in known if is_named(pattern, f"{module_id}:{name}")]
        for pattern in patterns
    }
    taken: dict[str, str] = {}
    for pattern, names in found.items():
        if not names:
            raise ValueError(
                f"shared: {pattern!r} matches no parameter of module {module_id!r}"
                f"{nearest(pattern, known)}"
            )
        for name in names:
            # A tensor with several names is one: see `FlatModule.names`.
            if taken.setdefault(known[name], pattern) != pattern:
                raise ValueError(
                    f"shared: {taken[known[name]]!r} and {pattern!r} both match {name!r} of module "
                    f"{module_id!r}: a parameter is shared by one pattern"
                )
    return found


def _links(one: _SharingModule, other: _SharingModule) -> dict[str, str]:
    """Return the second module's names of shared tensors, by the first one's.

    Raises:
        ValueError: they cannot share them.
    """
    links: dict[str, str] = {}
    for pattern in one.patterns.keys() & other.patterns.keys():
        for member, without in ((one, other), (other, one)):
            for name in member.patterns[pattern]:
                if name not in without.patterns[pattern]:
                    raise ValueError(
                        f"shared: {pattern!r} matches {name!r} in module {member.module_id!r}, and "
                        f"module {without.module_id!r} has none of that name: both need the same "
                        "parts, or a pattern that matches fewer"
                    )
        for name in one.patterns[pattern]:
            ours, theirs = one.core.flat.names[name], other.core.flat.names[name]
            _must_be_alike(one, other, name, ours, theirs)
            links[ours] = theirs
    return links


def _must_be_alike(
    one: _SharingModule, other: _SharingModule, name: str, ours: str, theirs: str
) -> None:
    """Raise ValueError if two modules' tensors cannot be shared."""
    mine, its = one.tensors()[ours], other.tensors()[theirs]
    both = f"shared: {name!r} of modules {one.module_id!r} and {other.module_id!r}"
    if mine.shape != its.shape:
        raise ValueError(
            f"{both} has the shapes {tuple(mine.shape)} and {tuple(its.shape)}: give both modules "
            "the same model, or share less"
        )
    if mine.dtype != its.dtype:
        raise ValueError(f"{both} has the dtypes {mine.dtype} and {its.dtype}: must be the same")
    # One value has one optimizer, and so the same rule in both modules.
    trained = ours in one.core.flat.sizes, theirs in other.core.flat.sizes
    if trained[0] != trained[1]:
        frozen = (other if trained[0] else one).module_id
        raise ValueError(f"{both} is trained in one of them, and is frozen in {frozen!r}")
    optimizers = one.core.optimizers, other.core.optimizers
    if trained[0] and optimizers[0].optimizer_of(ours) != optimizers[1].optimizer_of(theirs):
        raise ValueError(
            f"{both} has one optimizer: give both modules the same optimizer, adam_betas, "
            "rmsprop_decay and optimizer_epsilon"
        )
