"""A type has one name, and a name is of one type: in all folders of src but those of the program and the loop,
where this holds of what headers declare and of names that begin with dray__ (every command has its own `arguments`)."""

import collections
import os
import re
import unittest
from pathlib import Path

SOURCE = Path(os.environ["DRAY_SOURCE_DIR"])
KERNELS = ("cuda_delta.h", "cuda_device.h", "floats.h", "formats.h", "cuda_groups.h", "cuda_quant.h")  # a program of their own: a GPU's


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def types(text):
    """Names of types that a text defines, of `typedef ... name;` and `struct name {`."""
    flat, before = without_comments(text), None
    found = re.findall(r"^(?:typedef )?(?:struct|union|enum) (\w+) \{", flat, re.M)
    while flat != before:  # the innermost braces first
        before, flat = flat, re.sub(r"\{[^{}]*\}", "", flat)
    for line in re.findall(r"^typedef\s([^;]*);", flat, re.M):
        line = re.sub(r"\s*__attribute__\s*\(\(.*\)\)", "", line)
        name = re.search(r"^[^(]*\(\*?(\w+)\)\(|^[^(]*\b(\w+)\(|(\w+)(?:\[[^]]*\])*$", line)
        name = next(filter(None, name.groups()))
        if not re.match(rf"(?:struct|union|enum) {name} \*?{name}$", line):
            found.append(name)
    return set(found)


def twice(files):
    """Of {path: text}: the names that are defined in several files. What a .c file of the program or the loop keeps to
    itself does not count."""
    where = collections.defaultdict(set)
    for path, text in files.items():
        for name in types(text):
            if path.endswith(".h") or name.startswith("dray__") or not path.startswith(("src/cmd/", "src/run/")):
                where[name].add(path)
    return sorted(f"{name}: {', '.join(sorted(paths))}" for name, paths in where.items() if len(paths) > 1)


class Names(unittest.TestCase):
    def test_the_library(self):
        files = {str(path.relative_to(SOURCE)): path.read_text()
                 for folder in ("src", "include") for path in (SOURCE / folder).rglob("*.[ch]")
                 if path.name not in KERNELS}
        self.assertGreater(len({name for text in files.values() for name in types(text)}), 500)
        self.assertEqual(twice(files), [])

    def test_each_form(self):
        text = """typedef struct dray__a { struct { int x; } in; } dray__a; /* typedef int dray__no; */
typedef struct dray__b dray__b;
typedef int (*dray__c)(int, char *);
typedef int dray__d(void);
typedef uint8_t dray__e[4];
struct dray__f {
"""
        self.assertEqual(types(text), {"dray__a", "dray__c", "dray__d", "dray__e", "dray__f"})
        one, other = "struct dray__a {\n};\nstruct own {\n};\n", "struct own {\n};\n"
        self.assertEqual(twice({"src/run/x.c": one, "src/run/y.c": one}), ["dray__a: src/run/x.c, src/run/y.c"])
        self.assertEqual(twice({"src/run/x.c": one, "src/run/y.c": other}), [])
        self.assertEqual(twice({"src/net/x.c": one, "src/run/y.c": other}), [])
        self.assertEqual(twice({"src/net/x.c": one, "src/plan/y.c": other}), ["own: src/net/x.c, src/plan/y.c"])
        self.assertEqual(twice({"x.h": one, "y.h": other}), ["own: x.h, y.h"])


if __name__ == "__main__":
    unittest.main()
