"""ARCHITECTURE.md's list "A step" is the stack of a step's update.

Arguments: the program step_stack_program, ARCHITECTURE.md, and the most frames from main to the updater.
"""

import re
import subprocess
import sys

PROGRAM, PAGE, MOST = sys.argv[1], sys.argv[2], int(sys.argv[3])


def listed_names():
    """The functions in the list, outermost first."""
    text = open(PAGE).read()
    section = text[text.index("## A step"):]
    lines = re.findall(r"^\d+\. .*$", section, re.MULTILINE)
    names = [name for line in lines for name in re.findall(r"`((?:\w+::)*\w+)`", line)]
    assert len(names) > 5, f"{PAGE}: the list has {names}"
    return names


def names_of(stack):
    """The functions of a stack's frames, outermost first."""
    names = []
    for file, place in (line.split() for line in reversed(stack)):
        found = subprocess.run(["addr2line", "-f", "-C", "-e", file, place], capture_output=True, text=True, check=True)
        names.append(found.stdout.splitlines()[0])
    return names


UPDATER = "gradient::Updater::"  # it asks for the learning rate before it updates

output = subprocess.run([PROGRAM], capture_output=True, text=True, check=True).stdout
stacks = [names_of(stack.splitlines()) for stack in output.split("end of a stack\n") if stack.strip()]
of_step = [stack for stack in stacks if any("GradientPath::apply(" in name for name in stack)]
assert of_step, f"no stack is of a step: {stacks}"
frames = of_step[0]
frames = frames[frames.index("main"):next(i for i, name in enumerate(frames) if UPDATER in name) + 1]

listed = listed_names()
assert listed.pop() == "Updater::update", f"{PAGE}: the list does not end with the update, but with {listed}"
at = 0
for name in listed:
    found = [i for i, frame in enumerate(frames) if i >= at and re.search(rf"(^|[: ]){re.escape(name)}(\(|<|$)", frame)]
    assert found, f"{PAGE} lists {name}, which the stack has not after frame {at}:\n" + "\n".join(frames)
    at = found[0]
assert len(frames) <= MOST, f"{len(frames)} frames from main to the updater, at most {MOST}:\n" + "\n".join(frames)
print(f"{len(frames)} frames:\n" + "\n".join(frames))
