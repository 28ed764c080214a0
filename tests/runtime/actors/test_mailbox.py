from __future__ import annotations

import threading
import time

from juggler.runtime.actors.mailbox import Mailbox


def test_gather_with_a_zero_timeout_never_waits() -> None:
    mailbox: Mailbox[int] = Mailbox()
    took = []
    for _ in range(20):  # other processes may hold one up
        before = time.perf_counter()
        assert mailbox.gather(timeout=0.0) == []
        took.append(time.perf_counter() - before)
    assert min(took) < 0.05


def test_gather_gives_everything_that_is_there_oldest_first() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(5):
        mailbox.put(number)
    assert mailbox.gather() == [0, 1, 2, 3, 4]
    assert mailbox.gather() == []


def test_a_put_in_another_thread_ends_the_wait() -> None:
    mailbox: Mailbox[str] = Mailbox()
    waiting = threading.Event()

    def put() -> None:
        waiting.wait()
        mailbox.put("here")

    thread = threading.Thread(target=put)
    thread.start()
    waiting.set()
    before = time.perf_counter()
    items: list[str] = []
    while not items:
        items = mailbox.gather(timeout=30.0)
    thread.join()
    assert items == ["here"]
    assert time.perf_counter() - before < 10.0


def test_nothing_is_lost_between_many_threads_and_one_loop() -> None:
    mailbox: Mailbox[int] = Mailbox()
    each, threads = 2000, 4

    def put(start: int) -> None:
        for number in range(start, start + each):
            mailbox.put(number)

    writers = [threading.Thread(target=put, args=(n * each,)) for n in range(threads)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    deadline = time.monotonic() + 30
    while len(seen) < each * threads and time.monotonic() < deadline:
        seen += mailbox.gather(timeout=1.0)
    for writer in writers:
        writer.join()
    assert sorted(seen) == list(range(each * threads))
