#!/usr/bin/env python3
"""Runs examples/gpu/shapes.yaml under four schedules, interleaved, and compares their use of the same GPUs.

  turns           sync; trainer and engines share all GPUs, and release them to each other together with their memory
  sync            sync; N GPUs train (--trainer), the others generate
  one_step_async  the same split; the engines' next weights arrive while they generate
  async           the same split; weights are taken in the middle of responses, staleness 2

    PYTHONPATH=python python3 bench/gpu_job.py --gpus 2 --trainer 1
    PYTHONPATH=python python3 bench/gpu_job.py --gpus 0 --model tiny --scale 0.1     # on a CPU

The figures are of the steps after the first --warm ones:

  samples/s       samples per second
  idle            shares of the trainer's and of the engines' time, by the cause of the wait
  update          the median over engines and steps of the time that an engine takes for a version, prefetched or not,
                  without the wait for the version
  pause, longest  the median and the longest time in which an engine generates nothing because of an update
  staleness       the mean over samples, of each sample's oldest token
  made anew       the samples of a step that became too old before they were finished

The lengths are those of examples/gpu/lengths.txt times --scale, the same in all runs. A failed run has a row that says
so."""
import collections
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jobs

SETTINGS = {
    "turns": ["schedule=sync", "staleness=0", "update=boundary"],
    "sync": ["schedule=sync", "staleness=0", "update=boundary"],
    "one_step_async": ["schedule=one_step_async", "staleness=0", "update=boundary"],
    "async": ["schedule=async", "staleness=2", "update=in_flight"],
}
TINY = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "float32"}
EXAMPLE = jobs.ROOT / "examples" / "gpu"


def prepare(options, folder):
    """Writes the lengths for all runs. Returns the model's folder."""
    model = EXAMPLE / options.model
    if options.model == "tiny":
        model = folder / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
    lines = (EXAMPLE / "lengths.txt").read_text().splitlines()
    lengths = [max(1, round(int(line) * options.scale)) for line in lines if not line.startswith("#")]
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
    return model


def roles(name, options, model, folder):
    """Returns the settings for the roles' commands and GPUs."""
    gpus, trainers = options.gpus, options.trainer
    train = f"exec {sys.executable} train.py --model {model} --no-checkpoints --threads {options.threads}"
    rollout = (f"exec {sys.executable} rollout.py --model {model} --lengths {folder / 'lengths.txt'} "
               f"--threads {options.threads}")
    found = {"trainer.command": train, "rollout.command": rollout}
    if name == "turns":
        device = f"cuda:0-{gpus - 1}" if gpus else "cpu:0"
        found.update({"trainer.devices": device, "trainer.ranks": gpus or 1,
                      "rollout.devices": device, "rollout.instances": gpus or 1})
    elif gpus:
        found.update({"trainer.devices": f"cuda:0-{trainers - 1}", "trainer.ranks": trainers,
                      "rollout.devices": f"cuda:{trainers}-{gpus - 1}", "rollout.instances": gpus - trainers})
    return [f"roles.{key}={value}" for key, value in found.items()]


def run(name, options, model, folder, number):
    out = folder / f"{name}-{number}"
    settings = [*SETTINGS[name], f"steps={options.warm + options.steps}", f"actor.micro_batch={options.micro}",
                f"rollout.micro_batch={options.slots}",
                *roles(name, options, model, folder), *options.set]
    began = time.monotonic()
    with open(folder / "log", "a") as log:
        code = subprocess.run(jobs.command("run", "gpu/shapes", out, settings), stdout=log, stderr=log,
                              stdin=subprocess.DEVNULL, check=False).returncode
    print(f"{name}: {time.monotonic() - began:.0f} s, status {code}", file=sys.stderr, flush=True)
    return out if code == 0 else None


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(out, warm):
    """Returns the figures of one run's steps after the warm-up."""
    rows = [row for row in lines(out / "metrics.jsonl") if row["step"] > warm]
    seconds = sum(row["step_seconds"] for row in rows)
    idle = {}
    for role in ("trainer", "rollout"):
        waits, whole = collections.Counter(), 0.0
        for row in rows:
            told = row["time"].get(role, {"processes": 0, "wait": {}})
            whole += told["processes"] * row["step_seconds"]
            waits.update(told["wait"])
        idle[role] = {cause: part / whole for cause, part in waits.items() if whole}
    events = lines(out / "events.jsonl")
    updates = [event for event in events
               if event["event"] == "engine_update" and event["version"] >= warm]
    lost = sum(int(event["message"].split()[1]) for event in events
               if event["event"] == "lost" and event["step"] >= warm and "too old" in event["message"])
    return {"samples": sum(row["samples"] for row in rows), "lost": lost, "steps": len(rows), "tokens": sum(row["tokens"] for row in rows),
            "seconds": seconds, "idle": idle, "update": [u["seconds"] - u.get("wait_seconds", 0) for u in updates],
            "pause": [u["pause_seconds"] for u in updates], "bytes": max((u["bytes"] for u in updates), default=0),
            "staleness": statistics.mean(row["staleness_mean"] for row in rows)}


def summary(name, found):
    """Returns a schedule's figures over all rounds."""
    if not found:
        return {"schedule": name, "failed": True}
    seconds, idle = sum(one["seconds"] for one in found), {}
    for role in ("trainer", "rollout"):
        causes = {cause for one in found for cause in one["idle"][role]}
        idle[role] = {c: statistics.mean(one["idle"][role].get(c, 0.0) for one in found) for c in sorted(causes)}
    every = {key: [value for one in found for value in one[key]] for key in ("update", "pause")}
    return {"schedule": name, "samples_per_s": sum(one["samples"] for one in found) / seconds,
            "tokens_per_s": sum(one["tokens"] for one in found) / seconds, "idle": idle,
            "update_seconds": statistics.median(every["update"] or [0.0]),
            "pause_seconds": statistics.median(every["pause"] or [0.0]), "pause_longest": max(every["pause"], default=0.0),
            "update_bytes": max(one["bytes"] for one in found), "staleness": statistics.mean(o["staleness"] for o in found),
            "made_anew": sum(one["lost"] for one in found) / sum(one["steps"] for one in found)}


def shares(idle):
    told = [f"{cause} {share:.1%}" for cause, share in sorted(idle.items(), key=lambda i: -i[1]) if share >= 0.005]
    return f"{sum(idle.values()):.1%}" + (f" ({', '.join(told)})" if told else "")


def table(found):
    print("| schedule | samples/s | tokens/s | trainer idle | engines idle | update | pause, longest | staleness | made anew |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        if row.get("failed"):
            print(f"| {row['schedule']} | failed |  |  |  |  |  |  |  |")
            continue
        print(f"| {row['schedule']} | {row['samples_per_s']:.2f} | {row['tokens_per_s']:.0f} | "
              f"{shares(row['idle']['trainer'])} | {shares(row['idle']['rollout'])} | {row['update_seconds'] * 1e3:.1f} ms | "
              f"{row['pause_seconds'] * 1e3:.1f}, {row['pause_longest'] * 1e3:.1f} ms | {row['staleness']:.2f} | {row['made_anew']:.1f} |")


def main():
    parser = jobs.options(__doc__, "json", gpus=2, trainer=1, steps=10, warm=2, rounds=1, scale=1.0, slots=64, micro=4,
                          threads=1, model="qwen2.5-1.5b", keep="", entries=[])
    options = parser.parse_args()
    if options.gpus and options.entries != ["turns"] and not 0 < options.trainer < options.gpus:
        parser.error(f"--trainer: 1 to {options.gpus - 1} of {options.gpus} GPUs expected, found {options.trainer}")
    entries = options.entries or list(SETTINGS)
    for name in entries:
        if name not in SETTINGS:
            parser.error(f"{name}: one of {', '.join(SETTINGS)} expected")
    folder = pathlib.Path(options.keep or tempfile.mkdtemp(prefix="dray-gpu-job-"))
    folder.mkdir(parents=True, exist_ok=True)
    made = collections.defaultdict(list)
    try:
        model = prepare(options, folder)
        for number in range(options.rounds):
            for name in entries:
                out = run(name, options, model, folder, number)
                if out:
                    made[name].append(measure(out, options.warm))
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    found = [summary(name, made[name]) for name in entries]
    if options.json:
        print(json.dumps(found))
    else:
        table(found)
    return any(row.get("failed") for row in found)


if __name__ == "__main__":
    sys.exit(main())
