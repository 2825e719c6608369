"""Reads with Python what Lockstep writes: safetensors' own reader, PyTorch's training of the same batches, TensorBoard's own reader.

interop_test.py PROGRAM FOLDER
"""
import pathlib
import shutil
import subprocess
import sys

import numpy
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
subprocess.run([program, str(folder)], check=True)
failures = 0


def check(holds, what):
    global failures
    failures += not holds
    print("ok  " if holds else "FAIL", what)


def load(name):
    return {key: torch.from_numpy(value.copy()) for key, value in load_file(folder / f"{name}.safetensors").items()}


NAMES = {"0.weight": "conv2d.weight", "0.bias": "conv2d.bias", "4.weight": "dense.weight", "4.bias": "dense.bias",
         "6.weight": "dense_1.weight", "6.bias": "dense_1.bias"}


def seed_cnn(weights):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
                              torch.nn.Linear(5408, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    net.load_state_dict({theirs: weights[ours] for theirs, ours in NAMES.items()})
    return net


class KerasAdam(torch.optim.Optimizer):
    """Keras's Adam: epsilon is added to the root of the uncorrected second moment."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        rate = 0.001 * (1 - 0.999 ** self.t) ** 0.5 / (1 - 0.9 ** self.t)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            m = state.setdefault("m", torch.zeros_like(p))
            v = state.setdefault("v", torch.zeros_like(p))
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.sub_(rate * m / (v.sqrt() + 1e-3))


batches = load("batches")
for name, make in (("momentum", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)), ("adam", KerasAdam)):
    net = seed_cnn(load(f"{name}_initial"))
    optimizer = make(net.parameters())
    for i in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(batches[f"x{i}"]), batches[f"y{i}"]).backward()
        optimizer.step()
    final = load(f"{name}_final")
    moved = max(float((final[ours] - load(f"{name}_initial")[ours]).abs().max()) for ours in NAMES.values())
    worst = max(float((net.state_dict()[theirs] - final[ours]).abs().max()) for theirs, ours in NAMES.items())
    check(worst <= 1e-5 < moved, f"seed CNN, {name}: PyTorch's weights after 20 steps differ by {worst:.1e} (moved by {moved:.1e})")
    outputs = seed_cnn(final)(batches["x0"]).detach()
    difference = float((outputs - load(f"{name}_outputs")["outputs"]).abs().max())
    check(difference <= 1e-4, f"seed CNN, {name}: outputs from the checkpoint in Python differ by {difference:.1e}")

history = load("history")
for part, tag, values in (("train", "epoch_loss", history["loss"]), ("validation", "epoch_accuracy", history["val_accuracy"])):
    log = EventAccumulator(str(folder / "logs" / part))
    log.Reload()
    events = log.Scalars(tag)
    check([event.step for event in events] == [0, 1, 2], f"TensorBoard: {part}/{tag} has steps 0, 1, 2")
    check(numpy.allclose([event.value for event in events], values.numpy(), rtol=1e-6), f"TensorBoard: {part}/{tag} has fit's values")
log = EventAccumulator(str(folder / "logs" / "train"))
log.Reload()
tags = log.Tags()["scalars"]
check({"epoch_loss", "epoch_accuracy", "epoch_learning_rate", "batch_loss", "batch_accuracy"} <= set(tags), f"TensorBoard: tags {sorted(tags)}")
check("evaluation_loss_vs_iterations" in EventAccumulator(str(folder / "logs" / "validation")).Reload().Tags()["scalars"],
      "TensorBoard: evaluation_loss_vs_iterations")
sys.exit(failures)
