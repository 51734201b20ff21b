"""Tables as text."""

from collections.abc import Mapping, Sequence


def render(rows: Sequence[Mapping[str, str]], markdown: bool = False) -> str:
    """Rows as aligned text, or as a Markdown table."""
    head = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in head]
    lines = [head, *([row[name] for name in head] for row in rows)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    if markdown:
        padded.insert(1, ["-" * width for width in widths])
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return "\n".join("  ".join(line).rstrip() for line in padded)
