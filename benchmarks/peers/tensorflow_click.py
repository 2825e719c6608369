"""Measures a step of the click model with TensorFlow's ParameterServerStrategy, asynchronous.
adagrad: plain variables and raw operators, which gather and update the rows of a batch where the table lives. keras-adagrad: Keras 3's
layers and optimizer."""
import argparse

import numpy as np
from tensorflow_tasks import measure, strategy_of_chief, tf

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=["adagrad", "keras-adagrad"], default="adagrad")
parser.add_argument("--rows", type=int, default=1_000_000)
options = parser.parse_args()
BATCH, FIELDS, WIDTH, RATE = 512, 26, 32, 0.01
keras = options.optimizer == "keras-adagrad"
strategy = strategy_of_chief()


def variables(rows, columns):
    return tf.Variable(tf.random.stateless_uniform((rows, columns), (1, 2), -rows ** -0.5, rows ** -0.5)), tf.Variable(tf.zeros(columns))


with strategy.scope():
    if keras:
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((FIELDS,), dtype="int64"), layers.Embedding(options.rows, WIDTH), layers.Flatten(),
                                     layers.Dense(64, activation="relu"), layers.Dense(32, activation="relu"), layers.Dense(1)])
        optimizer = tf.keras.optimizers.Adagrad(RATE)
        optimizer.build(model.trainable_variables)
    else:
        tower = [variables(FIELDS * WIDTH, 64), variables(64, 32), variables(32, 1)]
        flat = [variable for pair in tower for variable in pair]
        squares = [tf.Variable(tf.fill(variable.shape, 0.1)) for variable in flat]
        table = tf.Variable(tf.random.stateless_uniform((options.rows, WIDTH), (3, 4), -0.05, 0.05))
        table_squares = tf.Variable(tf.fill((options.rows, WIDTH), 0.1))


def loss_of(y, scores):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, scores))


def forward(rows):
    hidden = tf.reshape(rows, (BATCH, FIELDS * WIDTH))
    hidden = tf.nn.relu(hidden @ tower[0][0] + tower[0][1])
    hidden = tf.nn.relu(hidden @ tower[1][0] + tower[1][1])
    return hidden @ tower[2][0] + tower[2][1]


def clicks():
    random = np.random.default_rng(0)
    x = random.integers(0, options.rows, (BATCH * 20, FIELDS))
    y = random.integers(0, 2, (BATCH * 20, 1)).astype("f")
    return tf.data.Dataset.from_tensor_slices((x, y)).cache().batch(BATCH, drop_remainder=True).repeat().prefetch(2)


@tf.function
def step(iterator):
    def replica(x, y):
        with tf.GradientTape() as tape:
            value = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
        return value

    x, y = next(iterator)
    if keras:
        return strategy.run(replica, args=(x, y))
    ids = tf.reshape(x, [-1])
    rows = tf.gather(table, ids)  # runs on the server: only these rows travel
    with tf.GradientTape() as tape:
        tape.watch(rows)
        value = loss_of(y, forward(rows))
    *gradients, of_rows = tape.gradient(value, [*flat, rows])
    for variable, square, gradient in zip(flat, squares, gradients):
        tf.raw_ops.ResourceApplyAdagradV2(var=variable.handle, accum=square.handle, lr=RATE, epsilon=1e-7, grad=gradient)
    tf.raw_ops.ResourceSparseApplyAdagradV2(var=table.handle, accum=table_squares.handle, lr=RATE, epsilon=1e-7, grad=of_rows, indices=ids)
    return value


measure(strategy, step, clicks, 25 if keras else 200, BATCH)
