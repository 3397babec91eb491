"""The pages of the site: their blocks run as they stand, their links lead somewhere, and nothing is fetched."""

import ast
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from conftest import ROOT
from documents import commands
from memorised_chats import save_chat_model
from typer.testing import CliRunner

from minimind_hf.cli import TINY_MODEL, app
from minimind_hf.convert import to_hf, to_torch
from minimind_hf.modeling_minimind import CACHE

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def run_blocks(page, capsys):
    """Run the blocks of a page in turn.

    A line `print(…)  # this` has to print this (trainers print more, of losses), and a text block is what the last
    command before it prints.
    """
    names, printed = {}, None
    for language, block in BLOCK.findall(read(page)):
        if language == "python":
            exec(compile(block.replace("cache=cache", f"{CACHE}=cache"), page, "exec"), names)
            lines = [
                line
                for line in capsys.readouterr().out.splitlines()
                if not re.match(r"\{'(loss|train_runtime)'", line)
            ]
            assert lines == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        elif language == "sh":
            for program, *arguments in commands(block):
                assert program == "minimind"
                run = CliRunner().invoke(app, arguments)
                assert run.exit_code == 0, (arguments, run.output, run.exception)
                printed = run.stdout
        else:
            assert (language, block) == ("text", printed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the pages name, around a checkpoint that answers."""
    monkeypatch.chdir(tmp_path)
    Path("assets").symlink_to(ROOT / "assets")
    Path("path/to/minimind").mkdir(parents=True)
    Path("path/to/minimind/model").symlink_to(TINY_MODEL)
    to_torch(TINY_MODEL, "full_sft_768.pth")
    modules = [f"model.layers.{layer}.self_attn.{name}_proj.lora" for layer in range(6) for name in "qo"]
    torch.save({f"{name}.A.weight": torch.randn(4, 128) for name in modules}
               | {f"{name}.B.weight": torch.randn(128, 4) for name in modules}, "lora.pth")  # fmt: skip
    return tmp_path


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/faq.md"])
def test_page_that_converts(page, folder, capsys):
    run_blocks(page, capsys)


@pytest.mark.parametrize("page", ["docs/generate.md", "docs/speed.md"])
def test_page_on_generation(page, folder, capsys):
    (folder / "my-minimind").symlink_to(TINY_MODEL)
    run_blocks(page, capsys)


def test_page_on_fine_tuning(folder, capsys):
    pytest.importorskip("trl", reason="TRL is not installed; it needs Python 3.11")
    to_hf("full_sft_768.pth", "my-minimind", tokenizer=TINY_MODEL, config=TINY_MODEL / "config.json")
    run_blocks("docs/finetune.md", capsys)


def test_page_on_chat(folder, capsys):
    save_chat_model(folder / "my-minimind")
    run_blocks("docs/chat.md", capsys)


def meaning(language, block):
    """A block without its comments."""
    if language == "python":
        return ast.dump(ast.parse(block))
    return [shlex.split(line, comments=True) for line in block.splitlines()] if language == "sh" else block


@pytest.mark.parametrize("page", ["README", "docs/index", "docs/quickstart"])
def test_page_in_chinese_follows_the_english_one(page):
    english, chinese = read(f"{page}.md"), read(f"{page}.zh.md")
    for one, other, text in ((english, f"{page}.zh.md", "中文"), (chinese, f"{page}.md", "English")):
        assert f"[{text}]({Path(other).name})" in one
    blocks = [[meaning(*block) for block in BLOCK.findall(text)] for text in (english, chinese)]
    assert blocks[0] == blocks[1]
    for part in (
        r"^(#+) ",  # headings
        r"^(\|).*\|$",  # rows of tables
        r"\]\((?!\w+(?:\.zh)?\.md\))(.+?)\)",  # links, but to each other
        r"(?<!`)`([^`\n]+)`(?!`)",  # names
    ):
        english_parts, chinese_parts = (
            re.findall(part, BLOCK.sub("", text), re.MULTILINE) for text in (english, chinese)
        )
        assert sorted(set(english_parts)) == sorted(set(chinese_parts))
        if part.startswith("^"):
            assert english_parts == chinese_parts


class Page(HTMLParser):
    """What a page refers to, as (tag, address), and the places in it that can be referred to."""

    def __init__(self, path):
        super().__init__()
        self.references, self.anchors = [], {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id") or attributes.get("name") or "")
        self.references += [(tag, attributes[name]) for name in ("href", "src") if attributes.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """All but the one for addresses that do not exist, which a server shows in place of any other."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_and_anchor_of_the_site_resolves(site, pages):
    assert {site / "index.html", site / "faq.html", site / "zh" / "quickstart.html"} <= pages.keys()
    for path, page in pages.items():
        for _, address in page.references:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)} refers to {address}"
            if target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {address}"


def test_site_fetches_nothing(site, pages):
    for path, page in pages.items():
        fetched = [(tag, address) for tag, address in page.references if tag != "a" and urlsplit(address).netloc]
        assert fetched == [], path.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert re.findall(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")) == []
    assert (site / "search" / "search_index.js").is_file()  # the search of the page from the disk
