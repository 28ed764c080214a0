"""`python -m pytest` in the project's directory."""

from __future__ import annotations

from gymnasium.utils.env_checker import check_env
from my_project.environment import Thermostat


def test_it_keeps_the_rules_of_gymnasium() -> None:
    check_env(Thermostat(), skip_render_check=True)


def test_heating_makes_it_warmer() -> None:
    cold, warm = Thermostat(), Thermostat()
    cold.reset(seed=1)
    warm.reset(seed=1)
    cold.step(0)
    warm.step(1)
    assert warm.inside == cold.inside + 1


def test_an_episode_ends_after_its_minutes() -> None:
    env = Thermostat(minutes=3)
    env.reset(seed=1)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
