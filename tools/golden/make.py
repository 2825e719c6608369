"""Writes tests/golden/*.json: what Keras 3 computes for every layer, loss, metric, optimizer and schedule of Lockstep.

    python3 -m venv venv && venv/bin/pip install -r tools/golden/requirements.txt && venv/bin/python tools/golden/make.py

Everything is computed in float64 and stored with 10 digits. Images are [batch, channels, height, width] and weights [outputs, inputs, ...] in the files, as in
LibTorch; Keras gets and gives them in its own order.
"""
import json
import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

keras.config.set_floatx("float64")
FOLDER = pathlib.Path(__file__).parents[2] / "tests" / "golden"
random = np.random.default_rng(20)


def packed(array):
    array = np.asarray(array)
    values = array.reshape(-1).tolist()
    if array.dtype.kind == "f":
        values = [float(f"{value:.10g}") for value in values]
    return {"shape": list(array.shape), "data": values, "integer": array.dtype.kind in "iub"}


def to_keras(image):
    return np.transpose(image, (0, 2, 3, 1))


def to_torch(image):
    image = np.asarray(image)
    return np.transpose(image, (0, 3, 1, 2)) if image.ndim == 4 else image


def torch_weight(name, value):
    """A Keras weight under LibTorch's name and order."""
    value = np.asarray(value)
    if name == "kernel":
        return "weight", np.transpose(value, (3, 2, 0, 1)) if value.ndim == 4 else value.T
    return {"embeddings": "weight", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean",
            "moving_variance": "running_var"}.get(name, name), value


def layer_row(kind, options, layer, x, image=False, training=False):
    inside = to_keras(x) if image else x
    layer.build(inside.shape)
    for weight in layer.weights:
        value = random.normal(size=weight.shape) * 0.5
        weight.assign(np.abs(value) + 0.5 if weight.name == "moving_variance" else value)
    before = dict(torch_weight(w.name, w.numpy()) for w in layer.weights)
    floating = x.dtype.kind == "f"
    with tf.GradientTape() as tape:
        inputs = tf.constant(inside)
        if floating:
            tape.watch(inputs)
        output = layer(inputs, training=training) if kind in ("BatchNormalization", "Dropout") else layer(inputs)
        cotangent = random.normal(size=output.shape)
        total = tf.reduce_sum(output * cotangent)
    sources = [w.value for w in layer.trainable_weights]
    gradients = tape.gradient(total, ([inputs] if floating else []) + sources)
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    row = {"kind": kind, "options": options, "training": training, "input": packed(x),
           "weights": {name: packed(value) for name, value in before.items()},
           "output": packed(to_torch(output) if image else output),
           "cotangent": packed(to_torch(cotangent) if image else cotangent)}
    if floating:
        row["input_gradient"] = packed(to_torch(gradients[0]) if image else gradients[0])
    row["weight_gradients"] = {}
    for weight, gradient in zip(layer.trainable_weights, gradients[floating:]):
        name, value = torch_weight(weight.name, gradient)
        row["weight_gradients"][name] = packed(value)
    if training:
        row["weights_after"] = {name: packed(value) for name, value in (torch_weight(w.name, w.numpy()) for w in layer.weights)}
    return row


def layers():
    L = keras.layers
    image = random.normal(size=(4, 2, 5, 6))
    rows = []
    for options in ({"filters": 3, "kernel_size": [3, 3]},
                    {"filters": 4, "kernel_size": [3, 2], "strides": [2, 2], "padding": "same", "activation": "relu"},
                    {"filters": 2, "kernel_size": [4, 4], "padding": "same"},
                    {"filters": 2, "kernel_size": [2, 2], "dilation_rate": [2, 2], "use_bias": False},
                    {"filters": 4, "kernel_size": [3, 3], "groups": 2, "padding": "same", "activation": "tanh"}):
        rows.append(layer_row("Conv2D", options, L.Conv2D(**options), image, image=True))
    for kind in ("MaxPooling2D", "AveragePooling2D"):
        for options in ({"pool_size": [2, 2]}, {"pool_size": [3, 3], "strides": [2, 2], "padding": "same"},
                        {"pool_size": [2, 2], "padding": "same"}, {"pool_size": [2, 3], "strides": [1, 2]}):
            rows.append(layer_row(kind, options, getattr(L, kind)(**options), image, image=True))
    rows.append(layer_row("GlobalAveragePooling2D", {}, L.GlobalAveragePooling2D(), image, image=True))
    rows.append(layer_row("Flatten", {}, L.Flatten(), image))
    rows.append(layer_row("Flatten", {}, L.Flatten(), random.normal(size=(5, 3))))
    for options in ({"units": 3}, {"units": 4, "activation": "relu"}, {"units": 2, "use_bias": False, "activation": "sigmoid"}):
        rows.append(layer_row("Dense", options, L.Dense(**options), random.normal(size=(5, 6))))
    rows.append(layer_row("Dense", {"units": 3}, L.Dense(3), random.normal(size=(5, 2, 4))))
    for name in ("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "sigmoid", "hard_sigmoid", "tanh", "softmax",
                 "log_softmax", "softplus", "softsign", "silu", "swish", "mish", "exponential"):
        function = (lambda x: keras.activations.gelu(x, approximate=False)) if name == "gelu" else name
        rows.append(layer_row("Activation", {"activation": name}, L.Activation(function), random.normal(size=(5, 7)) * 3))
    rows.append(layer_row("Dropout", {"rate": 0.4}, L.Dropout(0.4), random.normal(size=(5, 4))))
    for options in ({}, {"momentum": 0.7, "epsilon": 0.01}, {"center": False}, {"scale": False}):
        for x in (image, random.normal(size=(6, 3)) + 1):
            for training in (False, True):
                rows.append(layer_row("BatchNormalization", options, L.BatchNormalization(axis=1, **options), x, training=training))
    for options in ({}, {"epsilon": 0.1, "center": False}, {"scale": False}):
        rows.append(layer_row("LayerNormalization", options, L.LayerNormalization(**options), random.normal(size=(5, 3, 6))))
    rows.append(layer_row("Embedding", {"input_dim": 9, "output_dim": 4}, L.Embedding(9, 4), random.integers(0, 9, size=(5, 3))))
    return rows


def stacks():
    """Layers that Lockstep computes in one pass, with sizes that its kernels take."""
    L = keras.layers
    own_random = np.random.default_rng(21)
    relu = {"activation": "relu"}
    cases = [([("Conv2D", {"filters": 9, "kernel_size": [3, 3], **relu}), ("MaxPooling2D", {"pool_size": [2, 2]})], (5, 1, 9, 10)),
             ([("Conv2D", {"filters": 20, "kernel_size": [2, 4], "padding": "same", **relu}), ("MaxPooling2D", {"pool_size": [2, 2]})], (5, 3, 8, 7)),
             ([("Dense", {"units": 16, **relu}), ("Dense", {"units": 9})], (7, 12))]
    rows = []
    for layers_, shape in cases:
        image = len(shape) == 4
        model = keras.Sequential([getattr(L, kind)(**options) for kind, options in layers_])
        x = own_random.normal(size=shape)
        inside = to_keras(x) if image else x
        model.build(inside.shape)
        for weight in model.weights:
            weight.assign(own_random.normal(size=weight.shape) * 0.5)
        before = [w.numpy() for w in model.weights]
        with tf.GradientTape() as tape:
            output = model(tf.constant(inside))
            cotangent = own_random.normal(size=output.shape)
            total = tf.reduce_sum(output * cotangent)
        gradients = tape.gradient(total, [w.value for w in model.trainable_weights])
        in_order = [packed(torch_weight(w.name, value)[1]) for w, value in zip(model.weights, before)]
        rows.append({"layers": [{"kind": kind, "options": options} for kind, options in layers_], "input": packed(x),
                     "weights": in_order, "output": packed(to_torch(output) if image else output),
                     "cotangent": packed(to_torch(cotangent) if image else cotangent),
                     "weight_gradients": [packed(torch_weight(w.name, g)[1]) for w, g in zip(model.weights, gradients)]})
    return rows


def losses():
    K = keras.losses
    rows = []
    logits = random.normal(size=(5, 4)) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    labels = random.integers(0, 4, size=(5,))
    one_hot = np.eye(4)[labels]
    sigmoid = 1 / (1 + np.exp(-random.normal(size=(5, 3)) * 2))
    bits = random.integers(0, 2, size=(5, 3)).astype(float)
    cases = [("SparseCategoricalCrossentropy", {"from_logits": True}, labels, logits),
             ("SparseCategoricalCrossentropy", {"from_logits": False}, labels, probabilities),
             ("SparseCategoricalCrossentropy", {"from_logits": True}, random.integers(0, 4, size=(5, 2)), random.normal(size=(5, 2, 4))),
             ("CategoricalCrossentropy", {"from_logits": True}, one_hot, logits),
             ("CategoricalCrossentropy", {"from_logits": False, "label_smoothing": 0.1}, one_hot, probabilities),
             ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, bits, random.normal(size=(5, 3)) * 3),
             ("BinaryCrossentropy", {"from_logits": False}, bits, sigmoid),
             ("BinaryCrossentropy", {"from_logits": False}, bits[:, :1], sigmoid[:, :1]),
             ("MeanSquaredError", {}, random.normal(size=(5, 3)), random.normal(size=(5, 3))),
             ("MeanSquaredError", {}, random.normal(size=(5, 2, 3)), random.normal(size=(5, 2, 3))),
             ("MeanAbsoluteError", {}, random.normal(size=(5, 3)), random.normal(size=(5, 3))),
             ("Huber", {}, random.normal(size=(5, 3)) * 2, random.normal(size=(5, 3)) * 2),
             ("Huber", {"delta": 0.3}, random.normal(size=(5, 3)), random.normal(size=(5, 3)))]
    for kind, options, y_true, y_pred in cases:
        for reduction in ("sum_over_batch_size", "sum", "mean_with_sample_weight"):
            for weight in (None, random.uniform(0, 2, size=(5,) + (1,) * (max(np.ndim(y_pred), 2) - 2))):
                prediction = tf.constant(y_pred)
                with tf.GradientTape() as tape:
                    tape.watch(prediction)
                    value = getattr(K, kind)(reduction=reduction, **options)(y_true, prediction, sample_weight=weight)
                rows.append({"kind": kind, "options": options, "reduction": reduction, "y_true": packed(y_true), "y_pred": packed(y_pred),
                             "sample_weight": None if weight is None else packed(weight), "value": float(value),
                             "gradient": packed(tape.gradient(value, prediction))})
    return rows


def metrics():
    K = keras.metrics
    scores = [random.uniform(size=(5, 6)) for _ in range(2)]
    labels = [random.integers(0, 6, size=(5,)) for _ in range(2)]
    one_hot = [np.eye(6)[label] for label in labels]
    binary_scores = [random.uniform(size=(5, 1)) for _ in range(2)]
    binary_labels = [random.integers(0, 2, size=(5, 1)) for _ in range(2)]
    multi = [random.integers(0, 2, size=(5, 6)).astype(float) for _ in range(2)]
    exact = [random.integers(0, 3, size=(5,)).astype(float) for _ in range(2)]
    guess = [random.integers(0, 3, size=(5,)).astype(float) for _ in range(2)]
    cases = [("Accuracy", {}, exact, guess), ("BinaryAccuracy", {}, binary_labels, binary_scores),
             ("BinaryAccuracy", {"threshold": 0.3}, multi, scores), ("CategoricalAccuracy", {}, one_hot, scores),
             ("SparseCategoricalAccuracy", {}, labels, scores), ("TopKCategoricalAccuracy", {"k": 2}, one_hot, scores),
             ("SparseTopKCategoricalAccuracy", {"k": 3}, labels, scores), ("Precision", {}, multi, scores),
             ("Precision", {"thresholds": 0.7}, binary_labels, binary_scores), ("Precision", {"top_k": 2}, one_hot, scores),
             ("Precision", {"class_id": 1}, multi, scores), ("Recall", {}, multi, scores), ("Recall", {"top_k": 3}, one_hot, scores),
             ("Recall", {"thresholds": 0.2, "class_id": 2}, multi, scores), ("MeanSquaredError", {}, multi, scores),
             ("MeanAbsoluteError", {}, multi, scores), ("Mean", {}, None, [score.mean(-1) for score in scores])]
    rows = []
    for kind, options, y_true, y_pred in cases:
        for weighted in (False, True):
            metric = getattr(K, kind)(**options)
            batches = []
            for i in range(2):
                weight = random.uniform(0, 2, size=(5,)) if weighted else None
                if kind == "Mean":
                    metric.update_state(y_pred[i], sample_weight=weight)
                else:
                    single = "TopK" in kind  # TensorFlow's in_top_k takes float32 only
                    metric.update_state(y_true[i], y_pred[i].astype("float32") if single else y_pred[i], sample_weight=weight)
                batches.append({"y_true": None if y_true is None else packed(y_true[i]), "y_pred": packed(y_pred[i]),
                                "sample_weight": None if weight is None else packed(weight)})
            rows.append({"kind": kind, "options": options, "batches": batches, "result": float(metric.result())})
    return rows


def optimizers():
    rows = []
    x = random.normal(size=(7, 4))
    y = random.normal(size=(7, 3))
    kernel, bias = random.normal(size=(4, 3)), random.normal(size=(3,))
    cases = [("SGD", {}), ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
             ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
             ("SGD", {"learning_rate": 0.5, "clipnorm": 0.3}), ("SGD", {"learning_rate": 0.5, "clipvalue": 0.1}),
             ("SGD", {"learning_rate": 0.5, "global_clipnorm": 0.4}), ("Adam", {}),
             ("Adam", {"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "amsgrad": True}),
             ("AdamW", {"learning_rate": 0.05}), ("AdamW", {"learning_rate": 0.05, "weight_decay": 0.1, "global_clipnorm": 0.5}),
             ("RMSprop", {"learning_rate": 0.02}), ("RMSprop", {"learning_rate": 0.02, "rho": 0.8, "momentum": 0.5, "centered": True}),
             ("Adagrad", {"learning_rate": 0.1}), ("Adagrad", {"learning_rate": 0.1, "initial_accumulator_value": 0.5, "epsilon": 1e-3})]
    for kind, options in cases:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.layers[0].kernel.assign(kernel)
        model.layers[0].bias.assign(bias)
        model.compile(loss="mse", optimizer=getattr(keras.optimizers, kind)(**options))
        for _ in range(10):
            model.train_on_batch(x, y)
        rows.append({"kind": kind, "options": options, "x": packed(x), "y": packed(y), "weight": packed(kernel.T), "bias": packed(bias),
                     "weight_after": packed(model.layers[0].kernel.numpy().T), "bias_after": packed(model.layers[0].bias.numpy())})
    return rows


def schedules():
    S = keras.optimizers.schedules
    steps = list(range(0, 14)) + [20, 100]
    cases = [("ExponentialDecay", {"initial_learning_rate": 0.1, "decay_steps": 5, "decay_rate": 0.5}),
             ("ExponentialDecay", {"initial_learning_rate": 0.1, "decay_steps": 5, "decay_rate": 0.5, "staircase": True}),
             ("PiecewiseConstantDecay", {"boundaries": [3, 7], "values": [1.0, 0.5, 0.1]}),
             ("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 10, "alpha": 0.1}),
             ("CosineDecay", {"initial_learning_rate": 0.01, "decay_steps": 10, "warmup_target": 0.2, "warmup_steps": 4})]
    rows = [{"kind": kind, "options": options, "steps": steps, "values": [float(getattr(S, kind)(**options)(step)) for step in steps]}
            for kind, options in cases]
    # A warm-up from 0 to a constant rate is what CosineDecay's warm-up does before its decay.
    warm = S.CosineDecay(0.0, 1000000, warmup_target=0.3, warmup_steps=8)
    rows.append({"kind": "WarmUp", "options": {"learning_rate": 0.3, "steps": 8}, "steps": list(range(9)),
                 "values": [float(warm(step)) for step in range(9)]})
    return rows


FOLDER.mkdir(parents=True, exist_ok=True)
for make in (layers, stacks, losses, metrics, optimizers, schedules):
    rows = make()
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (FOLDER / f"{make.__name__}.json").write_text(f"[\n{lines}\n]\n")
    print(f"{make.__name__}: {len(rows)} rows")
