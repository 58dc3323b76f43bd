"""Counts marks of translated-sounding English, and long sentences: `python tools/prose_lint.py [--show] FILE...`

Reads prose of Markdown, and of Python docstrings, comments and messages (strings of several words). The marks are
those of a style that this project avoids: "what is returned is logged", "by name", "of its own".
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONG = 30  # words; longer sentences count as long
_VERB = r"is|are|has|have|was|were|does|do|says|gives|counts|needs|lies|crosses|fits|keeps|goes|stands|comes|stays"
_OWNER = r"its|one's|their|your|our|yours|ours|theirs|my"
MARKS = {
    "What ... is": rf"(?:^|[.;:,(] |\b(?:of|by|in|to|and|or) )[Ww]hat (?:\w+ ){{1,8}}?(?:{_VERB}|each|an?|the|it)\b",
    "Of ... first": r"(?:^|[.;:] )Of (?:an?|the|them|what|one|rows|models|shards|several|these|this|those)\b",
    "where = if": r", where (?!to\b)",
    "So is": r"(?:^|[.;] )So (?:is|are|does|do|it is|was|they are)\b",
    "else": r"(?:[;,] |\. )[Ee]lse\b",
    "alone": r"\b\w+ alone\b",
    "beside": r"\bbeside\b",
    "archaic": r"\b(?:anew|once more|as ever|by turns|in the midst|but for|save for|in place of|meanwhile|at hand)\b",
    "said, nobody": r"\b(?:(?:is|was|are|were) said|unsaid|without a word|said once|says so|nobody|somebody|whoever)\b",
    "by name": r"\b(?:by name|named in|is named|are named|in words|told|hand(?:s|ed)? on)\b",
    "goes on": r"\b(?:go|goes|going|went) (?:on|by|along|with|there|back|beside|through|into)\b",
    "of its own": rf"\bof (?:{_OWNER}) own\b|\bof (?:ours|yours|theirs|others|users|somebody)\b",
    "as many": r"\b(?:as|so) (?:many|much)\b",
    "of which": r"\b(?:of|in|by|to|over|from|with|for|at) which\b",
}


class Count(NamedTuple):
    """What is counted in a text."""

    words: int
    sentences: int
    marks: int
    long: int

    @property
    def per_thousand(self) -> float:
        """Marks per 1,000 words."""
        return 1000 * self.marks / max(1, self.words)

    @property
    def long_share(self) -> float:
        """Share of sentences above 30 words."""
        return self.long / max(1, self.sentences)


def prose(text: str) -> str:
    """Markdown without blocks, tables, headings and markup; code is one word."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^ *(```+).*?^ *\1\s*$", "", text, flags=re.S | re.M)
    text = re.sub(r"^\s*\|.*$|^#+ .*$", "", text, flags=re.M)
    text = re.sub(r"<[^>\n]+>|!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|\*|_", "", re.sub(r"`[^`]*`", "CODE", text))


def sentences(text: str) -> Iterator[str]:
    """Sentences of more than two words."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z(\"C])", " ".join(paragraph.split())):
            if len(sentence.split()) > 2:
                yield sentence


def docstrings(code: str) -> list[str]:
    """Docstrings of a module, its classes, functions and fields."""
    nodes = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Expr))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def messages(code: str) -> list[str]:
    """Strings of at least four words that are no docstrings: errors, warnings, log lines, help."""
    tree = ast.parse(code)
    own = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    own |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(p.value if isinstance(p, ast.Constant) else "CODE" for p in node.values))
    return [text for text in found if len(text.split()) >= 4]


def comments(code: str) -> list[str]:
    """Comments; those of consecutive lines are one text."""
    found: list[str] = []
    end = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if token.start == end:
                found[-1] += " " + text
            else:
                found.append(text)
            end = (token.start[0] + 1, token.start[1])
    return found


def count(text: str) -> Count:
    """Counts a text, as `prose` returns it."""
    found = list(sentences(text))
    words = [len(sentence.split()) for sentence in found]
    marks = sum(len(re.findall(mark, sentence)) for sentence in found for mark in MARKS.values())
    return Count(sum(words), len(found), marks, sum(number > LONG for number in words))


def main(arguments: list[str]) -> None:
    """Prints a line per file, and with --show each sentence that is marked or long."""
    for file in (argument for argument in arguments if not argument.startswith("--")):
        text = Path(file).read_text()
        parts = [text] if not file.endswith(".py") else [*docstrings(text), *messages(text), *comments(text)]
        read = "\n\n".join(map(prose, parts))
        found = count(read)
        print(f"{file}: {found.words} words, {found.per_thousand:.1f} marks per 1,000, {found.long_share:.0%} long")
        for sentence in sentences(read) if "--show" in arguments else ():
            names = [name for name, mark in MARKS.items() if re.search(mark, sentence)]
            if names or len(sentence.split()) > LONG:
                print(f"    {names or 'long'} {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
