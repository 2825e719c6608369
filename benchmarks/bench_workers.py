"""Training over workers, ours and the peers', in turns in one run: a table of ratios and a closing line of JSON.

    make bench-workers        or: benchmarks/bench_workers.py [--rounds 3] [--only TEXT]

The rows of hosts need root: hosts are network namespaces.
"""
import dataclasses
import json
import subprocess
import time

import rounds
from programs import ROOT, Hosts, Program, run

LOCKSTEP, TRAIN_STEP = (str(ROOT / "build/release" / name) for name in ("lockstep", "benchmarks/train_step"))
PEERS = ROOT / "benchmarks/peers"
TENSORFLOW, PYTORCH = (str(ROOT / f".peers/{name}/bin/python") for name in ("tensorflow", "pytorch"))
TRANSFORMER = ("--model", "transformer", "--batch", "16", "--steps", "20")
SLOW = {"rate": "100mbit"}
TRUST = (("LOCKSTEP_TRUSTED_NETWORK", "1"),)
SOON_S = 2


@dataclasses.dataclass(frozen=True)
class Start:
    """Measures how long a command takes to the first step of a training."""
    command: tuple

    def seconds(self):
        start = time.perf_counter()
        with subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True) as process:
            next(line for line in process.stdout if "first step" in line)
            seconds = time.perf_counter() - start
            process.terminate()
            process.stdout.read()
        return {"seconds": seconds}


def with_tf_config(command, hosts):
    """The command once a host, each as a worker."""
    workers = [f"{host}:{26451 + i}" for i, host in enumerate(hosts)]
    config = [json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}) for i in range(len(hosts))]
    return tuple(("env", f"TF_CONFIG={one}", *command) for one in config)


HERE = ("127.0.0.1", "127.0.0.1")
THERE = (Hosts.address(0), Hosts.address(1))


def workers(*options):
    return Program(with_tf_config((TRAIN_STEP, "--multi-worker", "--replicas", "1", *options), HERE))


def mirrored(*options):
    return Program(((TRAIN_STEP, "--replicas", "2", *options),))


def workers_on_hosts(*options, rate="1gbit"):
    return Program(with_tf_config((TRAIN_STEP, "--multi-worker", "--replicas", "1", *options), THERE), (0, 1), TRUST, rate)


def pytorch_on_hosts(*options):
    def rank(number):
        return ("env", f"RANK={number}", "WORLD_SIZE=2", f"MASTER_ADDR={THERE[0]}", "MASTER_PORT=29513", "GLOO_SOCKET_IFNAME=eth0", PYTORCH,
                str(PEERS / "pytorch_step.py"), "--ddp", *options)

    return Program((rank(0), rank(1)), (0, 1))


def samples(result):
    return result["samples_per_s"]


def rows():
    tensorflow = Program(with_tf_config((TENSORFLOW, str(PEERS / "tensorflow_workers.py")), HERE))
    start = Start((LOCKSTEP, "run", "-n", "2", TRAIN_STEP, "--multi-worker", "--replicas", "1"))
    yield rounds.Row("seed CNN, 2 workers of 1 replica", "Mirrored, 2 replicas", workers(), mirrored(), 0.95, samples, samples)
    yield rounds.Row("the same, optimizer state sharded", "Mirrored, 2 replicas", workers("--shard-optimizer-state"), mirrored(), 0.97, samples,
                     samples)
    yield rounds.Row("fit, seed CNN, 2 workers, elastic", "not elastic", workers("--fit", "--elastic"), workers("--fit"), 0.98, samples, samples)
    yield rounds.Row("fit, seed CNN, 2 workers, state sharded, elastic", "not elastic", workers("--fit", "--shard-optimizer-state", "--elastic"),
                     workers("--fit", "--shard-optimizer-state"), 0.85, samples, samples)
    yield rounds.Row("seed CNN, 2 workers of 1 replica", "TensorFlow, MultiWorkerMirroredStrategy", workers(), tensorflow, 3.5, samples, samples)
    yield rounds.Row("from lockstep run to the first step, sooner by", f"{SOON_S} s", start, start, 1, lambda result: SOON_S / result["seconds"],
                     lambda _: 1)
    yield rounds.Row("seed CNN, two hosts, 1 Gbit/s", "PyTorch DDP over gloo", workers_on_hosts(), pytorch_on_hosts(), 1.7, samples, samples)
    yield rounds.Row("the same, bfloat16 on the wire", "PyTorch DDP over gloo", workers_on_hosts("--gradient-dtype", "bfloat16"), pytorch_on_hosts(),
                     3, samples, samples)
    eight, sixteen = ("--gradient-dtype", "int8"), ("--gradient-dtype", "bfloat16")
    for name, model in (("seed CNN", ("--steps", "20")), ("small GPT", TRANSFORMER)):
        slow = workers_on_hosts(*model, **SLOW)
        yield rounds.Row(f"{name}, two hosts, 100 Mbit/s, 8 bits", "float32", workers_on_hosts(*model, *eight, **SLOW), slow, 3, samples, samples)
        yield rounds.Row(f"{name}, two hosts, 100 Mbit/s, 8 bits", "bfloat16", workers_on_hosts(*model, *eight, **SLOW),
                         workers_on_hosts(*model, *sixteen, **SLOW), 1.6, samples, samples)
        meeting = tuple("100" if word == "20" else word for word in model) + ("--diloco", "50")
        diloco = f"{name}, two hosts, 100 Mbit/s, DiLoCo of 50 steps"
        yield rounds.Row(diloco, "float32 in each step", workers_on_hosts(*meeting, **SLOW), slow, 20, samples, samples)
        yield rounds.Row(diloco, "in each step, without the limit", workers_on_hosts(*meeting, **SLOW), workers_on_hosts(*model, rate=None), 0.95,
                         samples, samples)
        yield rounds.Row(f"{name}, two hosts, 1 Gbit/s, 8 bits", "float32", workers_on_hosts(*model, *eight), workers_on_hosts(*model), 1, samples,
                         samples)
    yield rounds.Row("transformer, two hosts, 1 Gbit/s", "without the limit", workers_on_hosts(*TRANSFORMER),
                     workers_on_hosts(*TRANSFORMER, rate=None), 0.85, samples, samples)


if __name__ == "__main__":
    rounds.main(__doc__, rows(), lambda program: program.seconds() if isinstance(program, Start) else run(program))
