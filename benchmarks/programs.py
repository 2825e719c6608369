"""Programs of several processes, here or on hosts that are network namespaces."""
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from hosts import Hosts  # noqa: E402

LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Program:
    """Processes that run at once; the first that prints JSON has the result. `hosts`: where each runs; () for all here."""
    commands: tuple
    hosts: tuple = ()
    environment: tuple = ()
    rate: str = "1gbit"  # of hosts' links; None: no bound


def run(program):
    if not program.hosts:
        return run_here(program, program.commands)
    with Hosts(max(program.hosts) + 1, program.rate) as hosts:
        return run_here(program, [hosts.command(host, *command) for host, command in zip(program.hosts, program.commands)])


def run_here(program, commands):
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **dict(program.environment)}
    started = []
    for command in commands:
        errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill
        started.append((subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment), command, errors))
    try:
        outputs = [(process.communicate(timeout=LIMIT_S)[0], process, command, errors) for process, command, errors in started]
    finally:
        for process, _, _ in started:
            process.kill()
    for _, process, command, errors in outputs:
        if process.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"this failed: {' '.join(command)}\n{errors.read()[-4000:]}")
    text = (re.sub(r"^\[0\] ", "", line) for output, *_ in outputs for line in output.splitlines())  # lockstep run's prefix
    lines = (json.loads(line) for line in text if line.startswith("{"))
    return next(line for line in lines if "event" not in line)
