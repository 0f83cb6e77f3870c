"""Who calls whom, as the linker sees it: a folder uses nothing that is defined in a folder below it in
docs/architecture.md (test_layers.sh looks at what is included), and of files that call each other, or
include each other, in a circle there are at most six, but where EXCEPT says why."""

import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE = Path(os.environ["DRAY_SOURCE_DIR"])
BUILD = Path(os.environ["DRAY_BUILD_DIR"])
MOST = 6
# A folder, and a file of each of its larger circles.
EXCEPT = {
    "queue/table/claims": "queue/table/table_inside.h says why the table's files call each other",
}


def folders():
    """The layers, in the order of docs/architecture.md."""
    text = (SOURCE / "docs" / "architecture.md").read_text()
    return re.findall(r"^\| `src/(\w+)/` \|", text, re.M)


def symbols(objects):
    """From lines of `nm -A -g`: (who defines a symbol, [(a file, what it uses)])."""
    defined, used = {}, []
    for line in objects.splitlines():
        found = re.match(r"\S+?\.dir/src/(\S+)\.c\.o: *[0-9a-f]* +(\w) (\S+)$", line)
        if found and found[2] == "U":
            used.append((found[1], found[3]))
        elif found and found[2] in "TDBRVWCi":
            defined[found[3]] = found[1]
    return defined, used


def against_the_layers(defined, used, order):
    """Uses of what is defined in a folder below."""
    place = {folder: number for number, folder in enumerate(order)}
    return sorted(
        f"{file}.c uses {symbol} of {defined[symbol]}.c"
        for file, symbol in used
        if symbol in defined and place[file.split("/")[0]] < place[defined[symbol].split("/")[0]]
    )


def circles(uses):
    """Sets of files of which each can be reached from each (Tarjan's strongly connected components)."""
    number, low, stack, found = {}, {}, [], []

    def visit(file):
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in uses.get(file, ()):
            if other not in number:
                visit(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], number[other])
        if low[file] == number[file]:
            at = stack.index(file)
            found.append(set(stack[at:]))
            del stack[at:]

    for file in list(uses):
        if file not in number:
            visit(file)
    return found


def too_large(uses):
    return [
        f"{len(circle)} files in a circle: {' '.join(sorted(circle))}"
        for circle in circles(uses)
        if len(circle) > MOST and not circle & EXCEPT.keys()
    ]


def calls(defined, used):
    uses = {}
    for file, symbol in used:
        if symbol in defined and defined[symbol] != file:
            uses.setdefault(file, set()).add(defined[symbol])
    return uses


def includes(root):
    """x.c and x.h are one file here."""
    uses = {}
    for path in root.rglob("*.[ch]"):
        file = str(path.relative_to(root).with_suffix(""))
        for other in re.findall(r'^#include "(\S+)\.h"', path.read_text(), re.M):
            if other != file and (root / f"{other}.h").exists():
                uses.setdefault(file, set()).add(other)
    return uses


def nm():
    """What the build's objects define and use; only of sources that are still there."""
    objects = [
        path
        for path in (BUILD / "CMakeFiles").glob("dray_*.dir/src/**/*.c.o")
        if (SOURCE / str(path).split(".dir/", 1)[1][: -len(".o")]).exists()
    ]
    command = ["nm", "-A", "-g", *map(str, objects)]
    return len(objects), subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Circles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        count, text = nm()
        cls.count = count
        cls.defined, cls.used = symbols(text)

    def test_all_objects_are_looked_at(self):
        folders_seen = {file.split("/")[0] for file in self.defined.values()}
        self.assertLessEqual({"base", "mover", "control", "weights", "queue"}, folders_seen)
        self.assertGreater(self.count, 200)

    def test_a_folder_uses_only_what_stands_above_it(self):
        self.assertEqual([], against_the_layers(self.defined, self.used, folders()))

    def test_no_large_circle_of_calls(self):
        self.assertEqual([], too_large(calls(self.defined, self.used)))

    def test_no_large_circle_of_includes(self):
        self.assertEqual([], too_large(includes(SOURCE / "src")))

    def test_exceptions_are_needed(self):
        graphs = [calls(self.defined, self.used), includes(SOURCE / "src")]
        large = [circle for graph in graphs for circle in circles(graph) if len(circle) > MOST]
        for file in EXCEPT:
            with self.subTest(file):
                self.assertTrue(any(file in circle for circle in large))

    def test_a_use_of_a_folder_below_is_seen(self):
        text = ("a.dir/src/base/x.c.o:                  U dray__there\n"
                "a.dir/src/queue/deep/y.c.o: 0000000000000010 T dray__there\n")
        defined, used = symbols(text)
        self.assertEqual(["base/x.c uses dray__there of queue/deep/y.c"],
                         against_the_layers(defined, used, ["base", "queue"]))
        self.assertEqual([], against_the_layers(defined, used, ["queue", "base"]))

    def test_a_circle_is_seen(self):
        ring = {f"a/{i}": {f"a/{(i + 1) % 7}"} for i in range(7)}
        self.assertEqual(1, len(too_large(ring)))
        ring["a/6"] = {"b/end"}
        self.assertEqual([], too_large(ring))


if __name__ == "__main__":
    if not shutil.which("nm"):
        sys.exit(77)
    sys.setrecursionlimit(10000)
    unittest.main()
