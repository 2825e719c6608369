"""Measures what the loss of one of three workers costs, ours and the peers', in turns. Steps take 50 ms; worker 1 is killed in the middle of a
training and started again. Prints three figures: seconds from the kill to the others' next step; steps dropped or made again; seconds from the
start of the new process to its first step. Our program is tests/elastic_fit_program.cc.

    benchmarks/worker_loss.py [--rounds 3] [--only TEXT]
    benchmarks/worker_loss.py --kills 50 --minutes 10     ours: that many kills at random moments; steps made, against a run without
"""
import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from programs import ROOT

STEP_MS, STEPS, KILL_AT = 50, 200, 25
PROGRAM, LOCKSTEP = (str(ROOT / "build/release" / name) for name in ("tests/elastic_fit_program", "lockstep"))
PYTHON, PEERS = ROOT / ".peers/pytorch/bin", ROOT / "benchmarks/peers"
ENVIRONMENT = {**os.environ, "STEP_MS": str(STEP_MS), "STEPS": str(STEPS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def start(command, **variables):
    return subprocess.Popen(list(map(str, command)), env={**ENVIRONMENT, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ours():
    """Its own pauses, which it measures."""
    job = start([LOCKSTEP, "run", "-n", 3, "--min-n", 2, "--restarts", 1, PROGRAM], VICTIM="1", STEP=str(KILL_AT), PLACE="forward", EPOCHS=str(STEPS // 20))
    pauses, started, joined, steps = [], None, None, set()
    for line in job.stdout:
        if "it is started again" in line:
            started = time.perf_counter()
        if "joined at step" in line:
            joined = time.perf_counter() - started
        if found := re.search(r"longest ([0-9.e-]+)", line):
            pauses.append(float(found[1]))
        if found := re.search(r"steps (\d+), weights", line):
            steps.add(int(found[1]))
    assert job.wait() == 0 and len(pauses) == 3 and steps == {STEPS}
    return max(pauses) - STEP_MS / 1000, 0, joined


class Lines:
    """The lines that processes print, with the time of each."""

    def __init__(self):
        self.lines, self.change = [], threading.Condition()

    def read(self, process):
        def take():
            for words in filter(None, map(str.split, process.stdout)):
                with self.change:
                    self.lines.append((time.perf_counter(), words))
                    self.change.notify_all()
        threading.Thread(target=take, daemon=True).start()

    def wait(self, test, limit_s=60):
        with self.change:
            found = lambda: next((line for line in self.lines if test(*line)), None)
            if not self.change.wait_for(found, limit_s):
                raise RuntimeError(f"no such line in {self.lines[-20:]}")
            return found()


def torchft(heartbeat_ms, join_ms):
    lighthouse = subprocess.Popen([PYTHON / "torchft_lighthouse", "--bind", "127.0.0.1:29651", "--min_replicas", "1", "--quorum_tick_ms", "100",
                                   "--join_timeout_ms", str(join_ms), "--heartbeat_timeout_ms", str(heartbeat_ms)], stderr=subprocess.DEVNULL)
    lines, jobs = Lines(), []

    def begin(replica):
        job = start([PYTHON / "python", PEERS / "torchft_step.py"], REPLICA=str(replica), TORCHFT_LIGHTHOUSE="http://127.0.0.1:29651", RUST_LOG="error")
        lines.read(job)
        jobs.append(job)
        return job

    try:
        victim = [begin(replica) for replica in range(3)][1]
        lines.wait(lambda _, words: words[:2] == ["step", "1"] and int(words[2]) >= KILL_AT and words[3] == "3")
        victim.kill()
        killed = time.perf_counter()
        begin(1)
        after = lambda at, words: at > killed and words[0] == "step"
        next_step = lines.wait(lambda at, words: after(at, words) and words[1] != "1" and words[3] == "2")
        joined = lines.wait(lambda at, words: after(at, words) and words[1] == "1")
        dropped = sum(words[:2] == ["dropped", "0"] for at, words in lines.lines if killed < at < joined[0])
        return next_step[0] - killed - STEP_MS / 1000, dropped, joined[0] - killed
    finally:
        for job in [*jobs, lighthouse]:
            job.kill()
            job.wait()


def torchrun():
    """All are started again, from the last checkpoint."""
    lines = Lines()
    with tempfile.TemporaryDirectory() as folder:
        job = start([PYTHON / "torchrun", "--standalone", "--nproc-per-node", 3, "--max-restarts", 3, PEERS / "torchrun_step.py"], FOLDER=folder,
                    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        lines.read(job)
        try:
            victim = lines.wait(lambda _, words: words[:3] == ["step", "1", str(KILL_AT)])[1]
            os.kill(int(victim[3]), signal.SIGKILL)
            killed = time.perf_counter()
            old = {words[3] for _, words in lines.lines if words[0] == "step"}
            is_new = lambda at, words: at > killed and words[0] == "step" and words[3] not in old
            first = lines.wait(is_new)
            seconds = first[0] - killed - STEP_MS / 1000
            return seconds, KILL_AT - (int(first[1][2]) - 1), seconds
        finally:
            job.terminate()
            job.wait()


def kills(count, minutes):
    """Seconds of a training with kills at random moments, and those of one without."""
    steps = int(minutes * 60 * 1000 / STEP_MS / 20) * 20

    def seconds(kill):
        job = start([LOCKSTEP, "run", "-n", 3, "--min-n", 1, "--restarts", count, PROGRAM], EPOCHS=str(steps // 20), VALIDATE="0")
        lines, living, chosen = Lines(), {}, random.Random(1)
        lines.read(job)
        lines.wait(lambda _, words: "worker" in words)
        begun = time.perf_counter()
        for number in range(count if kill else 0):
            time.sleep(max(0, begun + (number + chosen.random()) * minutes * 60 / count - time.perf_counter()))
            for _, words in list(lines.lines):
                if words[1:3] == ["worker", "at"]:
                    living[words[0]] = int(words[3])
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen.choice(list(living.values())), signal.SIGKILL)
            print(f"\r{number + 1} of {count} kills", end="", file=sys.stderr, flush=True)
        status = job.wait()
        taken = time.perf_counter() - begun
        ends = [words for _, words in lines.lines if "weights" in words]
        assert status == 0 and ends and all(words[2] == f"{steps}," for words in ends), lines.lines[-5:]
        assert len({tuple(words[4:]) for words in ends}) == 1, ends
        print(f"\r{steps} steps by {len(ends)} workers in {taken:.1f} s", file=sys.stderr)
        return taken

    without, with_kills = seconds(False), seconds(True)
    print(f"{count} kills in {minutes} minutes: {without / with_kills:.3f} of the steps of a run without (target 0.97)")


ROWS = {"ours": ours, "torchft, its defaults": lambda: torchft(5000, 10000), "torchft, timeouts of 0.5 s": lambda: torchft(500, 500),
        "torchrun, a checkpoint every 10 steps": torchrun}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    if options.kills:
        sys.exit(kills(options.kills, options.minutes))
    results = {name: [] for name in ROWS if options.only in name}
    for number in range(options.rounds):
        for name in results:
            print(f"\rround {number + 1} of {options.rounds}: {name:40}", end="", file=sys.stderr, flush=True)
            results[name].append(ROWS[name]())
    print(file=sys.stderr)
    for name, measured in results.items():
        pause, lost, joins = (statistics.median(values) for values in zip(*measured))
        print(f"{name:40} next step after {pause:6.3f} s, {lost:2.0f} steps lost, a newcomer's first step after {joins:5.2f} s")
    print("targets, of ours: 0.5 s, 0, 1.5 s")
    print(json.dumps(results))
