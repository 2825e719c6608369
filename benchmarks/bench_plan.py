#!/usr/bin/env python3
"""Compares plans for two ranks with measurements: the step that plan_parallel predicts for each split, and the step that the split takes. Splits run in turns,
so that all see the same machine. `make bench-plan` builds the programs.

    python3 benchmarks/bench_plan.py [--rounds 7] [--only "width 768"]
"""
import argparse
import json
import sys

from programs import ROOT, Program, run

LOCKSTEP, STEP = (str(ROOT / "build/release" / name) for name in ("lockstep", "benchmarks/plan_step"))
SIZES = {"4 layers, width 256, batch 8": ("--layers", "4", "--batch", "8"),
         "4 layers, width 256, batch 32": ("--layers", "4", "--batch", "32"),
         "2 layers, width 768, batch 8": ("--layers", "2", "--width", "768", "--batch", "8"),
         "2 layers, width 768, batch 16": ("--layers", "2", "--width", "768", "--batch", "16", "--steps", "2")}
FARTHEST = 0.15  # a prediction from what was measured
SLOWEST = 1.1    # the first choice against the fastest that was measured


def report(size, result):
    """Prints a line a split; returns whether the plan keeps what it promises."""
    rows = result["rows"]
    fastest = min(row["measured_ms"] for row in rows)
    kept = rows[0]["measured_ms"] <= SLOWEST * fastest
    print(f"{size}: planned in {result['planning_s']:.0f} s")
    for row in rows:
        ratio = row["predicted_ms"] / row["measured_ms"]
        near = abs(ratio - 1) <= FARTHEST
        kept = kept and near
        print(f"  {'ok  ' if near else 'MISS'} {row['split']:45} predicted {row['predicted_ms']:8.1f} ms, measured {row['measured_ms']:8.1f} ms: {ratio:.2f}")
    first = rows[0]["measured_ms"] / fastest
    print(f"  {'ok  ' if first <= SLOWEST else 'MISS'} the first choice takes {first:.2f} of the fastest\n", flush=True)
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="sizes whose text has this")
    args = parser.parse_args()
    results, kept = {}, []
    for size, options in SIZES.items():
        if args.only in size:
            results[size] = run(Program(((LOCKSTEP, "run", "-n", "2", STEP, "--rounds", str(args.rounds), *options),)))
            kept.append(report(size, results[size]))
    if not results:
        sys.exit(f"no size has \"{args.only}\"")
    print(json.dumps({"sizes": results, "kept": all(kept)}))
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
