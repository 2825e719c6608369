"""Measures a training step of the seed CNN with TensorFlow's ParameterServerStrategy, asynchronous.
adam: plain variables and the raw operator, where the variables live. keras-adam: Keras 3's layers and optimizer."""
import argparse

import numpy as np
from tensorflow_tasks import measure, strategy_of_chief, tf

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=["adam", "keras-adam"], default="adam")
options = parser.parse_args()
IMAGES = 64
strategy = strategy_of_chief()
keras = options.optimizer == "keras-adam"


def variables(rows, columns):
    return tf.Variable(tf.random.stateless_uniform((rows, columns), (1, 2), -rows ** -0.5, rows ** -0.5)), tf.Variable(tf.zeros(columns))


with strategy.scope():
    if keras:
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
                                     layers.Dense(64, activation="relu"), layers.Dense(10)])
        optimizer = tf.keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    else:
        tower = [(tf.Variable(tf.random.stateless_uniform((3, 3, 1, 32), (1, 2), -0.1, 0.1)), tf.Variable(tf.zeros(32))), variables(5408, 64),
                 variables(64, 10)]
        flat = [variable for pair in tower for variable in pair]
        first, second = ([tf.Variable(tf.zeros(v.shape)) for v in flat] for _ in range(2))
        powers = [tf.Variable(0.9), tf.Variable(0.999)]


def forward(images):
    hidden = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(images, tower[0][0], 1, "VALID") + tower[0][1]), 2, 2, "VALID")
    hidden = tf.nn.relu(tf.reshape(hidden, (IMAGES, 5408)) @ tower[1][0] + tower[1][1])
    return hidden @ tower[2][0] + tower[2][1]


def images():
    x, y = np.random.rand(IMAGES * 20, 28, 28, 1).astype("f"), np.random.randint(0, 10, IMAGES * 20)
    return tf.data.Dataset.from_tensor_slices((x, y)).cache().batch(IMAGES, drop_remainder=True).repeat().prefetch(2)


@tf.function
def step(iterator):
    def replica(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
        return value

    x, y = next(iterator)
    if keras:
        return strategy.run(replica, args=(x, y))
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, forward(x)))
    for variable, m, v, gradient in zip(flat, first, second, tape.gradient(value, flat)):
        tf.raw_ops.ResourceApplyAdam(var=variable.handle, m=m.handle, v=v.handle, beta1_power=powers[0], beta2_power=powers[1], lr=1e-3,
                                     beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient)
    return value


measure(strategy, step, images, 400, IMAGES)
