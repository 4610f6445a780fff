# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site of static pages: `make docs`, or `python docs/build_site.py [--out FOLDER]`.

Pages link to each other, and to files beside docs/, as they do on GitHub: so what is built is a tree of links to them
that has the repository's shape. Nothing is fetched, neither by the build nor by the pages. A link or a heading that is
missing, or a page that docs/README.md does not list, ends the build.
"""

import argparse
import logging
import re
import shutil
from pathlib import Path

from properdocs.commands.build import build
from properdocs.config import load_config

ROOT = Path(__file__).parents[1]
SHOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "benchmarks/results")
_ROW = re.compile(r"^\| \[([^]]+)\]\(([^)#]+)\) \|", re.M)


def navigation() -> list[dict[str, str]]:
    """Title and path of each page, in the order of docs/README.md's first table."""
    listed = _ROW.findall((ROOT / "docs" / "README.md").read_text().partition("\n## ")[0])
    pages = {title: str((ROOT / "docs" / path).resolve().relative_to(ROOT)) for title, path in listed}
    pages = {"Home": "README.md", "All pages": "docs/README.md", **pages}
    pages |= {"Changelog": "CHANGELOG.md", "Ready configurations": "configs/README.md"}
    return [{title: path} for title, path in pages.items()]


def lay_out(folder: Path) -> None:
    """Make `folder` a tree of links to what the site shows."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in SHOWN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(ROOT / name)


def heading_anchor(heading: str, separator: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="made anew; default: build/site")
    out = parser.parse_args().out.absolute()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)  # each of which ends the build
    pages = out.parent / f"{out.name}-pages"
    lay_out(pages)
    config = load_config(str(ROOT / "properdocs.yml"), docs_dir=str(pages), site_dir=str(out), nav=navigation())
    config.mdx_configs.setdefault("toc", {})["slugify"] = heading_anchor
    build(config)
    print(f"{out / 'index.html'}")


if __name__ == "__main__":
    main()
