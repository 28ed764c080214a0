"""What hears of a run because its configuration says so."""

from __future__ import annotations

from juggler.driver.callbacks import Callback
from juggler.driver.driver_config import DriverConfig
from juggler.driver.trackers.tracking import tracking
from juggler.driver.watching.beside import PageBeside


def callbacks_of(config: DriverConfig) -> tuple[Callback, ...]:
    """Those of the keys `track` and `web`.

    Raises:
        ConfigError: a tracker is not usable.
    """
    page = (PageBeside(),) if config.web else ()
    return (*tracking(config.track), *page)
