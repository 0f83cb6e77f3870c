#!/usr/bin/env python3
"""chart.py RUN_FOLDER > chart.svg: reward and held-out accuracy by step, and the time of every weight
update, of a run's metrics.jsonl. Made docs/demo.svg. Standard library only."""
import json
import os
import sys

WIDTH, HEIGHT, LEFT, TOP, GAP = 820, 250, 56, 46, 70
PLOT = WIDTH - LEFT - 24


def read(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as lines:
        return [json.loads(line) for line in lines]


def path(points, x, y):
    return "M" + "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)


def smooth(points, width):
    return [(points[i][0], sum(v for _, v in points[max(0, i - width + 1):i + 1]) / min(i + 1, width))
            for i in range(len(points))]


def panel(out, top, title, y_max, ticks, form):
    y = lambda value: top + HEIGHT - value / y_max * HEIGHT
    out.append(f'<text x="{LEFT}" y="{top - 14}" class="t">{title}</text>')
    for tick in ticks:
        out.append(f'<line x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" class="g"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{form(tick)}</text>')
    return y


def chart(rows):
    steps = [row for row in rows if "reward_mean" in row]
    last = max(row["step"] for row in steps)
    x = lambda step: LEFT + step / last * PLOT
    bottom = TOP + 2 * HEIGHT + GAP
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}" '
           f'font-family="sans-serif" font-size="12">',
           '<style>text{fill:#555}.t{font-size:14px;fill:#222;font-weight:bold}.g{stroke:#ddd}'
           '.a{fill:none;stroke:#9bbcd8}.b{fill:none;stroke:#12507b;stroke-width:2}'
           '.c{fill:#c2410c}.k{fill:#222}</style>',
           f'<rect width="{WIDTH}" height="{bottom + 50}" fill="#fff" rx="6"/>']
    reward = [(row["step"], row["reward_mean"]) for row in steps]
    y = panel(out, TOP, "reward, by step", 1.0, (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:g}")
    out.append(f'<path d="{path(reward, x, y)}" class="a"/>')
    out.append(f'<path d="{path(smooth(reward, 10), x, y)}" class="b"/>')
    held_out = [(row["step"], row["eval_accuracy"]) for row in rows
                if row.get("eval_accuracy") is not None]
    out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" class="c"/>' for a, b in held_out]
    note = "sampled (mean of 10 steps over each step)" + (
        "; dots: held-out prompts, greedy" if held_out else "")
    out.append(f'<text x="{LEFT + PLOT}" y="{TOP - 14}" text-anchor="end">{note}</text>')

    updates = [(row["step"], 1e3 * row["update_seconds"]) for row in steps if row.get("update_seconds")]
    size = max(row.get("update_bytes", 0) for row in steps)
    values = sorted(value for _, value in updates)
    y_max = 1.25 * values[int(0.99 * (len(values) - 1))]
    y = panel(out, TOP + HEIGHT + GAP, "time of each weight update, ms", y_max,
              [0, y_max / 4, y_max / 2, 3 * y_max / 4, y_max], lambda v: f"{v:.2g}")
    out += [f'<circle cx="{x(a):.1f}" cy="{y(min(b, y_max)):.1f}" r="1.8" class="c"/>' for a, b in updates]
    out.append(f'<text x="{LEFT + PLOT}" y="{TOP + HEIGHT + GAP - 14}" text-anchor="end">'
               f'{len(updates)} updates of {size / 1e6:.2f} MB, median {values[len(values) // 2]:.2f} ms; '
               f'on the top edge: {sum(v > y_max for v in values)} longer ones'
               '</text>')
    for tick in range(0, last + 1, max(1, last // 8 // 10 * 10)):
        out.append(f'<text x="{x(tick):.1f}" y="{bottom + 22}" text-anchor="middle">{tick}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/chart.py RUN_FOLDER > chart.svg")
    sys.stdout.write(chart(read(sys.argv[1])))
