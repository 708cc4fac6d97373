"""The documents keep their word: every fenced block in README.md and docs/ runs, and what it shows is what comes out.

A page runs from top to bottom in a directory of its own:

- `python` blocks share one namespace;
- `console` blocks are `$ command` lines, each followed by what it prints; `bash` blocks are commands alone;
- `json title="name"` blocks become files, and events files are priced (calibrated if their noise is left out);
- `text` blocks are what the block before them printed.

Output is compared as doctest does, `...` standing for anything. Any other language is refused, so no block escapes.
"""

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from silobayes import families
from silobayes.cli.main import main
from silobayes.families import AbstractFamily
from silobayes.plans import METHODS
from silobayes.privacy.events import _REGISTRY, Sampling

ROOT = Path(__file__).resolve().parents[2]
# Run where what they add to the package is there (test_adding_a_method).
OWN_TESTS = (ROOT / "docs" / "adding-a-method.md",)
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in OWN_TESTS)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHOWN = {"COLUMNS": "120", "PYTHONUTF8": "1", "MPLBACKEND": "agg"}
ENVIRONMENT = {**os.environ, **SHOWN}
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_NOISE_KEYS = {"std", "scale", "gamma", "epsilon"}


@dataclass(frozen=True, kw_only=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks, `line` being that of their first line of content."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if not (fence := re.match(r"( *)(`{3,}|~{3,}) *(\S*)(.*)", lines[number])):
            number += 1
            continue
        indent, ticks, language, rest = fence.groups()
        end = number + 1
        while end < len(lines) and lines[end].strip() != ticks:
            end += 1
        if end == len(lines):
            raise AssertionError(f"line {number + 1}: the block is never closed")
        title = re.search(r'title="([^"]+)"', rest)
        body = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
        found.append(Block(language=language, title=title and title[1], text=body, line=number + 2))
        number = end + 1
    return found


def run_page(text: str, name: str, directory: Path) -> None:
    """Run all blocks of a page; raises at the first that does not do what the page says."""
    namespace: dict = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(text):
        where = f"{name}:{block.line}"
        if block.title is not None:
            (directory / block.title).write_text(block.text + "\n")
        if block.language == "python":
            printed = run_python(block, where, namespace)
        elif block.language in ("console", "bash"):
            printed = run_commands(block, where, directory)
        elif block.language == "json":
            check_json(block, where)
        elif block.language == "text":
            expect(block.text, printed, where)
        else:
            raise AssertionError(f"{where}: nobody runs blocks in {block.language or 'no language'}")


def run_python(block: Block, where: str, namespace: dict) -> str:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own line
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, where.rsplit(":", 1)[0], "exec"), namespace)
    return out.getvalue()


def run_commands(block: Block, where: str, directory: Path) -> str:
    """Run each command in a shell; in `console` blocks the lines below it are its output."""
    printed = ""
    if block.language == "bash":
        steps = [(line, "") for line in block.text.splitlines() if line.strip()]
    else:
        first, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not first, f"{where}: expected `$ command`, got {first!r}"
        steps = [(command, output) for command, _, output in (part.partition("\n") for part in parts)]
    for command, output in steps:
        if promised(command):
            assert not output.strip(), f"{where}: {command} is not run here, so nothing may be shown below it"
            continue
        code, printed = run_command(command, directory)
        assert code == 0, f"{where}: {command} ended with {code}:\n{printed}"
        if output.strip():
            expect(output, printed, f"{where}: {command}")
    return printed


def run_command(command: str, directory: Path) -> tuple[int, str]:
    """Exit code and output, as of a shell; a first `silobayes` runs in this process, which need not import it anew."""
    if not (own := re.fullmatch(r"silobayes ([^|;&<>$`]*)(?:([|;])(.*))?", command)):
        return in_shell(command, directory)
    words, join, rest = own.groups()
    done = CliRunner(env=SHOWN).invoke(main, shlex.split(words), prog_name="silobayes")
    if not join:
        return done.exit_code, done.output
    if join == "|":
        code, printed = in_shell(rest, directory, done.stdout)
        return code, done.stderr + printed
    code, printed = in_shell(f"(exit {done.exit_code});{rest}", directory)
    return code, done.output + printed


def in_shell(command: str, directory: Path, given: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        command, shell=True, cwd=directory, env=ENVIRONMENT, text=True, encoding="utf-8",
        input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout


def promised(command: str) -> bool:
    """Whether `command` builds an environment, which a test must not; then what it names is checked to exist."""
    words = shlex.split(command, comments=True)
    if words[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert len(words) == 2, f"expected one make target, got {command}"
        assert words[1] in targets, f"expected a target of the Makefile, got {command}"
        return True
    if words[:2] == ["pip", "install"]:
        here = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[-1])
        assert here, f"expected pip install of this directory, got {command}"
        extras = set(here[1].split(",")) if here[1] else set()
        assert extras <= set(PROJECT["optional-dependencies"]), f"expected extras of pyproject.toml, got {command}"
        return True
    return False


def expect(want: str, got: str, where: str) -> None:
    same = doctest.OutputChecker().check_output(want.strip() + "\n", got.strip() + "\n", _SAME)
    assert same, f"{where}: the page shows\n{want}\nbut it printed\n{got}"


def check_json(block: Block, where: str) -> None:
    data = json.loads(block.text)
    if not (isinstance(data, dict) and "events" in data):
        return
    complete = all(_NOISE_KEYS & set(item) for item in data["events"])
    command = ["price"] if complete else ["calibrate", "--epsilon", "1"]
    result = CliRunner().invoke(main, ["privacy", *command, "-", "--delta", "1e-5", "--json"], input=block.text)
    assert result.exit_code == 0, f"{where}: {result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_the_page_does_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix(), tmp_path)


BROKEN = {
    "python that fails": ("```python\n1 / 0\n```", "division by zero"),
    "a name of a later block": ("```python\nprint(x)\n```\n```python\nx = 1\n```", "'x' is not defined"),
    "a command that fails": ("```console\n$ silobayes privacy price no.json --delta 1e-5\n```", "ended with 2"),
    "a bash command that fails": ("```bash\ntrue\nfalse\n```", "ended with 1"),
    "output that is not printed": ("```console\n$ echo one\ntwo\n```", "the page shows"),
    "text that is not printed": ('```python\nprint("one")\n```\n```text\ntwo\n```', "the page shows"),
    "text after nothing": ("```text\ntwo\n```", "the page shows"),
    "json that does not parse": ("```json\n{,}\n```", "property name"),
    "an unknown mechanism": (
        '```json\n{"relation": "substitute", "events": [{"mechanism": "gauss", "std": 1}]}\n```',
        "mechanism: expected one of",
    ),
    "a relation left out": (
        '```json\n{"events": [{"mechanism": "laplace", "clip_norm": 1, "scale": 1}]}\n```',
        "there is no default",
    ),
    "an unknown target": ("```bash\nmake coffee\n```", "expected a target of the Makefile"),
    "an unknown extra": ("```bash\npip install '.[coffee]'\n```", "expected extras of pyproject"),
    "a package from elsewhere": ("```bash\npip install coffee\n```", "pip install of this directory"),
    "output of what is not run": ("```console\n$ make demo\nposterior\n```", "nothing may be shown"),
    "a console without a command": ("```console\nsilobayes demo\n```", "expected `. command`"),
    "an unknown language": ("```ruby\nputs 1\n```", "nobody runs blocks in ruby"),
    "no language": ("```\nanything\n```", "nobody runs blocks in no language"),
    "a block that is never closed": ("```python\nx = 1\n", "never closed"),
    "a block inside a list": ("- item\n\n    ```python\n    1 / 0\n    ```", "division by zero"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_page_whose_block_fails_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, reason = BROKEN[name]
    with pytest.raises((AssertionError, ArithmeticError, NameError, ValueError), match=reason):
        run_page(page, name, tmp_path)


def test_files_of_a_page_reach_its_later_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = '```json title="a.json"\n{"one": 1}\n```\n```console\n$ cat a.json\n{"one": ...}\n```\n'
    run_page(page + '```python\nassert "one" in open("a.json").read()\n```', "page", tmp_path)


@pytest.mark.parametrize("command", ["silobayes --help", "silobayes --help; true", "silobayes --help | cat"])
def test_commands_that_run_here_do_what_the_installed_one_does(command: str, tmp_path: Path) -> None:
    assert run_command(command, tmp_path) == in_shell(command, tmp_path)


@pytest.mark.parametrize("command", ["silobayes verify nowhere", 'silobayes verify nowhere; echo "exit code $?"'])
def test_exit_codes_of_commands_that_run_here_are_those_of_a_shell(command: str, tmp_path: Path) -> None:
    code, printed = run_command(command, tmp_path)
    assert "exit code 2" in printed if "echo" in command else code == 2


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threat_model = (tmp_path / "site" / "threat-model" / "index.html").read_text(encoding="utf-8")
    assert "Who may be dishonest" in threat_model  # the root file was included, not only its name
    assert '<a href="../attacks/">Attacks tried</a>' in threat_model  # as seen from the site, not from the root file


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_between_root_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, flags=re.MULTILINE)
    for target in targets:
        if "://" not in target:
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_dependency_is_explained_and_no_other() -> None:
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    names = sorted(re.match(r"[\w-]+", line)[0] for line in used)  # type: ignore[index]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)", page, flags=re.MULTILINE)) == names


def test_every_mechanism_is_described_with_its_keys() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", page, flags=re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted([*_REGISTRY, "sampling"])
    common = {"clip_norm", "sensitivity", "terms", "sampling", "count"}
    for name, section in sections.items():
        keys = {field.name for field in fields(Sampling if name == "sampling" else _REGISTRY[name])}
        assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == keys - common, name
    assert common <= set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))


def test_every_key_of_every_method_is_described_and_no_other() -> None:
    page = (ROOT / "docs" / "study-file.md").read_text(encoding="utf-8")
    section = page.split("## `[protocol]`")[1].split("\n## ")[0]
    keys = {field.name for method in METHODS.values() for field in fields(method.keys)}
    assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == keys


def test_every_method_is_described() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for method in METHODS.values():
        assert f"`{method.kind}`" in page
        assert f"`{method.privatise}`" in page or f'privatise = "{method.privatise}"' in page


def test_every_family_is_described() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    kinds = [getattr(families, name) for name in families.__all__]
    final = {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, AbstractFamily) and kind is not AbstractFamily
    }
    assert set(re.findall(r"^\| `(\w+)", page, flags=re.MULTILINE)) == final


def test_every_reference_is_in_both_files() -> None:
    keys = re.findall(r"^@\w+\{([\w-]+),", (ROOT / "docs" / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"^\| `([\w-]+)`", (ROOT / "docs" / "references.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(keys)) == len(keys) > 0
    assert sorted(keys) == sorted(listed)
