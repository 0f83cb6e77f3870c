"""The options of the benchmarks of whole jobs, and the command that runs an example."""
import argparse
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def options(doc, flags="json quick strict", **more):
    """Returns a parser with the options that all benchmarks have, and those of one: name=default. A default that is a
    list makes a positional argument."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[])
    for flag in flags.split():
        parser.add_argument("--" + flag, action="store_true")
    for name, default in more.items():
        if isinstance(default, list):
            parser.add_argument(name, nargs="*", default=default)
        else:
            parser.add_argument("--" + name, type=type(default), default=default)
    return parser


def command(verb, example, out, settings, *more):
    """Returns the words of: dray VERB examples/EXAMPLE.yaml --out OUT MORE... --set SETTING..."""
    program = os.environ.get("DRAY_PROGRAM") or str(ROOT / "build/release/dray")
    words = [program, verb, str(ROOT / f"examples/{example}.yaml"), "--out", str(out), *more]
    return words + [word for setting in settings for word in ("--set", setting)]
