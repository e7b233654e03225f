"""What the suites of `check` compute, what they leave out, and what is said of a result. The command is in test_cli.py."""

from collections import Counter
from dataclasses import replace

import pytest

from cupy_flash.judge import check
from cupy_flash.judge.cases import Case, case_named, full_cases, quick_cases
from cupy_flash.judge.check import BACKWARD, COMPUTATIONS, DETERMINISTIC, FORWARD, FORWARD_V1, GENERIC, CaseResult
from cupy_flash.judge.compare_gradients import GradientComparison, Judgement
from cupy_flash.plan.architecture import ARCHITECTURES


@pytest.mark.parametrize(
    "backend, direction, algorithm, computations",
    [
        ("cuda", "both", "all", COMPUTATIONS),
        ("host", "forward", "all", (FORWARD, FORWARD_V1)),
        ("host", "both", "v1", (FORWARD_V1,)),
        ("cuda", "both", "v2", (FORWARD, BACKWARD, DETERMINISTIC)),
        ("cuda", "backward", "v1", ()),
        ("numpy", "both", "all", (FORWARD, BACKWARD)),
        ("numpy", "both", "v1", ()),
    ],
)
def test_what_is_computed(backend, direction, algorithm, computations):
    assert check.select_computations(backend, direction, algorithm) == computations


def test_where_a_kernel_is_made_for_an_architecture_the_one_for_all_is_computed_as_well():
    sm_80, sm_90a = ARCHITECTURES["80"], ARCHITECTURES["90a"]
    assert check.select_computations("host", architecture=sm_80) == COMPUTATIONS
    assert check.select_computations("cuda", architecture=sm_90a) == (*COMPUTATIONS, *GENERIC)
    forward, *backwards = GENERIC
    assert check.select_computations("cuda", "forward", "v2", sm_90a) == (FORWARD, forward)
    assert check.select_computations("cuda", "backward", architecture=sm_90a) == (BACKWARD, DETERMINISTIC, *backwards)
    assert list(map(str, GENERIC)) == ["forward v2 by fwd_v2", "backward v2 by bwd_v2", "backward v2 deterministic by bwd_v2"]


@pytest.mark.parametrize("own, generic", list(zip((FORWARD, BACKWARD, DETERMINISTIC), GENERIC)), ids=str)
def test_the_kernel_for_all_is_another_one_for_16_bits_only(own, generic):
    sm_90a, half, single = ARCHITECTURES["90a"], Case("bfloat16", 70, 80), Case("float32", 70, 80)
    kernels = check.kernels_of({half: (own, generic)}, "host", "90a")
    others = [kernel.file for kernel in kernels if own == FORWARD or not kernel.file.startswith("fwd")]
    assert others == [check.BETTER[generic.kernel], generic.kernel]
    assert check.why_skipped(half, generic, "cuda", sm_90a) == ""
    reason = f"{generic.direction} v2 of float32 is by {generic.kernel} anyway"
    assert check.why_skipped(single, generic, "cuda", sm_90a) == reason
    assert check.kernels_of({single: (own,)}, "host", "90a") == check.kernels_of({single: (generic,)}, "host", "90a")


def test_a_case_is_computed_in_every_way():
    case = Case("float16", 40, 50, heads_q=4, heads_kv=2, causal=True, return_lse=False)
    results = check.run_case(case, COMPUTATIONS, "host")
    assert [result.computation for result in results] == list(COMPUTATIONS)
    assert [result.plan.partition("-")[0] for result in results] == ["fwd_v2", "fwd_v1", "bwd_v2", "bwd_v2"]
    assert all(result.ok for result in results), [result.message for result in results]
    kernels = check.kernels_of({case: COMPUTATIONS}, "host")
    assert {result.plan for result in results} == {kernel.name for kernel in kernels}


def test_of_gradients_the_one_closest_to_failing_is_shown():
    judged = [Judgement(2.0, 8.0, 0.0), Judgement(1.0, 2.0, 0.0), Judgement(0.0, 0.0, 0.0)]
    result = CaseResult(quick_cases()[0], BACKWARD, "", GradientComparison(True, "", *judged), 0.0)
    assert result.figures == (1.0, 2.0)
    assert replace(result, comparison=GradientComparison(False, "dq is float32")).figures is None
    assert replace(result, comparison=None, error="ValueError: q").figures is None


SKIPS = ("float64-h3x1-q45-k61-d40-causal", "bfloat16-h2-q49-k63-d256", "tf32-h1-q79-k103-d64")


@pytest.mark.parametrize("name", SKIPS)
def test_a_suite_leaves_out_what_a_backend_or_an_architecture_lacks(name):
    case = case_named(name)
    for computation in COMPUTATIONS:
        assert all(check.why_skipped(case, computation, backend, ARCHITECTURES["75"]) for backend in ("host", "cuda"))
        assert not check.why_skipped(case, computation, "numpy")


def test_a_suite_leaves_heavy_cases_to_a_gpu():
    heavy = next(case for case in full_cases() if case.heavy and case.dtype == "float16")
    assert check.why_skipped(heavy, FORWARD, "host", ARCHITECTURES["80"])
    assert not check.why_skipped(heavy, FORWARD, "cuda", ARCHITECTURES["80"])


@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("computation", COMPUTATIONS, ids=str)
def test_a_suite_leaves_out_what_no_kernel_computes_and_nothing_else(computation, arch):
    """The reasons know nothing of the planner: what they leave in can be planned, and what they leave out cannot."""
    first_of_each = {(case.dtype, case.precision, case.dim, case.dim_v): case for case in reversed(full_cases())}
    for case in first_of_each.values():
        reason = check.why_skipped(case, computation, "cuda", ARCHITECTURES[arch])
        assert bool(reason) != bool(check.kernels_of({case: (computation,)}, "host", arch)), (str(case), reason)


def test_the_main_kernel_is_the_one_that_most_cases_share():
    cases = [case for case in quick_cases() if case.dtype != "float64"]
    others = check.beyond_main_kernel(cases, FORWARD_V1, "host")
    [main] = check.kernels_of(dict.fromkeys(set(cases) - set(others), (FORWARD_V1,)), "host")
    counts = Counter(kernel for case in cases for kernel in check.kernels_of({case: (FORWARD_V1,)}, "host"))
    assert main.file == "fwd_v1" and counts[main] == max(counts.values())
    assert sum(counts.values()) == counts[main] + len(others)
