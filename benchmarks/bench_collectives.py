"""Reductions between processes, ours and the peers', in turns in one run: a table of ratios and a closing line of JSON.

    make bench-collectives        or: benchmarks/bench_collectives.py [--rounds 3] [--only TEXT]

The rows of links need root: hosts are network namespaces.
"""
import socket
import sys

import rounds
from programs import ROOT, Hosts, Program, run

LOCKSTEP, DDP_STEP = (str(ROOT / "build/release" / name) for name in ("lockstep", "benchmarks/ddp_step"))
PYTORCH = ROOT / ".peers/pytorch/bin"
CNN, MIB16, MIB64 = 1388584, 16 << 20, 64 << 20  # the seed CNN's gradients, and more
NAMES = {4: "4 B", 4096: "4 KiB", 65536: "64 KiB", CNN: "1.39 MB", MIB16: "16 MiB", MIB64: "64 MiB"}


def ours(backend, *options, ranks=2):
    return Program(((LOCKSTEP, "bench", "collectives", "--backend", backend, "--ranks", str(ranks), *options),))


def mpi(*options, ranks=2):
    return Program((("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *options, str(ROOT / ".peers/mpi/all_reduce")),))


def ours_by_mpi(*options, ranks=2):
    return Program((("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), LOCKSTEP, "bench", "collectives", "--backend", "mpi", *options),))


def torchrun(script, *options):
    return Program(((str(PYTORCH / "torchrun"), "--nproc-per-node", "2", str(ROOT / "benchmarks/peers" / script), *options),))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def on_hosts(program, hosts, per_host, *options, store="--store", hold=()):
    """Ranks of a program of ours, `per_host` on each of the hosts."""
    ranks = len(hosts) * per_host
    commands = []
    for rank in range(ranks):
        host = rank // per_host
        commands.append((*program, "--rank", str(rank), store, f"{Hosts.address(0)}:29511", "--host", f"host{host}",
                         "--address", Hosts.address(host), *options, *(hold if rank == 0 else ())))
    return Program(tuple(commands), tuple(rank // per_host for rank in range(ranks)), (("LOCKSTEP_TRUSTED_NETWORK", "1"),))


def link_bench(backend, hosts, per_host, *options):
    return on_hosts((LOCKSTEP, "bench", "collectives", "--backend", backend, "--ranks", str(hosts * per_host)), range(hosts),
                    per_host, *options, hold=("--hold-store",))


def link_ddp(*options):
    return on_hosts((DDP_STEP, "--size", "2", "--model", "transformer", "--batch", "16", "--steps", "20"), range(2), 1, *options)


def ddp(*options, kernels="lockstep"):
    port = free_port()
    commands = tuple((DDP_STEP, "--rank", str(rank), "--size", "2", "--store", f"127.0.0.1:{port}", *options) for rank in range(2))
    return Program(commands, environment=(("LOCKSTEP_KERNELS", kernels),))


def raw_stream(*sizes):
    return Program(tuple(("python3", str(ROOT / "benchmarks/peers/raw_stream.py"), role, Hosts.address(0), "29512", *map(str, sizes))
                         for role in ("listen", "connect")), (0, 1))


def at(size):
    return lambda result: 1 / result["us"][str(size)]


def row(work, against, mine, peer, size, target):
    return rounds.Row(f"{work}, {NAMES[size]}", against, mine, peer, target, at(size), at(size))


def samples(result):
    return result["samples_per_s"]


def rows():
    shm, shm_any, threads, tcp = ours("shm"), ours("shm", "--any-buffer"), ours("threads"), ours("tcp")
    memory, over_tcp, gloo = mpi(), mpi("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"), torchrun("gloo_all_reduce.py")
    for size, against_mpi, against_gloo in ((CNN, 3, 20), (MIB64, 4, 6)):
        yield row("shm, buffers from allocate", "Open MPI, shared memory", shm, memory, size, against_mpi)
        yield row("shm, buffers from allocate", "gloo", shm, gloo, size, against_gloo)
        yield row("shm, any buffer", "Open MPI, shared memory", shm_any, memory, size, 1.5)
    for size in (4, 4096):
        yield row("shm, blocking call", "Open MPI, shared memory", shm_any, memory, size, 0.7)
    yield row("threads", "Open MPI, shared memory", threads, memory, CNN, 4)
    for size, target in ((CNN, 4), (MIB64, 1.5)):
        yield row("tcp, 2 processes", "gloo", tcp, gloo, size, target)
    for size, target in ((4, 0.5), (4096, 0.5), (CNN, 1), (MIB16, 1), (MIB64, 1)):
        yield row("tcp, 2 processes", "Open MPI over TCP", tcp, over_tcp, size, target)
    for size, target in ((4, 0.25), (4096, 0.35), (65536, 0.95), (CNN, 0.95), (MIB16, 0.95), (MIB64, 0.95)):
        yield row("mpi, 2 processes", "Open MPI, its own all-reduce", ours_by_mpi(), memory, size, target)
        any_target = 0.65 if size in (65536, CNN) else target  # with copies
        yield row("mpi, any buffer", "Open MPI, its own all-reduce", ours_by_mpi("--any-buffer"), memory, size, any_target)
    shm4, memory4 = ours("shm", ranks=4), mpi(ranks=4)
    for size in NAMES:
        yield row("shm, 4 ranks on 2 cores", "Open MPI, 4 ranks", shm4, memory4, size, 1)

    large = ("--sizes", f"{MIB16},{MIB64}", "--seconds", "1")
    for size in (MIB16, MIB64):
        yield row("two hosts, 1 Gbit/s", "a raw stream both ways", link_bench("tcp", 2, 1, *large), raw_stream(MIB16, MIB64), size, 0.97)
    both = ("--sizes", f"65536,{MIB16}", "--seconds", "1")
    for size, target in ((65536, 1.8), (MIB16, 1.1)):
        yield row("four hosts of 2 ranks, 1 Gbit/s, hierarchical", "a ring over all eight", link_bench("hierarchical", 4, 2, *both),
                  link_bench("tcp", 4, 2, "--implementation", "ring", *both), size, target)
    yield rounds.Row("transformer, two hosts, 1 Gbit/s", "no overlap, no compression", link_ddp("--gradient-dtype", "bfloat16", "--bucket-cap-mb", "0.25"),
              link_ddp("--at-the-end"), 1.4, samples, samples)

    transformer = ("--model", "transformer", "--batch", "16", "--steps", "8")
    for kernels, work, cnn_target, transformer_target in (("lockstep", "DDP", 5, 1.05), ("libtorch", "DDP, Lockstep's kernels off", 1.3, 1)):
        yield rounds.Row(f"{work}, seed CNN", "PyTorch DDP over gloo", ddp(kernels=kernels), torchrun("pytorch_step.py", "--ddp"), cnn_target,
                  samples, samples)
        yield rounds.Row(f"{work}, transformer", "PyTorch DDP over gloo", ddp(*transformer, kernels=kernels),
                  torchrun("pytorch_step.py", "--ddp", *transformer), transformer_target, samples, samples)


if __name__ == "__main__":
    rounds.main(__doc__, rows(), run)
