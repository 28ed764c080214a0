# ruff: noqa: E501
"""Puts one fault at a time into a copy of the package, and runs the fast tests of its room.

    python benchmarks/mutations.py [--only WORDS] [--list] [--timeout SECONDS]

A fault that no test finds is a gap in the tests. The results are kept in mutations.jsonl; a fault
whose text is not in its file any more is reported as moved, and has to be written again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "mutations.jsonl"
#: By the beginning of a path: the tests of that room.
ROOMS = {
    "driver/core/": "tests/driver/core tests/driver/workers",
    "driver/league/": "tests/driver/league",
    "driver/learner_group": "tests/driver/learner_group",
    "driver/periodic_work": "tests/driver/workers",
    "driver/": "tests/driver",
    "runtime/actors/": "tests/runtime/actors tests/runtime/test_histories.py",
    "runtime/streams/": "tests/runtime/streams",
    "learner/data/": "tests/learner/data",
    "learner/algorithms/": "tests/learner/algorithms",
    "learner/": "tests/learner/core tests/learner/optim tests/learner/data",
}


@dataclass(frozen=True)
class Fault:
    """One change of the package.

    Attributes:
        file: below `juggler/`.
        old: text that is there exactly once.
        new: what takes its place.
        what: the fault, in a few words.
    """

    file: str
    old: str
    new: str
    what: str


LEDGER, MODULE, RUNNERS, MEMBERS = (
    f"driver/core/{name}.py" for name in ("ledger", "module_core", "runners", "group")
)
SHARDS, PERIODIC = "driver/learner_group.py", "driver/periodic_work.py"
ROOM = "driver/core/staleness.py"
HUB, WORKER = "runtime/actors/hub.py", "runtime/actors/worker.py"
SUPERVISOR, MAILBOX = "runtime/actors/supervisor.py", "runtime/actors/hub.py"
WEIGHTS, EPISODES = "runtime/streams/weights_stream.py", "runtime/streams/episodes.py"
RETURNS, TREES = "learner/core/returns.py", "learner/data/replay/table.py"
COLLATE, STORE = "learner/data/collate.py", "learner/data/batch_store.py"
IMPALA, DQN = "learner/algorithms/impala/core.py", "learner/algorithms/dqn/core.py"
SCHEDULES, PFSP = "learner/optim/optimizers.py", "driver/league/pfsp.py"

FAULTS = [
    # The books of steps.
    Fault(LEDGER, "        batch.steps = live_steps\n        self.sampled += live_steps", "        self.sampled += batch.steps\n        batch.steps = live_steps", "requested steps count as sampled"),
    Fault(LEDGER, 'self.dropped["stale"] += steps', "pass", "stale steps are not counted"),
    Fault(LEDGER, "self.trained += batch.steps", "self.trained += 1", "a batch counts as one step"),
    Fault(LEDGER, 'ledger.dropped["restart"] += counters.in_flight', "pass", "steps in flight vanish at a resume"),
    Fault(LEDGER, "self.lost_unreported -= batch.steps", "pass", "a revived batch stays lost"),
    Fault(LEDGER, 'self.drop(batch, "restart")  #', 'self.train(batch)  #', "a forgotten batch counts as trained"),
    Fault(LEDGER, 'self.dropped[reason] -= batch.steps', "pass", "a reopened batch counts twice"),
    # What a module decides.
    Fault(MODULE, "return newest\n", "return newest._replace(update=max(0, newest.update - 1))\n", "synchronous runs accept old weights"),
    Fault(MODULE, "behind = max(0, newest.update - 1)", "behind = newest.update", "asynchronous runs wait for the newest weights"),
    Fault(MODULE, "            learner.opens(batch)\n            learner.hold(batch)", "            learner.hold(batch)", "a held batch is not open"),
    Fault(MODULE, "self.weights_version = max(self.weights_version, event.version)\n        else:", "self.weights_version = event.version\n        else:", "weights go backwards"),
    Fault(MODULE, "self._unanswered[batch.batch_id] = batch", "pass", "an unanswered update is not settled"),
    Fault(MODULE, "self._state.between_turns = self.settings.synchronous", "self._state.between_turns = False", "synchronous runs begin the next turn at once"),
    Fault(MODULE, "if self._group.members and not self._group.joiners and not self.between_turns:", "if self._group.members and not self.between_turns:", "updates go on while learners wait to join"),
    Fault(MODULE, "        self.ledger.settle(share, answers.values())\n        self.weights_version = max(self.weights_version, event.version)", "        self.ledger.settle(share, answers.values())", "an update that was not reported leaves the weights at their version"),
    Fault(MEMBERS, "if not each.open_steps] if self._have_met else []", "if not each.open_steps]", "the last weights leave with their learner"),
    Fault(MEMBERS, "self._have_met = self._have_met or generation == self.generation", "self._have_met = True", "another group that meets counts as this one"),
    Fault(MEMBERS, "return self._form() if self.members and generation == self.generation else None", "return self._form() if self.members else None", "a group is renewed twice"),
    Fault(RUNNERS, "len(runner.rounds) < self._most_rounds", "len(runner.rounds) <= self._most_rounds", "one round too many"),
    Fault(RUNNERS, "runner.rounds[number] -= 1", "runner.rounds[number] -= 2", "a round ends too early"),
    Fault(RUNNERS, "runner is not None and runner.worker == worker", "runner is not None", "an earlier process is taken for the present one"),
    Fault(ROOM, "(left + 1) // 2", "left + 1", "twice the updates are open"),
    Fault(ROOM, "left = max_staleness - (weights_interval - 1)", "left = max_staleness", "the interval of weights is not counted"),
    Fault(ROOM, "batches < self.updates or", "batches < self.updates and", "small batches leave no room"),
    # The league.
    Fault(PFSP, '"squared": lambda rate: (1 - rate) ** 2', '"squared": lambda rate: rate**2', "easy opponents are drawn"),
    Fault(PFSP, "weight / total for", "weight for", "probabilities do not add up to 1"),
    # Workers and their streams of commands.
    Fault(MAILBOX, "self._items.append(item)\n        self._ready.set()", "self._items.append(item)", "a put does not wake the loop"),
    Fault(MAILBOX, "        self._ready.clear()\n        items = []\n        while self._items:\n            items.append(self._items.popleft())", "        items = []\n        while self._items:\n            items.append(self._items.popleft())\n        self._ready.clear()", "a wake that comes meanwhile is overlooked"),
    Fault(MAILBOX, "self._items.popleft()", "self._items.pop()", "the newest item comes first"),
    Fault(HUB, "            for report in message.reports:\n                events.put(WorkerReported(worker, report))\n", "", "reports are dropped"),
    Fault(HUB, "size, start = 0, end", "size, start = 0, end + 1", "a command between two messages is lost"),
    Fault(HUB, "late, looked = now - looked - interval, now", "late, looked = 0.0, now", "a pause of the driver counts as silence"),
    Fault(HUB, "if len(self._connections) >= settings.max_workers:", "if len(self._connections) > settings.max_workers:", "one worker too many"),
    Fault(HUB, "del self._connections[worker_id]", "pass", "a worker leaves twice"),
    Fault(HUB, "if self._connections.get(worker_id) is connection:", "if True:", "a replaced worker takes its successor along"),
    Fault(HUB, "if stuck > self._settings.hang_seconds:", "if False:", "a worker that hangs is never lost"),
    Fault(SUPERVISOR, "2.0 ** min(deaths - 1, 64)", "2.0 ** min(deaths, 64)", "the first delay is doubled"),
    Fault(SUPERVISOR, "self.failures >= self.policy.quarantine_after", "self.failures > self.policy.quarantine_after", "one life too many"),
    Fault(SUPERVISOR, "if self.has_run_long_enough(now) or (exitcode in _KILLED and self.uses):", "if self.has_run_long_enough(now):", "a killed worker counts as failed"),
    Fault(WORKER, "                if stop.failure:\n                    raise FailedOnRequest(stop.failure)\n", "", "a failure that the driver names is not raised"),
    Fault(SHARDS, "if reply.last and not self.done():", "if not self.done():", "the first of several replies ends a request"),
    Fault(PERIODIC, "                    for text in self.standstill.silent_runners():\n                        parts.progress.message(text, \"warning\")\n", "", "an EnvRunner that brings nothing is never named"),
    # Weights and batches on their way.
    Fault(WEIGHTS, "weights.version > self._newest.version", "True", "readers go back to older weights"),
    Fault(WEIGHTS, "                self._newest = weights\n                self._condition.notify_all()", "                self._newest = weights", "no reader is woken by new weights"),
    Fault(WEIGHTS, "newest.version >= version, timeout", "newest.version > version, timeout", "the very version is not enough"),
    Fault(WEIGHTS, "                    self._failure = error\n", "                    pass\n", "a dead thread goes unnoticed"),
    Fault(EPISODES, 'self._settled(answer.batch_id, "refused" if answer.refused else "", answer.refused)', 'self._settled(answer.batch_id, "", answer.refused)', "a refused batch counts as taken"),
    Fault(EPISODES, '        for batch_id in lost:\n            self._settled(batch_id, "learner_lost", end.why)\n', "", "batches on a broken stream are never settled"),
    Fault(EPISODES, "            self._open.discard(answer.batch_id)\n", "", "a batch is settled twice"),
    # What is learned.
    Fault(RETURNS, "- values) * live  # [N, T] r + γ V' - V", "- values)  # [N, T] r + γ V' - V", "steps that are not live count"),
    Fault(RETURNS, "carried = discounts * ~truncated *", "carried = discounts *", "corrections flow over a truncation"),
    Fault(RETURNS, "lambda_ * discounts * ~truncated, errors", "discounts * ~truncated, errors", "GAE without its lambda"),
    Fault(RETURNS, "targets=(values + corrections) * live", "targets=(values - corrections) * live", "a sign in the targets of V-trace"),
    Fault(RETURNS, "ratios.clamp(max=rho_bar) * errors, torch", "ratios * errors, torch", "ratios are not clipped"),
    Fault(IMPALA, "policy_loss = -mean(", "policy_loss = mean(", "the sign of the policy's loss"),
    Fault(IMPALA, "action_logp - columns[c.ACTION_LOGP], 0.0", "columns[c.ACTION_LOGP] - action_logp, 0.0", "the ratio is upside down"),
    Fault(DQN, "if self.config.double:", "if not self.config.double:", "double estimates are the other way round"),
    Fault(DQN, "(targets - chosen).detach().abs()", "(targets + chosen).detach().abs()", "priorities of another number"),
    Fault(SCHEDULES, "/ (stop - start)).clamp(0, 1)", "/ (stop - start))", "a schedule goes on behind its last point"),
    Fault(TREES, "places = (running[1:] <= rest)", "places = (running[1:] < rest)", "a slot without weight is drawn"),
    Fault(TREES, "rest -= running[places, rows]", "pass", "draws below the root forget what is to the left"),
    Fault(COLLATE, "indices = [rows + start for rows, start in", "indices = [rows for rows, start in", "rows of the second batch name those of the first"),
    Fault(COLLATE, "columns[start : start + n, t:] = rest", "pass", "short rows are padded with anything"),
    Fault(STORE, "max(0, update - self.version.update)", "update", "every batch is as old as the run"),
]  # fmt: skip


def room_of(file: str) -> list[str]:
    """The tests that have to find a fault of a file."""
    return next(tests for begins, tests in ROOMS.items() if file.startswith(begins)).split()


def moved(fault: Fault, root: Path = ROOT) -> str:
    """Why a fault cannot be put in; "": it can."""
    path = root / "juggler" / fault.file
    if not path.is_file():
        return "there is no such file"
    count = path.read_text().count(fault.old)
    return "" if count == 1 else f"its text is there {count} times"


def tried(fault: Fault, copy: Path, timeout: float) -> str:
    """Whether tests find a fault: "found", "no end", "not found", or "moved: ..."."""
    if why := moved(fault, copy):
        return f"moved: {why}"
    path = copy / "juggler" / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    tests = [each for each in room_of(fault.file) if (copy / each).exists()]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}",
    }
    process = subprocess.Popen(
        [*command, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        result = "found" if process.wait(timeout) else "not found"
    except subprocess.TimeoutExpired:  # the fault is a wait without an end, or the machine is slow
        result = "no end"
    finally:
        path.write_text(text)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words of the file or the fault")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one fault")
    parser.add_argument("--list", action="store_true", help="only report faults that have moved")
    arguments = parser.parse_args()
    faults = [each for each in FAULTS if arguments.only in f"{each.file} {each.what}"]
    if arguments.list:
        lost = [f"{each.file}: {each.what}: {why}" for each in faults if (why := moved(each))]
        print("\n".join([*lost, f"{len(faults)} faults, {len(lost)} of them moved"]))
        return bool(lost)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    kept = {(line["file"], line["what"]): line["result"] for line in map(json.loads, lines)}
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        copy = Path(directory) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
        # A failing history is enough: Hypothesis takes minutes to find a shorter one.
        conftest = copy / "tests" / "conftest.py"
        without = "deadline=None, phases=[Phase.explicit, Phase.generate]"
        text = conftest.read_text().replace("deadline=None", without)
        conftest.write_text(
            text.replace("hypothesis import settings", "hypothesis import Phase, settings")
        )
        for fault in faults:
            result = kept[fault.file, fault.what] = tried(fault, copy, arguments.timeout)
            print(f"{result:10}  {fault.file}: {fault.what}", flush=True)
            results = (
                {
                    "file": each.file,
                    "what": each.what,
                    "result": kept.get((each.file, each.what), ""),
                }
                for each in FAULTS
            )
            RESULTS.write_text("".join(json.dumps(each) + "\n" for each in results))
    return any(kept[each.file, each.what] not in ("found", "no end") for each in faults)


if __name__ == "__main__":
    sys.exit(main())
