"""Processes that the surrounding program starts with multiprocessing's forkserver."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
import time

import pytest

from juggler.runtime.actors import processes

#: As one has for its own processes, such as those of a vector of environments.
PROGRAM_WITH_ITS_OWN = """
    import multiprocessing, time
    from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

    theirs = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    theirs.start()
    warm_up()
    ours = WorkerProgram("time:sleep", 0).start("worker")
    ours.join()
    WorkerProgram.ended(ours)
    cool_down()
    theirs.join(0.5)
    print(ours.exitcode, theirs.is_alive())
    theirs.kill()
"""


#: Such as those of a DataLoader. The forkserver stays for them, and only for them.
PROGRAM_THAT_USES_OURS = """
    import multiprocessing, time
    from juggler.runtime.actors import processes
    from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

    warm_up()
    theirs = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    theirs.start()
    ours = WorkerProgram("time:sleep", 0).start("worker")
    ours.join()
    WorkerProgram.ended(ours)
    theirs.join(0.5)
    said = [theirs.is_alive()]
    left = WorkerProgram("time:sleep", 60).start("worker")
    cool_down()
    left.join(30)
    said += [theirs.is_alive(), processes.forkserver_pid() > 0, left.exitcode]
    WorkerProgram.ended(left)
    theirs.kill()
    theirs.join()
    cool_down()
    print(*said, processes.forkserver_pid())
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(PROGRAM_WITH_ITS_OWN, "0 True\n"), (PROGRAM_THAT_USES_OURS, "True True True -9 0\n")],
    ids=["a forkserver that was there before", "processes below Juggler's forkserver"],
)
def test_what_is_the_scripts_own_outlives_the_workers(program: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said


def test_a_process_that_another_thread_closes_meanwhile_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = multiprocessing.Process(target=time.sleep, args=(0,))
    closed.close()
    monkeypatch.setattr(multiprocessing.process, "_children", {closed})
    assert processes._of_the_script() == set()
