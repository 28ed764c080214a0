"""The driver's core: events in, commands out. No clock, no threads, no input or output."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, zip_longest

from juggler.driver.core import events
from juggler.driver.core.ledger import Counters
from juggler.driver.core.module_core import ModuleCore, ModuleStart
from juggler.runtime.episodes.version import Version


class DriverCore:
    """Keeps runners and learners busy, and the books of what they did, module by module.

    Every module has books, a group of learners and a staleness budget of its own. Runners are
    shared: each may have `requests_per_runner` requests of every module.

    Args:
        modules: what each begins with, by module id.
        first_id: of batches and updates; a run that goes on passes the `next_id` it had got to.

    Attributes:
        modules: by module id.
        next_id: of the next batch or update.
    """

    def __init__(self, modules: Mapping[str, ModuleStart], first_id: int = 1) -> None:
        self.next_id = first_id
        self.modules = {
            module_id: ModuleCore(module_id, start, self._take_id)
            for module_id, start in modules.items()
        }

    def book(self, event: events.Event) -> list[events.Command]:
        """Book what happened. Returns what has to be sent because of it, in this order.

        Raises:
            ValueError: it names a module that the run does not have.
        """
        concerned = list(self.modules.values())
        if not isinstance(event, events.OfEveryModule):
            concerned = [self.module(event.module_id)]
        return [command for module in concerned for command in module.book(event)]

    def issue_updates(self) -> list[events.Command]:
        """Every update that learners can make now, and the groups that are to make them."""
        return [command for each in self.modules.values() for command in each.issue_updates()]

    def top_up(self) -> list[events.Request]:
        """Requests wherever there is room for more steps; modules take turns."""
        rounds = zip_longest(*(module.requests() for module in self.modules.values()))
        return [request for request in chain.from_iterable(rounds) if request is not None]

    def module(self, module_id: str) -> ModuleCore:
        """
        Raises:
            ValueError: the run does not have it.
        """
        if module_id not in self.modules:
            known = ", ".join(self.modules)
            raise ValueError(f"there is no module {module_id[:100]!r} in this run: it has {known}")
        return self.modules[module_id]

    # Over all modules.

    @property
    def idle(self) -> bool:
        """No update is in flight."""
        return all(module.idle for module in self.modules.values())

    @property
    def between_rounds(self) -> bool:
        """In synchronous mode: every module waits for `Proceed`."""
        return all(module.between_rounds for module in self.modules.values())

    @property
    def members(self) -> tuple[str, ...]:
        """The learners of all groups, each once."""
        names = (name for module in self.modules.values() for name in module.members)
        return tuple(dict.fromkeys(names))

    @property
    def weights_version(self) -> Version:
        """The newest of any module."""
        return max(module.weights_version for module in self.modules.values())

    @property
    def updates(self) -> int:
        """That weights have had, over the whole run."""
        return sum(module.weights_version.update for module in self.modules.values())

    @property
    def trained(self) -> int:
        """Live steps that were trained on."""
        return sum(module.ledger.trained for module in self.modules.values())

    @property
    def requests_in_flight(self) -> int:
        return sum(len(module.ledger.requested) for module in self.modules.values())

    @property
    def updates_in_flight(self) -> int:
        return sum(module.updates_in_flight for module in self.modules.values())

    @property
    def held_batches(self) -> int:
        """Batches that wait at learners."""
        return sum(len(module.ledger.held) for module in self.modules.values())

    @property
    def held_steps(self) -> int:
        """Steps in them."""
        return sum(module.held_steps for module in self.modules.values())

    @property
    def missing_learners(self) -> int:
        """How many have yet to come before the first of their group begin."""
        return sum(module.missing_learners for module in self.modules.values())

    @property
    def num_runners(self) -> int:
        return max(module.num_runners for module in self.modules.values())

    def counters(self) -> Counters:
        """The books of all modules together."""
        return Counters.sum(module.ledger.counters() for module in self.modules.values())

    def _take_id(self) -> int:
        taken = self.next_id
        self.next_id += 1
        return taken
