"""Measures a training step with TensorFlow, or its input pipeline alone. `make bench-step` runs it.

    tensorflow_step.py --strategy one|mirrored --loop step|fit|data --model seed_cnn|cifar_cnn --threads 1
"""
import argparse
import gzip
import json
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # TensorFlow turns oneDNN on by itself only where the CPU has AVX-512 or the like
parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["seed_cnn", "cifar_cnn"], default="seed_cnn")
parser.add_argument("--strategy", choices=["one", "mirrored"], default="one")
parser.add_argument("--loop", choices=["step", "fit", "data"], default="step")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

import numpy as np
import tensorflow as tf

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
tf.config.threading.set_intra_op_parallelism_threads(args.threads)
tf.config.threading.set_inter_op_parallelism_threads(2 if args.strategy == "mirrored" else 1)
if args.strategy == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    strategy = tf.distribute.get_strategy()
replicas = strategy.num_replicas_in_sync
batch = args.batch * replicas
layers = tf.keras.layers


def fashion_mnist(per_batch):
    with gzip.open(f"{FASHION_MNIST}/train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(f"{FASHION_MNIST}/train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.map(lambda x, y: (tf.cast(x, tf.float32) / 255, y)).cache()
    return data.shuffle(10_000).batch(per_batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def conv(filters):
    return layers.Conv2D(filters, 3, padding="same", activation="relu")


def make():
    if args.model == "cifar_cnn":
        return tf.keras.Sequential([
            layers.Input((32, 32, 3)), conv(32), conv(32), layers.MaxPooling2D(), conv(64), conv(64), layers.MaxPooling2D(),
            layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dense(10)])
    return tf.keras.Sequential([
        layers.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
        layers.Dense(64, activation="relu"), layers.Dense(10)])


with strategy.scope():
    model = make()
    optimizer = tf.keras.optimizers.Adam()
    model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer, metrics=["accuracy"])
    optimizer.build(model.trainable_variables)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

steps = args.steps
if args.loop == "fit":
    data = fashion_mnist(batch)
    steps = int(data.cardinality())

    def run():
        model.fit(data, epochs=1, verbose=0)
elif args.loop == "data":
    data = fashion_mnist(batch)
    steps = int(data.cardinality())

    def run():
        data.reduce(np.int64(0), lambda count, _: count + 1).numpy()
else:
    images, labels = tf.random.uniform((args.batch, *model.input_shape[1:])), tf.random.uniform((args.batch,), 0, 10, tf.int32)

    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(loss(labels, model(images, training=True))) / batch
            optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
        strategy.run(replica)

    def run():
        for _ in range(steps):
            step()

    step()
    model.trainable_variables[0].numpy()
    print(json.dumps({"event": "first step"}), flush=True)


def timed():
    start = time.perf_counter()
    run()
    if args.loop == "step":
        model.trainable_variables[0].numpy()  # waits for what was enqueued
    return time.perf_counter() - start


run()
best = min(timed() for _ in range(3))
print(json.dumps({"ms_per_step": 1e3 * best / steps, "samples_per_s": batch * steps / best}))
