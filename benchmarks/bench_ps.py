"""Compares training with our parameter servers and TensorFlow's, in turns in one run, and measures calls to a server. Prints a table of ratios and a closing
line of JSON.

    make bench-ps        or: benchmarks/bench_ps.py [--rounds 3] [--only TEXT]
"""
import json
import subprocess
import tempfile

import rounds
from programs import ROOT, Program, run

BUILD = ROOT / "build/release/benchmarks"
WORKERS = 2
ROWS = 1_000_000  # of the click model's table
SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)


def tensorflow(script, *options, port):
    return cluster((str(ROOT / ".peers/tensorflow/bin/python"), str(ROOT / "benchmarks/peers" / script), *options), port)


# A process so started shares no memory with the others, as if it were on another host. Needs root.
APART = ("unshare", "--pid", "--fork", "--mount-proc")


def cluster(command, port, worker_by=()):
    """The command once a process: a chief, the workers and a server on this host. The chief's JSON is the result."""
    places = [("chief", 0), *(("worker", i) for i in range(WORKERS)), ("ps", 0)]
    jobs = {}
    for number, (job, _) in enumerate(places):
        jobs.setdefault(job, []).append(f"127.0.0.1:{port + number}")
    return Program(tuple(("env", "TF_CONFIG=" + json.dumps({"cluster": jobs, "task": {"type": job, "index": index}}),
                          *(worker_by if job == "worker" else ()), *command)
                         for job, index in places))


def ours():
    return cluster((str(BUILD / "train_step"), "--parameter-servers"), 26511)


def clicks(rows, worker_by=(), batch=512):
    return cluster((str(BUILD / "click_step"), "--rows", str(rows), "--batch", str(batch)), 26531, worker_by)


def mirrored():
    return Program(((str(BUILD / "train_step"), "--replicas", str(WORKERS)),))


def calls(size, certificates):
    return Program(((str(BUILD / "server_calls"), "--bytes", str(size), "--certs", certificates),))


def samples(result):
    return result["samples_per_s"]


def steps_a_byte(result):
    return 1 / result["loopback_bytes_per_step"]


def bytes_a_step(result):
    return result["loopback_bytes_per_step"]


def carried(what):
    return lambda result: result[f"{what}_bytes_per_s"]


def rows(certificates):
    for optimizer in ("adam", "keras-adam"):
        yield rounds.Row("seed CNN, asynchronous, 2 workers, 1 server", f"TensorFlow, {optimizer}", ours(),
                         tensorflow("tensorflow_ps.py", "--optimizer", optimizer, port=26521), 3, samples, samples)
    yield rounds.Row("seed CNN, asynchronous, 2 workers, 1 server", "Mirrored, 2 replicas", ours(), mirrored(), 0, samples, samples)
    for optimizer, target in (("adagrad", 1.5), ("keras-adagrad", 10)):
        yield rounds.Row(f"click model, table of {ROWS:,} x 32, asynchronous", f"TensorFlow, {optimizer}", clicks(ROWS),
                         tensorflow("tensorflow_click.py", "--optimizer", optimizer, "--rows", str(ROWS), port=26541), target, samples, samples)
    for size in SIZES[1:]:  # the same number of rows is used, so nearly all of the speed and traffic should be left
        work = f"click model, table of {size:,} x 32"
        against = f"one of {SIZES[0]:,} x 32"
        yield rounds.Row(work, against, clicks(size), clicks(SIZES[0]), 0.8, samples, samples)
        yield rounds.Row(f"{work}, steps a byte, sent", against, clicks(size, APART), clicks(SIZES[0], APART), 0.8, steps_a_byte, steps_a_byte)
    yield rounds.Row("click model, 4 times the examples a step: bytes, sent", "one batch of 512", clicks(ROWS, APART, 2048), clicks(ROWS, APART), 0,
                     bytes_a_step, bytes_a_step)
    for mib in (64, 1.33):
        program = calls(int(mib * (1 << 20)), certificates)
        yield rounds.Row(f"push and pull of {mib} MiB, sent", "a raw socket", program, program, 0.5, carried("sent"), carried("raw"))
        yield rounds.Row(f"push and pull of {mib} MiB, sent with TLS", "a raw socket", program, program, 0, carried("tls"), carried("raw"))
        yield rounds.Row(f"push and pull of {mib} MiB, in shared memory", "a raw socket", program, program, 0.5, carried("shared"), carried("raw"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(ROOT / "build/release/lockstep"), "certs", folder], check=True)
        rounds.main(__doc__, list(rows(folder)), run)
