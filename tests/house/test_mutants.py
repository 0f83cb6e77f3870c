"""The planted faults of tests/mutants: their anchors are found once, their suites are there, and the
runner's own checks fail where they must. Running them is for `make soak`."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["DRAY_SOURCE_DIR"])
sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "tests" / "mutants"))
import run  # noqa: E402

GOOD = "== one\nfile: a.c\ndies in: base_test_base\n int a;\n-int b;\n+int c;\n"


class Mutants(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)

    def read(self, text, source="int a;\nint b;\n"):
        (self.path / "x.mutants").write_text(text)
        (self.path / "a.c").write_text(source)
        return run.read_mutants(self.path)

    def test_every_anchor_is_found_once(self):
        mutants = run.read_mutants()
        self.assertGreaterEqual(len(mutants), 40)
        self.assertEqual([], run.check_anchors(mutants))

    def test_every_suite_is_there(self):
        suites = run.suites_of(os.environ["DRAY_BUILD_DIR"])
        self.assertEqual([], run.check_suites(run.read_mutants(), suites))

    def test_a_mutant_changes_its_lines_alone(self):
        mutant = self.read(GOOD)[0]
        self.assertEqual("int z;\nint a;\nint c;\n", mutant.applied("int z;\nint a;\nint b;\n"))

    def test_an_anchor_that_is_gone_or_there_twice_is_a_mistake(self):
        for source, found in (("int a;\n", 0), ("int a;\nint b;\n" * 2, 2), ("xint a;\nint b;\n", 0)):
            mistakes = run.check_anchors(self.read(GOOD, source), self.path)
            self.assertEqual(1, len(mistakes))
            self.assertIn(f"found {found} times", mistakes[0])

    def test_a_suite_that_is_not_there_is_a_mistake(self):
        mutants = self.read(GOOD)
        self.assertEqual([], run.check_suites(mutants, {"base_test_base": ""}, self.path))
        self.assertIn("no suite base_test_base", run.check_suites(mutants, {}, self.path)[0])

    def test_malformed_files_are_refused(self):
        for text in ("file: a.c\n", GOOD + GOOD, GOOD.replace("file: a.c\n", ""),
                     GOOD.replace("-int b;\n+int c;\n", ""), GOOD + "int d;\n"):
            with self.assertRaises(run.Mistake):
                self.read(text)


if __name__ == "__main__":
    unittest.main()
