#!/usr/bin/env python3
"""Plants the faults of tests/mutants/*.mutants, one at a time, and sees that the suites fail.

    tests/mutants/run.py [PATTERN] [--list | --check] [--json]

PATTERN is a regular expression over the mutants' names. The sources are copied to
build/mutants/source and built there: the working tree stays as it is. Each mutant is applied to the
copy, what it changes is built, its suites run, and it is taken out again. A suite that
fails, crashes or hangs (120 s, --timeout) has killed the mutant. The exit status is 1 when a mutant
survives or does not build, 2 when nothing can be said: an anchor is gone, a suite fails unmutated.

A mutant in a file of mutants:

    == a_name_of_its_own
    file: src/folder/file.c
    dies in: folder_test_name folder_test_other
     a line of context, as it stands
    -a line that is taken out
    +a line that is put in

There are no line numbers: the lines of context and those taken out must be found exactly once in
the file. Empty lines and lines that begin with # between mutants are nothing."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "mutants"
WORK = ROOT / "build" / "mutants"
JOBS = os.environ.get("JOBS") or str(os.cpu_count() or 1)


class Mistake(Exception):
    """A file of mutants, or a suite that it names, is not as it must be."""


class Mutant:
    def __init__(self, name, where):
        self.name, self.where = name, where
        self.file, self.suites = "", []
        self.old, self.new = [], []

    def texts(self):
        return "".join(f"{line}\n" for line in self.old), "".join(f"{line}\n" for line in self.new)

    def applied(self, text):
        """The file's text with the fault in it."""
        old, new = self.texts()
        changed, count = re.subn(f"^{re.escape(old)}", lambda _: new, text, flags=re.M)
        if count != 1:
            raise Mistake(f"{self.where}: mutant {self.name}: its lines are expected once in "
                          f"{self.file}, found {count} times")
        return changed


def read_file(path):
    mutants = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path.name}:{number}"
        if line.startswith("== "):
            mutants.append(Mutant(line[3:].strip(), where))
            continue
        mutant = mutants[-1] if mutants else None
        if not line or line.startswith("#"):
            continue
        if not mutant:
            raise Mistake(f"{where}: '== NAME' expected before '{line}'")
        if line.startswith("file: "):
            mutant.file = line[6:].strip()
        elif line.startswith("dies in: "):
            mutant.suites = line[9:].split()
        elif line[0] in " -+":
            if line[0] != "+":
                mutant.old.append(line[1:])
            if line[0] != "-":
                mutant.new.append(line[1:])
        else:
            raise Mistake(f"{where}: 'file:', 'dies in:' or a line with ' ', '-' or '+' before it "
                          f"expected, found '{line}'")
    return mutants


def read_mutants(folder=HERE):
    mutants = [m for path in sorted(folder.glob("*.mutants")) for m in read_file(path)]
    seen = {}
    for m in mutants:
        if m.name in seen:
            raise Mistake(f"{m.where}: a mutant {m.name} stands at {seen[m.name]}, too")
        seen[m.name] = m.where
        if not m.file or not m.suites or not m.old or m.old == m.new:
            raise Mistake(f"{m.where}: mutant {m.name}: a file, suites and changed lines expected")
    return mutants


def check_anchors(mutants, root=ROOT):
    """The mistakes of all, each a line."""
    mistakes = []
    for m in mutants:
        try:
            m.applied((root / m.file).read_text())
        except (Mistake, OSError) as mistake:
            mistakes.append(str(mistake))
    return mistakes


def check_suites(mutants, known, root=ROOT):
    """Suites that there are not. Python's are known by their files: not every build has them."""
    mistakes = []
    for m in mutants:
        for suite in m.suites:
            folder, _, base = suite.partition("_")
            if suite not in known and not (root / "tests" / folder / f"{base}.py").exists():
                mistakes.append(f"{m.where}: mutant {m.name}: there is no suite {suite}")
    return mistakes


def suites_of(build):
    """{suite: the C program that it runs; None: a script} of a build folder."""
    told = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    suites = {}
    for test in json.loads(told)["tests"]:
        variables = next((p["value"] for p in test["properties"] if p["name"] == "ENVIRONMENT"), [])
        seen = [v for v in variables if v.startswith("DRAY_THREADS_SEEN=")]  # .../program@suite
        suites[test["name"]] = seen[0].rpartition("/")[2].partition("@")[0] if seen else None
    return suites


# ---- a copy that may be spoilt -------------------------------------------------------------------


def copy_sources(to):
    """The tracked and the new files; one that is the same there keeps its time."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in sorted(names):
        source, target = ROOT / name, to / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for path in to.rglob("*"):
        name = path.relative_to(to)
        if path.is_file() and name.parts[0] != "build" and str(name) not in names:
            path.unlink()


class Copy:
    def __init__(self, timeout):
        self.source = WORK / "source"
        self.build = self.source / "build" / "release"  # so lie, for ccache, all working trees
        self.timeout = timeout
        self.log = WORK / "log.txt"
        self.source.mkdir(parents=True, exist_ok=True)
        copy_sources(self.source)
        python = os.environ.get("DRAY_TEST_PYTHON", "")
        self.command(["cmake", "--preset", "release", f"-DDRAY_TEST_PYTHON={python}"], must=True)
        self.programs = suites_of(self.build)

    def command(self, command, must=False):
        with self.log.open("w") as log:
            status = subprocess.run(command, cwd=self.source, stdout=log,
                                    stderr=subprocess.STDOUT, check=False).returncode
        if must and status:
            raise Mistake(f"{' '.join(command[:3])} ... failed:\n{self.log.read_text()[-4000:]}")
        return status

    def targets(self, suite):
        """A suite's program; what it starts or loads, where it does, and what scripts do."""
        folder, _, name = suite.partition("_")
        tests = self.source / "tests" / folder
        # Programs whose allocations fail do not write down their threads.
        program = self.programs[suite] or (suite if (tests / f"{name}.c").is_file() else None)
        if not program:
            more = [f"{folder}_{path.stem}" for path in tests.glob("*.c")
                    if path.name.startswith(("helper_", "shared_"))]
            return {"dray_product", *more}
        text = "".join(path.read_text() for path in tests.glob("*.[ch]")
                       if path.suffix == ".h" or f"{folder}_{path.stem}" == program)
        return {program} | ({"dray_product"} if "DRAY_PROGRAM" in text else set())

    def compile(self, suites):
        targets = set().union(*(self.targets(suite) for suite in suites))
        return self.command(["cmake", "--build", str(self.build), "-j", JOBS, "--target",
                             "fake_cuda", "fake_nccl", "threads_seen", *sorted(targets)]) == 0

    def failing(self, suites, jobs="1"):
        """Which of the suites fail: (failed, skipped)."""
        names = "|".join(map(re.escape, suites))
        self.command(["ctest", "--test-dir", str(self.build), "-R", f"^({names})$", "-j", jobs,
                      "--timeout", str(self.timeout), "--output-on-failure"])
        lines = self.log.read_text(errors="replace").splitlines()
        results = [re.match(r" *\d+/\d+ +Test +#\d+: (\S+) \.*(.*)", line) for line in lines]
        found = {r.group(1): r.group(2) for r in results if r}
        skipped = [s for s in suites if "Skipped" in found.get(s, "Skipped")]
        return [s for s in suites if s not in skipped and " Passed " not in found[s]], skipped

    def try_mutant(self, m):
        path = self.source / m.file
        whole = path.read_text()
        began = time.monotonic()
        path.write_text(m.applied(whole))
        try:
            if not self.compile(m.suites):
                verdict, by = "does not build", []
            else:
                by = []
                for suite in m.suites:
                    by = self.failing([suite])[0]
                    if by:
                        break
                verdict = "killed" if by else "SURVIVES"
        finally:
            path.write_text(whole)
        return {"name": m.name, "file": m.file, "verdict": verdict, "by": by,
                "suites": m.suites, "seconds": round(time.monotonic() - began, 1)}


# ---- all of it -----------------------------------------------------------------------------------


def run_all(mutants, timeout, say):
    copy = Copy(timeout)
    mistakes = check_anchors(mutants, copy.source)
    mistakes += [f"mutant {m.name}: suite {suite} is not part of this build (DRAY_TEST_PYTHON?)"
                 for m in mutants for suite in m.suites if suite not in copy.programs]
    if mistakes:
        raise Mistake("\n".join(mistakes))
    suites = sorted({suite for m in mutants for suite in m.suites})
    say(f"building and running {len(suites)} suites without a fault")
    if not copy.compile(suites):
        raise Mistake(f"the sources do not build:\n{copy.log.read_text()[-4000:]}")
    failed, skipped = copy.failing(suites, JOBS)
    if failed:
        failed = copy.failing(failed)[0]  # once more, alone: this machine may be busy
    if failed or skipped:
        raise Mistake(f"suites must pass without a fault; failed: {failed}, skipped: {skipped}")
    results = []
    for i, m in enumerate(mutants, 1):
        result = copy.try_mutant(m)
        results.append(result)
        say(f"[{i}/{len(mutants)}] {m.name}: {result['verdict']}"
            f"{' by ' + result['by'][0] if result['by'] else ''}, {result['seconds']} s")
    return results


def table(results):
    lines = ["", f"{'mutant':32} {'file':34} {'verdict':10} suite"]
    for r in results:
        lines.append(f"{r['name']:32} {r['file']:34} {r['verdict']:10} "
                     f"{' '.join(r['by'] or r['suites'])}")
    killed = sum(r["verdict"] == "killed" for r in results)
    lines.append(f"{killed} of {len(results)} mutants died")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="only mutants with such a name")
    parser.add_argument("--list", action="store_true", help="name them and run nothing")
    parser.add_argument("--check", metavar="BUILD",
                        help="only see that anchors and suites are there, with a build's suites")
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a suite")
    options = parser.parse_args()
    say = (lambda text: print(text, file=sys.stderr if options.json else sys.stdout, flush=True))
    try:
        mutants = [m for m in read_mutants() if re.search(options.pattern, m.name)]
        if not mutants:
            raise Mistake(f"no mutant's name has '{options.pattern}' in it")
        if options.list:
            rows = [{"name": m.name, "file": m.file, "suites": m.suites} for m in mutants]
            print(json.dumps(rows, indent=1) if options.json else
                  "\n".join(f"{r['name']:32} {r['file']:34} {' '.join(r['suites'])}" for r in rows))
            return 0
        if options.check:
            mistakes = check_anchors(mutants) + check_suites(mutants, suites_of(options.check))
            print("\n".join(mistakes or [f"{len(mutants)} mutants are anchored"]))
            return 2 if mistakes else 0
        results = run_all(mutants, options.timeout, say)
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(json.dumps(results, indent=1) if options.json else table(results))
    return 0 if all(r["verdict"] == "killed" for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
