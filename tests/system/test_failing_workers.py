"""Workers that cannot work end, and the run says why."""

from __future__ import annotations

import pytest
from support.place import Place, assert_books_balance, summary

#: For every process of a run: one of this title gets no thread of this name; "": none at all.
_NO_THREADS = """
import setproctitle, threading

start = threading.Thread.start

def start_or_fail(self):
    if NAME in self.name and setproctitle.getproctitle() == "juggler: TITLE":
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = start_or_fail
"""


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("learner 0", ""),  # it cannot even listen
        ("learner 0", "attach-receive"),
        ("envrunner 0", "attach-heartbeat"),
        ("envrunner 0", "weights"),
    ],
)
def test_a_worker_that_gets_no_threads_ends_the_run_with_its_reason(
    place: Place, title: str, name: str
) -> None:
    """As where memory or the number of threads is limited."""
    text = _NO_THREADS.replace("TITLE", title).replace("NAME", repr(name))
    place.write("sitecustomize.py", text)
    options = ["--num-env-runners", 1, "--run-dir", "run", "--worker-timeout-seconds", 250]
    run = place.run("train", "cartpole", "--stop-steps", 2000, *options, seconds=110)
    assert run.status == 1, run.output
    assert "can't start new thread" in run.output.splitlines()[-1], run.output
    assert "can't start new thread" in summary(place.path / "run")["failure"]
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
