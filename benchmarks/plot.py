"""A bar chart as SVG, without a library."""
import html

LEFT, WIDTH, BAR, GAP, TOP = 280, 440, 26, 12, 48


def bars(title, values):
    """`values`: (label, number) pairs, drawn from the top."""
    largest = max(number for _, number in values)
    height = TOP + len(values) * (BAR + GAP) + GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 100}" height="{height}" font-family="sans-serif" font-size="14">',
             '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="12" y="28" font-size="16" font-weight="bold">{html.escape(title)}</text>']
    for i, (label, number) in enumerate(values):
        y, width = TOP + i * (BAR + GAP), WIDTH * number / largest
        color = "#1a6fb0" if label.startswith("Lockstep") else "#b8c4ce"
        parts.append(f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{html.escape(label)}</text>'
                     f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
                     f'<text x="{LEFT + width + 8:.1f}" y="{y + 18}">{number:,.0f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
