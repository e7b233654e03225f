"""Random texts that are accepted as scores and masks, as C++: a compiler takes all of them, and computes what NumPy does."""

import random
import shutil
import subprocess

import numpy
import pytest
from test_expression_cplusplus import NAMES, element
from test_score_texts import ARRAYS, LENGTH, Grammar, K, Q, random_text, read_by

from cupy_flash import plan_attention
from cupy_flash.machine import source
from cupy_flash.problem.expression.cplusplus import cplusplus
from cupy_flash.problem.expression.derivative import derivative
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.tree import SCORE, Node

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning"),  # Python's, of texts such as 1if
]
COORDINATES = [(0, 0, 0, 2), (1, 3, 1, 0), (1, 2, 2, 2), (0, 1, 0, 1)]  # b, h, q_idx, kv_idx
LANES = [
    {"score": score, "b": b, "h": h, "h_kv": h // 2, "q_idx": q_idx, "kv_idx": kv_idx, "q_len": LENGTH, "kv_len": LENGTH}
    for score, (b, h, q_idx, kv_idx) in zip((-1.375, 0.0, 0.625, 1.5), COORDINATES)
]
BATCHES = [*(pytest.param(start, 1000, marks=pytest.mark.release) for start in range(0, 10_000, 1000))]
# Divided by 0 and by infinity, seen through comparisons.
QUOTIENTS = [f"{x} // {y}" for x in ("score", "-1.5", "7.5") for y in ("0.0", "(gain - gain)", "inf", "-inf")]
ENDS = [f"where({x} {than}, 1.0, -2.0)" for x in QUOTIENTS for than in ("< -1", "< 0", "> 1", "== 0", "== -1")]


def trees(start: int, count: int) -> dict[Node, str]:
    """What the accepted ones of these texts mean, and the derivatives of scores."""
    found = {plan_attention(Q, K, K, score=text, arrays=read_by(text)).problem.scores.score.tree: text for text in ENDS}
    for number in range(start, start + count):
        draw = random.Random(number)
        option = draw.choice(("score", "mask"))
        text = random_text(draw, Grammar(number), option)
        try:
            scores = plan_attention(Q, K, K, **{option: text}, arrays=read_by(text)).problem.scores
        except (TypeError, ValueError):
            continue
        tree = getattr(scores, option).tree
        found[tree] = text
        if option == "score":
            found.setdefault(derivative(tree, SCORE), f"the derivative of {text}")
    return found


def reading() -> str:
    """The functions that read arrays; an index beyond the ends is that of the end."""
    lines = ["static int clipped(int i, int n) { return min(max(i, 0), n - 1); }"]
    kinds = {"f": "float", "i": "int", "b": "bool"}
    for name, array in ARRAYS.items():
        kind, elements = kinds[array.dtype.kind], ", ".join(str(x).lower() for x in array.ravel().tolist())
        if not array.ndim:
            lines.append(f"static {kind} the_{name} = {elements};")
            continue
        place = "0"
        for i, n in enumerate(array.shape):
            place = f"({place} * {n} + clipped(i{i}, {n}))"
        arguments = ", ".join(f"int i{i}" for i in range(array.ndim))
        lines.append(f"static {kind} {name}_at({arguments}) {{ static {kind} a[] = {{{elements}}}; return a[{place}]; }}")
    return "\n".join(lines)


def functions() -> str:
    """Those of kernels that C++ has not."""
    text = source.files()["tile/score_context.cuh"]
    own = text[text.index("OP float sigmoid(") : text.index("// An element of any type as one of three kinds.")]
    lines = ["#include <algorithm>", "#include <cmath>", "#include <cstdio>", "#include <cstdlib>"]
    lines += ["#define OP inline", "#define ON_GPU 0"]
    lines += ["using std::abs, std::max, std::min;", "inline float infinity() { return __builtin_inff(); }"]
    lines += ["inline float tanh_by_sinh(float x) { return tanhf(x); }"]
    return "\n".join([*lines, "inline float rsqrtf(float x) { return 1 / sqrtf(x); }", own.replace("#pragma unroll", "")])


def computed(forms: list[Node], folder) -> list[list[float]]:
    """What a compiler makes of them: for each the values at `LANES`."""
    arguments = ", ".join(f"{'float' if name == 'score' else 'int'} {text}" for name, text in NAMES.items())
    written = [f"static float form_{i}({arguments}) {{ return {cplusplus(x, NAMES, element)}; }}" for i, x in enumerate(forms)]
    table = "static float (*const forms[])(" + arguments + ") = {" + ", ".join(f"form_{i}" for i in range(len(forms))) + "};"
    calls = " ".join(f'printf("%.9g ", f({", ".join(str(lane[name]) for name in NAMES)}));' for lane in LANES)
    main = f'int main() {{ for (auto f : forms) {{ {calls} printf("\\n"); }} }}'
    file = folder / "forms.cpp"
    file.write_text("\n".join([functions(), reading(), *written, table, main]))
    flags = ["-std=c++20", "-O0", "-fwrapv"]
    done = subprocess.run(["g++", *flags, "-o", folder / "forms", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    printed = subprocess.run([folder / "forms"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [list(map(float, line.split())) for line in printed]


@pytest.mark.parametrize("start, count", [(0, 300), *BATCHES])
def test_compilers_take_what_is_accepted_and_agree(start, count, tmp_path):
    found = trees(start, count)
    judged = 0
    for (form, text), values in zip(found.items(), computed(list(found), tmp_path), strict=True):
        for lane, value in zip(LANES, values, strict=True):
            with numpy.errstate(all="ignore"):
                single, double = (float(evaluate(form, lane, ARRAYS, dtype)) for dtype in ("float32", "float64"))
            # Where roundings decide, as next to a jump, float32 is no judge of float32.
            if not abs(single - double) <= 1e-5 * (1 + abs(double)) or abs(double) > 1e6:
                continue
            judged += 1
            assert abs(value - single) <= 1e-4 * (1 + abs(single)), (text, lane, value, single)
    assert judged > 0.6 * len(found) * len(LANES) > 0.5 * count, (judged, len(found))
