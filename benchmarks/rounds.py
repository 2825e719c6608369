"""Programs measured in turns: every round runs each once, so that all see the same machine. A ratio is the median of the rounds' ratios. The last line printed
is JSON."""
import argparse
import dataclasses
import json
import statistics
import sys


@dataclasses.dataclass
class Row:
    """of_ours and of_peer take a figure that is better when larger from a program's result."""
    work: str
    against: str
    ours: object  # programs
    peer: object
    target: float
    of_ours: callable
    of_peer: callable


def measure(programs, rounds, run):
    """[round][program]: what run(program) says."""
    results = []
    for number in range(rounds):
        results.append({})
        for done, program in enumerate(programs):
            print(f"\rround {number + 1} of {rounds}, program {done + 1} of {len(programs)} ", end="", file=sys.stderr, flush=True)
            results[-1][program] = run(program)
    print(file=sys.stderr)
    return results


def report(rows, results):
    """Prints a line a row, and JSON."""
    table = []
    for row in rows:
        ours = [row.of_ours(result[row.ours]) for result in results]
        peer = [row.of_peer(result[row.peer]) for result in results]
        ratios = [a / b for a, b in zip(ours, peer)]
        table.append({"work": row.work, "against": row.against, "ours": float(f"{statistics.median(ours):.4g}"),
                      "peer": float(f"{statistics.median(peer):.4g}"), "ratio": round(statistics.median(ratios), 3), "target": row.target})
        print(f"{'ok  ' if table[-1]['ratio'] >= row.target else 'MISS'} {row.work:52} {row.against:44} "
              f"{table[-1]['ratio']:7.2f}x  (target {row.target}; rounds {', '.join(f'{r:.2f}' for r in ratios)})")
    print(json.dumps({"rows": table}))


def main(description, rows, run, options=None):
    """A script's whole: measures the rows that --only names, --rounds times. `options`: a parser of its own ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     parents=[options] if options else [])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose text has this")
    args = parser.parse_args()
    chosen = [row for row in rows if args.only in f"{row.work} / {row.against}"]
    if not chosen:
        sys.exit(f"no row has \"{args.only}\"")
    programs = list(dict.fromkeys(program for row in chosen for program in (row.ours, row.peer)))
    report(chosen, measure(programs, args.rounds, run))
