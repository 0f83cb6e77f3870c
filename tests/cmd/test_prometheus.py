"""`dray status --prometheus` and GET /metrics by the rules of the exposition format (prometheus_client's
parser where it is installed), against what was put, claimed, committed and refused."""
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request

program = os.environ["DRAY_PROGRAM"]
PARTITION = 'odd "name"\\ of a step'


def must(*arguments, **more):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, **more)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)$')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parse(text):
    samples, typed, current = {}, set(), None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert kind in ("gauge", "counter", "histogram") and current not in typed, line
            assert (kind == "counter") == current.endswith("_total"), line
            typed.add(current)
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            base = re.sub("_(bucket|sum|count)$", "", found.group(1)) if kind == "histogram" else \
                found.group(1)
            assert base == current, line
            labels = tuple((k, re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v))
                           for k, v in LABEL.findall(found.group(2)))
            assert (found.group(1), labels) not in samples, line
            samples[found.group(1), labels] = float(found.group(3))
    return samples


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def refused(url, code, data=None):
    try:
        urllib.request.urlopen(url, data=data, timeout=20)
    except urllib.error.HTTPError as error:
        assert error.code == code, (url, error.code)
    else:
        assert False, url


with tempfile.TemporaryDirectory() as folder:
    os.environ["DRAY_ADDRESS"] = f"unix:{folder}/s"
    os.environ["XDG_RUNTIME_DIR"] = folder
    server = subprocess.Popen([program, "serve", "--json", "--listen", f"unix:{folder}/s",
                               "--metrics", "0"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    try:
        url = json.loads(server.stdout.readline())["metrics"]
        assert url.startswith("http://127.0.0.1:") and url.endswith("/metrics")
        parse(must("status", "--prometheus"))
        must("queue", "open", "--task", "a:x>y", "--task", "b:y>")
        must("queue", "insert", "-p", PARTITION, *['{"x": %d}' % i for i in range(5)])
        claim = must("queue", "claim", "-t", "a", "-n", "2").strip()
        done = subprocess.run([program, "queue", "seal", "-p", "nowhere"], capture_output=True)
        assert done.returncode == 1
        text = get(url)
        samples = parse(text)
        # The same but for who asks.
        assert {s: v for s, v in parse(must("status", "--prometheus")).items()} == samples
        try:
            from prometheus_client.parser import text_string_to_metric_families
            theirs = {(s.name, tuple(s.labels.items())): s.value
                      for family in text_string_to_metric_families(text) for s in family.samples}
            assert {(n, frozenset(l)): v for (n, l), v in theirs.items()} == \
                {(n, frozenset(l)): v for (n, l), v in samples.items()}
        except ImportError:
            print("prometheus_client is not here")

        # What the dashboard asks for is what there is: names, and labels of them.
        known = {name: set() for name in re.findall(r"# TYPE (\S+)", text)}
        for name, labels in samples:
            known[re.sub("_(bucket|sum|count)$", "", name) if name not in known else name] |= dict(labels).keys()
        dashboard = json.loads((pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples/grafana/dray.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                asked = re.findall(r"dray_[a-z_]+", target["expr"])
                assert asked, target
                for name in asked:
                    base = re.sub("_bucket$", "", name)
                    assert base in known, name
                    wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                    assert not known[base] or wanted - {"error"} <= known[base] | {"error"}, (target, known[base])

        def value(name, *labels):
            return samples[name, (("queue", "samples"), *labels)]

        here = ("partition", PARTITION)
        assert value("dray_queue_rows") == 5 and value("dray_queue_bytes") == 40
        assert value("dray_queue_column_rows", here, ("column", "x")) == 5
        assert value("dray_queue_taken_rows", here, ("task", "a")) == 2
        assert value("dray_queue_ready_rows", here, ("task", "a")) == 3
        assert value("dray_queue_ready_rows", here, ("task", "b")) == 0
        assert value("dray_queue_waiting_claims", ("task", "b")) == 0
        assert value("dray_queue_inserted_rows_total") == 5
        assert value("dray_queue_column_in_rows_total", ("column", "x")) == 5
        assert value("dray_queue_column_in_bytes_total", ("column", "x")) == 40
        task = ("task", "a")
        assert value("dray_queue_task_claims_total", task) == 1
        assert value("dray_queue_task_claimed_rows_total", task) == 2
        assert value("dray_queue_task_claimed_bytes_total", task) == 16
        assert value("dray_queue_task_committed_rows_total", task) == 0
        assert value("dray_queue_lost_rows_total", ("cause", "failed")) == 0
        assert samples["dray_queue_refusals_total", (("request", "QUEUE_SEAL"), ("error", "ENOENT"))
                       ] == 1
        waits = [v for (n, l), v in samples.items() if n == "dray_queue_wait_seconds_bucket" and
                 dict(l)["request"] == "claim"]
        assert len(waits) == 12 and waits == sorted(waits) and waits[-1] == 1
        claimed = (("request", "claim"), task)
        assert value("dray_queue_wait_seconds_count", *claimed) == 1
        assert 0 <= value("dray_queue_wait_seconds_sum", *claimed) < 60
        refused(url + "x", 404)
        refused(url, 501, data=b"x=1")
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as rude:
            rude.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100000)
            rude.settimeout(20)
            assert b"200" not in rude.recv(100)
        must("queue", "release", claim)

        claim = must("queue", "claim", "-t", "a", "-n", "5", "-o", "priority", "--fresh", "9").strip()
        must("queue", "release", claim)  # rows without a version are always fresh
        later = parse(get(url))
        assert later["dray_queue_task_given_back_rows_total", (("queue", "samples"), task)] == 7
        text = must("status")
        assert "queues samples, tasks_out" in text and "queues samples, waited" in text, text
        for address, environment in (("0.0.0.0:0", {}), ("nonsense", {}), ("127.0.0.1:70000", {})):
            bad = subprocess.run([program, "serve", "--listen", f"unix:{folder}/t", "--metrics", address],
                                 capture_output=True, text=True, timeout=60,
                                 env=dict(os.environ, DRAY_TRUSTED_NETWORKS="", **environment))
            status = 1 if address == "0.0.0.0:0" else 2  # refused, or no address at all
            assert bad.returncode == status and "metrics" in bad.stderr, bad
    finally:
        server.terminate()
        assert server.wait(20) == 0
