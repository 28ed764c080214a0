"""Simulators with random behaviour at a gateway whose books are kept twice.

A story is some hundred things that happen to one gateway. After each of them nothing was raised,
every step is somewhere and batches hold what simulators did; when all is over, every step of a
simulator that did nothing wrong was in a batch once, or in a counter that it may be in.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from support.fuzzed_gateway import RESUME_SECONDS, STALL_SECONDS, FuzzedGateway, fuzzed_gateway
from support.fuzzed_simulators import Local, Logged, Remote, Several, Simulator, exchange

from juggler.runtime.episodes.version import Version

EVENTS = {"act": 40, "exchange": 40, "ask": 10, "time": 4, "use": 5, "settle": 2}
EVENTS |= {"vanish": 3, "come back": 6, "leave": 1, "join": 2, "be late": 1, "repeat": 2}
MOST_SIMULATORS = 6


class Story:
    """One gateway, and what happens to it.

    Args:
        seed: of all of it.
        wild: some messages are damaged.
        several: simulators have several agents.
    """

    def __init__(self, seed: int, wild: bool, several: bool) -> None:
        self.rng = random.Random(seed)
        self.wild, self.several = wild, several

    def tell(self, length: int) -> FuzzedGateway:
        with fuzzed_gateway(self.rng, self.several) as gateway:
            self.gateway = gateway
            self.simulators: list[Simulator] = [self._newcomer()]
            exchange(self.simulators)  # the first one says the spaces
            names, weights = list(EVENTS), list(EVENTS.values())
            for name in self.rng.choices(names, weights, k=length):
                self._happens(name)
            self._end()
            return gateway

    def _newcomer(self) -> Simulator:
        kinds = (Several,) if self.several else (Remote, Remote, Remote, Local, Logged)
        kind = self.rng.choice(kinds)
        return kind(self.gateway)

    def _happens(self, name: str) -> None:
        gateway, rng = self.gateway, self.rng
        one = rng.choice(self.simulators)
        match name:
            case "act":
                for each in rng.sample(self.simulators, rng.randint(1, len(self.simulators))):
                    each.act()
                if self.wild and rng.random() < 0.02:
                    one.go_wild()
            case "repeat" if one.here and one.unanswered:
                one.post(rng.choice(list(one.unanswered.values()))[0])
            case "exchange":
                exchange(rng.sample(self.simulators, rng.randint(1, len(self.simulators))))
            case "ask":
                self._ask(rng.choice((1, 2, 9, 50)))
            case "time":
                gateway.wait(rng.choice((0.1, 1.5, 4.0)))
            case "use":
                self._use()
            case "settle":
                self._settle()
            case "vanish" if one.here:
                one.vanish()
            case "come back" if not one.leaves and (one.welcome is None or rng.random() < 0.1):
                one.come_back()
            case "leave" if one.here:
                one.leave()
                self._replace(one)
            case "join" if len(self.simulators) < MOST_SIMULATORS:
                self.simulators.append(self._newcomer())
            case "be late":
                gateway.wait(RESUME_SECONDS + 1)
        for each in self.simulators:
            if each.wild and each.stream.closed:
                self._replace(each)

    def _replace(self, one: Simulator) -> None:
        self.simulators[self.simulators.index(one)] = self._newcomer()

    def _ask(self, batches: int) -> None:
        if self.gateway.newest.generation == 0:
            self._use()  # no samples are asked for before there are weights
        self.gateway.asked += batches
        self.gateway.server.wake()

    def _use(self) -> None:
        generation, update = self.gateway.newest
        if not generation or self.rng.random() < 0.1:
            version = Version(generation + 1, max(0, update - self.rng.randrange(4)))
        else:
            version = Version(generation, update + self.rng.choice((1, 1, 2, 5)))
        self.gateway.use(version)

    def _settle(self) -> None:
        """No simulator waits for long while samples are requested."""
        for _ in range(2):  # a welcomed client repeats its unanswered requests
            exchange(self.simulators)
        for _ in range(100):  # one after the other, where little is asked for
            self.gateway.wait(2 * STALL_SECONDS)
            for each in self.simulators:
                each.read()
            if not (self.gateway.asked and any(map(_waits, self.simulators))):
                return
        raise AssertionError("a simulator waits forever")

    def _end(self) -> None:
        """All come back that can, get what they wait for, and leave."""
        gateway = self.gateway
        for each in self.simulators:
            if not each.wild and each.welcome is None and self.rng.random() < 0.7:
                each.come_back()
        self._ask(10_000)
        for _ in range(3):
            self._settle()
        for each in self.simulators:
            if each.wild:
                each.inbox = [(each.stream, None)]
            elif each.here:
                each.leave()
            else:
                each.vanish()
        exchange(self.simulators, reads=False)
        gateway.wait(2 * RESUME_SECONDS)
        for each in self.simulators:
            if not (each.leaves or each.wild):
                each.over()
        gateway.rows = 1
        gateway.server.wake()
        gateway.wait(0.0)
        self._balance()

    def _balance(self) -> None:
        gateway = self.gateway
        assert gateway.player is not None
        counts, kept = gateway.server.counts(), gateway.player
        assert counts["sessions"] == counts["environments"] == counts["steps_waiting"] == 0
        assert kept.rows._places.used == 0
        assert gateway.server._local is None or not gateway.server._local.bytes_waiting
        assert not kept.rows._finals
        gateway.ended.update(kept.ended)  # since the last batch
        gateway.pop_played()
        if self.several and not gateway.wild:
            of_agents = sum(total * count for (total, _), count in gateway.ended.items())
            # An environment may be cut of which an agent has ended.
            assert sum(total for total, _ in gateway.env_ended) <= of_agents
            assert all(length for _, length in gateway.env_ended)
        steps = [s for s in gateway.known.values() if s.sent and not s.simulator.wild]
        missing = [step for step in steps if not step.seen]
        assert all(step.may_miss for step in missing), "a step is nowhere"
        right = {step.simulator for step in gateway.known.values() if not step.simulator.wild}
        ended = sum((each.ended for each in right), Counter())
        may_end = sum((each.may_end for each in right), Counter())
        assert not ended - gateway.ended, "the return of an episode is missing"
        self._compare_infos(right)
        if not gateway.wild:
            assert len(missing) == gateway.missing(counts)
            assert not gateway.ended - may_end, "the return of an episode that was never seen"

    def _compare_infos(self, right: set[Simulator]) -> None:
        """What was told of steps is their rewards, over the same episodes."""
        told = self.gateway.infos
        for name in ("reward", "recorded"):
            mine = [each for each in right if each.info_names[:1] == (name,)]
            missing = means(each.ended for each in mine) - told[name]
            # Those of an agent that ended are told when its environment's episode is over.
            assert self.several or not missing, f"a {name} is missing"
            if name == "reward" and not self.gateway.wild:
                assert not told[name] - means(each.may_end for each in mine)
        assert not told["nothing"] or self.gateway.wild


def means(of: Iterable[Counter[tuple[float, int]]]) -> Counter[float]:
    """Means of rewards over steps, for these returns and lengths."""
    found: Counter[float] = Counter()
    for each in of:
        for (total, length), count in each.items():
            found[total / length] += count
    return found


def _waits(one: Simulator) -> bool:
    """For an answer that is due."""
    asks = isinstance(one, Local) and one.asks
    return one.here and not one.wild and bool(one.unanswered or asks)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(
    "seeds",
    [range(12), pytest.param(range(12, 30), marks=[pytest.mark.long])],
    ids=["some", "others"],
)
def test_whatever_simulators_do_every_step_is_somewhere(
    seeds: range, wild: bool, several: bool
) -> None:
    for seed in seeds:
        Story(seed, wild, several).tell(150)
