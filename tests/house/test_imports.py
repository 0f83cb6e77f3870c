"""A name that a Python file imports from one of dray's modules is there. Modules that want verl, vLLM or SGLang are
imported by few tests, or by none on a machine without these; their names are looked up here without running them."""

import ast
import os
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["DRAY_SOURCE_DIR"])


def module_file(root, name):
    """The file of module `name` (dotted) under root, or None."""
    at = root.joinpath(*name.split("."))
    return next((file for file in (at / "__init__.py", at.with_suffix(".py")) if file.is_file()), None)


def bound(targets):
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def names(tree):
    """What a module binds at its top level, in branches and `try` too; None where it answers any name (`import *`, or
    a `__getattr__` of its own)."""
    found, todo = set(), list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= bound(node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            found |= bound([node.target])
        else:
            found |= bound([node.target] if isinstance(node, ast.For) else [])
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return None if found & {"*", "__getattr__"} else found


def missing(root, file):
    """Imports of `file` from modules under root that would fail, in functions too."""
    package = list(file.relative_to(root).parts[:-1]) if file.is_relative_to(root) else []
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        above = package[:len(package) - node.level + 1] if node.level else []
        name = ".".join(above + [node.module] if node.module else above)
        if name.split(".")[0] != "dray":
            continue
        where = module_file(root, name)
        if not where:
            found.append(f"{file.name}:{node.lineno}: no module {name}")
            continue
        there = names(ast.parse(where.read_text()))
        found += [f"{file.name}:{node.lineno}: {name} has no {alias.name}" for alias in node.names
                  if there is not None and alias.name not in there | {"*"}
                  and not module_file(root, f"{name}.{alias.name}")]
    return found


class Imports(unittest.TestCase):
    def test_every_imported_name_is_there(self):
        files = [file for folder in ("python", "tests", "bench", "examples")
                 for file in (SOURCE / folder).rglob("*.py")]
        self.assertGreater(len(files), 150)
        self.assertEqual([], [line for file in sorted(files) for line in missing(SOURCE / "python", file)])

    def test_a_missing_name_is_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "dray" / "deep").mkdir(parents=True)
            (root / "dray" / "__init__.py").write_text("")
            (root / "dray" / "one.py").write_text("try:\n    there = 1\nexcept ValueError as e:\n    other = 2\n")
            file = root / "dray" / "deep" / "two.py"
            file.write_text("from ..one import there, other\nfrom .. import one\n\ndef late():\n"
                            "    from ..one import gone\n    from dray.none import x\n    from os import path\n")
            self.assertEqual(["two.py:5: dray.one has no gone", "two.py:6: no module dray.none"], missing(root, file))


if __name__ == "__main__":
    unittest.main()
