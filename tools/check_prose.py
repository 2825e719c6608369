"""Checks that comments and pages read plainly: no comment begins with OPENINGS, and no sentence has more than MOST_WORDS words.

Files that had such comments before this check keep their numbers in tools/prose_known.txt, a line a file: path, openings, long sentences.
The numbers only go down: once a file has fewer, --write writes the list anew.
"""
import io
import pathlib
import re
import subprocess
import sys
import tokenize

KNOWN = pathlib.Path("tools/prose_known.txt")
MOST_WORDS = 30
OPENINGS = re.compile(r"(Of|What|Whether|The same)\b")
# The last word of a sentence; "e.g." and "..." end none.
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)(?<!\bal)(?<!\.)[.!?][\"')\]`*]*$")
ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
# Strings are matched so that two slashes within them start no comment.
CPP = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|(?P<comment>//[^\n]*)', re.DOTALL)


def cpp_lines(text):
    """Yields (line, column, whether code is before it, text) of each // comment."""
    for match in CPP.finditer(text):
        if match["comment"]:
            start = text.rfind("\n", 0, match.start()) + 1
            yield text.count("\n", 0, start) + 1, match.start() - start, bool(text[start:match.start()].strip()), match["comment"][2:]


def python_lines(text):
    """Yields the # comments as cpp_lines does, and docstrings line by line, with a blank line before and after each."""
    statement_begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        if token.type == tokenize.COMMENT:
            yield line, column, bool(token.line[:column].strip()), token.string[1:]
        elif token.type == tokenize.STRING and statement_begins and token.string.startswith('"""'):
            for number, part in enumerate(["", *token.string.strip('"').splitlines(), ""], line - 1):
                yield number, column, False, part.removeprefix(" " * column)
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            statement_begins = token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def markdown_lines(text):
    """Yields the lines of paragraphs and lists; headings, tables and code are blank lines."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        yield number, 0, False, "" if code or fence or re.match(r"\s*[#|<]", line) else line


def paragraphs(lines):
    """Joins the comments of consecutive lines; yields each paragraph, and each item of a list, as a list of (line, text)."""
    paragraph, in_item, last = [], False, (0, 0)
    for line, column, after_code, text in lines:
        adjacent = not after_code and last[0] in {line, line - 1} and last[1] == column
        begins = ITEM.match(text)
        in_item = bool(begins) or (in_item and adjacent)
        blank = not text.strip() or (text.startswith("   ") and not in_item)  # indented: code or a drawing
        if paragraph and (begins or blank or not adjacent):
            yield paragraph
            paragraph = []
        if not blank:
            paragraph.append((line, text[begins.end():] if begins else text))
        in_item = in_item and not blank
        last = (line, column)
    if paragraph:
        yield paragraph


def findings(path):
    """Returns (openings, long sentences) of a file, each a list of messages."""
    openings, sentences = [], []
    read = {".py": python_lines, ".md": markdown_lines}.get(path.suffix, cpp_lines)
    for paragraph in paragraphs(read(path.read_text())):
        words = [(word, line) for line, text in paragraph for word in text.split()]
        start = 0
        for end, (word, _) in enumerate(words, 1):
            if end < len(words) and not END.search(word):
                continue
            sentence = [word for word, _ in words[start:end]]
            counted = sum(bool(re.search(r"\w", word)) for word in sentence)
            message = f'{path}:{words[start][1]}: "{" ".join(sentence[:8])}", {counted} words'
            if start == 0 and OPENINGS.match(" ".join(sentence)):
                openings.append(f"{message}, begins without a subject")
            if counted > MOST_WORDS:
                sentences.append(f"{message}, at most {MOST_WORDS}")
            start = end
    return openings, sentences


names = subprocess.run(["git", "ls-files", "*.h", "*.cc", "*.py", "*.md"], capture_output=True, text=True, check=True).stdout.split()
found = {name: findings(pathlib.Path(name)) for name in names if pathlib.Path(name).exists()}
counts = {name: [len(kind) for kind in kinds] for name, kinds in found.items()}
if "--write" in sys.argv:
    KNOWN.write_text("".join(f"{name} {openings} {sentences}\n" for name, (openings, sentences) in counts.items() if openings + sentences))
known = {line.split()[0]: [int(number) for number in line.split()[1:]] for line in KNOWN.read_text().splitlines()}
problems = [f"{KNOWN}: {name} is gone; remove its line" for name in known if name not in counts]
for name, kinds in found.items():
    for kind, now, before in zip(kinds, counts[name], known.get(name, [0, 0])):
        if now > before:
            problems += [*kind, f"{name}: {now} of these, {before} known; write the new ones again"]
        elif now < before:
            problems.append(f"{KNOWN}: {name} has {now}, not {before}; lower the number (python3 tools/check_prose.py --write)")
print("\n".join(problems) if problems else f"prose: ok, {sum(map(sum, counts.values()))} known")
sys.exit(1 if problems else 0)
