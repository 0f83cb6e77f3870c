#!/usr/bin/env python3
"""bars.py README.md > docs/updates.svg: the README's table of updates on GPUs as bars, one scale for all.
Standard library only."""
import re
import sys

WIDTH, LEFT, TOP, BAR, GAP = 820, 236, 64, 15, 20
PLOT = WIDTH - LEFT - 96
# Of a column's heading: its class, and what the legend calls it.
KINDS = {"the links' limit": ("limit", "what the links allow"), "dray": ("dray", "dray, verified"),
         "NCCL M2N": ("m2n", "NCCL M2N"), "gather and slice": ("flow", "gather, send, slice")}
STYLE = """text{fill:#444}.t{font-size:14px;font-weight:bold;fill:#1b1b1b}.paper{fill:#fff}.g{stroke:#e2e2e2}
.limit{fill:#9aa5b1}.dray{fill:#12507b}.m2n{fill:#6b4fa0}.flow{fill:#c2410c}
@media (prefers-color-scheme: dark){text{fill:#b8c0c8}.t{fill:#f0f3f6}.paper{fill:#0d1117}.g{stroke:#2b323b}
.limit{fill:#6e7a87}.dray{fill:#58a6e8}.m2n{fill:#a78bda}.flow{fill:#f0883e}}"""


def table(text):
    """On which GPUs, and of each row what is updated, with (class, time in milliseconds as it is written)."""
    found = re.search(r"^\| update, ([^|]*) (\| the links' limit .*)\n\|[- |]+\n((?:\|.*\n)+)", text, re.M)
    kinds = [KINDS[cell.strip()] for cell in found[2].strip("|").split("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[3].splitlines()]
    return found[1], kinds, [(what, [(kind[0], time.removesuffix(" ms")) for kind, time in zip(kinds, times)
                                     if time != "-"]) for what, *times in lines]


def number(time):
    return float(time.replace(",", ""))


def halves(what):
    """The label's two lines: the model, and how it moves."""
    model, _, rest = what.partition(", ")
    return model.partition(" (")[0], rest


def chart(gpus, kinds, found):
    most = max(number(time) for _, times in found for _, time in times)
    height = TOP + sum(max(len(times), 3) * (BAR + 3) + GAP for _, times in found) + 8
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
           f'font-family="sans-serif" font-size="12">', f"<style>{STYLE}</style>",
           f'<rect width="{WIDTH}" height="{height}" class="paper" rx="6"/>',
           f'<text x="20" y="28" class="t">Milliseconds to update an engine\'s weights, {gpus}</text>']
    at = 20
    for kind, words in kinds:
        out.append(f'<rect x="{at}" y="40" width="11" height="11" class="{kind}"/>'
                   f'<text x="{at + 16}" y="50">{words}</text>')
        at += 32 + 7 * len(words)
    out.append(f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{height - 12}" class="g"/>')
    y, before = TOP + 4, None
    for what, times in found:
        model, how = halves(what)
        how = before if how == "the same" else how
        before = how
        middle = min((abs(m.start() - len(how) / 2), m.start()) for m in re.finditer(" ", how))[1]
        lines = [how] if len(how) < 34 else [how[:middle], how[middle + 1:]]
        out.append(f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end" class="t">{model}</text>')
        out += [f'<text x="{LEFT - 12}" y="{y + 28 + 15 * i}" text-anchor="end">{line}</text>'
                for i, line in enumerate(lines)]
        top = y
        for kind, time in times:
            width = max(1.5, number(time) / most * PLOT)
            out.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" class="{kind}"/>'
                       f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{time}</text>')
            y += BAR + 3
        y = top + max(len(times), 3) * (BAR + 3) + GAP
    return "\n".join(out + ["</svg>"])


with open(sys.argv[1], encoding="utf-8") as page:
    print(chart(*table(page.read())))
