"""Tables of the experiments: Markdown between markers of a README, made from results alone."""

import re
from collections.abc import Mapping, Sequence


def filled(text: str, tables: Mapping[str, str]) -> str:
    """`text` with each table between its markers, `<!-- table:NAME -->` and `<!-- /table -->`."""
    for name, table in tables.items():
        parts = re.split(f"(?<=<!-- table:{re.escape(name)} -->).*?(?=<!-- /table -->)", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(f"Expected one table {name} in README.md. Add its markers.")
        text = f"{parts[0]}\n{table}\n{parts[1]}"
    return text


def markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heading, rule, *lines])
