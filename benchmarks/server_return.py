"""Measures how long training pauses when a parameter server is killed and `lockstep run --restarts` starts it again. The figure is the longest
time between two steps of the click model, over rounds with and without the kill.

    benchmarks/server_return.py [--rounds 5]
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time

from programs import ROOT

JOB = (str(ROOT / "build/release/lockstep"), "run", "--workers", "2", "--ps", "2", "--restarts", "1", str(ROOT / "build/release/benchmarks/click_step"))


def pause(kill, steps):
    """The longest pause in seconds; the server is killed in the second of the measured runs."""
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen((*JOB, "--steps", str(steps), "--backup", folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        restarts = 0
        for line in job.stdout:
            found = re.search(r"ps 1 at (\d+)", line)
            if found and kill and restarts == 0:
                restarts += 1
                time.sleep(6)  # past the start, in the training
                os.kill(int(found[1]), signal.SIGKILL)
            if "longest_pause_s" in line:
                result = json.loads(line[line.index("{"):])
        assert job.wait() == 0
    return result["longest_pause_s"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    without, killed = ([pause(kill, options.steps) for _ in range(options.rounds)] for kill in (False, True))
    print(f"longest pause between two steps: {statistics.median(killed):.2f} s with a killed server (target 5; rounds "
          f"{', '.join(f'{p:.2f}' for p in killed)}), {statistics.median(without):.2f} s without")
    print(json.dumps({"killed_s": killed, "without_s": without}))
