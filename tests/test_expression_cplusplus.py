"""Expressions as C++, and what a compiler makes of them."""

import math
import shutil
import subprocess

import pytest
from expressions import ARRAYS, DECLARED, TEXTS, VALUES, many, same, text_of, trees
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.problem.expression.cplusplus import cplusplus
from cupy_flash.problem.expression.derivative import derivative
from cupy_flash.problem.expression.entry import score_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.tree import SCORE

NAMES = {name: f"lane_{name}" for name in VALUES}


def element(name, indices):
    return f"{name}_at({', '.join(indices)})" if indices else f"the_{name}"


@many
@given(st.sampled_from(("float", "bool")).flatmap(trees))
def test_cplusplus_is_balanced_and_the_same_each_time(tree):
    text = cplusplus(tree, NAMES, element)
    assert text == cplusplus(text_of(tree), NAMES, element)
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        assert depth >= 0
    assert depth == 0 and text.isascii() and not set(text) & set("[]{};#\"'\\@$`")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("score + slope[h] * (kv_idx - q_idx)", "(lane_score + (slope_at(lane_h) * float((lane_kv_idx - lane_q_idx))))"),
        ("where(h < 2 and not seen[0], -inf, 0.5)", "(((lane_h < 2) & (!seen_at(0))) ? (-infinity()) : 0.5f)"),
        ("0.1 + 1e300 + -1.5", "((0x1.99999a0000000p-4f + infinity()) + (-1.5f))"),
        ("h // 2 + h % -3 + int(-2147483648)", "float(((floor_div(lane_h, 2) + floor_mod(lane_h, (-3))) + (-2147483647 - 1)))"),
        ("score ** 3 + score ** gain", "(power<3>(lane_score) + powf(lane_score, the_gain))"),
        ("min(h, 1) + min(score, 1)", "(float(min(lane_h, 1)) + fminf(lane_score, 1.0f))"),
    ],
)
def test_cplusplus(text, expected):
    assert cplusplus(score_expression(text, DECLARED).tree, NAMES, element) == expected


PRELUDE = """
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
using std::abs, std::max, std::min;
inline float infinity() { return __builtin_inff(); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float tanh_by_sinh(float x) { return tanhf(x); }
inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
template <int N> inline auto power(auto x) { decltype(x) y = 1; for (int i = 0; i < N; i++) y *= x; return y; }
inline int floor_mod(int a, int b) { int r = b ? a % b : 0; return r && (r < 0) != (b < 0) ? r + b : r; }
inline int floor_div(int a, int b) { return b ? (a - floor_mod(a, b)) / b : 0; }
inline float floor_mod(float a, float b) { float r = fmodf(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
inline float floor_div(float a, float b) {
  if (b == 0) return a / b;
  float r = fmodf(a, b), whole = roundf((a - r) / b);
  return r != 0 && (r < 0) != (b < 0) ? whole - 1 : whole;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_agrees(tmp_path):
    forms = [score_expression(text, DECLARED).tree for text in TEXTS]
    forms += [derivative(form, SCORE) for form in forms]
    lanes = [{**VALUES, "score": score, "h": h, "kv_idx": kv} for score in (-0.75, 0.0, 1.625) for h in (0, 3) for kv in (2, 6)]
    functions = []
    for number, form in enumerate(forms):
        arguments = ", ".join(f"{'float' if name == 'score' else 'int'} {text}" for name, text in NAMES.items())
        functions.append(f"float form_{number}({arguments}) {{ return {cplusplus(form, NAMES, element)}; }}")
    calls = [
        f'printf("%.9g\\n", form_{number}({", ".join(map(str, lane.values()))}));' for number in range(len(forms)) for lane in lanes
    ]
    reading = """
int clipped(int i, int n) { return min(max(i, 0), n - 1); }
float slope_at(int i) { static float a[] = {0.5f, -1.25f, 2.0f, 0.75f}; return a[clipped(i, 4)]; }
int table_at(int i, int j) { static int a[] = {3, -1, 4, 1, -5, 9}; return a[clipped(i, 2) * 3 + clipped(j, 3)]; }
bool seen_at(int i) { static bool a[] = {true, false, true}; return a[clipped(i, 3)]; }
float the_gain = 0.625f;
"""
    source = tmp_path / "forms.cpp"
    source.write_text(PRELUDE + reading + "\n".join(functions) + f"\nint main() {{ {' '.join(calls)} }}\n")
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-Wall", "-Werror", "-Wno-parentheses", "-o", tmp_path / "forms", source], check=True
    )
    printed = subprocess.run([tmp_path / "forms"], check=True, capture_output=True, text=True).stdout.split()
    assert len(printed) == len(forms) * len(lanes)
    for got, (form, lane) in zip(map(float, printed), ((form, lane) for form in forms for lane in lanes)):
        expected = evaluate(form, lane, ARRAYS, "float32").item()
        assert same(got, expected, 1e-5) or (math.isnan(got) and math.isnan(expected)), (str(form), lane)
