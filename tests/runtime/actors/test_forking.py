"""Programs that are started by a process that uses gRPC."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = """
import os, time
from juggler.runtime.actors.endpoints import bind, dial
import grpc
from concurrent.futures import ThreadPoolExecutor

answer = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Say": answer}),))
address = bind(server, "127.0.0.1:0")
server.start()
with dial(address) as channel:
    assert channel.unary_unary("/test/Say")(b"hello", timeout=30) == b"hello"
server.stop(None).wait()
for _ in range(5):
    if not (pid := os.fork()):
        time.sleep(0.05)
        os._exit(len(os.listdir("/proc/self/task")))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_what_is_forked_has_no_threads_of_grpc(run_python: Callable[..., str]) -> None:
    assert run_python("-c", PROGRAM).split() == ["1"] * 5
