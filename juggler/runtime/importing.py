"""Detects Python modules that start a run while a run imports them.

A run's processes import the module that `env="my_file:MyEnv"` names. If that module starts the run
at its top level, each import would start a further run.
"""

from __future__ import annotations

import sys

_PACKAGE = __name__.partition(".")[0]


class StartedByImport(RuntimeError):
    """A Python module starts a run while a run imports it."""


def must_not_be_imported() -> None:
    """Raise an error if a run is started during an import.

    Raises:
        StartedByImport: the run is started at the top level of a module that Juggler imports.
    """
    module = ""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        frame = outer
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>":
            module = module or name
        elif module and name.partition(".")[0] == _PACKAGE:
            raise StartedByImport(
                f"{module} starts a run whenever it is imported, and the processes of a run import "
                "it. Put the start of the run behind a guard, so that it happens only if the "
                'file itself is run: if __name__ == "__main__": juggler.train(...)'
            )
