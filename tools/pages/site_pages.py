"""Hooks of mkdocs (mkdocs.yml): the README is the first page of the site, and links that leave docs/ become paths.

The pages are written to be read in the repository, where such links lead to code, examples and data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
"""A link or an image to a file: whether it is an image, its text, its target."""

README = "index.md"
"""The page that the README becomes."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as the first page."""
    from mkdocs.structure.files import File

    text = (Path(config.config_file_path).parent / "README.md").read_text("utf-8")
    files.append(File.generated(config, README, content=LINK.sub(_move_link, text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links of a page that lead out of docs/ paths of the repository."""
    return markdown if page.file.src_uri == README else LINK.sub(_cut_link, markdown)


def _move_link(match: re.Match[str]) -> str:
    """Writes a link of the README as that of a page in docs/."""
    image, text, target = match.groups()
    if target.startswith("docs/"):
        return f"{image}[{text}]({target.removeprefix('docs/')})"
    return _describe_path(text, target)


def _cut_link(match: re.Match[str]) -> str:
    _, text, target = match.groups()
    return _describe_path(text, target.removeprefix("../")) if target.startswith("../") else match[0]


def _describe_path(text: str, target: str) -> str:
    """Returns the text of a link, with the path that it leads to unless the text is that path."""
    path = target.partition("#")[0]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
