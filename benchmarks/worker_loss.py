"""What the loss of one of three workers costs an elastic training (tests/elastic_fit_program.cc, steps of 50 ms): the longest time between two steps
of those that go on, beyond a step's own, and the time from the start of the process in its place to its first step.

    benchmarks/worker_loss.py [--rounds 5]
"""
import argparse
import json
import re
import statistics
import subprocess
import time

from programs import ROOT

STEP_MS = 50
JOB = ("env", "VICTIM=1", "STEP=10", "PLACE=forward", f"STEP_MS={STEP_MS}", str(ROOT / "build/release/lockstep"), "run", "-n", "3", "--min-n", "2",
       "--restarts", "1", str(ROOT / "build/release/tests/elastic_fit_program"))


def measure():
    """Seconds: the pause, and the newcomer's way to its first step."""
    job = subprocess.Popen(JOB, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pauses, killed, joined = [], None, None
    for line in job.stdout:
        if "it is started again" in line:
            killed = time.perf_counter()
        if "joined at step" in line:
            joined = time.perf_counter() - killed
        if found := re.search(r"longest ([0-9.e-]+)", line):
            pauses.append(float(found[1]))
    assert job.wait() == 0 and len(pauses) == 3
    return max(pauses) - STEP_MS / 1000, joined


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    results = [measure() for _ in range(parser.parse_args().rounds)]
    pause, joins = (statistics.median(values) for values in zip(*results))
    print(f"pause of those that go on: {pause:.3f} s (target 0.5), no step lost; a newcomer's first step: {joins:.2f} s after its start (target 1.5)")
    print(json.dumps({"pause_s": [r[0] for r in results], "joins_s": [r[1] for r in results]}))
