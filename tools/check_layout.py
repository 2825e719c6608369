"""Checks what the style promises about the tree: which module may include which, where torch may be seen, lengths, leftovers."""
import pathlib
import re
import subprocess
import sys


def modules():
    """Reads src/modules.txt: {library: kind}, {name: (library, the modules that it may include)}."""
    lines = [line for line in pathlib.Path("src/modules.txt").read_text().splitlines() if line and not line.startswith("#")]
    kinds = dict(line.split(" = ") for line in lines if "=" in line)
    return kinds, {name: (rest.split()[0], rest.split()[1:]) for name, rest in (line.split(":") for line in lines if ":" in line)}


KINDS, MODULES = modules()
PARTS = {name.split("/")[1]: name for name in MODULES if "/" in name}


def top(name):
    """The module that a part is in."""
    return name.split("/")[0]


TOPS = {top(name) for name in MODULES}


def module_of(folders):
    """The module, or the part of one, that has the files of src/`folders`."""
    return next((name for name in ("/".join(folders[:2]), *folders[:1]) if name in MODULES), folders[0] if folders else None)


WITHOUT_TORCH = {name for name, (library, _) in MODULES.items() if KINDS[library] != "torch"}
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
    # Public headers lie in folders of the modules' names; those that users include first are beside the folders.
    module = module_of(path.parts[1:-1]) if path.parts[0] == "src" else PARTS.get(path.parts[2], path.parts[2]) if public and len(path.parts) > 3 else None
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if LEFTOVERS.search(line):
            problems.append(f"{where}: a leftover marker")
        if (module in WITHOUT_TORCH or (public and "Torch-free" in "".join(lines[:2]))) and TORCH.search(line):
            problems.append(f"{where}: torch is not for this module")
        if public and BROAD.search(line):
            problems.append(f"{where}: too broad for a public header")
        included = re.match(r'#include "(lockstep/(?=\w+/))?(?!lockstep/)([a-z_/]+)/', line)
        if path.suffix == ".cc" and module and not path.stem.endswith("_test") and re.match(r'#include ".*_testing\.h"', line):
            problems.append(f"{where}: a helper for tests in a source that is none")
        if module and not path.stem.endswith("_test") and (front := re.match(r'#include "lockstep/(\w+)\.h"', line)) and PARTS.get(front.group(1), front.group(1)) != module:
            problems.append(f"{where}: the library's own sources include the headers that they need")
        namespace = re.match(r"namespace lockstep(?:::(\w+))?", line)
        if module and namespace and namespace.group(1) not in {None, "internal", *module.split("/")}:
            problems.append(f"{where}: the namespace of another module")
        if module and included:
            folders = included.group(2).split("/")
            other = PARTS.get(folders[0], folders[0]) if included.group(1) else module_of(folders)
            if other not in {module, "base", *MODULES[module][1]}:
                problems.append(f"{where}: {module}/ may not include {other}/")


for name in subprocess.run(["git", "ls-files", "*.h", "*.cc"], capture_output=True, text=True, check=True).stdout.split():
    path = pathlib.Path(name)
    if path.exists():
        check(path)
# Two types of one name in one namespace are against C++'s one-definition rule, whichever files they are in.
defined = {}
for name in subprocess.run(["git", "ls-files", "src/*.h", "include/*.h"], capture_output=True, text=True, check=True).stdout.split():
    path, namespace = pathlib.Path(name), ""
    for line in path.read_text().splitlines() if path.exists() else []:
        if opened := re.match(r"namespace ([\w:]+) \{", line):
            namespace = opened.group(1)
        if found := re.match(r"(?:class|struct|enum class)(?: \w+\([^)]*(?:\([^)]*\))*[^)]*\)| alignas\(\d+\))? (\w+)(?: final)?(?: : [^;]*)? \{", line):
            first = defined.setdefault((namespace, found.group(1)), name)
            if first != name:
                problems.append(f"{name}: {namespace}::{found.group(1)} is also a type in {first}")
for folder in pathlib.Path("src").glob("*/**/"):
    if "/".join(folder.parts[1:]) not in TOPS | MODULES.keys() and len([p for p in folder.glob("*.cc") if not p.stem.endswith("_test")]) < 2:
        problems.append(f"{folder}: a folder for a single source file")
there = {p.name for p in pathlib.Path("src").iterdir() if p.is_dir()} | {name for name in MODULES if pathlib.Path("src", name).is_dir()}
for module in sorted(there ^ (TOPS | MODULES.keys())):
    problems.append(f"src/{module}: a folder that is not in src/modules.txt, or the other way round")
modules_section = pathlib.Path("ARCHITECTURE.md").read_text().partition("\n## Modules\n")[2].partition("\n## ")[0]
listed = re.findall(r"^\| `(\w+)` \|", modules_section, re.MULTILINE)
if sorted(listed) != sorted(TOPS):
    problems.append(f"ARCHITECTURE.md: its table of modules and src/modules.txt differ in {sorted(TOPS ^ set(listed))}, or one is listed twice")


# CMake reads the list from top to bottom.
for number, (name, (_, others)) in enumerate(MODULES.items()):
    problems += [f"src/modules.txt: {name} may include {other}, which is not above it" for other in others if other not in list(MODULES)[:number]]


# The modules, each with what its parts include.
GRAPH = {}
for name, (_, others) in MODULES.items():
    GRAPH.setdefault(top(name), set()).update({top(other) for other in others} - {top(name)})


def reachable(module, path=()):
    if module in path:
        sys.exit(f"src/modules.txt: modules include each other: {' > '.join([*path, module])}")
    return {other for one in GRAPH[module] for other in {one} | reachable(one, (*path, module))}


# The picture has the arrows that do not follow from others.
arrows = {(name, one) for name, others in GRAPH.items() for one in others if not any(one in reachable(other) for other in others)}
PICTURE = "docs/design/modules.md"
drawn = set(re.findall(r"^  (\w+) --> (\w+)$", pathlib.Path(PICTURE).read_text(), re.MULTILINE))
problems += [f"{PICTURE}: the picture has the arrow {a} --> {b}, which src/modules.txt has not" for a, b in sorted(drawn - arrows)]
problems += [f"{PICTURE}: the picture lacks the arrow {a} --> {b}" for a, b in sorted(arrows - drawn)]
print("\n".join(problems) if problems else "layout: ok")
sys.exit(1 if problems else 0)
