#!/usr/bin/env python3
"""make frameworks: dray's wheel with the frameworks themselves, a line a part.

    tests/frameworks/run.py [--list] [--json] [--soak] [--jobs N] [PART...]

A part is a folder here and a line of PARTS: `test.py` in it is run by a Python of its own, under
build/frameworks/PART, that has the wheel (scripts/wheel.sh makes it, first of all) and, where the part has a
`requirements.txt`, what that pins. The environment is made once, and anew when the pins change; the wheel is
put into it whenever it has changed. Exit status 0 of the test: passed; 77: skipped; its last line says what
was seen, and everything that it said is in build/frameworks/PART/log. It finds $DRAY_SOURCE_DIR, and an empty
folder in $DRAY_WORK. --soak: $DRAY_SOAK=1, and the longer limit. N parts
run side by side (2 where there are two cores: most of what they do is to import and to wait), those that may take
longest first, and each may take half as long again. A part that reads a framework's repository
names it as `upstream`: it is skipped where $DRAY_UPSTREAM has no such folder."""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
BUILD = TOP / "build/frameworks"


@dataclass
class Part:
    name: str
    seconds: int       # how long it may take, without what is made once
    soak: int          # in make soak
    what: str
    upstream: str = ""
    ray: bool = False  # it starts Ray, of which one at a time may be on a host


PARTS = [
    Part("wheel", 240, 1200, "the wheel in machines that have nothing: doctor, imports, examples/weights.py"),
    Part("verl_real", 480, 2400, "verl's manager, trainer and workers with checkpoint engine dray: bits, steps, deaths", ray=True),
    Part("ray_real", 480, 480, "dray.ray in a cluster of three nodes: one removed and one added, rewards as undisturbed", ray=True),
    Part("ce_real", 120, 120, "checkpoint-engine's protocol: its own update_weights_from_ipc, and dray's end"),
    Part("formats_real", 120, 600, "torchao, compressed-tensors and DeepGEMM's formulas: the formats that engines load, bit for bit"),
    Part("record_real", 480, 1800, "dray.weights.record with vLLM's models and loaders, by bytes"),
    Part("record_sglang", 360, 1800, "the same with SGLang's"),
    Part("models_real", 120, 120, "transformers' modules with Conv3d, router biases, tied heads: FSDP2's shards, received by modules"),
    Part("nemo_contract", 120, 300, "dray's checkpoint engine with NeMo-RL's own classes, and its tests of them", "nemo-rl"),
    Part("slime_contract", 180, 400, "dray's updater and data source with slime's own modules, and its test of data sources", "slime"),
    Part("miles_contract", 120, 300, "dray's transfer protocol with miles' own", "miles"),
    Part("megatron_real", 180, 600, "mbridge's converters of Megatron-Core's parameters, recorded: blocks by bytes"),
    Part("vllm_real", 480, 1200, "vLLM for the CPU with backend dray, and an FSDP2 trainer: tokens as transformers'"),
    Part("gpu_job_real", 600, 1800, "examples/gpu with vLLM for the CPU, in the process and as a server that dies: log-probs by version"),
    Part("lora_real", 300, 600, "adapters alone, PEFT's, by vLLM's own path for them; and merged on the way"),
    Part("sglang_real", 480, 1200, "SGLang's weight updates by dray, and an FSDP2 trainer: bytes as SGLang's own loading has them"),
    Part("swift_real", 120, 120, "checkpoints in a bucket of OpenStack Swift, which verifies signatures: bits; a wrong key is refused"),
    Part("seen_real", 120, 120, "Perfetto's classes, TensorBoard's and Weights & Biases' readers: what they read of a run"),
    Part("tq_real", 900, 1800, "TransferQueue's own tests: dray as its storage, and in its place", ray=True),
]
OF_TORCH = ("torchaudio", "torchcodec", "torchvision")  # PyPI's do not load with a torch for the CPU; frameworks do without
SETTING_UP = 600     # seconds: packages fetched and built, for one part


RUNNING = set()      # processes, each of a group of its own


def say(text, file=sys.stderr):
    print(text, file=file, flush=True)


def end(process):
    """Ends a process and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(command, log, seconds, **options):
    """Its exit status; None: it took too long, and was ended with what it had started."""
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, cwd=TOP, **options)
        RUNNING.add(process)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
            process.wait()
            RUNNING.discard(process)


def make_wheel():
    """The wheel's path. What scripts/wheel.sh does is seen as it is done."""
    subprocess.run([TOP / "scripts/wheel.sh"], check=True, stdout=sys.stderr)
    return next((TOP / "build/wheel/dist").glob("*.whl"))


class Failed(Exception):
    pass


def environment(part, wheel, log):
    """The part's Python, with its packages and this wheel."""
    folder = BUILD / part.name
    pins = HERE / part.name / "requirements.txt"
    wanted = f"{sys.version}\n{pins.read_text() if pins.is_file() else ''}"
    python, stamp, has = folder / "venv/bin/python", folder / "made", folder / "has"

    def pip(*arguments):
        command = [python, "-m", "pip", "install", "-q", "--no-compile", "--retries", "2", *arguments]  # what is imported, compiles itself
        if run(command, log, SETTING_UP) != 0:
            raise Failed(f"pip install {arguments[-1]}")

    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder / "venv", ignore_errors=True)
        has.unlink(missing_ok=True)
        if run([sys.executable, "-m", "venv", folder / "venv"], log, SETTING_UP) != 0:
            raise Failed("python -m venv")
        if pins.is_file():
            pip("-r", pins)
            for name in OF_TORCH:
                if run([python, "-c", f"import importlib.util as u; u.find_spec('{name}') and __import__('{name}')"],
                       log, SETTING_UP) != 0:
                    run([python, "-m", "pip", "uninstall", "-q", "-y", name], log, SETTING_UP)
        stamp.write_text(wanted)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if not has.is_file() or has.read_text() != digest:
        pip("--no-deps", "--force-reinstall", wheel)
        has.write_text(digest)
    return python


def try_part(part, wheel, soak, beside):
    """("passed", "failed" or "skipped", what was seen). beside: another part may run at the same time."""
    repository = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), part.upstream)
    if part.upstream and not repository.is_dir():
        return "skipped", f"$DRAY_UPSTREAM has no {part.upstream}"
    folder = BUILD / part.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    log.write_bytes(b"")
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    limit = (part.soak if soak else part.seconds) * (1.5 if beside else 1)
    variables = {name: value for name, value in os.environ.items()
                 if not name.startswith("DRAY_") and name not in ("PYTHONPATH", "LD_PRELOAD")}
    variables.update(DRAY_SOURCE_DIR=str(TOP), DRAY_WORK=str(work), DRAY_WHEEL=str(wheel), PYTHONUNBUFFERED="1",
                     **({"DRAY_SOAK": "1"} if soak else {}),
                     **({"DRAY_UPSTREAM": os.environ["DRAY_UPSTREAM"]} if "DRAY_UPSTREAM" in os.environ else {}))
    try:
        python = environment(part, wheel, log)
        status = run([python, HERE / part.name / "test.py"], log, limit, env=variables)
    except Failed as failed:
        return "failed", f"{failed}: {log.relative_to(TOP)} has what it said"
    said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    if status not in (0, 77):
        for line in said[-30:]:
            say("    " + line)
        return "failed", f"took more than {limit:.0f} s" if status is None else f"ended with {status}: {said[-1]}"
    return "skipped" if status else "passed", said[-1]


def timed(part, *options):
    begun = time.monotonic()
    return part, *try_part(part, *options), time.monotonic() - begun


def try_all(parts, wheel, soak, jobs):
    """Yields (part, result, what was seen, seconds) of each when it has ended."""
    jobs = min(jobs, len(parts))
    left = sorted(parts, key=lambda part: -(part.soak if soak else part.seconds)) if jobs > 1 else list(parts)
    with ThreadPoolExecutor(jobs) as pool:
        begun = {}
        try:
            while left or begun:
                for part in list(left):
                    if len(begun) < jobs and not (part.ray and any(other.ray for other in begun.values())):
                        left.remove(part)
                        begun[pool.submit(timed, part, wheel, soak, jobs > 1)] = part
                for ended in wait(begun, return_when=FIRST_COMPLETED).done:
                    del begun[ended]
                    yield ended.result()
        except BaseException:  # interrupted
            for process in list(RUNNING):
                end(process)
            raise


def positive(text):
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"a number of at least 1 expected, found {text!r}")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--soak", action="store_true", default=os.environ.get("DRAY_SOAK") == "1")
    parser.add_argument("--jobs", type=positive, default=min(2, len(os.sched_getaffinity(0))))
    given = parser.parse_args()
    by_name = {part.name: part for part in PARTS}
    unknown = [name for name in given.parts if name not in by_name]
    if unknown:
        parser.error(f"one of {', '.join(by_name)} expected, found {unknown[0]}")
    if given.list:
        for part in PARTS:
            line = {"part": part.name, "what": part.what, "seconds": part.seconds, "soak_seconds": part.soak,
                    "upstream": part.upstream}
            say(json.dumps(line) if given.json else f"{part.name:<16} {part.what}", sys.stdout)
        return 0
    wheel, count = make_wheel(), {"passed": 0, "failed": 0, "skipped": 0}
    parts = [by_name[name] for name in given.parts] or PARTS
    for part, result, seen, seconds in try_all(parts, wheel, given.soak, given.jobs):
        count[result] += 1
        say(json.dumps({"part": part.name, "result": result, "seconds": round(seconds, 1), "seen": seen})
            if given.json else f"{part.name:<16} {seconds:5.0f} s  {result}: {seen}", sys.stdout)
    if count["skipped"] and not given.json:
        say(f"{count['skipped']} skipped", sys.stdout)
    if not given.json:
        say(f"{count['passed']} passed, {count['failed']} failed", sys.stdout)
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
