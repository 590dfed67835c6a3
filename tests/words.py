"""Riddles in the prose of this repository: phrases that a reader has to turn around, and the remedy of each.

`python tests/words.py` prints the table, `python tests/words.py docs src/polytempo/core` the riddles of folders or
files, and `python tests/words.py --lower` lowers the entries of words.toml, or of the folders named, to the present
counts.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_name("words.toml")
FOLDERS = ("src", "docs", "tests", "benchmarks", "examples")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")  # CHANGELOG.md is history, which is not rewritten
EXAMPLES = {Path(__file__), Path(__file__).with_name("test_words.py")}
MADE = {"generated", "__pycache__", "build"}
HEAD = """# The most riddles that a folder's prose may have. `python tests/words.py --lower` lowers them.
# The first count, on 2026-11-24: 10,857 riddles in 415,501 words, 26.1 per 1,000.
[most]
"""
FEWEST_WORDS = 4  # a string literal with fewer is a name, not a message
PREPOSITIONS = (
    r"about|after|among|as|at|before|between|by|for|from|in|into|of|on|out|over|through|to|under|with|within|without"
)
PRONOUNS = r"what|whether|where|who|whose|which|that|those|these|they|it|its|he|how|if|why|when|each of|all of"
CODE = re.compile(r"`[^`]*`")
HIDDEN = re.compile(
    r"^( *```).*?^\1|<!--.*?-->|^ {4,}[^\s*-].*?$|`[^`]*`|(?<=\])\([^)\s]*\)",  # code, remarks, targets of links
    re.DOTALL | re.MULTILINE,
)
LITERAL = re.compile(
    r"(?P<comment>#[^\n]*)|(?P<prefix>[rbfu]{0,2})"
    r"""(?:\"{3}(?P<long>(?:\\.|[^\\])*?)\"{3}|"(?P<double>(?:\\.|[^"\\\n])*)"|'(?P<single>(?:\\.|[^'\\\n])*)')""",
    re.DOTALL | re.IGNORECASE,
)
ESCAPED = re.compile(r"\\[ntr]")
PLACEHOLDER = re.compile(r"\{[^{}]*\}")


class Riddle(NamedTuple):
    """A phrase that the reader has to turn around, and the plain way to say it."""

    name: str
    pattern: re.Pattern[str]
    remedy: str


def riddle(name: str, pattern: str, remedy: str) -> Riddle:
    """The riddle of this pattern; a space stands for any white space."""
    return Riddle(name, re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), remedy)


FIRST_WORD = riddle("first word", rf"(?:{PREPOSITIONS}|{PRONOUNS})\b", "begin with a noun or a verb")
RIDDLES = (
    riddle(
        "what", r"\bwhat(?:ever)?\b", "name the noun: 'the gradients', not 'what is sent' (a question may ask 'what')"
    ),
    riddle("of which", r"\b(?:in|of|to|for|by|with|from|on|at|into|over|under|after|through) which\b", "two sentences"),
    riddle("whose", r"\bwhose\b", "'with', 'that has', or two sentences"),
    riddle("that of", r"\b(?:that|those) of\b", "repeat the noun"),
    riddle("those that", r"\bthose (?:that|who|which|with|in|for)\b", "name the noun: 'the ranks that'"),
    riddle("one that", r"\bones? (?:that|who|which|of (?:whose|which))\b", "name the noun: 'a rank that'"),
    riddle("is no", r"(?<!there\s)\b(?:is|are|was|were) no\b(?! longer| more\b)", "'is not a'"),
    riddle("nobody", r"\b(?:nobody|everybody|lest|somebody)\b", "'no worker', 'all ranks', 'so that … not'"),
    riddle("is told", r"\b(?:is|are) told\b", "say which message or argument it receives"),
    riddle("anew", r"\banew\b", "'again'"),
    riddle("besides", r"\bbesides\b", "'also', 'in addition', 'other than'"),
    riddle("for want of", r"\bfor want of\b", "'without', 'because there is no'"),
    riddle("by itself", r"\b(?:by|of) (?:itself|themselves)\b", "'alone', 'separately', 'automatically'"),
    riddle("as they pass", r"\bas (?:they|it) pass(?:es)?\b", "name the event"),
    riddle("at once", r"\bat once\b", "'immediately', or 'at the same time'"),
    riddle("reckon", r"\breckon(?:s|ed|ing)?\b", "'compute', 'estimate', 'count'"),
    riddle("lies", r"\b(?:lies|lie|lay)\b", "'is'"),
    riddle(
        "two clauses", r"\b(?:which|who|whose)\b[^.:;|?!]*\b(?:which|who|whose)\b", "one relative clause a sentence"
    ),
)


class Text(NamedTuple):
    """A piece of prose: where it begins, and whether it is a docstring."""

    text: str
    line: int
    is_docstring: bool = False


class Found(NamedTuple):
    """A riddle in a file."""

    path: Path
    line: int
    phrase: str
    riddle: Riddle

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.phrase!r}: {self.riddle.remedy}"


class Count(NamedTuple):
    """The words of a folder's prose, and the riddles in them."""

    words: int
    found: list[Found]


def files() -> Iterator[Path]:
    """All files with prose: Python and Markdown."""
    yield from (ROOT / page for page in PAGES)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".md"} and not MADE & set(path.parts) and path not in EXAMPLES:
                yield path


def folder_of(path: Path) -> str:
    """The file's entry of the table: "docs", "README.md", "src/polytempo/core"."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0]
    return "/".join(parts[:3]) if len(parts) > 3 else "src/polytempo"


def prose(path: Path) -> Iterator[Text]:
    """The file's prose: a page without its code, or a module's docstrings, comments and messages."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        yield Text(page_text(source), 1)
    else:
        for text in source_texts(source):
            plain = text._replace(text=CODE.sub(blank, text.text))
            if text.is_docstring or len(plain.text.split()) >= FEWEST_WORDS:
                yield plain


def page_text(source: str) -> str:
    """The page with blanks in place of code and of links' targets, so that lines keep their numbers."""
    return HIDDEN.sub(blank, source)


def source_texts(source: str) -> Iterator[Text]:
    """Docstrings, comments and messages; comments of consecutive lines are one text, and so are adjacent literals."""
    pending: Text | None = None
    last_end, last_comment = 0, False
    for match in LITERAL.finditer(source):
        is_comment = match["comment"] is not None
        gap = source[last_end : match.start()]
        last_end = match.end()
        if "b" in (match["prefix"] or "").lower():
            continue
        text = (
            match["comment"]
            if is_comment
            else next(part for part in match.group("long", "double", "single") if part is not None)
        )
        text = text.lstrip("#: ") if is_comment else ESCAPED.sub(blank, text)
        if "f" in (match["prefix"] or "").lower():
            text = PLACEHOLDER.sub(blank, text)
        if pending and not gap.strip() and is_comment == last_comment and not (is_comment and gap.count("\n") > 1):
            pending = pending._replace(text=pending.text + "\n" * gap.count("\n") + text)
            continue
        if pending:
            yield pending
        begins_line = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        pending = Text(text, source.count("\n", 0, match.start()) + 1, match["long"] is not None and begins_line)
        last_comment = is_comment
    if pending:
        yield pending


def blank(match: re.Match[str]) -> str:
    """A word in place of the match, with its line breaks."""
    return "x" + "\n" * match[0].count("\n")


def riddles_of(text: Text) -> Iterator[tuple[int, str, Riddle]]:
    """The riddles in a text: line, phrase, and which riddle it is."""
    if text.is_docstring and (match := FIRST_WORD.pattern.match(text.text.lstrip())):
        yield text.line, " ".join(text.text.split()[:5]), FIRST_WORD
    for each in RIDDLES:
        for match in each.pattern.finditer(text.text):
            if each.name == "what" and is_question(text.text, match.end()):
                continue
            phrase = text.text[match.start() : match.end() + 30].split("\n\n")[0]
            yield text.line + text.text.count("\n", 0, match.start()), " ".join(phrase.split()), each


def is_question(text: str, start: int) -> bool:
    """True if the sentence that goes on at `start` ends with a question mark."""
    end = re.compile(r"[?!|]|[.:;](?=\s|$)|\n\s*\n").search(text, start)
    return end is not None and end[0] == "?"


def counts() -> dict[str, Count]:
    """Each folder's words and riddles."""
    words: Counter[str] = Counter()
    found: dict[str, list[Found]] = {}
    for path in files():
        folder = folder_of(path)
        riddles = found.setdefault(folder, [])
        for text in prose(path):
            words[folder] += len(text.text.split())
            riddles += (Found(path, *each) for each in riddles_of(text))
    return {folder: Count(words[folder], riddles) for folder, riddles in found.items()}


def allowed() -> dict[str, int]:
    """Each folder's most riddles. A folder that is not in the file may have none."""
    return tomllib.loads(ALLOWED.read_text("utf-8"))["most"] if ALLOWED.exists() else {}


def table(found: dict[str, Count], most: dict[str, int]) -> str:
    """The counts of all folders, the counts that words.toml allows, and riddles per 1,000 words."""
    rows = [(folder, each.words, len(each.found), most.get(folder, 0)) for folder, each in sorted(found.items())]
    rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3))))
    lines = [f"{'folder':30} {'words':>8} {'riddles':>8} {'allowed':>8} {'per 1,000':>10}"]
    lines += (
        f"{name:30} {words:8,} {n:8,} {most:8,} {1000 * n / max(words, 1):10.1f}" for name, words, n, most in rows
    )
    return "\n".join(lines)


def lower(found: dict[str, Count], most: dict[str, int], folders: tuple[str, ...]) -> None:
    """Write the entries: entries of `folders` (none: all) are lowered to the present count."""
    kept = {folder: most.get(folder, len(each.found)) for folder, each in found.items()}
    now = {folder: len(each.found) for folder, each in found.items() if not folders or folder in folders}
    rows = [f'"{folder}" = {min(now.get(folder, entry), entry)}' for folder, entry in sorted(kept.items())]
    ALLOWED.write_text(HEAD + "\n".join(rows) + "\n", "utf-8")


def main(arguments: list[str]) -> None:
    """Print the table, or the riddles of the folders and files that are named; lower the entries if asked to."""
    found, names = counts(), tuple(each for each in arguments if each != "--lower")
    if names and "--lower" not in arguments:
        print(*(each for count in found.values() for each in count.found if str(each).startswith(names)), sep="\n")
    if "--lower" in arguments:
        lower(found, allowed(), names)
    if not names or "--lower" in arguments:
        print(table(found, allowed()))


if __name__ == "__main__":
    main(sys.argv[1:])
