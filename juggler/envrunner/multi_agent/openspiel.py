"""Games of OpenSpiel (Lanctot et al., arXiv:1908.09453) as environments with several agents."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.runtime.near_matches import nearest

#: The prefix of their names in `env`.
SCHEME: Final = "open_spiel:"
_SEED: Final = "rng_seed"


def find_game(name: str) -> Callable[..., OpenSpielGame]:
    """Return a function that makes a game of OpenSpiel.

    Args:
        name: "open_spiel:GAME", such as "open_spiel:kuhn_poker".

    Raises:
        ValueError: OpenSpiel is not installed, or has no such game.
    """
    check_extra(name)
    known = importlib.import_module("pyspiel").registered_names()
    game = name.removeprefix(SCHEME)
    if game not in known:
        raise ValueError(f"env {name!r}: OpenSpiel has no such game{nearest(game, known)}")
    return functools.partial(OpenSpielGame, game)


class OpenSpielGame:
    """A game with PettingZoo's AEC interface, in which players take turns.

    Players are the agents "player_0", "player_1" and so on. The player on turn observes
    {"observation": float32 [D], "action_mask": int8 [A]}: its information state if the game has
    that as a tensor, else its observation, as a flat vector. Chance is drawn from the seed of
    `reset`, unless `parameters` has the game's own `rng_seed`. In a game of simultaneous moves,
    players choose one after another, and do not see each other's choices. Rewards are differences
    of OpenSpiel's returns. The end of a game is a termination.

    Args:
        name: of the game, such as "kuhn_poker"; see `pyspiel.registered_names`.
        parameters: of the game, such as players=3.

    Raises:
        ValueError: OpenSpiel cannot load the game, it is a mean-field game, or it has no
            observation tensor.
    """

    def __init__(self, name: str, **parameters: Any) -> None:
        self._pyspiel: Any = importlib.import_module("pyspiel")
        self._name, self._parameters = name, parameters
        try:
            game = self._load()
        except self._pyspiel.SpielError as error:
            raise ValueError(f"OpenSpiel cannot load the game {name!r}: {error}") from None
        kind = game.get_type()
        if kind.dynamics == self._pyspiel.GameType.Dynamics.MEAN_FIELD:
            raise ValueError(f"OpenSpiel's game {name!r} is a mean-field game: choose another kind")
        # A game that draws chance itself can only be seeded when it is loaded.
        self._draws_itself = (
            kind.chance_mode == self._pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
            and _SEED in kind.parameter_specification.keys() - parameters.keys()
        )
        # Information states tell players all that they have seen so far.
        self._informed = kind.provides_information_state_tensor
        if not self._informed and not kind.provides_observation_tensor:
            raise ValueError(f"OpenSpiel's game {name!r} has no tensor that players could see")
        shape = (
            game.information_state_tensor_shape()
            if self._informed
            else game.observation_tensor_shape()
        )
        # All players see and act alike.
        self.game = game
        self.possible_agents = [f"player_{player}" for player in range(game.num_players())]
        actions = game.num_distinct_actions()
        self._size, self._action_space = int(np.prod(shape)), spaces.Discrete(actions)
        self._observation_space = spaces.Dict(
            observation=spaces.Box(-np.inf, np.inf, (self._size,), np.float32),
            action_mask=spaces.Box(0, 1, (actions,), np.int8),
        )
        self._random = random.Random()  # NumPy's takes longer to seed and to choose
        self.agents: list[str] = []
        self.agent_selection = self.possible_agents[0]

    def observation_space(self, agent: str) -> Space[Any]:
        return self._observation_space

    def action_space(self, agent: str) -> Space[Any]:
        return self._action_space

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        """Begin a game."""
        if seed is not None:
            self._random.seed(seed)
            if self._draws_itself:
                self.game = self._load(**{_SEED: seed % 2**31})
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        # By agent, since its own last move.
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self._returns = np.zeros(len(self.agents))
        self._state = self.game.new_initial_state()
        self._advance()

    def observe(self, agent: str) -> dict[str, NDArray[Any]]:
        """Return a player's observation; its mask is zeros out of turn."""
        player = self.possible_agents.index(agent)
        mask = np.zeros(self.game.num_distinct_actions(), np.int8)  # [A]
        if not self._state.is_terminal() and self._state.current_player() == player:
            mask[self._state.legal_actions()] = 1
        see = (
            self._state.information_state_tensor
            if self._informed
            else self._state.observation_tensor
        )
        return {"observation": np.array(see(player), np.float32), "action_mask": mask}

    def last(
        self, observe: bool = True
    ) -> tuple[dict[str, NDArray[Any]] | None, float, bool, bool, dict[str, Any]]:
        """Return the selected agent's results, with rewards since its last move."""
        agent = self.agent_selection
        seen = self.observe(agent) if observe else None
        ends = self.terminations[agent], self.truncations[agent]
        return seen, self._cumulative_rewards[agent], *ends, self.infos[agent]

    def step(self, action: int | None) -> None:
        """Make the selected agent's move; None after the end of the game.

        Raises:
            ValueError: the move is not legal, or the game has ended.
        """
        agent = self.agent_selection
        if self.terminations[agent]:
            if action is not None:
                raise ValueError(f"the game is over, and {agent} moves: {action}")
            self.agents.remove(agent)
            self.agent_selection = self.agents[0] if self.agents else agent
            return
        legal = self._state.legal_actions()
        if action is None or action not in legal:
            raise ValueError(f"{agent} moves {action}, and may move {legal}")
        self._cumulative_rewards[agent] = 0.0
        self._state.apply_action(int(action))
        self._advance()

    def close(self) -> None:
        """Do nothing."""

    def _load(self, **more: Any) -> Any:
        game = self._pyspiel.load_game(self._name, {**self._parameters, **more})
        if game.get_type().dynamics == self._pyspiel.GameType.Dynamics.SIMULTANEOUS:
            game = self._pyspiel.convert_to_turn_based(game)
        return game

    def _advance(self) -> None:
        """Draw chance moves, reward all players, and select the next player."""
        while self._state.is_chance_node():
            outcomes, chances = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._random.choices(outcomes, chances)[0])
        returns = np.array(self._state.returns())  # [players]
        gained, self._returns = returns - self._returns, returns
        for agent, reward in zip(self.possible_agents, gained.tolist(), strict=True):
            self.rewards[agent] = reward
            self._cumulative_rewards[agent] += reward
        if self._state.is_terminal():
            self.terminations = dict.fromkeys(self.agents, True)
            self.agent_selection = self.agents[0]
        else:
            self.agent_selection = self.possible_agents[self._state.current_player()]
