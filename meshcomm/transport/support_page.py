"""The support table as a page of documentation: `python -m meshcomm.transport.support_page`."""

from __future__ import annotations

from meshcomm.transport.support import LACKS, REDUCE_OPS, WIDENED, name_of, support_table


def page() -> str:
    """Markdown, made from the table that the checks use."""
    lines = [
        "# What each backend reduces",
        "",
        "Made by `python -m meshcomm.transport.support_page` from the table that refuses calls before a byte moves; a test",
        "compares them. Data is only moved, never reduced, by broadcast, gathers, scatter, all_to_all and messages: these take every dtype.",
        "",
    ]
    rows = support_table()
    for backend in dict.fromkeys(row["backend"] for row in rows):
        lines += [
            f"## {backend}",
            "",
            "| dtype | " + " | ".join(REDUCE_OPS) + " |",
            "|---" * (len(REDUCE_OPS) + 1) + "|",
        ]
        for row in rows:
            if row["backend"] == backend:
                has = row["ops"].split()
                lines.append(
                    f"| {row['dtype']} | "
                    + " | ".join("yes" if op in has else "-" for op in REDUCE_OPS)
                    + " |"
                )
        lacking = ", ".join(sorted(LACKS.get(backend, ())))
        lines += ["", f"{backend} itself lacks {lacking}." if lacking else "", ""]
    widened = ", ".join(f"{name_of(a)} as {name_of(b)}" for a, b in WIDENED.items())
    lines += [
        f"Exact by a wider dtype and back: {widened}. Complex numbers add as pairs of floats. premul_sum scales, then sums.",
        "Every other backend is asked itself.",
    ]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])) + "\n"


if __name__ == "__main__":
    print(page(), end="")
