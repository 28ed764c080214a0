"""The keys of algorithms that may keep steps. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.config import LearnerConfig


@dataclass(kw_only=True)
class KeptConfig(LearnerConfig):
    """Where steps are kept, and how many."""

    replay_capacity: int = 100_000
    """Steps that each learner keeps, the newest ones. Each takes the memory of two observations; of
    frames that are stacked, of one."""

    replay_memory: float | None = None
    """Largest size of the kept steps of each learner, in gigabytes, if replay_capacity steps take
    more; none: no limit. What a step takes is estimated from the first ones, and may be twice as
    much later. What does not fit into a host's memory is told when a run starts."""

    replay_directory: str = ""
    """Directory in which each learner keeps steps on disk, in a file without a name that ends with
    it; without it, they are kept in memory."""

    save_replay: bool = True
    """Whether checkpoints hold the kept steps. Without them a run that is resumed begins with none,
    and so does a synchronous run after each checkpoint."""

    def numbers_of_losses(self) -> list[str]:
        return [key for key in super().numbers_of_losses() if key != "replay_memory"]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("replay_capacity", 1)
        if self.replay_memory is not None:
            self.check_above("replay_memory", 0)
