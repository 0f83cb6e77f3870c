"""The page of a run while it goes on: dray run says where, who asks by another name is refused, nothing but GET is
answered, and the events are the rows of metrics.jsonl, to the end."""
import http.client
import re
import urllib.parse

from pages import *

CLOCK = ("clock.enabled=true", "clock.token_seconds=0.01", "clock.train_seconds=0.001", "steps=8", "roles.engine.ranks=1")


def ask(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    return connection.getresponse()


def events(response):
    """(name, data) of a stream of server-sent events, until it ends."""
    name = None
    for line in response:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            name = text[7:]
        elif text.startswith("data: "):
            yield name, json.loads(text[6:])


folder = work / "live"
process = start(folder, *words(CLOCK))
said = [process.stdout.readline() for _ in range(2)]
found = re.search(r"http://127\.0\.0\.1:(\d+)/", said[1])
check(found, f"no address: {said}")
port = int(found[1]) if found else 0

page = ask(port)
text = page.read().decode()
check(page.status == 200 and page.headers["Content-Type"].startswith("text/html"), f"the page: {page.status}")
shown = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])
check(shown["live"] and shown["runs"][0]["folder"] == str(folder), f"the page: {shown}")
check(ask(port, host=f"localhost:{port}").status == 200, "by localhost")
for host in ("example.com", f"example.com:{port}", "127.0.0.1", f"127.0.0.1:{port}.example.com"):
    check(ask(port, host=host).status == 403, f"asked by {host}")
check(ask(port, method="POST").status == 501 and ask(port, method="DELETE").status == 501, "other methods")
check(ask(port, "/other").status == 404 and ask(port, "/../config.yaml").status == 404, "other paths")

stream = ask(port, "/events")
check(stream.headers["Content-Type"] == "text/event-stream", f"the stream: {stream.headers}")
seen = list(events(stream))
process.communicate(timeout=PATIENCE)
check(process.returncode == 0, f"the run: {process.returncode}")
check(seen and seen[-1][0] == "end" and {name for name, _ in seen[:-1]} == {"row"}, f"events: {[n for n, _ in seen]}")
check([row for _, row in seen[:-1]] == rows(folder), "the events are not the rows of metrics.jsonl")
try:
    ask(port)
    check(False, "it is answered after the run")
except ConnectionRefusedError:
    pass
check_nothing_left(folder)
finish()
