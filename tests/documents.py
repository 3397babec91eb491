"""The blocks of the documents, for tests that run them as they stand."""

import re
import shlex

from conftest import ROOT


def blocks(document: str, heading: str | None, language: str) -> list[str]:
    """The blocks in a language under a heading of a document; None: before the first of its headings."""
    text = (ROOT / document).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    section = text.partition("\n## ")[0] if heading is None else sections[heading]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell block but installations."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("pip install")]
