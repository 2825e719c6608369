"""Training with parameter servers, ours and TensorFlow's, in turns in one run, and what calls to a server carry: a table of ratios and a
closing line of JSON.

    make bench-ps        or: benchmarks/bench_ps.py [--rounds 3] [--only TEXT]
"""
import json

import rounds
from programs import ROOT, Program, run

BUILD = ROOT / "build/release/benchmarks"
TENSORFLOW = (str(ROOT / ".peers/tensorflow/bin/python"), str(ROOT / "benchmarks/peers/tensorflow_ps.py"))
WORKERS = 2


def cluster(command, port):
    """The command once a process: a chief, the workers and a server on this host. The chief's JSON is the result."""
    places = [("chief", 0), *(("worker", i) for i in range(WORKERS)), ("ps", 0)]
    jobs = {}
    for number, (job, _) in enumerate(places):
        jobs.setdefault(job, []).append(f"127.0.0.1:{port + number}")
    return Program(tuple(("env", "TF_CONFIG=" + json.dumps({"cluster": jobs, "task": {"type": job, "index": index}}), *command)
                         for job, index in places))


def ours(*options):
    return cluster((str(BUILD / "train_step"), "--parameter-servers", *options), 26511)


def calls(size):
    return Program(((str(BUILD / "server_calls"), "--bytes", str(size)),))


def samples(result):
    return result["samples_per_s"]


def carried(what):
    return lambda result: result[f"{what}_bytes_per_s"]


def rows():
    for optimizer in ("adam", "keras-adam"):
        yield rounds.Row("seed CNN, asynchronous, 2 workers, 1 server", f"TensorFlow, {optimizer}", ours(),
                         cluster((*TENSORFLOW, "--optimizer", optimizer), 26521), 3, samples, samples)
    for mib in (64, 1.33):
        program = calls(int(mib * (1 << 20)))
        yield rounds.Row(f"push and pull of {mib} MiB, sent", "a raw socket", program, program, 0.5, carried("sent"), carried("raw"))
        yield rounds.Row(f"push and pull of {mib} MiB, in shared memory", "a raw socket", program, program, 0.5, carried("shared"), carried("raw"))


if __name__ == "__main__":
    rounds.main(__doc__, list(rows()), run)
