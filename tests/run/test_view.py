"""On a terminal a run draws a picture in place, within the terminal's width, and takes it away."""
import fcntl
import pty
import re
import struct
import termios

from jobs import *

folder = work / "seen"
leader, terminal = pty.openpty()
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
process = subprocess.Popen(command(folder, "--set", "steps=40", "--set", "checkpoint.every=1"), stdout=terminal,
                           stderr=subprocess.PIPE,
                           cwd=work, env=dict(os.environ, TERM="xterm"))
os.close(terminal)
seen = b""
while True:
    try:
        more = os.read(leader, 65536)
    except OSError:  # the other side is closed
        break
    if not more:
        break
    seen += more
error = process.stderr.read().decode()
process.wait(timeout=PATIENCE)
check(process.returncode == 0, f"status {process.returncode}: {error}")
check_nothing_left(folder)
text = seen.decode()
check("\033[K" in text and re.search(r"\033\[\d+A", text), "nothing is redrawn in place")
for word in ("tiny  step", "weights ", "staleness", "seconds a step", "queue ", "held-out"):
    check(word in text, f"no '{word}' in the picture")
picture = re.findall(r"([^\n\r]*)\033\[K", re.sub(r"\033\[(\d+A|J)", "", text))
check(picture and all(len(line) < 60 for line in picture), "a line is wider than the terminal")
for begin, last in (("seconds a step", "checkpoint"), ("queue", "prompt")):
    check(begin in text and re.search(rf"\b{last} \d", text), f"no {last} behind '{begin}'")
# After the last picture is taken away only plain lines follow.
rest = text[text.rindex("\033[J"):]
check("done after 40 of 40 steps" in rest and "\033[K" not in rest, "the last lines")

# No terminal: no escape codes.
done = run(work / "plain")
check("\033" not in done.stdout and "step   6/6" in done.stdout, "plain lines")
finish()
