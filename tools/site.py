"""What the documentation site has beside the pages in docs/: the files they lead to, and all public names.

mkdocs calls the functions `on_...` (mkdocs.yml names this file). The pages in docs/ are written for whoever reads them
in the repository, so their links lead to files of it; here each such file becomes a page: README.md the first one,
source code one that shows it.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("", ".config", ".data", ".callbacks", ".loggers", ".modules", ".optim", ".errors")  # below dream_trainer
ROOMS = {  # by where a name is defined
    "trainer": ("Trainers and mixins", "What a trainer is built from."),
    "simple": ("Trainer without a class", "From a model, a loss, an optimizer and data."),
    "config": ("Configs", "Every field that a config has, with its default and meaning."),
    "data": ("Data", "Loaders, mixtures, packing and streams."),
    "optim": ("Optimizers and schedules", "Built by name, or used as they are."),
    "modules": ("Layers", "For models of one's own."),
    "weights": ("Weights", "Loading those that exist."),
    "callbacks": ("Callbacks", "Watchers of a run."),
    "events": ("Events", "What a callback is."),
    "loggers": ("Loggers", "Where numbers and media go."),
    "errors": ("Errors", "What is raised, beside ValueError and TypeError."),
}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The reference and the pages of the repository's own files end the navigation."""
    reference = [{title: f"reference/{room}.md"} for room, (title, _) in ROOMS.items()]
    about = [{"Changelog": "changelog.md"}, {"Contributing": "contributing.md"}, {"Security": "security.md"}]
    assert config.nav is not None
    config.nav = [*config.nav, {"Reference": reference}, {"About": about}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is not in docs/."""
    for room, names in public_names().items():
        files.append(File.generated(config, f"reference/{room}.md", content=reference(room, names)))
    pending = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    pending += [path for file in files.documentation_pages() for path in _led_to(file)]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        in_navigation = (
            InclusionLevel.INCLUDED if path.parent == ROOT and path.suffix == ".md" else InclusionLevel.NOT_IN_NAV
        )
        files.append(File.generated(config, site_path(path), content=shown(path), inclusion=in_navigation))
        if path.suffix == ".md":
            pending += _outside(path.read_text(), path.parent)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to their pages."""
    here = repository_path(page.file.src_uri)
    if here is None:
        return markdown
    at = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        path = _target(found[2], here.parent)
        return found[0] if path is None else f"{found[1]}{posixpath.relpath(site_path(path), at)}{found[3]}"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt: the pages with what each is for, for a language model that looks for one."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav or []:
        lines += _listed(section)
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def public_names() -> dict[str, list[str]]:
    """Where each public name is imported from, as short as it can be, by the room that defines it."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        module = import_module(f"dream_trainer{package}")
        for name in vars(module).get("__all__") or _defined(module):
            found.setdefault(name, f"dream_trainer{package}.{name}")
    rooms: dict[str, list[str]] = {room: [] for room in ROOMS}
    for name, path in sorted(found.items()):
        value = getattr(import_module(path.rpartition(".")[0]), name)
        home = value.__module__ if isinstance(value, type) or callable(value) else path
        room = home.split(".")[1]
        rooms["modules" if room == "parallel" else room].append(path)  # its layers are for models of one's own
    return rooms


def reference(room: str, names: list[str]) -> str:
    """The page of a room: each of its public names with its docstring."""
    title, subject = ROOMS[room]
    entries = "\n\n".join(f"::: {name}" for name in names)
    return f"# {title}\n\n{subject}\n\n{entries}\n"


def shown(path: Path) -> str:
    """A file of the repository as a page."""
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = [f"- [{found.name}]({found.name})" for found in sorted(path.iterdir()) if found.is_file()]
        return f"# {name}\n\n" + "\n".join(files)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def site_path(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name == "README.md":
        return "index.md"
    if "/" not in name and path.suffix == ".md":
        return name.lower()
    return f"files/{name}" if path.suffix == ".md" else f"files/{name}.md"


def repository_path(src_uri: str) -> Path | None:
    """The file of the repository that a page of the site shows, if it is written in Markdown."""
    if src_uri == "index.md":
        return ROOT / "README.md"
    candidates = [
        ROOT / "docs" / src_uri,
        ROOT / src_uri.upper().replace(".MD", ".md"),
        ROOT / src_uri[len("files/") :],
    ]
    return next((path for path in candidates if path.is_file()), None)


def _target(link: str, directory: Path) -> Path | None:
    """The file that a relative link leads to, if it lies in the repository."""
    if re.match(r"[a-z]+:", link):
        return None
    path = Path(posixpath.normpath(directory / link))
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _outside(markdown: str, directory: Path) -> list[Path]:
    """Files outside docs/ that a page leads to."""
    links = [
        found[2] for part in _FENCE.split(markdown) if not part.startswith("```") for found in _LINK.finditer(part)
    ]
    found = [_target(link, directory) for link in links]
    return [path for path in found if path is not None and not path.is_relative_to(ROOT / "docs")]


def _led_to(file: File) -> list[Path]:
    path = repository_path(file.src_uri)
    return [] if path is None else _outside(path.read_text(), path.parent)


def _defined(module: Any) -> list[str]:
    """Public names that a module without `__all__` defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _listed(entry: Any, level: int = 2) -> list[str]:
    """An entry of the navigation: a section with its pages, or a page with its first sentence."""
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        return ["", f"{'#' * level} {title}", "", *(line for part in inside for line in _listed(part, level + 1))]
    source = repository_path(inside)
    subject = _first_sentence(source) if source else ROOMS[Path(inside).stem][1]
    return [f"- [{title}]({inside.removesuffix('.md')}.html): {subject}"]


def _first_sentence(path: Path) -> str:
    paragraphs = [part for part in path.read_text().split("\n\n") if not part.startswith(("#", "```", "!", "|", "<"))]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":")
