"""Training steps, ours and the peers', in turns in one run: a table of ratios, a closing line of JSON, and a plot.

    make bench-peers bench-step        or: benchmarks/bench_step.py [--rounds 3] [--only TEXT] [--plot docs/step.svg]
    benchmarks/bench_step.py --gpu     on one GPU, with the build of the preset cuda

Every round runs each program once, one after the other, so that all see the same machine. A ratio is the median of the
rounds' ratios. A program is measured once a round for all the rows that need it.
"""
import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import plot
import rounds

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSORFLOW, PYTORCH = ROOT / ".peers/tensorflow/bin", ROOT / ".peers/pytorch/bin"
SEED_CNN_MFLOP = 185  # of a step: forward, input and weight gradients of 64 images


@dataclasses.dataclass(frozen=True)
class Program:
    command: tuple
    copies: int = 1  # processes at the same time


def ours(*arguments, copies=1):
    return Program((str(ROOT / "build/release/benchmarks/train_step"), *arguments), copies)


def tensorflow(*arguments):
    return Program((str(TENSORFLOW / "python"), str(ROOT / "benchmarks/peers/tensorflow_step.py"), *arguments))


def pytorch(*arguments):
    return Program((str(PYTORCH / "python"), str(ROOT / "benchmarks/peers/pytorch_step.py"), *arguments))


def ddp(*arguments):
    return Program((str(PYTORCH / "torchrun"), "--nproc-per-node", "2", str(ROOT / "benchmarks/peers/pytorch_step.py"), "--ddp", *arguments))


# A row compares one of these figures of a program's closing line; each is better when larger.
def samples(result):
    return result["samples_per_s"]


def first_step(result):
    return 1 / result["first_step_s"]


def memory(result):
    return 1 / result["memory_mib"]


def floor(result):
    return result["gflops"] * 1e3 / SEED_CNN_MFLOP * 64  # samples a second at the FMA peak


def row(work, against, ours, peer, target, of_ours=samples, of_peer=samples):
    return rounds.Row(work, against, ours, peer, target, of_ours, of_peer)


ONE, TWO = ours("--replicas", "1"), ours("--replicas", "2")
FLOOR = Program((str(ROOT / "build/release/benchmarks/fma_peak"),))


def rows():
    seed = "seed CNN, 1 replica, 1 thread, bare steps"
    yield row(seed, "TensorFlow, 1 thread", ONE, tensorflow(), 2.8)
    yield row(seed, "PyTorch, 1 thread, fused Adam", ONE, pytorch(), 8)
    yield row(seed, "PyTorch, 1 thread, fused Adam, channels last", ONE, pytorch("--channels-last"), 8)
    yield row(seed, "the FMA peak", ONE, FLOOR, 0.75, of_peer=floor)
    seed = "seed CNN, 2 replicas, bare steps"
    yield row(seed, "PyTorch DDP, 2 processes", TWO, ddp(), 10)
    yield row(seed, "TensorFlow MirroredStrategy, 2 logical CPUs", TWO, tensorflow("--strategy", "mirrored"), 4)
    yield row(seed, "TensorFlow, 2 threads", TWO, tensorflow("--threads", "2"), 4)
    yield row("seed CNN, 2 replicas, fit", "TensorFlow MirroredStrategy's fit", ours("--replicas", "2", "--fit"),
              tensorflow("--strategy", "mirrored", "--loop", "fit"), 5)
    for model, steps, batch in (("seed_cnn", 200, 64), ("mlp", 200, 64), ("cifar_cnn", 8, 64), ("transformer", 8, 16)):
        options = ("--model", model, "--steps", str(steps), "--batch", str(batch))
        yield row(f"{model}, 2 replicas", "two separate processes of 1 replica", ours("--replicas", "2", *options),
                  ours(*options, copies=2), 0.95)
    yield row("seed CNN as a torch module that calls our operators", "TensorFlow, 1 thread", ours("--kind", "own"), tensorflow(), 2.4)
    yield row("seed CNN as a plain torch module", "PyTorch, 1 thread", ours("--kind", "plain"), pytorch(), 2.2)
    cifar = ("--model", "cifar_cnn", "--steps", "8")
    yield row("CIFAR CNN, 1 thread", "TensorFlow", ours(*cifar), tensorflow(*cifar), 1.0)
    yield row("CIFAR CNN, 1 thread", "PyTorch, channels last", ours(*cifar), pytorch(*cifar, "--channels-last"), 1.15)
    yield row("MLP, 1 thread", "PyTorch", ours("--model", "mlp"), pytorch("--model", "mlp"), 1.25)
    transformer = ("--model", "transformer", "--steps", "8", "--batch", "16")
    yield row("transformer, 1 thread", "PyTorch", ours(*transformer), pytorch(*transformer), 1.05)
    yield row("fit on Fashion-MNIST, 1 replica", "bare steps", ours("--fit"), ONE, 0.92)
    yield row("fit on Fashion-MNIST, 2 replicas", "bare steps", ours("--replicas", "2", "--fit"), TWO, 0.92)
    yield row("Dataset: map, cache, shuffle, batch", "tf.data", Program((str(ROOT / "build/release/benchmarks/dataset"),)),
              tensorflow("--loop", "data"), 3)
    yield row("from exec to the first step, sooner by", "TensorFlow", ONE, tensorflow(), 5, first_step, first_step)
    yield row("memory of 2 replicas, smaller by", "PyTorch DDP, 2 processes", TWO, ddp(), 2, memory, memory)


def gpu_rows():
    program = str(ROOT / "build/cuda/benchmarks/train_step")
    for model, steps, batch in (("seed_cnn", 500, 64), ("mlp", 500, 64), ("cifar_cnn", 200, 64), ("transformer", 200, 16)):
        options = ("--model", model, "--steps", str(steps), "--batch", str(batch), "--device", "cuda")
        eager, recorded = Program((program, *options)), Program((program, *options, "--jit-compile"))
        yield row(f"{model}, 1 GPU", "PyTorch, eager", eager, pytorch(*options), 1)
        # Ours reads the loss of each step, since train_on_batch returns it.
        yield row(f"{model}, 1 GPU, jit_compile", "PyTorch, CUDA graph, reads the loss", recorded, pytorch(*options, "--graph", "--read-loss"), 1)
        yield row(f"{model}, 1 GPU, jit_compile", "PyTorch, CUDA graph", recorded, pytorch(*options, "--graph"), 1)


def start(command):
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    process.errors = errors
    return process


def results_of(program, process, began):
    result = {}
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        if "first step" in line:
            result["first_step_s"] = time.perf_counter() - began
        else:
            result.update(json.loads(line))
    if process.wait() != 0:
        process.errors.seek(0)
        raise RuntimeError(f"this failed: {' '.join(program.command)}\n{process.errors.read()[-4000:]}")
    return result


def run(program):
    try:
        return run_once(program)
    except RuntimeError as error:  # some peers crash now and then; a second time says more
        print(f"\nbench_step: once more: {error}", file=sys.stderr)
        return run_once(program)


def run_once(program):
    began = time.perf_counter()
    processes = [start(program.command) for _ in range(program.copies)]
    results = [results_of(program, process, began) for process in processes]
    return {**results[0], "samples_per_s": sum(result.get("samples_per_s", 0) for result in results)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose text has this")
    parser.add_argument("--plot", type=pathlib.Path, help="where the plot of samples a second goes")
    parser.add_argument("--gpu", action="store_true", help="rows of one GPU instead")
    args = parser.parse_args()
    if args.plot and (args.only or args.gpu):
        parser.error("--plot needs all rows on CPUs")
    chosen = [row for row in (gpu_rows() if args.gpu else rows()) if args.only in f"{row.work} / {row.against}"]
    programs = list(dict.fromkeys(program for row in chosen for program in (row.ours, row.peer)))
    results = rounds.measure(programs, args.rounds, run)
    if args.plot:
        def median(program):
            return statistics.median(samples(r[program]) for r in results)

        bars = [("Lockstep, 2 replicas", median(TWO)), ("Lockstep, 1 replica", median(ONE)),
                ("TensorFlow MirroredStrategy, 2 CPUs", median(tensorflow("--strategy", "mirrored"))),
                ("TensorFlow, 1 thread", median(tensorflow())), ("PyTorch DDP, 2 processes", median(ddp())),
                ("PyTorch, 1 thread", median(pytorch()))]
        args.plot.write_text(plot.bars("Seed CNN, batches of 64 images a replica: samples a second on two cores", bars))
    rounds.report(chosen, results)


if __name__ == "__main__":
    main()
