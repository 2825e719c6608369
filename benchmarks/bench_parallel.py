#!/usr/bin/env python3
"""Compares steps of a transformer that is split over two processes of one thread with PyTorch's over gloo, and with one process. Programs run in turns, so that
all see the same machine. `make bench-parallel` builds and installs what they need.

    python3 benchmarks/bench_parallel.py [--rounds 5] [--only "tensor"]
"""
import sys

import rounds
from programs import ROOT, Program, run

LOCKSTEP, STEP = (str(ROOT / "build/release" / name) for name in ("lockstep", "benchmarks/parallel_step"))
PEER = (str(ROOT / ".peers/pytorch/bin/python"), str(ROOT / "benchmarks/peers/pytorch_parallel.py"))
SMALL, WIDE = ("--layers", "4"), ("--layers", "2", "--width", "1024", "--steps", "5")
DEEP = ("--layers", "8", "--steps", "6")


def ours(*options):
    return Program(((LOCKSTEP, "run", "-n", "2", STEP, *options),))


def one(*options):
    """Returns one process whose linear layers use the same kernels."""
    return Program(((STEP, "--mode", "tensor", *options),))


def peer(*options):
    return Program(((*PEER, *options),))


def speed(result):
    return result["samples_per_s"]


def rows():
    def row(work, against, mine, theirs, target, of=speed):
        return rounds.Row(work, against, mine, theirs, target, of, of)

    yield row("tensor parallel", "PyTorch's", ours("--mode", "tensor", *SMALL), peer("--mode", "tensor", *SMALL), 1.5)
    yield row("tensor parallel, sequence divided", "PyTorch's tensor parallel", ours("--mode", "sequence", *SMALL), peer("--mode", "tensor", *SMALL), 1.5)
    yield row("tensor parallel, width 1024", "PyTorch's", ours("--mode", "tensor", *WIDE), peer("--mode", "tensor", *WIDE), 1.5)
    yield row("tensor parallel", "one process", ours("--mode", "tensor", *SMALL), one(*SMALL), 1.6)
    yield row("tensor parallel, sequence divided", "one process", ours("--mode", "sequence", *SMALL), one(*SMALL), 1.6)
    yield row("fully_shard", "PyTorch's FSDP2", ours("--mode", "shard", *SMALL), peer("--mode", "shard", *SMALL), 1.5)
    for batch in ("8", "32"):
        size = (*DEEP, "--batch", batch)
        for schedule, theirs in (("gpipe", "gpipe"), ("1f1b", "1f1b"), ("zero_bubble", "interleaved-zb"), ("zero_bubble_v", "zbv")):
            mine = ours("--mode", "pipeline", "--schedule", schedule, *size)
            yield row(f"pipeline, {schedule}, batch {batch}", f"PyTorch's {theirs}", mine,
                      peer("--mode", "pipeline", "--schedule", theirs, *size), 1.2)
            yield rounds.Row(f"pipeline, {schedule}, batch {batch}", "what its schedule allows", mine, mine, 0.95,
                             lambda result: result["of_schedule"], lambda result: 1)
        yield row(f"pipeline, zero_bubble_v, batch {batch}", "one process", ours("--mode", "pipeline", "--schedule", "zero_bubble_v", *size), one(*size), 1.2)
    for batch in ("8", "32"):
        few = ("--mode", "pipeline", *DEEP, "--batch", batch, "--microbatches", "4")
        yield row(f"pipeline, zero_bubble, 4 microbatches, batch {batch}", "1f1b", ours(*few, "--schedule", "zero_bubble"), ours(*few, "--schedule", "1f1b"), 1.05)


if __name__ == "__main__":
    rounds.main(sys.modules[__name__].__doc__, list(rows()), run)
