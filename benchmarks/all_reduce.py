"""What an update of a learner group costs beyond raw torch.distributed.

Several processes reduce the gradients of one module as learners do, and one flat vector of the same
size as torch.distributed does, in turns. Prints one JSON line: medians in milliseconds, the slowest
process at each turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed

from juggler.learner.core import UnitAux
from juggler.learner.peers import MeetingPoint, Peers
from juggler.learner.reduction import mean_over_learners
from juggler.runtime.actors.memory import keep_freed_memory

dist: Any = torch.distributed
HOST = "127.0.0.1"


def member(rank: int, size: int, parameters: int, turns: int, addresses: Any, found: Any) -> None:
    """One of the learners; rank 0 says where to meet."""
    keep_freed_memory()  # as learners do
    torch.set_num_threads(1)
    if rank == 0:
        point = MeetingPoint(HOST)
        for _ in range(size):
            addresses.put(point.address)
    address = addresses.get(timeout=60)
    peers = Peers(address, 1, rank, size, HOST, bool)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("raw", store), rank=rank, world_size=size
    )
    gradient = torch.randn(parameters)  # [P]
    aux = UnitAux({"default": torch.tensor(1000 + rank)}, {}, {}, {"default": {}})
    nothing = ({"default": torch.zeros(parameters)}, {"default": aux})
    bucket = torch.randn(parameters)  # [P]
    ours, theirs = [], []

    def reduce() -> None:
        mean_over_learners({"default": gradient}, {"default": aux}, nothing, peers.sum)

    def all_reduce() -> None:
        dist.all_reduce(bucket)

    for turn in range(turns):
        pair = [(reduce, ours), (all_reduce, theirs)]
        for work, seconds in pair if turn % 2 else reversed(pair):
            # All begin at once, as at the end of equal shares of a batch.
            dist.barrier()
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
    slowest = torch.tensor([ours, theirs], dtype=torch.float64)  # [2, turns]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        found.put(slowest.tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=1_700_000)
    parser.add_argument("--turns", type=int, default=100)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    addresses, found = context.Queue(), context.Queue()
    processes = [
        context.Process(
            target=member,
            args=(rank, given.learners, given.parameters, given.turns, addresses, found),
            daemon=True,
        )
        for rank in range(given.learners)
    ]
    for process in processes:
        process.start()
    ours, theirs = (np.array(times[given.turns // 5 :]) for times in found.get(timeout=120))
    for process in processes:
        process.join()
    print(
        json.dumps(
            {
                "reduction_ms": statistics.median(ours) * 1e3,
                "all_reduce_ms": statistics.median(theirs) * 1e3,
                "ratio": statistics.median(ours / theirs),
            }
        )
    )


if __name__ == "__main__":
    main()
