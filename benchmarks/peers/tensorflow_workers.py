"""Measures a training step of the seed CNN with TensorFlow's MultiWorkerMirroredStrategy; one process a worker, by TF_CONFIG."""
import json
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # TensorFlow turns oneDNN on by itself only where the CPU has AVX-512 or the like
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

IMAGES, STEPS = 64, 200  # of each worker
tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync


def images(_):
    x, y = np.random.rand(IMAGES * 20, 28, 28, 1).astype("f"), np.random.randint(0, 10, IMAGES * 20)
    return tf.data.Dataset.from_tensor_slices((x, y)).cache().batch(IMAGES, drop_remainder=True).repeat().prefetch(2)


with strategy.scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
                                 layers.Dense(64, activation="relu"), layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def step(iterator):
    def replica(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(y, model(x, training=True))) / (IMAGES * replicas)
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
        return value

    return strategy.reduce("SUM", strategy.run(replica, args=(next(iterator),)), axis=None)


batches = iter(strategy.distribute_datasets_from_function(images))
for _ in range(STEPS // 10):
    step(batches)
start = time.perf_counter()
for _ in range(STEPS):
    step(batches)
seconds = (time.perf_counter() - start) / STEPS
if strategy.cluster_resolver.task_id == 0:
    print(json.dumps({"ms_per_step": 1e3 * seconds, "samples_per_s": IMAGES * replicas / seconds}), flush=True)
