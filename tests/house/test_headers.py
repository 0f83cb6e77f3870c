"""How headers guard themselves. Each one of include/dray/ by itself is C11 and C++17, its _INIT macros, too, without a warning; and
what Python's ctypes has of the headers (python/dray/_declared.py) is what the compiler makes of them."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["DRAY_SOURCE_DIR"])
HEADERS = sorted((SOURCE / "include/dray").glob("*.h"))
LANGUAGES = {"c": (os.environ.get("CC", "cc"), "c11"), "c++": (os.environ.get("CXX", "c++"), "c++17")}
FLAGS = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE / 'include'}"]


def module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


DECLARED = module(SOURCE / "python/dray/_declared.py", "declared")
MAKER = module(SOURCE / "scripts/declared.py", "maker")


def complaints(language, text):
    compiler, standard = LANGUAGES[language]
    done = subprocess.run([compiler, f"-std={standard}", *FLAGS, "-x", language, "-fsyntax-only", "-"],
                          input=text, text=True, capture_output=True)
    return done.stderr if done.returncode else ""


def use_of(header):
    """Includes it, and uses its macros."""
    inits = re.findall(r"#define (DRAY_(\w+)_INIT)\b", header.read_text())
    return f"#include <dray/{header.name}>\n" + "".join(
        f"extern dray_{name.lower()} {name};\ndray_{name.lower()} {name} = {macro};\n" for macro, name in inits)


def laid_out(structs):
    """{struct: [its size, offsets of its fields]} by the C compiler."""
    lines = [f'    printf("{name}' + " %zu" * (len(fields) + 1) + f'\\n", sizeof({name})' +
             "".join(f", offsetof({name}, {field})" for field in fields) + ");" for name, fields in structs]
    text = "".join(f"#include <dray/{h.name}>\n" for h in HEADERS) + \
        "#include <stdio.h>\nint main(void)\n{\n" + "\n".join(lines) + "\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([LANGUAGES["c"][0], *FLAGS, "-x", "c", "-", "-o", f"{folder}/sizes"], input=text,
                       text=True, check=True)
        said = subprocess.run([f"{folder}/sizes"], text=True, check=True, capture_output=True).stdout
    return {name: list(map(int, numbers)) for name, *numbers in map(str.split, said.splitlines())}


class Headers(unittest.TestCase):
    def test_each_in_both_languages(self):
        for language, (compiler, _) in LANGUAGES.items():
            if not shutil.which(compiler):
                continue
            for header in HEADERS:
                with self.subTest(language=language, header=header.name):
                    self.assertEqual(complaints(language, use_of(header)), "")
            self.assertNotEqual(complaints(language, "struct two { int a, b; } x = {1, 2, 3};"), "")
        if shutil.which(LANGUAGES["c++"][0]):
            self.assertNotEqual(complaints("c++", "struct a { int b; } x = {.b = 1};"), "")

    def test_guards(self):
        names = (SOURCE / "src/mover/cuda/cuda_embedded.h").read_text()
        compiled = re.findall(r'"(\S+)"', names)
        self.assertGreater(len(compiled), 1)
        keep = {*HEADERS, *(SOURCE / "src" / name for name in compiled)}  # named: by users' compilers, and by NVRTC
        for header in (h for part in ("include", "src", "bench", "tests") for h in (SOURCE / part).rglob("*.h")):
            named = re.findall(r"^#ifndef (\w+_H)\n#define \1$", header.read_text(), re.M)
            with self.subTest(header=header):
                self.assertEqual(len(named), int(header in keep))

    def test_nothing_is_there_for_nothing(self):
        for header in HEADERS:
            self.assertEqual(re.findall(r"^ +\w+ (?:unused|reserved\w*);", header.read_text(), re.M), [])

    def test_what_python_has(self):
        self.assertEqual(MAKER.made(), (SOURCE / "python/dray/_declared.py").read_text(),
                         "scripts/declared.py makes it anew")
        headers, text = MAKER.preprocessed()
        types = MAKER.Types(text, MAKER.constants(text, headers))
        self.assertEqual(set(types.structs), set(re.findall(r"^\} (dray_\w+);", text, re.M)) - types.enums)
        classes = [(name, getattr(DECLARED, MAKER.class_of(name))) for name in types.structs]
        self.assertGreater(len(classes), 50)
        by_compiler = laid_out([(name, [field for field, _ in kind._fields_]) for name, kind in classes])
        for name, kind in classes:
            with self.subTest(struct=name):
                self.assertEqual([ctypes.sizeof(kind)] +
                                 [getattr(kind, field).offset for field, _ in kind._fields_], by_compiler[name])

    def test_functions_are_those_of_the_library(self):
        library = ctypes.CDLL(os.environ["DRAY_LIBRARY"])
        self.assertEqual([name for name in DECLARED.FUNCTIONS if not hasattr(library, name)], [])


if __name__ == "__main__":
    unittest.main()
