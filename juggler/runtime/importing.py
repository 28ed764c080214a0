"""What a Python module must not do while a run imports it.

A run's processes import the module that `env="my_file:MyEnv"` names. Where that is the very script
that starts the run, with nothing around the start, each import would start a further run.
"""

from __future__ import annotations

import sys

_PACKAGE = __name__.partition(".")[0]


class StartedByImport(RuntimeError):
    """A Python module starts a run while a run imports it."""


def must_not_be_imported() -> None:
    """To be called before a run starts.

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
                "it. Put what starts the run behind a guard, so that it happens only where the "
                'file itself is run: if __name__ == "__main__": juggler.train(...)'
            )
