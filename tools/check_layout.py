"""Checks what the style promises about the tree: which room may include which, where torch may be seen, lengths, leftovers."""
import pathlib
import re
import subprocess
import sys

# A room may include itself, `base`, the public headers, and these.
ROOMS = {
    "base": set(),
    "kernels": set(),
    "transport": set(),
    "cluster": {"transport"},
    "launch": {"cluster", "transport"},
    "collective": {"cluster", "kernels", "transport"},
    "optimizer": {"kernels"},
    "checkpoint": set(),
    "ops": {"kernels"},
    "cuda": {"ops"},
    "gradient": {"collective", "kernels", "optimizer"},
    "data": {"checkpoint", "ops"},
    "ddp": {"cluster", "collective", "gradient", "ops"},
    "strategy": {"cluster", "collective", "data", "gradient", "ops", "optimizer"},
    "train": {"checkpoint", "data", "gradient", "ops", "optimizer", "strategy"},
    "horovod": {"checkpoint", "cluster", "collective", "data", "gradient", "strategy", "train"},
    "estimator": {"strategy", "train"},
    "cli": {"checkpoint", "cluster", "collective", "launch", "train"},
}
WITHOUT_TORCH = {"base", "kernels", "transport", "cluster", "launch", "collective", "optimizer", "checkpoint", "cli"}
HEADERS_WITHOUT_TORCH = {"buffer", "checkpoint", "cluster", "communicator", "deadline", "error", "gradient_hook", "group", "group_wrappers", "job", "logs", "memory", "mixed_precision", "optimizer", "random", "replica_values", "schedule", "store", "world"}
TORCH = re.compile(r'#include [<"](torch|ATen|c10)/')
BROAD = re.compile(r'#include [<"](torch/torch\.h|torch/all\.h|ATen/ATen\.h|spdlog|fmt|nlohmann)')
LEFTOVERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MOST_LINES = {".h": 400, ".cc": 400}
MOST_LINES_PUBLIC = 200

problems = []


def check(path):
    text = path.read_text()
    lines = text.splitlines()
    public = path.parts[0] == "include"
    most = MOST_LINES_PUBLIC if public else MOST_LINES[path.suffix]
    if len(lines) > most:
        problems.append(f"{path}: {len(lines)} lines; at most {most}")
    room = path.parts[1] if path.parts[0] == "src" else None
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if LEFTOVERS.search(line):
            problems.append(f"{where}: a leftover marker")
        if room in WITHOUT_TORCH or (public and path.stem in HEADERS_WITHOUT_TORCH):
            if TORCH.search(line):
                problems.append(f"{where}: torch is not for this {'header' if public else 'room'}")
        if public and BROAD.search(line):
            problems.append(f"{where}: too broad for a public header")
        included = re.match(r'#include "([a-z_]+)/', line)
        if room and included:
            other = included.group(1)
            if other not in ({room, "base", "lockstep"} | ROOMS[room]):
                problems.append(f"{where}: {room}/ may not include {other}/")


for name in subprocess.run(["git", "ls-files", "*.h", "*.cc"], capture_output=True, text=True, check=True).stdout.split():
    path = pathlib.Path(name)
    if path.exists():
        check(path)
for room in sorted({p.name for p in pathlib.Path("src").iterdir() if p.is_dir()} - ROOMS.keys()):
    problems.append(f"src/{room}: a room that tools/check_layout.py does not know")
print("\n".join(problems) if problems else "layout: ok")
sys.exit(1 if problems else 0)
