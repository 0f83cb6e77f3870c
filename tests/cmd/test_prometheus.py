"""`dray status --prometheus` by the rules of the exposition format (prometheus_client's parser where
it is installed), against what was put."""
import os
import re
import subprocess
import tempfile

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
            assert kind == "gauge" and current not in typed, line
            typed.add(current)
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found and found.group(1) == current, line
            labels = tuple((k, re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v))
                           for k, v in LABEL.findall(found.group(2)))
            assert (current, labels) not in samples, line
            samples[current, labels] = float(found.group(3))
    return samples


with tempfile.TemporaryDirectory() as folder:
    os.environ["DRAY_ADDRESS"] = f"unix:{folder}/s"
    os.environ["XDG_RUNTIME_DIR"] = folder
    server = subprocess.Popen([program, "serve", "--listen", f"unix:{folder}/s"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout.readline().startswith("listening")
        parse(must("status", "--prometheus"))
        must("queue", "open", "--task", "a:x>y", "--task", "b:y>")
        must("queue", "insert", "-p", PARTITION, *['{"x": %d}' % i for i in range(5)])
        claim = must("queue", "claim", "-t", "a", "-n", "2").strip()
        text = must("status", "--prometheus")
        samples = parse(text)
        try:
            from prometheus_client.parser import text_string_to_metric_families
            theirs = {(s.name, tuple(s.labels.items())): s.value
                      for family in text_string_to_metric_families(text) for s in family.samples}
            assert {(n, frozenset(l)): v for (n, l), v in theirs.items()} == \
                {(n, frozenset(l)): v for (n, l), v in samples.items()}
        except ImportError:
            print("prometheus_client is not here")

        def value(name, *labels):
            return samples[name, (("queue", "samples"), *labels)]

        here = ("partition", PARTITION)
        assert value("dray_queue_rows") == 5 and value("dray_queue_bytes") == 40
        assert value("dray_queue_column_rows", here, ("column", "x")) == 5
        assert value("dray_queue_taken_rows", here, ("task", "a")) == 2
        assert value("dray_queue_ready_rows", here, ("task", "a")) == 3
        assert value("dray_queue_ready_rows", here, ("task", "b")) == 0
        assert value("dray_queue_waiting_claims", ("task", "b")) == 0
        must("queue", "release", claim)

        claim = must("queue", "claim", "-t", "a", "-n", "5", "-o", "priority", "--fresh", "9").strip()
        must("queue", "release", claim)  # rows without a version are always fresh
    finally:
        server.terminate()
        assert server.wait(20) == 0
