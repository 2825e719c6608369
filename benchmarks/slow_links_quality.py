"""Losses and accuracies of training over slow links: a table of ways to meet, and a closing line of JSON.

    benchmarks/slow_links_quality.py [--steps 7500] [--first 3000] [--seeds 3] [--task gpt|seed]    (two hours on two cores; --task seed five minutes)

A small GPT learns the bytes of this project's sources: the loss on a tenth that it has not seen, at equal tokens. All ways begin with the weights of the first
steps, in which two workers summed gradients, as in DiLoCo's paper. The seed program learns Fashion-MNIST for five epochs: the mean accuracy over the seeds.
"""
import argparse
import json
import subprocess
import tempfile

from programs import ROOT

PROGRAM = ROOT / "build/release/benchmarks/slow_links_quality"
EIGHT = ("--gradient-dtype", "int8")
SIXTEEN = ("--gradient-dtype", "bfloat16")


def meeting(steps, *more):
    return ("--meet-after", str(steps), *more)


GPT = {"float32 in each step": (), "8 bits in each step": EIGHT, "DiLoCo, 20 steps": meeting(20), "DiLoCo, 50 steps": meeting(50),
       "DiLoCo, 50 steps, 8 bits": meeting(50, "--meet-dtype", "int8")}
SEED = {"float32 in each step": (), "bfloat16 in each step": SIXTEEN, "8 bits in each step": EIGHT,
        "LocalSGD, 20 steps": meeting(20, "--outer-rate", "1", "--outer-momentum", "0"), "DiLoCo, 20 steps": meeting(20), "DiLoCo, 50 steps": meeting(50),
        "DiLoCo, 50 steps, 8 bits": meeting(50, "--meet-dtype", "int8")}


def value(workers, *options):
    command = (str(ROOT / "build/release/lockstep"), "run", "-n", str(workers), str(PROGRAM), *options)
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(output.split("[0] ", 1)[1])["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument("--first", type=int, default=3000)
    parser.add_argument("--task", choices=("gpt", "seed"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    texts = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("src/*/*.cc"))
    found, folder = [], tempfile.mkdtemp()

    def tell(task, workers, way, measured, relative):
        found.append({"task": task, "workers": workers, "way": way, "value": measured})
        print(f"{task}, {workers} workers, {way:28} {measured:8.4f}  {relative}", flush=True)

    begun = f"{folder}/begun"
    if args.task != "seed":
        value(2, "--task", "gpt", "--steps", str(args.first), "--to", begun, *texts)
    for workers in () if args.task == "seed" else (2, 4):
        first, batch = None, str(32 // workers)
        for way, options in GPT.items():
            loss = value(workers, "--task", "gpt", "--batch", batch, "--steps", str(args.steps), "--from", begun, *options, *texts)
            first = first or loss
            tell("small GPT", workers, way, loss, f"{100 * (loss / first - 1):+.2f}%")
    for workers in () if args.task == "gpt" else (2, 4):
        first = None
        for way, options in SEED.items():
            accuracies = [value(workers, "--task", "seed", "--batch", "64", "--steps", "5", "--seed", str(seed + 1), *options)
                          for seed in range(args.seeds)]
            accuracy = 100 * sum(accuracies) / len(accuracies)
            first = first or accuracy
            tell("seed program", workers, way, accuracy, f"{accuracy - first:+.2f} points")
    print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
