"""What lanes do each by itself: on a GPU `for_lane` is no loop, so that nothing may leave it as one."""

import re

import pytest

from cupy_flash.machine import source

WORDS = re.compile(r"//[^\n]*|\{|\}|\b(?:continue|break)\s*;")
LOOP = re.compile(r"\b(?:for|while)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*$|\bdo\s*$")
OF_LANES = re.compile(r"\bfor_lane\s*\(\w+\)\s*$")
SWITCH = re.compile(r"\bswitch\s*\([^{}]*\)\s*$")


def leaves(text):
    """The lines at which `continue` or `break` would leave a loop around the lanes on a GPU, and on the host that over them."""
    blocks, found, begin = [], [], 0
    for word in WORDS.finditer(text):
        if word[0] == "{":
            before = text[max(begin, word.start() - 400) : word.start()]
            kinds = {"lanes": OF_LANES, "loop": LOOP, "switch": SWITCH}
            blocks.append(next((kind for kind, pattern in kinds.items() if pattern.search(before)), "other"))
        elif word[0] == "}":
            blocks.pop()
        elif not word[0].startswith("//"):
            around = [kind for kind in blocks if kind == "lanes" or kind == "loop" or (kind == "switch" and word[0][0] == "b")]
            if around and around[-1] == "lanes":
                found.append(text.count("\n", 0, word.start()) + 1)
        begin = word.end()
    return found


@pytest.mark.parametrize("file", sorted(name for name in source.files() if name.endswith((".cu", ".cuh"))))
def test_nothing_leaves_lanes_as_a_loop(file):
    assert leaves(source.files()[file]) == []


def test_what_leaves_lanes_is_found():
    text = "for (int i = 0; i < n; ++i) {\n  for_lane(l) {\n    if (l) continue;\n    for (;;) {\n      break;\n    }\n  }\n}\n"
    assert leaves(text) == [3]
    assert leaves(text.replace("continue", "break")) == [3] and leaves(text.replace("continue", "return")) == []
