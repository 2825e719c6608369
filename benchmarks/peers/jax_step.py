"""Measures a step of the seed CNN with JAX, on CPU devices: convolution 32 3x3 relu, 2x2 max-pooling, dense 64 relu, dense 10; Adam.

    jax_step.py [--pooling reshape|reduce_window] [--batch 64] [--devices 1] [--steps 100]

reduce_window is what flax's max_pool calls; reshape is faster on CPUs. Several devices divide a batch of that many examples each.
"""
import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--pooling", choices=["reshape", "reduce_window"], default="reshape")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_num_cpu_devices", args.devices)
mesh = Mesh(np.array(jax.devices()), ("data",))
everywhere, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

rng = np.random.default_rng(0)


def weights(*sizes):
    return rng.uniform(-1, 1, sizes).astype("f") / np.sqrt(np.prod(sizes[:-1]), dtype="f")


parameters = {"conv": weights(3, 3, 1, 32), "conv_bias": np.zeros(32, "f"), "hidden": weights(5408, 64), "hidden_bias": np.zeros(64, "f"),
              "output": weights(64, 10), "output_bias": np.zeros(10, "f")}


def pooled(x):
    if args.pooling == "reshape":
        return x.reshape(x.shape[0], 13, 2, 13, 2, 32).max((2, 4))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loss_of(p, x, y):
    features = jax.lax.conv_general_dilated(x, p["conv"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p["conv_bias"]
    flat = pooled(jax.nn.relu(features)).reshape(x.shape[0], -1)
    logits = jax.nn.relu(flat @ p["hidden"] + p["hidden_bias"]) @ p["output"] + p["output_bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def train_step(p, m, v, step, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(p, x, y)
    step = step + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, v, gradients)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    p = jax.tree.map(lambda a, b, c: a - rate * b / (jnp.sqrt(c) + 1e-7), p, m, v)
    return p, m, v, step, loss


compiled = jax.jit(train_step, donate_argnums=(0, 1, 2))
state = jax.device_put((parameters, jax.tree.map(np.zeros_like, parameters), jax.tree.map(np.zeros_like, parameters), np.float32(0)), everywhere)
x = rng.random((args.batch * args.devices, 28, 28, 1), "f")
y = rng.integers(0, 10, args.batch * args.devices)


def run(steps):
    global state
    for _ in range(steps):
        *state, loss = compiled(*state, *jax.device_put((x, y), divided))
        float(loss)  # as train_on_batch reads it


run(max(1, args.steps // 5))
best = 1e9
for _ in range(3):
    start = time.perf_counter()
    run(args.steps)
    best = min(best, (time.perf_counter() - start) / args.steps)
print(json.dumps({"ms_per_step": best * 1e3, "samples_per_s": args.batch * args.devices / best}))
