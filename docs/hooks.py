"""For mkdocs: what the pages say to readers of the repository only."""

import re


def on_page_markdown(markdown, **_):
    """Leave out a page's link to itself in the other language: on the site, the switch at the top is that link."""
    return re.sub(r"^\[(?:中文|English)\]\(.+\)\n\n", "", markdown, count=1, flags=re.MULTILINE)
