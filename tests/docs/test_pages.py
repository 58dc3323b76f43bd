"""The pages agree with the repository: file names, the setup order, and the names of its interfaces."""

import re

from dream_trainer import DreamTrainer
from tests.api import AXES, CONFIGURE, SETUP, MixinHooks
from tests.docs.pages import ROOT

ARCHITECTURE = [ROOT / "docs/architecture.md", *(ROOT / "docs/architecture").glob("*.md")]


def test_every_file_that_the_architecture_names_exists() -> None:
    text = "\n".join(page.read_text() for page in ARCHITECTURE)
    files = set(re.findall(r"[a-z_]+(?:/[a-z_]+)+\.py", text))
    folders = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*)/`", text))
    assert len(files) > 20
    missing = [
        found
        for found in sorted(files | folders)
        if not any((ROOT / at / found).exists() for at in ("dream_trainer", ""))
    ]
    assert not missing


def test_every_room_of_the_package_is_in_the_architecture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "dream_trainer").glob("*/*.py") if path.name != "__init__.py"]
    assert not [room for room in set(rooms) if f"| `{room}/` |" not in text]


def test_the_architecture_shows_the_setup_order_as_it_is() -> None:
    text = (ROOT / "docs/architecture/setup.md").read_text()
    axes = [(axis.name, axis.reason) for axis in AXES if axis.order is not None]
    stages = [*(stage[:2] for stage in CONFIGURE), *axes, *(stage[:2] for stage in SETUP)]
    assert "\n".join(f"| {stage} | {reason} |" for stage, reason in stages) in text


def test_the_api_page_names_everything_public_of_a_trainer() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = [cls.__doc__.partition("Attributes:")[2] for cls in DreamTrainer.__mro__ if cls.__doc__]
    attributes = {found for block in listed for found in re.findall(r"^ +(\w+): ", block, re.MULTILINE)}
    assert {"world", "global_step", "best"} <= attributes | set(dir(DreamTrainer))
    public = {name for name in dir(DreamTrainer) if not name.startswith("_")} | attributes
    assert not [found for found in sorted(public) if not re.search(rf"`[^`]*\b{found}\b[^`]*`|### {found}\b", text)]


def test_the_page_on_extending_lists_every_hook_that_mixins_share() -> None:
    text = (ROOT / "docs/extend.md").read_text()
    hooks = {name for name, value in vars(MixinHooks).items() if re.match(r"_[a-z]", name) and callable(value)}
    hooks -= {"_media_log"}
    listed = set(re.findall(r"`(_[a-z_]+)\(", text.partition("## The hooks")[2]))
    assert listed == hooks
