"""What the tests of pages share: the data of a page, as it shows it, and a headless Chromium that opens it."""
import base64
import re
import shutil
import struct

from jobs import *

CHROMIUM = next((found for found in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if found), None)


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)[1])


def numbers(code, count):
    """What the page draws: floats of 32 bits, a number for all, or none."""
    if isinstance(code, str):
        raw = base64.b64decode(code)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    return [code if code is not None else float("nan")] * count


def flat(row, prefix=""):
    for key, value in row.items():
        if isinstance(value, dict) and prefix + key != "seconds":
            yield from flat(value, prefix + key + ".")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


def same(a, b):
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-30)


def check_values(name, run, made):
    """Every number of every row of metrics.jsonl is in the page's curves."""
    stride, points = run["stride"], -(-run["rows"] // run["stride"])
    check(run["rows"] == len(made), f"{name}: {run['rows']} rows of {len(made)}")
    curves = {key: numbers(code, points) for key, code in run["curves"].items()}
    rows_of = [dict(flat(row)) for row in made]
    check(set(curves) >= {key for row in rows_of for key in row}, f"{name}: keys without a curve")
    for key, values in curves.items():
        for i in range(points) if not key.startswith("stale.") else ():
            there = [row[key] for row in rows_of[i * stride:(i + 1) * stride] if key in row]
            if not there:
                check(i >= len(values) or values[i] != values[i], f"{name}: {key} {i}: {values[i]} of nothing")
                continue
            # A role's time lacks the causes that it did not wait for.
            base = key if not key.startswith("time.") else ".".join(key.split(".")[:2]) + ".processes"
            among = sum(base in row for row in rows_of[i * stride:(i + 1) * stride])
            want = max(there) if key.endswith("_max") else sum(there) / among
            if not same(values[i], want):
                check(False, f"{name}: {key}, point {i}: the page has {values[i]}, metrics.jsonl {want}")
                return


def open_page(name, page, width, dark):
    """The page as Chromium has it after it was drawn: no error in the console, nothing wider than the window. The page's
    own policy (Content-Security-Policy) lets the browser refuse, and report, what would come from elsewhere."""
    look = ["--force-dark-mode"] if dark else []
    profile = tempfile.mkdtemp(prefix="dray-chromium-", dir=work)
    done = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                           "--enable-logging=stderr", f"--window-size={width},2000", *look,
                           "--dump-dom", page.as_uri()],
                          capture_output=True, text=True, timeout=PATIENCE)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    check(not said, f"{name}, {width} px: {said}")
    root = re.search(r"<html[^>]*>", done.stdout)
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', root[0] if root else ""))
    check("drawn" in attributes, f"{name}, {width} px: the page was not drawn: {done.stderr[-2000:]}")
    check("error" not in attributes, f"{name}, {width} px: {attributes}")
    check(attributes.get("overflow") == "0", f"{name}, {width} px: wider than the window: {attributes}")
    check("<canvas" in done.stdout, f"{name}: no pictures")
    return attributes
