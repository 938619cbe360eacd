"""Training loops drawn at random: the same bits with plans and without, and beside torch nearly its numbers."""

from fuzz_programs import FEATURES, drawn, fuzz


def test_programs_have_the_same_bits_with_plans_and_without():
    failures, did = fuzz(map(drawn, range(200)))
    assert failures == []
    assert [name for name in FEATURES if not did[name]] == []
    assert did["beside torch"] >= 15
    assert did["refused"] <= 10
