"""Put mistakes mechanically into lines that have changed since a revision, one at a time.

    python tests/mutations/mutants.py HEAD~1 tests/graphs tests/nn/test_nn_batches.py

Mistakes are those of cosmic-ray: another operator, another number, `not`, a decorator less. Each is
made in a copy of the checkout, and the tests that are named run. Mistakes that none of them notices
are printed. Some of them are none: they change a message, or give the same in another way.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checkout import Checkout

TOP = Path(__file__).resolve().parents[2]


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the numbers of lines of the library that are not those of a revision."""
    command = ["git", "diff", "-U0", "--no-color", since, "--", "graphattn", "kernels"]
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in subprocess.check_output(command, cwd=TOP, text=True).splitlines():
        if line.startswith("+++ b/"):
            lines = found.setdefault(line[6:], set())
        elif at := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(at[1]), int(at[2] or 1)
            lines.update(range(start, start + count))
    return {name: lines for name, lines in found.items() if lines and name.endswith(".py")}


def mutants(code: str, lines: set[int]) -> Iterator[str]:
    """Return the code with one mistake in one of the lines, for every such mistake."""
    import cosmic_ray.plugins  # not installed where only tests run
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        places = (x for node in ast_nodes(get_ast(code)) for x in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if start[0] in lines:
                yield mutate_code(code, operator, occurrence)


def main(since: str, *tests: str) -> int:
    """Print the mistakes that nobody notices; return how many they are, 1 at most."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(TOP, Path(folder))
        status, output = checkout.run(tests)
        if status:
            raise SystemExit(f"without a mistake the tests must pass:\n{output}")
        noticed = missed = 0
        for name, lines in changed_lines(since).items():
            code = (TOP / name).read_text()
            for mutant in mutants(code, lines):
                with checkout.replaced(name, mutant):
                    status, _ = checkout.run(tests)
                noticed += status != 0
                missed += status == 0
                if status == 0:
                    both = code.splitlines(), mutant.splitlines()
                    print(*difflib.unified_diff(*both, name, "", n=0, lineterm=""), sep="\n")
        checkout.close()
    print(f"{noticed} mistakes were noticed, {missed} were not")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
