"""The cost of a learner group's reduction beyond raw torch.distributed.

Several processes take turns to reduce the gradients of one module as learners do, to sum one flat
vector of the same size as learners of one host do, to sum it as learners of several hosts do, over
TLS, and to sum it with torch.distributed. Prints one JSON line: medians in milliseconds, of the
slowest process in each turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from juggler.learner.core.learner_core import Aux
from juggler.learner.group.peers import mean_over_learners
from juggler.learner.group.ring_peers import RingAccess, RingPeers, RingServer
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.process.learner_program import device_for, devices_here
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.credentials import call_metadata, why_refused
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.actors.tls import read_tls

dist: Any = torch.distributed
HOST = "127.0.0.1"


def encrypted(rank: int, size: int, store: Any, directory: str) -> RingPeers:
    """The same learners, over TLS."""
    tls = read_tls(directory)
    ring = RingServer(lambda metadata: why_refused(metadata, "secret", "run"))
    server = make_server(8)
    server.add_generic_rpc_handlers((ring.handler(),))
    address = bind(server, f"{HOST}:0", token="secret", tls=tls)
    server.start()
    store.set(f"ring/{rank}", address)
    addresses = [store.get(f"ring/{each}").decode() for each in range(size)]
    access = RingAccess(ring, address, call_metadata("secret", "run", str(rank)), tls)
    return RingPeers(access, "default/1", rank, addresses, bool)


def member(
    rank: int,
    size: int,
    device_name: str,
    parameters: int,
    turns: int,
    directory: str,
    addresses: Any,
    found: Any,
) -> None:
    """One of the learners; rank 0 tells the others where to meet."""
    device = torch.device(device_for(device_name, rank, devices_here()))
    on_device = torch.get_device_module(device)
    on_device.set_device(device)
    keep_freed_memory()  # as learners do
    torch.set_num_threads(1)
    if rank == 0:
        point = MeetingPoint(HOST)
        for _ in range(size):
            addresses.put(point.address)
    address = addresses.get(timeout=60)
    peers = GlooPeers(address, 1, rank, size, HOST, bool, device)
    way = "nccl" if peers._nccl else "gloo"
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("raw", store), rank=rank, world_size=size
    )
    raw = dist.new_group(backend=way)
    secure = encrypted(rank, size, store, directory)
    gradient = torch.randn(parameters, device=device)  # [P]
    live_steps = torch.tensor(1000 + rank, device=device)  # []
    aux = Aux(live_steps, {})
    bucket = gradient.clone() if way == "nccl" else gradient.cpu()  # [P]

    def reduce() -> None:
        mean_over_learners(gradient, aux, peers.sum)

    def sum_up() -> None:
        peers.sum(bucket)

    def all_reduce() -> None:
        dist.all_reduce(bucket, group=raw)

    def sum_over_tls() -> None:
        secure.sum(bucket)

    works = [reduce, sum_up, all_reduce, sum_over_tls]
    seconds = torch.zeros(len(works), turns, dtype=torch.float64)  # [4, turns]
    for turn in range(turns):
        for place in range(len(works)):
            index = (place + turn) % len(works)
            # All begin at once, as at the end of equal shares of a batch.
            dist.barrier()
            started = time.perf_counter()
            works[index]()
            on_device.synchronize()
            seconds[index, turn] = time.perf_counter() - started
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        found.put((way, seconds.tolist()))
    secure.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--devices", default="cpu", help="auto: all GPUs in turn")
    parser.add_argument("--parameters", type=int, default=1_700_000)
    parser.add_argument("--turns", type=int, default=100)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    addresses, found = context.Queue(), context.Queue()
    directory = tempfile.TemporaryDirectory(prefix="jb-")
    make_certificates(Path(directory.name), [HOST], 1)
    group = (given.learners, given.devices, given.parameters, given.turns, directory.name)
    processes = [
        context.Process(
            target=member,
            args=(rank, *group, addresses, found),
            daemon=True,
        )
        for rank in range(given.learners)
    ]
    for process in processes:
        process.start()
    way, times = found.get(timeout=120)
    reduction, summed, raw, secure = np.array(times)[:, given.turns // 5 :]
    for process in processes:
        process.join()
    directory.cleanup()
    result = {
        "way": way,
        "reduction_ms": statistics.median(reduction) * 1e3,
        "sum_ms": statistics.median(summed) * 1e3,
        "all_reduce_ms": statistics.median(raw) * 1e3,
        "reduction_ratio": statistics.median(reduction / raw),
        "sum_ratio": statistics.median(summed / raw),
        "encrypted_ms": statistics.median(secure) * 1e3,
        "encrypted_ratio": statistics.median(secure / summed),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
