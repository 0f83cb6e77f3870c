#!/usr/bin/env python3
"""Makes tables of the results of bench/gpu.sh.

  gpu_tables.py OUT.json             prints them
  gpu_tables.py OUT.json --write     writes them into README.md, docs/gpu.md and docs/updates.svg

README.md has the table of the run that was written last. docs/gpu.md has one for each number of GPUs, between two
comments. bench/gpu.sh makes OUT.json. The script needs the standard library only."""
import argparse
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NUMBERS = {2: "two", 4: "four", 8: "eight"}
PAUSE_MS = 3  # the target of a commit by exchange
FLOWS = (("m2n_ms", "NCCL M2N", ("m2n",)), ("gather_ms", "gather and slice", ("broadcast", "ipc")),
         ("packed_ms", "packed buckets", ("packed",)), ("server_ms", "ParameterServer", ("server",)))


def collect(args):
    """Returns the run: rows with their limits and ratios, and flows, from the lines that bench/gpu.sh wrote."""
    with open(args.found) as file:
        lines = [json.loads(line) for line in file]
    rows, flows = [[line for line in lines if key in line] for key in ("row", "flow")]
    times = {r["row"]: r["bench"]["value"] for r in rows if "bench" in r}
    for flow in flows:
        if "bench" in flow:
            flow["ms"] = flow["bench"]["median_seconds"] * 1e3
    for r in rows:
        if "bench" not in r:
            continue
        b = r["bench"]
        limit = b["limit"] if r["against"] == "limit" else times.get(r["against"], 0)
        r["limit_ms"], r["ms"] = limit * 1e3, b["value"] * 1e3
        r["engine_ms"] = b["engine_seconds"] * 1e3 if "engine_seconds" in b else None
        r["ratio"] = b["value"] / limit if limit else 0
        r["met"] = r["target"] == 0 or 0 < r["ratio"] <= r["target"]
        for key, _, kinds in FLOWS:
            r[key] = min((f["ms"] for f in flows
                          if f["of"] == r["row"] and f["flow"] in kinds and "ms" in f), default=None)
    verified, bare = times.get("32B apart"), times.get("32B apart, not verified")
    return {"gpus": args.gpus, "kind": args.kind, "repeats": args.repeats, "seconds": args.seconds,
            "verification": verified / bare - 1 if verified and bare else None,
            "rows": rows, "flows": flows, "ways": [line["way"] for line in lines if "way" in line]}


def ms(value):
    """Returns milliseconds as tables write them: 9.6, 82.7, 324, 1,219; "" for None."""
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# ---- on a terminal --------------------------------------------------------------------------------

def notes(run):
    """Yields the sentences beside the table."""
    if run["verification"] is not None:
        yield (f"Verification, on both sides, costs {100 * run['verification']:.1f} % of an update "
               "(32B apart; target 3 %).")
    for r in run["rows"]:
        d = r.get("bench", {}).get("decoding")
        if "by exchange" in r["row"] and "bench" in r:
            said = r["bench"]["report"]
            yield (f"{r['row']}: pause {r['bench']['pause_seconds'] * 1e3:.2f} ms (target {PAUSE_MS} ms), of "
                   f"{said['bytes'] / 1e9:.1f} GB {said['exchanged_bytes'] / 1e9:.1f} were exchanged, spare memory "
                   f"{said['spare_bytes'] / 1e9:.1f} GB, {said['spare_waste_bytes'] / 1e6:.1f} MB of it unused.")
        if "delta" in r["row"] and "bench" in r:
            b = r["bench"]
            sent, of = ((b["prefetch_delta_bytes"], b["prefetch_delta_covered_bytes"]) if "prefetch_delta_bytes" in b
                        else (b["report"]["delta_bytes"], b["report"]["delta_covered_bytes"]))
            yield (f"{r['row']}: {100 * sent / of if of else 100:.2f} % of the bytes that deltas stand for, pause "
                   f"{b['pause_seconds'] * 1e3:.2f} ms"
                   + (f", the prefetch {b['prefetch_seconds'] * 1e3:.1f} ms." if "prefetch_seconds" in b else "."))
        if d and d["steps"]:
            yield (f"{r['row']}: steps of {d['step_before_seconds'] * 1e3:.2f} ms took "
                   f"{d['step_seconds'] * 1e3:.2f} ms (+{100 * (d['slowdown'] - 1):.1f} %), p99 of "
                   f"{d['p99_before_seconds'] * 1e3:.2f} ms {d['p99_seconds'] * 1e3:.2f} ms "
                   f"(+{100 * (d['p99_slowdown'] - 1):.1f} %), the "
                   f"prefetch {r['bench']['prefetch_seconds'] * 1e3:.1f} ms.")
    for f in run["flows"]:
        if f.get("bench", {}).get("matrices_only"):
            yield f"{f['flow']}, {f['of']}: matrices only, without biases, norms and routers."


def ways(run):
    """Yields the cells of `dray bench compare --memory cuda`: name, time, ratio, pause, and a rank's staging."""
    for w in run.get("ways", []):
        yield (w["name"], ms(w["value"] * 1e3), f"{w['value'] / w['limit']:.2f} x {w['limit_by']}",
               ms(w["pause_seconds"] * 1e3), f"{w['report']['peak_extra_bytes'] / 1e6:,.0f} MB")


def print_run(run):
    form = "%-56s %8s %8s %7s %7s %8s %8s %8s %8s %8s %7s%s"
    print(form % (f"work, {run['gpus']} GPUs, ms", "limit", "dray", "ratio", "target", "engines", "M2N",
                  "gather", "packed", "server", "faster", ""))
    for r in run["rows"]:
        if "bench" not in r:
            print("%-56s %s" % (r["row"], r["error"][:100]))
            continue
        others = [r[key] for key, _, _ in FLOWS if r[key]]
        print(form % (r["row"], ms(r["limit_ms"]), ms(r["ms"]), f"{r['ratio']:.3f}", r["target"] or "",
                      ms(r["engine_ms"]), *(ms(r[key]) for key, _, _ in FLOWS),
                      f"{min(others) / r['ms']:.1f}x" if others else "", "" if r["met"] else "  missed"))
    print("dray: from dray_publisher_publish to the last engine's commit (of what was prefetched, the commit alone); "
          "engines: from the end of the last trainer's publish on.")
    for f in run["flows"]:
        print(f"{f['flow']}, {f['of']}: " + (ms(f["ms"]) + " ms" if "ms" in f else f["error"][-100:]))
    for note in notes(run):
        print(note)
    for cells in ways(run):
        print("%-48s %8s ms  %-24s pause %8s ms, staging %s" % cells)


# ---- in the docs ----------------------------------------------------------------------------------

def replace(path, begin, end, text, before=None):
    """Replaces the text between two comments of a page. A block that does not exist yet is inserted before the line
    `before`."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    block = f"{begin}\n{text}\n{end}"
    if begin in page:
        page = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: block, page, count=1, flags=re.S)
    elif before and before in page:
        page = page.replace(before, block + "\n\n" + before, 1)
    else:
        sys.exit(f"gpu_tables.py: {path} has no line {begin}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def readme(run):
    rows = {r["row"]: r for r in run["rows"] if "bench" in r}
    half, gpus = run["gpus"] // 2, run["gpus"]
    apart = f"from {half} GPUs to {half} others" if half > 1 else "from one GPU to another"
    names = (("32B apart", f"Qwen2.5-32B, {apart}"),
             ("30B-A3B apart", "Qwen3-30B-A3B (18,867 tensors), the same"),
             (f"32B co-located TP{gpus}", f"Qwen2.5-32B, trainer and engine on the same {gpus} GPUs"),
             (f"30B-A3B co-located TP{gpus}", "Qwen3-30B-A3B, the same"))
    missing = [name for name, _ in names if name not in rows]
    if missing:
        sys.exit(f"gpu_tables.py: the run has no figure of {', '.join(missing)}")
    first = rows["32B apart"]

    def line(name, what):
        row = rows[name]
        gathering = min((row[key] for key in ("gather_ms", "packed_ms") if row[key]), default=None)
        cells = [row["limit_ms"], row["ms"], row["m2n_ms"], gathering]
        return "| " + " | ".join([what] + [ms(c) + " ms" if c is not None else "-" for c in cells]) + " |"
    table = "\n".join(line(name, what) for name, what in names)
    return f"""dray's time counts from `dray_publisher_publish` to the last engine's commit, which waits for the publishers' checksums:

![The links allow {ms(first['limit_ms'])} ms for Qwen2.5-32B, dray takes {ms(first['ms'])}; \
the table has all](docs/updates.svg)

| update, {NUMBERS.get(gpus, gpus)} {run['kind']} | the links' limit | dray | NCCL M2N | gather and slice |
| --- | --- | --- | --- | --- |
{table}"""


def all_rows(run):
    lines = []
    for r in run["rows"]:
        if "bench" in r:
            against = "" if r["against"] == "limit" else f" (against {r['against']})"
            lines.append(f"| {r['row']}{against} | {ms(r['limit_ms'])} | {ms(r['ms'])} | {r['ratio']:.2f} | "
                         f"{ms(r['engine_ms'])} | " + " | ".join(ms(r[key]) for key, _, _ in FLOWS) + " |")
    said = "\n".join(f"- {note}" for note in notes(run))
    each = "\n".join("| " + " | ".join(cells) + " |" for cells in ways(run))
    if each:
        said += """

Qwen3-4B in every way, `dray bench compare --memory cuda --model qwen3-4b` (prefetches: the commit alone; pause: how
long the engine may not run):

| mode, strategy, state dict | ms | over the limit | pause, ms | staging of a rank |
| --- | --- | --- | --- | --- |
""" + each
    return f"""{str(NUMBERS.get(run['gpus'], run['gpus'])).capitalize()} {run['kind']}, milliseconds, medians \
of {run['repeats']}; the run took {run['seconds']} s:

| | limit | dray, publish to commit | ratio | engines' part | {" | ".join(name for _, name, _ in FLOWS)} |
| --- | --- | --- | --- | --- |{" --- |" * len(FLOWS)}
""" + "\n".join(lines) + ("\n\n" + said if said else "")


def write(run, root):
    page, pages = os.path.join(root, "README.md"), os.path.join(root, "docs/gpu.md")
    replace(page, "<!-- bench/gpu_tables.py -->", "<!-- end -->", readme(run))
    replace(pages, f"<!-- bench/gpu_tables.py: {run['gpus']} GPUs -->", "<!-- end -->", all_rows(run),
            "<!-- bench/gpu_tables.py: more -->")
    bars = subprocess.run([sys.executable, os.path.join(HERE, "scripts/bars.py"), page], check=True,
                          stdout=subprocess.PIPE)
    with open(os.path.join(root, "docs/updates.svg"), "wb") as file:
        file.write(bars.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="OUT.json")
    parser.add_argument("--write", action="store_true", help="into README.md, docs/gpu.md, docs/updates.svg")
    parser.add_argument("--root", default=HERE, help="the folder that has them")
    for name, kind in ("found", str), ("out", str), ("kind", str), ("gpus", int), ("repeats", int), \
            ("seconds", int):
        parser.add_argument("--" + name, type=kind, help=argparse.SUPPRESS)  # bench/gpu.sh gives them
    args = parser.parse_args()
    if args.found:
        run = collect(args)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(run, file, indent=1)
    elif args.run:
        with open(args.run) as file:
            run = json.load(file)
    else:
        parser.error("expected OUT.json")
    if args.write:
        write(run, args.root)
    else:
        print_run(run)


main()
