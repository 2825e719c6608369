"""Compares compiled steps on the PJRT plugin for CPUs with JAX's of the same network, and with other numbers of devices, in turns in one run.

    make bench-tpu        or: benchmarks/bench_tpu.py [--rounds 3] [--only TEXT]
"""
import glob

import rounds
from programs import ROOT, Program, run

TRAIN_STEP, JAX = str(ROOT / "build/release/benchmarks/train_step"), str(ROOT / ".peers/jax/bin/python")
PLUGIN = glob.glob(str(ROOT / ".deps/pjrt/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"))
ONE_CORE = ("taskset", "-c", "0")


def ours(devices, before=()):
    command = (*before, TRAIN_STEP, "--device", "tpu", "--steps", "100")
    return Program((command,), environment=(("PJRT_PLUGIN_LIBRARY_PATH", PLUGIN[0]), ("PJRT_PLUGIN_OPTIONS", f"cpu_device_count={devices}")))


def jax(*options, before=()):
    return Program(((*before, JAX, str(ROOT / "benchmarks/peers/jax_step.py"), *options),))


def samples(result):
    return result["samples_per_s"]


ONE = ours(1, before=ONE_CORE)
TWO = ours(2)
ROWS = [
    rounds.Row("seed CNN, one core", "JAX, pooling by reshape", ONE, jax("--pooling", "reshape", before=ONE_CORE), 1.0, samples, samples),
    rounds.Row("seed CNN, one core", "JAX, pooling by reduce_window (flax)", ONE, jax("--pooling", "reduce_window", before=ONE_CORE), 1.0, samples, samples),
    rounds.Row("seed CNN, two devices", "JAX, two devices", TWO, jax("--devices", "2"), 1.0, samples, samples),
    rounds.Row("seed CNN, two devices, samples/s", "one device on one core", TWO, ONE, 1.6, samples, samples),
]

if __name__ == "__main__":
    rounds.main(__doc__, ROWS, run)
