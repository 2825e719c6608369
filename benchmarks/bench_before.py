"""The rows of the other benchmarks, but against another build of Lockstep in the place of the peers: has anything become slower?

    benchmarks/bench_before.py --before /path/to/another/checkout/build/release [--rounds 5] [--only TEXT] [--skip=TEXT]

--skip leaves out the programs whose command has this text: an option which the other build does not have. Both builds need the target benchmarks. The rows of
hosts, and of bytes that are sent, need root.
"""
import argparse
import dataclasses
import pathlib
import subprocess
import tempfile

import bench_collectives
import bench_parallel
import bench_ps
import bench_step
import bench_workers
import programs
import rounds

HERE = str(programs.ROOT / "build/release")
MOST_LOST = 0.97  # 3%


def of_build(value, build):
    """A program with every path of this build replaced by that of another."""
    if isinstance(value, str):
        return value.replace(HERE, build)
    if isinstance(value, tuple):
        return tuple(of_build(one, build) for one in value)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{field.name: of_build(getattr(value, field.name), build) for field in dataclasses.fields(value)})
    return value


def rows(build, skip, certificates):
    """Each of our programs once for each figure that a row takes of it."""
    seen = set()
    scripts = {bench_step: (), bench_collectives: (), bench_workers: (), bench_parallel: (), bench_ps: (certificates,)}
    for script, arguments in scripts.items():
        for row in script.rows(*arguments):
            for program, figure in ((row.ours, row.of_ours), (row.peer, row.of_peer)):
                name = (program, figure.__name__, getattr(figure, "__closure__", None) and figure.__closure__[0].cell_contents)
                before = of_build(program, build)
                if before == program or name in seen or "fma_peak" in str(program) or (skip and skip in str(program)):
                    continue
                seen.add(name)
                what = f"{script.__name__}: {row.work}" + ("" if program is row.ours else f" ({row.against})")
                yield rounds.Row(what, "before", program, before, MOST_LOST, figure, figure)


def run(program):
    if isinstance(program, bench_step.Program):
        return bench_step.run(program)
    return program.seconds() if isinstance(program, bench_workers.Start) else programs.run(program)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--before", type=pathlib.Path, required=True)
    parser.add_argument("--skip", default="")
    known, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([f"{HERE}/lockstep", "certs", folder], check=True, stdout=subprocess.DEVNULL)
        rounds.main(__doc__, list(rows(str(known.before.resolve()), known.skip, folder)), run, parser)
